"""How acceptance grows with a draft's size and its training text: lines over a logarithm.

    draftsmith scaling results=runs/scaling/rows.json out=docs/results

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
from typing import Any, NamedTuple

import numpy as np

from draftsmith.command import parse
from draftsmith.decode.evaluate.metrics import bootstrap
from draftsmith.decode.report.charts import Trend, drawing, scatter
from draftsmith.decode.report.figures import TEMPLATES
from draftsmith.printed import bracket, print_table, short_count

Row = dict[str, Any]

VALUES = ("alpha", "tau")
AXES = ("tokens", "parameters")
FIELDS = ("what", "parameters", "tokens", "seed", *VALUES)
FEWEST = 3  # places of a line, beside the one that is held out


@dataclass
class Scaling:
    """The measurements, and where the fits go."""

    results: str  # JSON: a list with what, parameters, tokens, seed, alpha, tau of each measurement
    out: str = "docs/results"  # the folder of scaling.json, .md and .svg


class Fit(NamedTuple):
    """value = slope log10(axis) + intercept, along one line of measurements.

    what, other: the arm, and the size or the tokens that all of the line have. r2: of the fitted
    points, each seed one. interval: of the slope, 95%, bootstrap over seeds; None with one seed.
    points, held_out: (place, mean over seeds).
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
        return self.slope * math.log10(place) + self.intercept

    @property
    def error(self) -> float:
        """Predicted minus measured where nothing was fitted."""
        return self.at(self.held_out[0]) - self.held_out[1]


def main(argv: list[str]) -> None:
    settings = parse(Scaling, argv)
    rows = read_rows(settings.results)
    fits = all_fits(rows)
    print_table(HEAD, map(cells, fits), HEAD)
    publish(rows, fits, Path(settings.out))
    print(f"written: {settings.out}/scaling.json, .md, .svg")


def read_rows(file: str) -> list[Row]:
    """The measurements in a JSON list; ValueError for a file or a row that isn't whole."""
    try:
        rows = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"results: got {file}, expected a JSON list of rows ({error})") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"results: got {file} without a list of rows, expected [{{...}}, ...]")
    # A published file also holds its fits.
    rows = [row for row in rows if "slope" not in row]
    for number, row in enumerate(rows, 1):
        absent = [name for name in FIELDS if name not in row]
        if absent:
            raise ValueError(
                f"results: got row {number} of {file} without {', '.join(absent)}; expected each "
                f"to have {', '.join(FIELDS)}"
            )
        if not all(isinstance(row[axis], int | float) and row[axis] > 0 for axis in AXES):
            raise ValueError(
                f"results: got row {number} of {file} with tokens={row['tokens']} and parameters="
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
        most = [max([n for k, n in places.items() if k[0] == axis], default=0) for axis in AXES]
        raise ValueError(
            f"results: got at most {most[0]} token counts of one size and {most[1]} sizes at one "
            f"token count, expected {FEWEST} points to draw a line through and one more to hold "
            "out; measure more"
        )
    return [fit_line(line, value, *key) for value in VALUES for key, line in whole.items()]


def fit_line(rows: Sequence[Row], value: str, axis: str, what: str, other: float) -> Fit:
    """The line of some rows without those of the largest place."""
    *means, held_out = (
        (float(place), float(np.mean([row[value] for row in rows if row[axis] == place])))
        for place in sorted({row[axis] for row in rows})
    )
    fitted = [row for row in rows if row[axis] < held_out[0]]
    x, y = (np.array([float(row[name]) for row in fitted]) for name in (axis, value))
    x = np.log10(x)
    slope, intercept = _line(x, y)
    left = y - slope * x - intercept
    seeds = np.array([row["seed"] for row in fitted])
    places = [np.flatnonzero(seeds == seed) for seed in np.unique(seeds)]

    def slope_of(draw: np.ndarray) -> float:
        chosen = np.concatenate([places[seed] for seed in draw])
        return _line(x[chosen], y[chosen])[0]

    r2 = float(1 - left.var() / y.var()) if y.var() else math.nan
    interval = bootstrap(slope_of, len(places), draws=300) if len(places) > 1 else None
    return Fit(value, axis, what, other, slope, intercept, r2, interval, means, held_out)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(slope, intercept); nan where all x are one, as in a draw of seeds that weren't all run."""
    slope, intercept = np.polyfit(x, y, 1) if np.ptp(x) else (math.nan, math.nan)
    return float(slope), float(intercept)


HEAD = (
    *("value", "arm", "of", "along", "a, a decade", "95%", "b", "R²", "points"),
    *("held out", "measured", "predicted", "error"),
)


def cells(fit: Fit) -> list[str]:
    """A fit in words, in the order of HEAD."""
    place, measured = fit.held_out
    interval = bracket(fit.interval, 3) or "one seed"
    of = f"{short_count(fit.other)} {AXES[AXES[0] == fit.axis]}"
    line = [f"{fit.slope:.3f}", interval, f"{fit.intercept:.3f}", f"{fit.r2:.3f}"]
    points = [str(len(fit.points)), short_count(place)]
    found = [f"{measured:.3f}", f"{fit.at(place):.3f}", f"{fit.error:+.3f}"]
    return [fit.value, fit.what, of, fit.axis, *line, *points, *found]


def publish(rows: Sequence[Row], fits: Sequence[Fit], folder: Path) -> None:
    """Write scaling.json (the rows, then a row for each fit), scaling.md and scaling.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {name: rows[0][name] for name in ("commit", "command", "machine") if name in rows[0]}
    found: list[Row] = []
    for fit in fits:
        row = {name: value for name, value in fit._asdict().items() if name != "points"}
        row |= {"held_out": fit.held_out[0], "measured": fit.held_out[1], "error": fit.error}
        found.append(row | made)
    (folder / "scaling.json").write_text(json.dumps([*rows, *found], indent=1) + "\n")
    (folder / "scaling.md").write_text(page(rows, fits))
    (folder / "scaling.svg").write_text(picture(fits))


def page(rows: Sequence[Row], fits: Sequence[Fit]) -> str:
    """Markdown, from the rows and their fits alone."""
    about: dict[str, Any] = {"first": rows[0], "seeds": len({row["seed"] for row in rows})}
    for name, axis in (("sizes", "parameters"), ("counts", "tokens")):
        about[name] = list(map(short_count, sorted({row[axis] for row in rows})))
    template = TEMPLATES.get_template("scaling.md.jinja")
    return template.render(head=HEAD, table=map(cells, fits), **about)


def picture(fits: Sequence[Fit]) -> str:
    """A panel for each value and axis; hollow: held out."""
    several = len({fit.what for fit in fits}) > 1
    panels: dict[tuple[str, str], list[Trend]] = {}
    for fit in fits:
        trends = panels.setdefault((fit.value, fit.axis), [])
        ends = fit.points[0][0], fit.held_out[0]
        name = f"{fit.what} {short_count(fit.other)}" if several else short_count(fit.other)
        line = [(end, fit.at(end)) for end in ends]
        trends.append(Trend(name, "abcd"[len(trends) % 4], fit.points, [fit.held_out], line))
    charts = [
        scatter(f"{value} against {axis}", trends, x_label=axis, y_label=value)
        for (value, axis), trends in panels.items()
    ]
    legend = [("a", "a line is fitted to the full points"), ("d", "hollow: held out")]
    return drawing(charts, legend)
