"""Three kinds of chart as inline SVG: upright columns, lying lanes, points with the lines through
them. No scripts, fonts or files.

Colours are CSS classes (`a`, `b`, ...), so that the page decides them, also in the dark.
Every length below is in units of the view box; the page scales it.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from draftsmith.decode.report.style import STYLE

WIDTH = 500
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 22, 44
COLUMN_HEIGHT = 250
LANE, LANE_GAP = 24, 26
CHARACTER = 6.4  # mean advance of the label font, for what can't be measured here
# A value written level needs this much; narrower columns have theirs turned.
LEVEL_LABEL = 30


@dataclass(frozen=True)
class Series:
    """Columns of one colour: a value and its printed label for each place."""

    name: str
    css: str
    values: Sequence[float]
    labels: Sequence[str]


@dataclass(frozen=True)
class LyingBar:
    """A lying bar: its name, its (css, length, words) parts from left to right, the note at its
    end, and the whisker of an interval.
    """

    name: str
    parts: Sequence[tuple[str, float, str]]
    note: str
    interval: Sequence[float] | None = None

    @property
    def length(self) -> float:
        return sum(length for _, length, _ in self.parts)


def columns(
    title: str,
    places: Sequence[str],
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    top: float | None = None,
) -> str:
    """Grouped columns, one group a place. top: the axis ends there; by default at the largest."""
    peak = max((value for one in series for value in one.values), default=0.0)
    steps = ticks(top or peak or 1.0)
    ceiling, floor = steps[-1], COLUMN_HEIGHT - BOTTOM
    group = (WIDTH - LEFT - RIGHT) / max(1, len(places))
    wide = min(56.0, 0.76 * group / len(series))
    height = floor - (TOP if wide >= LEVEL_LABEL else 2 * TOP)
    out = [_grid(steps, floor, height)]
    for at, place in enumerate(places):
        middle = LEFT + (at + 0.5) * group
        out.append(_text(middle, floor + 16, place, "tick", "middle"))
        for nth, one in enumerate(series):
            x = middle + (nth - len(series) / 2) * wide
            tall = height * one.values[at] / ceiling
            hint = f"{x_label} {place}, {one.name}: {one.labels[at]}"
            out.append(_column(one.css, x + 1, floor - tall, wide - 2, tall, hint))
            out.append(_column_label(x + wide / 2, floor - tall, wide, one.labels[at]))
    out.append(_text((LEFT + WIDTH - RIGHT) / 2, COLUMN_HEIGHT - 8, x_label, "axis", "middle"))
    out.append(_turned(13, floor - height / 2, y_label, "axis", "middle"))
    spoken = "; ".join(
        f"{one.name}: " + ", ".join(f"{p} {v}" for p, v in zip(places, one.labels, strict=True))
        for one in series
    )
    return _frame(title, spoken, COLUMN_HEIGHT, out)


def lanes(
    title: str,
    rows: Sequence[LyingBar],
    *,
    x_label: str,
    reference: tuple[float, str] | None = None,
) -> str:
    """Lying bars from 0. reference: (x, words) of a dashed upright line across all of them."""
    ends = [max(row.length, row.interval[1] if row.interval else 0.0) for row in rows]
    # The notes stand right of their bars, so the axis ends before the picture does.
    note = max(len(row.note) for row in rows) * CHARACTER + 14
    steps = ticks(max(ends, default=1.0) or 1.0)
    scale = (WIDTH - 8 - RIGHT - note) / steps[-1]
    floor = TOP + len(rows) * (LANE + LANE_GAP)
    out = []
    for step in steps:
        x = 8 + step * scale
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{floor}"/>')
        out.append(_text(x, floor + 16, _tick(step), "tick", "middle" if step else "start"))
    if reference:
        x = 8 + reference[0] * scale
        out.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{floor}"/>')
        out.append(_text(x, TOP - 9, reference[1], "tick", "middle"))
    for at, row in enumerate(rows):
        out.append(_lane(row, TOP + at * (LANE + LANE_GAP) + LANE_GAP - 6, scale))
    out.append(_text(WIDTH / 2, floor + 36, x_label, "axis", "middle"))
    spoken = "; ".join(f"{row.name}: {row.note}" for row in rows)
    return _frame(title, spoken, floor + 44, out)


@dataclass(frozen=True)
class Trend:
    """Points (x, y) of one colour and the line through some places, straight in between as drawn;
    apart: points that the line was not drawn through, shown hollow. name: at the line's end.
    """

    name: str
    css: str
    points: Sequence[tuple[float, float]]
    apart: Sequence[tuple[float, float]]
    line: Sequence[tuple[float, float]]


def scatter(
    title: str,
    trends: Sequence[Trend],
    *,
    x_label: str,
    y_label: str,
    log: bool = True,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Points over an axis of x: logarithmic and marked where points lie, or even (log=False); or
    lines alone, of which the ends are marked. marks: (x, words) of dashed upright lines.
    """
    all_points = [point for one in trends for point in (*one.points, *one.apart, *one.line)]
    places = sorted({x for one in trends for x, _ in (*one.points, *one.apart)})
    places = places or [min(x for x, _ in all_points), max(x for x, _ in all_points)]
    places = places if log else _round_steps(places)
    along = math.log10 if log else float
    steps = _round_steps([y for _, y in all_points])
    floor, height = COLUMN_HEIGHT - BOTTOM, COLUMN_HEIGHT - BOTTOM - TOP
    names = max(len(one.name) for one in trends) * CHARACTER + 14
    first, wide = along(places[0]), WIDTH - LEFT - RIGHT - 16 - names
    span = (along(places[-1]) - first) or 1.0

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = (along(point[0]) - first) / span
        up = (point[1] - steps[0]) / (steps[-1] - steps[0])
        return LEFT + 8 + across * wide, floor - up * height

    out = [_grid(steps, floor, height)]
    out += [_text(at((x, 0))[0], floor + 16, short_count(x), "tick", "middle") for x in places]
    for x, words in marks:
        line = f'x1="{at((x, 0))[0]:.1f}" x2="{at((x, 0))[0]:.1f}" y1="{TOP}" y2="{floor}"'
        out.append(f'<line class="mark" {line}/>')
        out.append(_text(at((x, 0))[0] + 3, TOP - 6, words, "tick", "start"))
    lowest = math.inf
    for one in sorted(trends, key=lambda one: one.line[-1][1]):
        way = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(at, one.line))
        out.append(f'<path d="M{way}" style="stroke: var(--{one.css}); fill: none"/>')
        x1, y1 = at(one.line[-1])
        for point, hollow in [(p, False) for p in one.points] + [(p, True) for p in one.apart]:
            out.append(_dot(one, at(point), hollow, f"{short_count(point[0])}: {point[1]:.4g}"))
        # Names of lines that end close to one another stand above one another.
        lowest = min(y1 + 4, lowest - 13)
        out.append(_text(x1 + 10, lowest, one.name, "value small", "start"))
    out.append(_text((LEFT + WIDTH - RIGHT) / 2, COLUMN_HEIGHT - 8, x_label, "axis", "middle"))
    out.append(_turned(13, floor - height / 2, y_label, "axis", "middle"))
    spoken = "; ".join(
        f"{one.name}: "
        + ", ".join(f"{short_count(x)} {y:.3g}" for x, y in (*one.points, *one.apart))
        for one in trends
    )
    return _frame(title, spoken, COLUMN_HEIGHT, out)


