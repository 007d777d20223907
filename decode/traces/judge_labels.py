"""Labels for a judge: which of the draft's tokens change nothing about the answer.

    python -m draftsmith judge-labels target=TARGET drafter=DRAFTER data=train.jsonl out=FOLDER
    python -m draftsmith judge-labels target=TARGET marked=answers.jsonl out=FOLDER

Without people, the draft's tokens are put into answers of the target, see `judge_mining.py`; `data`
has questions whose answers end in #### and a number, and its training side is asked.

By people (`marked`), a line has {"question", "answer"} (or {"prompt", "completion"}) and, where the
answer is wrong, "error": [first, end] in characters of it. What comes before is kept, the error
isn't, and what follows from it is left out, as in judge decoding (Bachmann et al., arXiv
2501.19309).

The rows go into a trace folder of kind "judge" (`decode/traces/store.py`): prompt, position, token, kept,
and the target's state after its final norm at the token. An interrupted run goes on; one with a
larger limit adds to what is there.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import parse
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.evaluate.tasks import MARK
from draftsmith.decode.prompts.prompts import prompt_ids
from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.decode.traces.judge_mining import Columns, Miner, as_columns, states
from draftsmith.decode.traces.store import TraceWriter, read_traces
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.scorers import weights_mark
from draftsmith.models.target import TargetSpec, check_split, load_target

# A shard so often, in rows: what an interrupted run loses.
SHARD_ROWS = 4096
DECIDE = ("data", "marked", "seed", "max_new_tokens", "dtype")  # what rows are made of


@dataclass
class Labels:
    """Exactly one of data and marked; marked needs no drafter."""

    target: str
    drafter: str = ""
    data: str = ""  # rows of question and answer, of which the training side is used
    marked: str = ""  # JSONL of answers marked by people
    out: str = "runs/judge/labels"
    limit: int | None = 400  # questions, drawn by the seed; none: all
    seed: int = 0
    max_new_tokens: int = 256
    batch: int = 64
    max_gb: float = 2.0  # of the folder
    device: str = "cpu"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if bool(self.data) == bool(self.marked) or bool(self.data) != bool(self.drafter):
            raise ValueError(
                f"got data={self.data!r} marked={self.marked!r} drafter={self.drafter!r}, expected "
                "data=... with drafter=..., or marked=... alone"
            )


def main(argv: list[str]) -> int:
    """Mine or read labels; 2 after a user's error."""
    console = Console(soft_wrap=True)
    if not argv or argv[0] in ("-h", "--help", "help"):
        console.print(f"{__doc__}\n\nKeys: {', '.join(Labels.__annotations__)}", markup=False)
        return 0
    try:
        console.print(label(parse(Labels, argv)), markup=False)
    except ValueError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        return 2
    return 0


def label(settings: Labels) -> str:
    """Write the rows of one source; in words, how many there are of which."""
    spec = TargetSpec(settings.target, dtype=settings.dtype)
    target, tokenizer = load_target(spec, torch.device(settings.device))
    check_split(target)
    drafter = load_drafter(settings.drafter or None, target, tokenizer)
    source = {name: getattr(settings, name) for name in DECIDE}
    about: dict[str, Any] = {"kind": "judge", "target": fingerprint(target, tokenizer)}
    about |= {"drafter": None, "settings": source}
    if drafter is not None:
        mark = weights_mark(settings.drafter)
        about["drafter"] = {"path": settings.drafter, "kind": drafter.kind, "mark": mark}
    room = int(settings.max_gb * 1e9)
    writer = TraceWriter(settings.out, about, max_bytes=room, shard_rows=SHARD_ROWS)
    found: Iterator[tuple[int, Columns]]
    if drafter is None:
        marked = [
            one for one in enumerate(load_rows(settings.marked, "all")) if one[0] not in writer.done
        ]
        todo, found = len(marked), labelled(target, tokenizer, marked)
    else:
        asked = [one for one in enumerate(questions(settings)) if one[0] not in writer.done]
        how = {"batch": settings.batch, "max_new_tokens": settings.max_new_tokens}
        todo, found = len(asked), Miner(target, tokenizer, drafter, **how).mine(asked)
    try:
        with Progress(transient=True) as progress:
            bar = progress.add_task("labels", total=todo)
            for index, columns in found:
                writer.add(index, columns)
                progress.advance(bar)
                if writer.full:
                    break
    finally:
        writer.close()
    kept = read_traces(settings.out, ["kept"]).columns["kept"]
    full = " (full: max_gb)" if writer.full else ""
    return (
        f"{settings.out}: {len(kept):,} tokens from {len(writer.done):,} prompts{full}, of which "
        f"{int(kept.sum()):,} do no harm and {int((~kept).sum()):,} do"
    )


def questions(settings: Labels) -> list[Row]:
    """Questions of the training side with a number as their answer, drawn by the seed."""
    rows = [row for row in load_rows(settings.data, "train") if MARK in row.completion]
    if not rows:
        raise ValueError(
            f"data: got {settings.data!r} without an answer that ends in {MARK} and a number, "
            "expected questions with such answers, as GSM8K has them"
        )
    random.Random(settings.seed).shuffle(rows)
    return rows[: settings.limit]


def labelled(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[tuple[int, Row]],
) -> Iterator[tuple[int, Columns]]:
    """(index, label rows) of each marked answer: its tokens before the error are kept, those that
    touch it aren't, and the rest is left out.
    """
    for index, row in rows:
        if not row.completion:
            raise ValueError(
                f"{row.where}: got a row of kind {row.kind} without an answer, expected "
                '{"question", "answer"} or {"prompt", "completion"}, with "error" where it is wrong'
            )
        prompt = prompt_ids(row, tokenizer)
        made = tokenizer(row.completion, add_special_tokens=False, return_offsets_mapping=True)
        first, end = row.error or (len(row.completion), len(row.completion))
        spans = [span for span in made["offset_mapping"] if span[0] < end]
        tokens = made["input_ids"][: len(spans)]
        kept = [span[1] <= first for span in spans]
        places = range(len(prompt), len(prompt) + len(tokens))
        state_TH = states(target, [prompt + tokens])[0, len(prompt) :]
        yield index, as_columns(places, tokens, kept, state_TH)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
