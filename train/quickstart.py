"""The main job on this machine's own text, from nothing to a proven speed-up.

    make quickstart          (or: python -m draftsmith quickstart)

The corpus is the running interpreter's standard library. Four steps, each a command of its own that
is printed before it runs: pretrain a target; pretrain a draft on the same text (*before*); distil
the draft from the target (*after*); decode with before, after and prompt lookup in turns, at
temperature 0 and 1. Training that is finished is not repeated; what was interrupted goes on.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.command import check_least, parse
from draftsmith.decode.evaluate.arms import Evaluation
from draftsmith.decode.evaluate.evaluate import evaluate
from draftsmith.decode.evaluate.metrics import paired_difference
from draftsmith.decode.report import results
from draftsmith.decode.report.page import write
from draftsmith.decode.report.terminal import comparison
from draftsmith.launch import run_as_user
from draftsmith.models.disk.store import read_lines

ENTRIES = {"target": "pretrain", "draft": "pretrain", "distill": "distill"}
TARGET = "target/model"
ARMS = {"before": "draft/drafter", "after": "distill/drafter", "ngram": "ngram"}


@dataclass
class Quickstart:
    """Where it goes, and how much is done."""

    out: str = "runs/quickstart"  # where everything goes
    steps: int = 0  # of each training run; 0: the recipes' own
    limit: int = 32  # prompts of each evaluation
    max_new_tokens: int = 96  # of each answer
    K: int = 4  # drafted tokens a round

    def __post_init__(self) -> None:
        check_least(self, steps=0)


def main(argv: list[str]) -> int:
    console, settings = Console(), parse(Quickstart, argv)
    out, started = Path(settings.out), time.perf_counter()
    asked(settings, temperature=0)  # refuses what step 4 would

    # --------------------------------------------------------------- training
    for number, (name, entry) in enumerate(ENTRIES.items(), start=1):
        console.rule(f"[bold]step {number} of 4: {name}")
        words = ["train", entry, "processes=1", *overrides(settings, name)]
        if code := run_as_user(words)[0]:
            told = f"step {name} ended with code {code}; the same command goes on from there"
            console.print(told)
            return code

    # ------------------------------------------------------------- evaluation
    console.rule("[bold]step 4 of 4: decode, prove, measure")
    arms = {arm: path if path == "ngram" else str(out / path) for arm, path in ARMS.items()}
    reports, rows = {}, []
    for temperature in (0, 1):
        for arm, result in evaluate(asked(settings, temperature), arms).items():
            write(result, out / arm / ("t1" if temperature else ""))
            reports[f"{arm}, temperature {temperature}"] = result
            rows.append(results.row(arm, result))
    results.publish("Quickstart", rows, out)

    # ------------------------------------------------------------------ result
    console.print(comparison(rows))
    for temperature in (0, 1):
        console.print(gains(reports, temperature), highlight=False)
    target, draft = (best_loss(out / name) for name in ("target", "draft"))
    console.print(  # the target must be clearly the better language model
        f"held-out loss, nats a token: target {target:.2f}, draft before distillation {draft:.2f}, "
        f"gap {draft - target:.2f}",
        highlight=False,
    )
    console.print(f"reports: {out / 'after' / 'report.html'} and its neighbours")
    console.print(f"finished in {time.perf_counter() - started:.0f} s (setup not counted)")
    return 0


def overrides(settings: Quickstart, name: str) -> list[str]:
    """What differs from the recipe: the folders, when `out` is another, and the steps."""
    out = Path(settings.out)
    found = [f"recipe=quickstart/{name}", f"out={out / name}"]
    if name != "target":
        found.append(f"target.path={out / TARGET}")
    if name == "distill":
        found.append(f"draft={out / ARMS['before']}")
    return found + ([f"steps={settings.steps}", "warmup=0"] if settings.steps else [])


def asked(settings: Quickstart, temperature: int) -> Evaluation:
    """The evaluation at one temperature, the same prompts for every arm."""
    return Evaluation(
        advice=False,
        target=str(Path(settings.out) / TARGET),
        drafter="before,after,ngram",
        temperature=temperature,
        K=settings.K,
        limit=settings.limit,
        max_new_tokens=settings.max_new_tokens,
        ignore_eos=True,
        threads=1,  # models this small are fastest on one core: t_plain 4.9 ms against 7.7 on two
    )


def gains(reports: dict[str, dict[str, Any]], temperature: int) -> str:
    """after - before in alpha and tau, with the interval of the paired difference over prompts."""
    after, before = (reports[f"{arm}, temperature {temperature}"] for arm in ("after", "before"))
    parts = []
    for name in ("alpha", "tau"):
        sides = (sums_and_counts(report, name) for report in (after, before))
        difference, (low, high) = paired_difference(*sides)
        parts.append(f"{name} {difference:+.3f} [{low:+.3f}, {high:+.3f}]")
    return f"after - before at temperature {temperature}: " + ", ".join(parts)


def sums_and_counts(report: dict[str, Any], name: str) -> Any:
    """Two columns, a number a prompt, whose sums' ratio is alpha or tau."""
    pairs = report["alpha_by_prompt"]
    if name == "tau":
        pairs = [(row["emitted"], row["rounds"]) for row in report["per_prompt"]]
    return tuple(zip(*pairs, strict=True))


def best_loss(run: Path) -> float:
    """The lowest held-out loss of a run."""
    lines = read_lines(run / "metrics.jsonl")
    return min(line["eval_loss"] for line in lines if "eval_loss" in line)
