"""The inspector: one example as the model sees it, with the tokens that are trained coloured.

    draftsmith data show data=chats.jsonl tokenizer=my/target index=3

data: anything that a recipe's `data=` takes (rows, a folder of train/prepare.py, `stdlib`).
"""

from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from draftsmith.command import parse
from draftsmith.decode.prompts.chat import set_template
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.train.text.tokenise import load_examples


@dataclass(kw_only=True)
class Show:
    """Which example, as which model sees it."""

    data: str  # rows, a folder of train/prepare.py, or stdlib
    tokenizer: str  # a folder or a hub's name
    split: str = "train"  # train | heldout | all
    thinking: bool | None = None
    template_kwargs: str = ""
    index: int = 0  # of the example
    tokens: int = 2000  # of the example, from its beginning; 0: all of it


def main(argv: list[str]) -> None:
    show(parse(Show, argv), Console())


def show(config: Show, console: Console) -> None:
    """Print the example that is asked for; without colours (a file, a pipe) the trained stretches
    stand between ⟦ and ⟧. Raises ValueError: what loading raises, or its index.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    set_template(tokenizer, config.thinking, config.template_kwargs)
    examples = load_examples(config.data, tokenizer, config.split)
    if not 0 <= config.index < len(examples):
        raise ValueError(f"index: got {config.index}, expected 0..{len(examples) - 1}")
    ids, trained = examples.example(config.index)
    shown = min(config.tokens or len(ids), len(ids))
    text = Text()
    place = 0
    for is_trained, stretch in groupby(trained[:shown].tolist()):
        end = place + len(list(stretch))
        words = str(tokenizer.decode(ids[place:end]))
        if is_trained and not console.color_system:
            words = f"⟦{words}⟧"
        text.append(words, style="bold black on green" if is_trained else "dim")
        place = end
    console.print(text, soft_wrap=True)
    console.rule()
    share = examples.trained.float().mean().item()
    console.print(
        f"example {config.index} of {len(examples):,}: {len(ids):,} tokens ({shown:,} shown), "
        f"{int(trained.sum()):,} trained ({trained.float().mean():.1%})\n"
        f"all: {len(examples.ids):,} tokens, {share:.1%} trained",
        highlight=False,
    )