def drawing(charts: Sequence[tuple[str, str]], legend: Sequence[tuple[str, str]]) -> str:
    """(title, chart of decode.svg) below one another as a picture file; legend: (colour, words)."""
    parts, y = [], 30.0
    for at, (css, words) in enumerate(legend):
        x = 8 + at * (WIDTH - 8) / len(legend)
        parts.append(f'<rect class="{css}" x="{x:.0f}" y="6" width="11" height="11" rx="3"/>')
        parts.append(f'<text class="axis" x="{x + 16:.0f}" y="16">{words}</text>')
    for title, chart in charts:
        found = re.fullmatch(rf'<svg viewBox="0 0 {WIDTH} (\d+)"[^>]*>(.*)</svg>', chart, re.S)
        assert found, f"a chart of decode.svg begins otherwise: {chart[:80]!r}"
        parts.append(f'<text class="name" x="8" y="{y + 12:.0f}">{title}</text>')
        parts.append(f'<g transform="translate(0 {y + 16:.0f})">{found[2]}</g>')
        y += 22 + float(found[1])
    box = f'viewBox="0 0 {WIDTH} {y:.0f}" width="{1.5 * WIDTH:.0f}"'
    paper = f'<rect width="{WIDTH}" height="{y:.0f}" style="fill: var(--card)"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}><style>{STYLE}</style>'
        f"{paper}{''.join(parts)}</svg>\n"
    )


