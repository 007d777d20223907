"""Answers on disk: shards of JSON lines that survive a kill, and the manifest that guards them.

A folder holds `prepare.json` (the recipe's identity and the number of requests) and one
`answers-<rank>-of-<world>.jsonl` a rank. A line is written when its answer is finished; a torn last
line is dropped. Finished requests are found across all shards, so a run may continue with another
number of processes.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from draftsmith.models.disk.store import Manifest, appending, read_lines
from draftsmith.progress import LongWork
from draftsmith.train.text.batches import Examples

Answer = dict[str, Any]
MANIFEST = Manifest("prepare.json", "train/prepare.py", schema=1, decides="identity")


def is_prepared(folder: str | Path) -> bool:
    """Whether train/prepare.py wrote this folder."""
    return MANIFEST.is_in(folder)


def claim(folder: Path, identity: dict[str, Any], about: dict[str, Any]) -> None:
    """Make `folder` this run's, or check that it already is. One rank comes first, alone.

    identity: what decides the answers, `requests` (their number) among it; compared key by key with
    what the folder was begun with; about: what else is worth knowing. ValueError: the folder
    belongs to another recipe, or holds something else.
    """
    if shards(folder) and not is_prepared(folder):
        raise ValueError(f"{folder} holds answers without {MANIFEST.name}; choose another out=")
    MANIFEST.claim(folder, {"identity": identity, "about": about})


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("answers-*-of-*.jsonl"))


def read_answers(folder: Path) -> Iterator[Answer]:
    """The finished answers of all shards. Raises ValueError on a spoiled line (file and number)."""
    return chain.from_iterable(map(read_lines, shards(folder)))


def summary(folder: Path, requests: int) -> str:
    """What a folder holds, in words; for answers tokenised again, how many can't be exact."""
    answers = list(read_answers(folder))
    tokens = sum(len(answer["token_ids"]) for answer in answers)
    stopped = sum(answer["finish_reason"] == "stop" for answer in answers)
    lines = [
        f"{folder}: {len(answers):,} of {requests:,} answers, {tokens:,} tokens, "
        f"{stopped / max(len(answers), 1):.1%} ended by the target itself"
    ]
    again = [answer["mismatch"] for answer in answers if answer.get("retokenised")]
    judged = [mismatch for mismatch in again if mismatch is not None]
    if again:
        rate = f"{sum(judged) / len(judged):.2%} of the" if judged else "none of"
        lines.append(
            f"  tokenised again from text: {len(again):,}; {rate} {len(judged):,} whose token "
            "count the server told have another one now (a lower bound of those that differ)"
        )
    told = [sum(map(math.exp, row.values())) for a in answers for row in a.get("top_logprobs", ())]
    if told:
        lines.append(
            f"  with log-probabilities of the likeliest tokens: {sum(told) / len(told):.2%} of the "
            "mass a token"
        )
    read = [a["prompt_mismatch"] for a in answers if a.get("prompt_mismatch") is not None]
    if any(read):
        lines.append(
            f"  warning: in {sum(read) / len(read):.2%} of {len(read):,} requests the server read "
            "another number of prompt tokens than we count; another chat template, or a second BOS?"
        )
    return "\n".join(lines)


def with_bar(answers: Iterable[Answer], total: int, console: Console) -> Iterator[Answer]:
    """The answers, with a progress bar that tells tokens a second."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
    started, tokens = time.monotonic(), 0
    with LongWork(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("answers", total=total, figures="")
        for answer in answers:
            tokens += len(answer["token_ids"])
            rate = f"{tokens / (time.monotonic() - started):,.0f} tokens/s"
            bar.update(task, advance=1, figures=rate)
            yield answer


def answer_file(
    folder: Path, rank: int, world: int
) -> AbstractContextManager[Callable[[Answer], None]]:
    """What appends answers to the file of one rank; errors of `store.appending`."""
    advice = "expected one run a folder, and with several processes a launch that connects them "
    name = f"answers-{rank:05d}-of-{world:05d}.jsonl"
    return appending(folder / name, f"{advice}(accelerate launch)")


def load_prepared(folder: str | Path) -> Examples:
    """The answers of a finished run in the order of the requests; the prompts are not trained. The
    end token is part of an answer that the target itself ended, and of no other. ValueError: no
    such folder, an unfinished run, or a spoiled line.
    """
    answers = finished_answers(Path(folder))
    return Examples.answered((answer["prompt_ids"], answer["token_ids"]) for answer in answers)


def finished_answers(folder: Path) -> list[Answer]:
    """The answers of a finished run in the order of the requests; errors of `load_prepared`."""
    requests = read_identity(folder)["requests"]
    answers = {answer["index"]: answer for answer in read_answers(folder)}
    if len(answers) < requests:
        raise ValueError(
            f"{folder}: got {len(answers)} of {requests} answers; run the same train/prepare.py "
            "command again to finish it"
        )
    return [answers[index] for index in sorted(answers)]


def read_identity(folder: Path) -> dict[str, Any]:
    """What decides the answers of a prepared folder, as `claim` was told."""
    return dict(MANIFEST.read(folder)["identity"])
