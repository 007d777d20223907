"""Three kinds of chart, drawn by matplotlib as SVG: upright columns, lying lanes, points and lines.

Colours are the CSS variables of style.css (`a`, `b`, ...), so that the page decides them, also in
the dark. Whatever a reader may point at tells its value. matplotlib is imported where something is
drawn. Lengths are in units of the view box; the page scales it.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.printed import short_count

STYLE = Path(__file__).with_name("style.css").read_text("utf-8")
LOOK = Path(__file__).with_name("charts.mplstyle")
WIDTH, HEIGHT, LANE = 480, 250, 50
# matplotlib writes colours as numbers: these stand for variables until all is drawn.
NAMES = ("a", "b", "c", "d", "on-a", "on-b", "on-c", "on-d", "ink", "soft", "line", "card")
PAINT = {name: f"#c0ffe{i:x}" for i, name in enumerate(NAMES)}
HINT = "hint: "  # begins the id of what tells its value
Point = tuple[float, float]


class Series(NamedTuple):
    """Columns of one colour: a value for each place, and how it is printed."""

    name: str
    css: str
    values: Sequence[float]
    label: Callable[[float], str]


class LyingBar(NamedTuple):
    """Its name, its (css, length, words) parts from left to right, the note at its end, and the
    whisker of an interval.
    """

    name: str
    parts: Sequence[tuple[str, float, str]]
    note: str
    interval: Sequence[float] | None = None


class Trend(NamedTuple):
    """Points (x, y) of one colour and the line through some places, straight in between as drawn;
    apart: points that the line was not drawn through, shown hollow. name: at the line's end.
    """

    name: str
    css: str
    points: Sequence[Point]
    apart: Sequence[Point]
    line: Sequence[Point]


class Chart(NamedTuple):
    """What `draw` draws on matplotlib's axes, with the names of both ways."""

    title: str
    draw: Callable[[Any], None]
    x_label: str
    y_label: str = ""
    height: float = HEIGHT


def columns(
    title: str, places: list[str], series: list[Series], x_label: str, y_label: str, top: float = 0
) -> Chart:
    """Grouped columns, one group a place. top: what the axis reaches at least."""

    def draw(axes: Any) -> None:
        group = 0.87 * WIDTH / max(1, len(places))
        wide = min(56.0, 0.76 * group / len(series))
        # Labels of narrow columns are turned; of still narrower ones only the hints remain.
        style = {"weight": "bold"} if wide >= 30 else {"rotation": 90, "fontsize": 10.5}
        for nth, one in enumerate(series):
            x = [at + (nth - (len(series) - 1) / 2) * wide / group for at in range(len(places))]
            bars = axes.bar(x, one.values, wide / group, color=PAINT[one.css], ec=PAINT["card"])
            for bar, place, value in zip(bars, places, one.values, strict=True):
                bar.set_gid(f"{HINT}{x_label} {place}, {one.name}: {one.label(value)}")
            if wide >= 9:
                axes.bar_label(bars, fmt=one.label, padding=4, **style)
        every = math.ceil(18 / group)  # a place's name needs this much
        axes.set_xticks(range(0, len(places), every), places[::every])
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.update_datalim([(0, top)])
        _round(axes.yaxis)

    return Chart(title, draw, x_label, y_label)


def lanes(
    title: str, rows: list[LyingBar], *, x_label: str, reference: tuple[float, str] | None = None
) -> Chart:
    """Lying bars from 0. reference: (x, words) of a dashed upright line across all of them."""
    ends = [max(sum(p[1] for p in row.parts), *(row.interval or [0])) for row in rows]

    def draw(axes: Any) -> None:
        for at, (row, end) in enumerate(zip(rows, ends, strict=True)):
            start = 0.0
            for css, length, words in row.parts:
                bar = axes.barh(at, length, 0.5, left=start, color=PAINT[css], ec=PAINT["card"])
                bar[0].set_gid(f"{HINT}{row.name}: {words or row.note}")
                if length / max(ends) * 0.8 * WIDTH > 7 * len(words) + 10:
                    _beside(axes, words, (start, at), (7, 0), color=PAINT[f"on-{css}"])
                start += length
            if row.interval:
                x = [end for end in row.interval for _ in range(3)]
                y = [at + rise for rise in (-0.1, 0.1, 0, 0, -0.1, 0.1)]
                axes.plot(x, y, color=PAINT["card"], linewidth=4)
                axes.plot(x, y, color=PAINT["ink"], linewidth=1.5)
            _beside(axes, row.note, (end, at), (8, 0), weight="bold")
            _beside(axes, row.name, (0, at - 0.25), (0, 8))
        if reference:
            _mark(axes, *reference)
        axes.set(ylim=(len(rows) - 0.6, -0.8), yticks=[])
        axes.spines.bottom.set_visible(False)
        _round(axes.xaxis)

    return Chart(title, draw, x_label, height=(len(rows) + 1.4) * LANE)