def ticks(peak: float) -> list[float]:
    """Three to seven round numbers from 0 to the first one at or above `peak` (above 0)."""
    rough = peak / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * (1 - 1e-9))
    return [round(i * step, 12) for i in range(math.ceil(peak / step - 1e-9) + 1)]


def _lane(row: LyingBar, y: float, scale: float) -> str:
    out = [_text(8, y - 6, row.name, "name", "start")]
    x = 8.0
    for css, length, words in row.parts:
        wide = length * scale
        out.append(_column(css, x, y, max(0.0, wide - 1), LANE, f"{row.name}: {words}"))
        if words and wide > len(words) * CHARACTER + 10:
            out.append(_text(x + 7, y + LANE / 2 + 4, words, f"inside on-{css}", "start"))
        x += wide
    end = x
    if row.interval:
        low, high = (8 + value * scale for value in row.interval)
        middle = y + LANE / 2
        end = max(end, high)
        shape = (
            f"M{low:.1f} {middle - 5}v10M{low:.1f} {middle}H{high:.1f}M{high:.1f} {middle - 5}v10"
        )
        out.append(f'<path class="casing" d="{shape}"/><path class="whisker" d="{shape}"/>')
    out.append(_text(end + 8, y + LANE / 2 + 4, row.note, "value", "start"))
    return "".join(out)


def _round_steps(values: Sequence[float]) -> list[float]:
    """Round numbers from at or below the least value to at or above the greatest."""
    step = ticks((max(values) - min(values)) or 1.0)[1]
    bottom = math.floor(min(values) / step)
    top = max(bottom + 1, math.ceil(max(values) / step))
    return [round(n * step, 12) for n in range(bottom, top + 1)]


def _grid(steps: Sequence[float], floor: float, height: float) -> str:
    out, low, ceiling = [], steps[0], steps[-1]
    for step in steps:
        y = floor - height * (step - low) / (ceiling - low)
        css = "grid" if step > low else "base"
        out.append(
            f'<line class="{css}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        out.append(_text(LEFT - 7, y + 4, _tick(step), "tick", "end"))
    return "".join(out)


def _column(css: str, x: float, y: float, wide: float, tall: float, hint: str) -> str:
    return (
        f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
        f'rx="2"><title>{escape(hint)}</title></rect>'
    )


def _column_label(x: float, y: float, wide: float, words: str) -> str:
    if wide >= LEVEL_LABEL:
        return _text(x, y - 5, words, "value", "middle")
    # Too narrow even for a turned label: the hint still tells the value.
    return _turned(x + 4, y - 5, words, "value small", "start") if wide >= 9 else ""


def _text(x: float, y: float, words: str, css: str, anchor: str) -> str:
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def _turned(x: float, y: float, words: str, css: str, anchor: str) -> str:
    return (
        f'<text class="{css}" transform="translate({x:.1f} {y:.1f}) rotate(-90)" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def _tick(value: float) -> str:
    return f"{value:,.10g}"


def _dot(one: Trend, at: tuple[float, float], hollow: bool, hint: str) -> str:
    inside = ' style="fill: var(--card)"' if hollow else ""
    return (
        f'<circle class="{one.css}"{inside} cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4" '
        f'stroke="var(--{one.css})" stroke-width="1.5"><title>{escape(f"{one.name}, {hint}")}'
        "</title></circle>"
    )


def short_count(count: float) -> str:
    """1.5M, 320k."""
    for size, sign in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{sign}"
    return f"{count:g}"


def _frame(title: str, spoken: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(f"{title}. {spoken}")}">{"".join(parts)}</svg>'
    )
