"""Prompts to decode, from the layouts people have them in.

Rows of chats, and of questions, instructions and `turns` where the tokenizer has a chat template,
are rendered by it up to the last user's turn, with the beginning of the assistant's; all other rows
are plain text. Running text (`{"text"}` rows, `stdlib`) is cut into windows, which the model then
continues.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftsmith.command import check_one_of
from draftsmith.decode.prompts.chat import chat_prompt
from draftsmith.decode.prompts.rows import Message, Row
from draftsmith.decode.prompts.splits import load_rows

CATEGORIES = {"question": "grade-school maths", "chat": "chat", "text": "running text"}
CATEGORIES["instruction"] = "instructions"
# Rows that are a chat of two where the tokenizer has a template, and else plain text.
ASKING = ("question", "instruction", "turns")
ASKED_SPLITS = ("report", "tune", "train", "all")


@dataclass(frozen=True)
class Prompt:
    """tokens: what the model reads; text: the same, decoded; category: as a report groups prompts;
    index: its number in the source's part before `limit` chose some of them; turns: what the user
    says, the first turn included, where that is more than the one (see `next_turn`); answer: the
    known one, worked out, where the source has it.
    """

    tokens: list[int]
    category: str
    index: int
    text: str
    turns: tuple[str, ...] = ()
    answer: str = ""


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int | None,
    prompt_tokens: int = 64,
    split: str = "report",
    turns: int | None = None,
) -> list[Prompt]:
    """The prompts of one split of a source, in its order.

    Args:
        source: what `sources.read_source` reads, `stdlib`, or a .txt file with a prompt a line.
        limit: that many, spread evenly over the source, whose categories so keep their shares; None
            for all. A source with fewer gives what it has.
        prompt_tokens: the length of a window of running text.
        split: `report`: of what the source's training side lacks, the part for figures; `tune`: the
            part for choices made on the way; `train`: that side; `all`: a source that nothing was
            trained on. Benchmarks (prompts with a category) and .txt files are taken whole, and are
            for reporting only.
        turns: of a user's turns (Spec-Bench, MT-bench) that many at most; None for all.

    ValueError for a missing or empty source, a row of unknown layout, an empty part, a chat without
    a template, running text shorter than a window, a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: got {limit}, expected at least 1, or none for all prompts")
    prompts: list[Prompt] = []
    for row in _rows(source, split):
        category = row.category or CATEGORIES.get(row.kind) or Path(source).stem
        if source == "stdlib":
            category = "library source"
        texts = row.kind == "text"
        found = windows(row, tokenizer, prompt_tokens) if texts else [prompt_ids(row, tokenizer)]
        said = (row.prompt, *row.later)[:turns] if row.later else ()
        answer = row.reference or (row.completion if row.kind == "question" else "")
        for tokens in found:
            text = str(tokenizer.decode(tokens))
            prompts.append(Prompt(tokens, category, len(prompts), text, said, answer))
    if not prompts:
        expected = "expected longer texts or smaller prompt_tokens"
        raise ValueError(f"prompts: no text of {source!r} has {prompt_tokens} tokens; {expected}")
    return spread(prompts, limit)


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """`limit` of them, evenly over their order; None for all."""
    count = min(limit or len(prompts), len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def next_turn(
    prompt: Prompt, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """What the model reads at the turn after `answers`, one to each turn so far: all that was said,
    through the chat template, or without one as plain lines.
    """
    said = prompt.turns[: len(answers) + 1]
    if tokenizer.chat_template is None:
        pairs = zip(said, answers, strict=False)
        before = "".join(f"{words}\n{answer}\n" for words, answer in pairs)
        return beginning(f"{before}{said[-1]}\n", tokenizer)
    messages = [{"role": "user", "content": said[0]}]
    for answer, words in zip(answers, said[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": words}]
    return chat_prompt(messages, tokenizer)


def prompt_ids(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the target answers to: of chats `chat_prompt`, others plain. ValueError for a document
    (see `windows`), or no template for a chat.
    """
    if row.kind == "text":
        raise ValueError(f"{row.where}: a document has no prompt of its own; take windows of it")
    try:
        messages = as_chat(row, tokenizer)
        if messages:
            return chat_prompt(messages, tokenizer, tools=row.tools)
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error
    return beginning(plain_prompt(row), tokenizer)


def as_chat(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[Message]:
    """The row as a chat, its answer included if it has one; empty for plain text."""
    if row.kind == "chat":
        return list(row.messages)
    if row.kind not in ASKING or tokenizer.chat_template is None:
        return []
    answer = [{"role": "assistant", "content": row.completion}] if row.completion else []
    return [{"role": "user", "content": row.prompt}, *answer]


def plain_prompt(row: Row) -> str:
    """The prompt of a row that is no chat."""
    return f"{row.prompt}\n" if row.kind in ASKING else row.prompt


def windows(row: Row, tokenizer: PreTrainedTokenizerBase, length: int) -> list[list[int]]:
    """All windows of `length` tokens of a document, without overlap; each begins as a text does.
    ValueError: no document, or no room beside the tokens that begin a text.
    """
    if row.kind != "text":
        raise ValueError(f"{row.where}: got a row of kind {row.kind}, expected a document")
    start = beginning("", tokenizer)
    step = length - len(start)
    if step < 1:
        raise ValueError(f"got prompts of {length} tokens, expected more than {len(start)}")
    ids = tokenizer(row.completion, add_special_tokens=False, verbose=False)["input_ids"]
    return [start + ids[i : i + step] for i in range(0, len(ids) - step + 1, step)]


def beginning(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of the beginning of a text: with BOS where the tokenizer adds one, never with EOS."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token)):
        ids.pop()
    return ids


def _rows(source: str, split: str) -> list[Row]:
    check_one_of("split", split, ASKED_SPLITS)
    lines = Path(source).suffix == ".txt"
    whole = lines or split == "all"
    if not whole and source != "stdlib":  # then a benchmark's are
        rows = load_rows(source, "all")
        whole = all(r.kind == "turns" or (r.kind == "prompt" and r.category) for r in rows)
    if whole and split in ("train", "tune"):
        raise ValueError(
            f"prompts: {source!r} is taken whole, to report on; choices need other prompts, such "
            "as the held-out side of the training data"
        )
    return _lines(Path(source)) if lines else load_rows(source, "all" if whole else split)


def _lines(path: Path) -> list[Row]:
    if not path.is_file():
        raise ValueError(f"prompts: got {str(path)!r}, which does not exist; expected a file")
    lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
    rows = [Row("prompt", f"{path}:{i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f"prompts: {str(path)!r} is empty; expected one prompt a line")
    return rows
