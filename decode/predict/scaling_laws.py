"""How acceptance grows with a draft's size and its training text: lines over a logarithm.

    draftsmith scaling rows=runs/scaling/rows.json out=docs/results

    value = a log10(tokens) + b   of each size,   value = a log10(parameters) + b   of each text

value is alpha or tau, as in "Scaling laws for speculative decoding" (arXiv 2505.07858). Each line
is fitted by least squares to all seeds, without its largest place: what the line says of that one
is compared with what was measured there. Four points always look like a line; one that was held out
needn't lie on it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftsmith.command import parse
from draftsmith.decode.evaluate.metrics import bootstrap
from draftsmith.decode.report.charts import Trend, drawing, scatter
from draftsmith.decode.report.printed import bracket, short_count

Row = dict[str, Any]

VALUES = ("alpha", "tau")
AXES = ("tokens", "parameters")
FIELDS = ("what", "parameters", "tokens", "seed", *VALUES)
FEWEST = 3  # places of a line, beside the one that is held out


@dataclass
class Scaling:
    """The measurements, and where the fits go."""

    rows: str  # JSON: a list with what, parameters, tokens, seed, alpha, tau of each measurement
    out: str = "docs/results"  # the folder of scaling.json, .md and .svg


@dataclass(frozen=True)
class Fit:
    """value = slope log10(axis) + intercept, along one line of measurements.

    what, other: the arm, and the size or the tokens that all of the line have. r2: of the fitted
    points, each seed one. interval: of the slope, 95%, bootstrap over seeds; None with one seed.
    points, held_out: (place, mean over seeds); predicted: the line at the place held out.
    """

    value: str
    axis: str
    what: str
    other: float
    slope: float
    intercept: float
    r2: float
    interval: list[float] | None
    points: list[tuple[float, float]]
    held_out: tuple[float, float]

    def at(self, place: float) -> float:
        """The line's value."""
        return self.slope * math.log10(place) + self.intercept

    @property
    def error(self) -> float:
        """Predicted minus measured where nothing was fitted."""
        return self.at(self.held_out[0]) - self.held_out[1]


def main(argv: list[str]) -> None:
    """Fit, print and publish."""
    settings = parse(Scaling, argv)
    rows = read_rows(settings.rows)
    fits = all_fits(rows)
    console = Console()
    table = Table(box=SIMPLE_HEAD)
    for name in HEAD:
        table.add_column(name, no_wrap=True)
    for fit in fits:
        table.add_row(*cells(fit))
    console.width = console.width if console.is_terminal else 150
    console.print(table)
    publish(rows, fits, Path(settings.out))
    print(f"written: {settings.out}/scaling.json, .md, .svg")


def read_rows(file: str) -> list[Row]:
    """The measurements in a JSON list; ValueError for a file or a row that isn't whole."""
    try:
        rows = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"rows: got {file}, expected a JSON list of rows ({error})") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"rows: got {file} without a list of rows, expected [{{...}}, ...]")
    # A published file also holds its fits.
    rows = [row for row in rows if "slope" not in row]
    for number, row in enumerate(rows, 1):
        absent = [name for name in FIELDS if name not in row]
        if absent:
            raise ValueError(
                f"rows: got row {number} of {file} without {', '.join(absent)}; expected each to "
                f"have {', '.join(FIELDS)}"
            )
        if not all(isinstance(row[axis], int | float) and row[axis] > 0 for axis in AXES):
            raise ValueError(
                f"rows: got row {number} of {file} with tokens={row['tokens']} and parameters="
                f"{row['parameters']}, expected numbers above 0, whose logarithm is taken"
            )
    return rows


def all_fits(rows: Sequence[Row]) -> list[Fit]:
    """Every line with enough places, alpha's first; ValueError where there is none."""
    lines: dict[tuple[str, str, float], list[Row]] = {}
    for axis, other in (AXES, AXES[::-1]):
        for row in sorted(rows, key=lambda row: row[other]):
            lines.setdefault((axis, row["what"], row[other]), []).append(row)
    places = {key: len({row[key[0]] for row in line}) for key, line in lines.items()}
    whole = {key: line for key, line in lines.items() if places[key] > FEWEST}
    if not whole:
        most = {axis: max([n for k, n in places.items() if k[0] == axis] or [0]) for axis in AXES}
        raise ValueError(
            f"rows: got at most {most['tokens']} token counts of one size and "
            f"{most['parameters']} sizes at one token count, expected {FEWEST} points to draw a "
            "line through and one more to hold out; measure more"
        )
    return [fit_line(line, value, *key) for value in VALUES for key, line in whole.items()]