def scatter(
    title: str,
    trends: Sequence[Trend],
    *,
    x_label: str,
    y_label: str,
    log: bool = True,
    marks: Sequence[tuple[float, str]] = (),
) -> Chart:
    """Points over an axis of x: logarithmic and marked where points lie, or even (log=False); or
    lines alone. marks: (x, words) of dashed upright lines.
    """

    def draw(axes: Any) -> None:
        for one in trends:
            style = {"color": PAINT[one.css], "clip_on": False}
            axes.plot(*zip(*one.line, strict=True), linewidth=1.2, **style)
            for point in (*one.points, *one.apart):
                inside = PAINT["card" if point in one.apart else one.css]
                hint = f"{HINT}{one.name}, {short_count(point[0])}: {point[1]:.4g}"
                axes.plot(*point, "o", markerfacecolor=inside, markersize=7, gid=hint, **style)
        _round(axes.yaxis)
        low, high = axes.get_ylim()
        highest = -math.inf
        for y, x, name in sorted((*one.line[-1][::-1], one.name) for one in trends):
            # Names of lines that end close to one another stand above one another.
            highest = max(y, highest + 0.06 * (high - low))
            _beside(axes, name, (x, highest), (10, 0), fontsize=10.5, weight="bold")
        for nth, (place, words) in enumerate(marks):  # neighbours at different heights
            _mark(axes, place, words, 8 + 13 * (nth % 2))
        if log:
            points = sorted({at for one in trends for at, _ in (*one.points, *one.apart)})
            axes.set_xscale("log")
            axes.set_xticks(points, map(short_count, points))
            axes.set_xticks([], minor=True)
        axes.margins(x=0.02)

    return Chart(title, draw, x_label, y_label)


def drawing(
    charts: Sequence[Chart], legend: Sequence[tuple[str, str]] = (), *, alone: bool = True
) -> str:
    """Charts below one another, with their titles, as a picture file; legend: (colour, words).
    alone=False: without titles, as an SVG element of a page that has the style sheet.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [chart.height + 30 * alone for chart in charts]
    height, written = sum(heights) + 24 * bool(legend), io.StringIO()
    with matplotlib.rc_context(fname=LOOK):
        picture = Figure((WIDTH / 72, height / 72))
        panels = picture.subplots(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, chart in zip(panels, charts, strict=True):
            chart.draw(axes)
            axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
            axes.set_title(chart.title if alone else "")
        if legend:
            keys = [Patch(color=PAINT[css], label=words) for css, words in legend]
            picture.legend(handles=keys, loc="outside upper left", ncols=len(keys))
        FigureCanvasSVG(picture).print_svg(written)  # savefig would draw it twice
    body = _body(written.getvalue())
    spoken = [*(escape(c.title) for c in charts), *re.findall("<title>(.*?)</title>", body)]
    frame = f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{"; ".join(spoken)}"'
    if not alone:
        return f"<svg {frame}>{body}</svg>"
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {spaces} width="{1.5 * WIDTH:g}" {frame}><style>{STYLE}</style>{body}</svg>\n'


def _body(svg: str) -> str:
    """What matplotlib wrote between <svg> and </svg>, with colours by name and hints for ids."""
    body = svg[svg.index('<g id="figure_1">') : svg.rindex("</svg>")]
    for name, paint in PAINT.items():
        body = body.replace(paint, f"var(--{name})")
    body = re.sub(rf'<g id="{HINT}(.*?)">', r"<g><title>\1</title>", body)
    body = re.sub(r"<defs>\s*<clipPath.*?</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r'(?<=<g) id=".*?"| clip-path=".*?"|; font-family: [^;"]*', "", body)
    return re.sub(r"\s+", " ", body).replace("> <", "><")


def _round(axis: Any) -> None:
    """Three to seven round numbers along an axis, around all that was drawn."""
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(*axis.get_data_interval())
    axis.set_ticks(ticks)
    axis.set_major_formatter("{x:,.10g}")
    axis.grid()


def _mark(axes: Any, x: float, words: str, rise: float = 8) -> None:
    axes.axvline(x, color=PAINT["soft"], linestyle=(0, (4, 4)), linewidth=1)
    above = "data", "axes fraction"
    _beside(axes, words, (x, 1), (3, rise), xycoords=above, color=PAINT["soft"])


def _beside(axes: Any, words: str, point: Point, by: Point, **style: Any) -> None:
    style = {"va": "center", "textcoords": "offset points", "annotation_clip": False} | style
    axes.annotate(words, point, by, **style)
