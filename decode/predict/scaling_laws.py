"""How acceptance grows with a draft's size and its training text: lines over a logarithm.

    draftsmith scaling results=runs/scaling/rows.json out=docs/results

    value = a log10(tokens) + b   of each size,   value = a log10(parameters) + b   of each text

value is alpha or tau, as in "Scaling laws for speculative decoding" (arXiv 2505.07858). Each line
is fitted by least squares to all seeds, without its largest place: what the line says of that one
is compared with what was measured there. Four points always look like a line; one that was held out
needn't lie on it. Where rows have `costs` (a round's time in plain steps by batch size), the
speed-up after most tokens is drawn over the batch in the same way; and one law of text and size
together (joint_law.py) says what to spend next.
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
from draftsmith.decode.predict.joint_law import (
    LAW_HEAD,
    SPENT_HEAD,
    joint_laws,
    law_cells,
    spending,
    spent_cells,
)
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
    out: str = "docs/results"
    name: str = "scaling"  # what is written there: <name>.json, .md and .svg


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
    for head, table in tables(rows, fits):
        print_table(head, table, head)
    publish(rows, fits, Path(settings.out), settings.name)
    print(f"written: {settings.out}/{settings.name}.json, .md, .svg")


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
    """Every line with enough places, alpha's first, the batch's last; ValueError where there is
    none.
    """
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
    fits = [fit_line(line, value, *key) for value in VALUES for key, line in whole.items()]
    return fits + batch_fits(rows)


def batch_fits(rows: Sequence[Row]) -> list[Fit]:
    """The speed-up of each size over the batch, after most tokens, where `costs` say it."""
    most = max(row["tokens"] for row in rows)
    last = [row for row in rows if row["tokens"] == most]
    lines: dict[tuple[str, float], list[Row]] = {}
    for row in last:
        for batch, cost in row.get("costs", {}).items():
            at = row | {"batch": int(batch), "speedup": row["tau"] / cost}
            lines.setdefault((row["what"], row["parameters"]), []).append(at)
    return [
        fit_line(line, "speedup", "batch", *key)
        for key, line in sorted(lines.items())
        if len({row["batch"] for row in line}) > FEWEST
    ]


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
    of = f"{short_count(fit.other)} {'tokens' if fit.axis == 'parameters' else 'parameters'}"
    line = [f"{fit.slope:.3f}", interval, f"{fit.intercept:.3f}", f"{fit.r2:.3f}"]
    points = [str(len(fit.points)), short_count(place)]
    found = [f"{measured:.3f}", f"{fit.at(place):.3f}", f"{fit.error:+.3f}"]
    return [fit.value, fit.what, of, fit.axis, *line, *points, *found]


def tables(rows: Sequence[Row], fits: Sequence[Fit]) -> list[tuple[Sequence[str], list[list[str]]]]:
    """The lines; the laws of text and size together; what budgets give most with, by tau's."""
    laws = joint_laws(rows)
    spent = [found for law in laws if law.value == "tau" for found in spending(rows, law)]
    every = [
        (HEAD, [cells(fit) for fit in fits]),
        (LAW_HEAD, [law_cells(law) for law in laws]),
        (SPENT_HEAD, [spent_cells(found) for found in spent]),
    ]
    return [(head, table) for head, table in every if table]


def publish(rows: Sequence[Row], fits: Sequence[Fit], folder: Path, name: str) -> None:
    """Write <name>.json (the rows, then a row for each fit), .md and .svg."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {name: rows[0][name] for name in ("commit", "command", "machine") if name in rows[0]}
    found: list[Row] = []
    for fit in fits:
        row = {name: value for name, value in fit._asdict().items() if name != "points"}
        row |= {"held_out": fit.held_out[0], "measured": fit.held_out[1], "error": fit.error}
        found.append(row | made)
    (folder / f"{name}.json").write_text(json.dumps([*rows, *found], indent=1) + "\n")
    (folder / f"{name}.md").write_text(page(rows, fits, name))
    (folder / f"{name}.svg").write_text(picture(fits))


def page(rows: Sequence[Row], fits: Sequence[Fit], name: str) -> str:
    """Markdown, from the rows and their fits alone."""
    about: dict[str, Any] = {"first": rows[0], "seeds": len({row["seed"] for row in rows})}
    for axes, axis in (("sizes", "parameters"), ("counts", "tokens")):
        about[axes] = list(map(short_count, sorted({row[axis] for row in rows})))
    template = TEMPLATES.get_template("scaling.md.jinja")
    return template.render(name=name, tables=tables(rows, fits), **about)


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