def fit_line(rows: Sequence[Row], value: str, axis: str, what: str, other: float) -> Fit:
    """The line of some rows without those of the largest place."""
    last = max(row[axis] for row in rows)
    fitted = [row for row in rows if row[axis] < last]
    x, y = (np.array([float(row[name]) for row in fitted]) for name in (axis, value))
    x, seed = np.log10(x), np.array([row["seed"] for row in fitted])
    slope, intercept = _least_squares(x, y)
    residual = y - slope * x - intercept
    spread = ((y - y.mean()) ** 2).sum()
    seeds = np.unique(seed)

    def slope_of(draw: np.ndarray) -> float:
        chosen = np.concatenate([np.flatnonzero(seed == one) for one in seeds[draw]])
        return _least_squares(x[chosen], y[chosen])[0]

    many = len(seeds) > 1
    means = [
        (float(place), float(np.mean([row[value] for row in rows if row[axis] == place])))
        for place in sorted({row[axis] for row in rows})
    ]
    return Fit(
        value=value,
        axis=axis,
        what=what,
        other=other,
        slope=slope,
        intercept=intercept,
        r2=float(1 - (residual**2).sum() / spread) if spread else float("nan"),
        interval=bootstrap(slope_of, len(seeds), draws=300) if many else None,
        points=means[:-1],
        held_out=means[-1],
    )


def _least_squares(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(slope, intercept); nan where all x are one, as in a draw of seeds that weren't all run."""
    centred = x - x.mean()
    if not centred.any():
        return math.nan, math.nan
    slope = float((centred * y).sum() / (centred**2).sum())
    return slope, float(y.mean() - slope * x.mean())


HEAD = (
    *("value", "arm", "of", "along", "a, a decade", "95%", "b", "R²", "points"),
    *("held out", "measured", "predicted", "error"),
)


def cells(fit: Fit) -> list[str]:
    """A fit in words, in the order of HEAD."""
    place, measured = fit.held_out
    other = AXES[AXES[0] == fit.axis]
    return [
        fit.value,
        fit.what,
        f"{short_count(fit.other)} {other}",
        fit.axis,
        f"{fit.slope:.3f}",
        bracket(fit.interval, 3) or "one seed",
        f"{fit.intercept:.3f}",
        f"{fit.r2:.3f}",
        str(len(fit.points)),
        short_count(place),
        f"{measured:.3f}",
        f"{fit.at(place):.3f}",
        f"{fit.error:+.3f}",
    ]


def publish(rows: Sequence[Row], fits: Sequence[Fit], folder: Path) -> None:
    """Write scaling.json (the rows, then a row for each fit), scaling.md and scaling.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("value", "axis", "what", "other", "slope", "intercept", "r2", "interval")
    made = {name: rows[0][name] for name in ("commit", "command", "machine") if name in rows[0]}
    found: list[Row] = []
    for fit in fits:
        row = {name: getattr(fit, name) for name in names}
        row |= {"held_out": fit.held_out[0], "measured": fit.held_out[1], "error": fit.error}
        found.append(row | made)
    (folder / "scaling.json").write_text(json.dumps([*rows, *found], indent=1) + "\n")
    (folder / "scaling.md").write_text(page(rows, fits))
    (folder / "scaling.svg").write_text(picture(fits))


def page(rows: Sequence[Row], fits: Sequence[Fit]) -> str:
    """Markdown, from the rows and their fits alone."""
    first, seeds = rows[0], len({row["seed"] for row in rows})
    run = (
        " `{command}` at commit {commit} on {machine}.".format(**first) if "commit" in first else ""
    )
    target = f" Target {first['target']}, text {first['data']}." if "target" in first else ""
    sizes, counts = (sorted({row[axis] for row in rows}) for axis in reversed(AXES))
    lines = [
        "# Acceptance against size and text",
        "",
        f"{len(sizes)} sizes of {short_count(sizes[0])} to {short_count(sizes[-1])} parameters, "
        f"measured after {', '.join(map(short_count, counts))} trained tokens, {seeds} seed(s)."
        f"{target}{run}",
        "",
        "A line is value = a log10(place) + b, by least squares over all seeds without its largest "
        "place, which is held out. 95%: of a, bootstrap over seeds. R² is that of the fitted "
        "points; error is predicted minus measured where nothing was fitted.",
        "",
        *(f"| {' | '.join(r)} |" for r in (HEAD, ["---"] * len(HEAD), *map(cells, fits))),
        "",
        "![scaling](scaling.svg)",
    ]
    return "\n".join(lines) + "\n"


def picture(fits: Sequence[Fit]) -> str:
    """A panel for each value and axis; hollow: held out."""
    charts = []
    for value, axis in ((value, axis) for value in VALUES for axis in AXES):
        lines = [fit for fit in fits if (fit.value, fit.axis) == (value, axis)]
        if lines:
            title = f"{value} against {axis}"
            charts.append(scatter(title, _trends(lines), x_label=axis, y_label=value))
    return drawing(
        charts, [("a", "a line is fitted to the full points"), ("d", "hollow: held out")]
    )


def _trends(fits: Sequence[Fit]) -> list[Trend]:
    several = len({fit.what for fit in fits}) > 1
    trends = []
    for number, fit in enumerate(fits):
        first, last = fit.points[0][0], fit.held_out[0]
        name = f"{fit.what} {short_count(fit.other)}" if several else short_count(fit.other)
        line = ((first, fit.at(first)), (last, fit.at(last)))
        trends.append(Trend(name, "abcd"[number % 4], fit.points, [fit.held_out], line))
    return trends
