"""What the training of a scorer leaves: calibrated, with figures, and how to use it."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.models.disk.atomic import whole_folder, write_atomically
from draftsmith.models.scorers import FOLDER, Scorer, save_scorer
from draftsmith.train.scoring.calibration import figures, picture, platt
from draftsmith.train.scoring.objective import logits
from draftsmith.train.scoring.rows import ScorerRows

THRESHOLDS = {"acceptance": 0.7, "judge": 0.5}  # the papers'


@torch.no_grad()
def calibrate(
    scorer: Scorer, tune: ScorerRows, check: ScorerRows
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calibrate a folded scorer on `tune`; its figures on `check` before and after. Its
    probabilities then mean that the rule keeps a token, whatever labels and weights it learned
    from.
    """
    scale, shift = platt(logits(scorer, tune), tune.kept_N)
    scorer.scale.fill_(scale)
    scorer.shift.fill_(shift)
    logit_N = logits(scorer, check)
    return figures(logit_N, check.kept_N), figures(scorer.calibrated(logit_N), check.kept_N)


def describe(
    made_for: str | dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
    threshold: float,
    made: dict[str, Any],
) -> dict[str, Any]:
    """What `save_scorer` wants told: figures before and after calibration, and the provenance."""
    better = after["brier"] < after["brier_constant"]
    about = {"made_for": made_for, "figures": after, "uncalibrated": before, "calibrated": better}
    return about | {"threshold": threshold, "provenance": made}


def save_result(folder: Path, scorer: Scorer, about: dict[str, Any], drafter: str) -> None:
    """A judge's own folder; or, where there is a drafter, a copy of its folder with the acceptance
    head in it. Whole or not at all; see `save_scorer` for `about`.
    """
    with whole_folder(folder) as half:
        if drafter:
            copy_folder(Path(drafter), half)
        save_scorer(half / FOLDER if drafter else half, scorer, about)


def copy_folder(source: Path, goal: Path) -> None:
    """All files of a drafter folder but an acceptance head's, as hard links where the disk allows
    it: no file of such a folder is ever written in place.
    """
    for file in sorted(source.rglob("*")):
        place = goal / file.relative_to(source)
        if not file.is_file() or place.is_relative_to(goal / FOLDER):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file.resolve(), place)
        except OSError:  # another disk, or one without links
            shutil.copy2(file, place)


def show(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Print the figures, and draw `reliability.svg` into the folder."""
    title = f"{folder}: {after['rows']:,} rows of prompts kept apart, {after['rate']:.3f} kept"
    table = Table(title=title)
    for heading in ("", "before calibration", "after", "the best constant"):
        table.add_column(heading, justify="right")
    constant = {"brier": after["brier_constant"], "auc": 0.5, "ece": 0.0}
    for name, words in NAMES.items():
        values = (before[name], after[name], constant[name])
        table.add_row(words, *(f"{value:.4f}" for value in values))
    Console().print(table)
    if after["brier"] >= after["brier_constant"]:
        print(
            "warning: it foretells no better than a constant, so it isn't marked as calibrated: "
            "give it more rows, other inputs (reads, scalars), or longer training"
        )
    chart = picture(after["reliability"], "Kept, by what was foretold")
    write_atomically(folder / "reliability.svg", chart.encode())


def next_command(kind: str, target: str, result: Path, threshold: float) -> str:
    """The line that decodes with it."""
    start = f"python -m draftsmith evaluate target={target}"
    if kind == "acceptance":
        return f"{start} drafter={result} policy=acceptance:{threshold:g}"
    return f"{start} drafter=DRAFTER lossy=judge:{result},{threshold:g} allow_lossy=true"


NAMES = {"brier": "Brier score", "auc": "AUC", "ece": "expected calibration error"}
