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

from draftsmith.decode.report.printed import short_count

STYLE = Path(__file__).with_name("style.css").read_text("utf-8")
WIDTH, HEIGHT, LANE = 480, 250, 50
# matplotlib writes colours as numbers: these stand for variables until all is drawn.
NAMES = ("a", "b", "c", "d", "on-a", "on-b", "on-c", "on-d", "ink", "soft", "line", "card")
PAINT = {name: f"#c0ffe{i:x}" for i, name in enumerate(NAMES)}
HINT = "hint: "  # begins the id of what tells its value
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "draftsmith",
    "font.size": 12,
    "text.color": PAINT["ink"],
    "text.parse_math": False,
    "axes.labelcolor": PAINT["soft"],
    "axes.edgecolor": PAINT["soft"],
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.titlesize": 12,
    "figure.constrained_layout.h_pad": 0.08,
    "legend.handlelength": 0.9,
    "legend.handleheight": 0.9,
    "legend.frameon": False,
    "grid.color": PAINT["line"],
    **{f"axes.spines.{side}": False for side in ("left", "right", "top")},
    **{f"{axis}tick.color": PAINT["soft"] for axis in "xy"},
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
    **{f"{axis}tick.major.pad": 7 for axis in "xy"},
}


class Series(NamedTuple):
    """Columns of one colour: a value and its printed label for each place."""

    name: str
    css: str
    values: Sequence[float]
    labels: Sequence[str]


class LyingBar(NamedTuple):
    """A lying bar: its name, its (css, length, words) parts from left to right, the note at its
    end, and the whisker of an interval.
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
    points: Sequence[tuple[float, float]]
    apart: Sequence[tuple[float, float]]
    line: Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """What `draw` draws on matplotlib's axes."""

    title: str
    draw: Callable[[Any], None]
    height: float = HEIGHT


def columns(
    title: str,
    places: Sequence[str],
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    top: float | None = None,
) -> Chart:
    """Grouped columns, one group a place. top: the axis ends there; by default at the largest."""

    def draw(axes: Any) -> None:
        group = 0.87 * WIDTH / max(1, len(places))
        wide = min(56.0, 0.76 * group / len(series))
        # Labels of narrow columns are turned; of still narrower ones only the hints remain.
        style = {"weight": "bold"} if wide >= 30 else {"rotation": 90, "fontsize": 10.5}
        for nth, one in enumerate(series):
            x = [at + (nth - (len(series) - 1) / 2) * wide / group for at in range(len(places))]
            bars = axes.bar(x, one.values, wide / group, color=PAINT[one.css], ec=PAINT["card"])
            for bar, place, label in zip(bars, places, one.labels, strict=True):
                bar.set_gid(f"{HINT}{x_label} {place}, {one.name}: {label}")
            if wide >= 9:
                axes.bar_label(bars, one.labels, padding=4, **style)
        every = math.ceil(18 / group)  # a place's name needs this much
        axes.set_xticks(range(0, len(places), every), places[::every])
        axes.set(xlim=(-0.5, len(places) - 0.5), xlabel=x_label, ylabel=y_label)
        _ticks(axes, "y", [0.0, top or max([v for one in series for v in one.values]) or 1.0])

    return Chart(title, draw)


def lanes(
    title: str,
    rows: Sequence[LyingBar],
    *,
    x_label: str,
    reference: tuple[float, str] | None = None,
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
        for place, words in [reference] if reference else []:
            _mark(axes, place, words)
        axes.set(ylim=(len(rows) - 0.6, -0.8), yticks=[], xlabel=x_label)
        axes.spines.bottom.set_visible(False)
        _ticks(axes, "x", [0.0, max(ends) or 1.0])

    return Chart(title, draw, (len(rows) + 1.4) * LANE)


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
        y = [p[1] for one in trends for p in (*one.points, *one.apart, *one.line)]
        unit, highest = _ticks(axes, "y", y), -math.inf
        for one in sorted(trends, key=lambda one: one.line[-1][1]):
            style = {"color": PAINT[one.css], "clip_on": False}
            axes.plot(*zip(*one.line, strict=True), linewidth=1.2, **style)
            for point in (*one.points, *one.apart):
                inside = PAINT["card" if point in one.apart else one.css]
                hint = f"{HINT}{one.name}, {short_count(point[0])}: {point[1]:.4g}"
                axes.plot(*point, "o", markerfacecolor=inside, markersize=7, gid=hint, **style)
            # Names of lines that end close to one another stand above one another.
            highest = max(one.line[-1][1], highest + 15 * unit)
            style = {"fontsize": 10.5, "weight": "bold"}
            _beside(axes, one.name, (one.line[-1][0], highest), (10, 0), **style)
        for nth, (place, words) in enumerate(marks):  # neighbours at different heights
            _mark(axes, place, words, 8 + 13 * (nth % 2))
        axes.set(xscale="log" if log else "linear", xlabel=x_label, ylabel=y_label)
        if log:
            points = sorted({at for one in trends for at, _ in (*one.points, *one.apart)})
            axes.set_xticks(points, map(short_count, points))
            axes.set_xticks([], minor=True)
        axes.margins(x=0.02)

    return Chart(title, draw)


def inline(chart: Chart) -> str:
    """A chart as an SVG element of a page that has the style sheet."""
    return _svg([chart], (), "")


def drawing(charts: Sequence[Chart], legend: Sequence[tuple[str, str]]) -> str:
    """Charts below one another, with their titles, as a picture file; legend: (colour, words)."""
    svg = _svg(charts, legend, f"<style>{STYLE}</style>")
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return svg.replace("<svg", f'<svg {spaces} width="{1.5 * WIDTH:g}"', 1) + "\n"


def _svg(charts: Sequence[Chart], legend: Sequence[tuple[str, str]], style: str) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [chart.height + 30 * bool(style) for chart in charts]
    height, written = sum(heights) + 24 * bool(legend), io.StringIO()
    with matplotlib.rc_context(RC):
        size = WIDTH / 72, height / 72
        picture = Figure(size, dpi=72, facecolor=PAINT["card"], layout="constrained")
        panels = picture.subplots(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, chart in zip(panels, charts, strict=True):
            chart.draw(axes)
            axes.set_title(chart.title if style else "", loc="left", pad=30)
        if legend:
            keys = [Patch(color=PAINT[css], label=words) for css, words in legend]
            picture.legend(handles=keys, loc="outside upper left", ncols=len(keys))
        FigureCanvasSVG(picture).print_svg(written)  # savefig would draw it twice
    body = _body(written.getvalue())
    titles = [escape(chart.title) for chart in charts]
    spoken = "; ".join(titles + re.findall("<title>(.*?)</title>", body))
    frame = f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{spoken}"'
    return f"<svg {frame}>{style}{body}</svg>"


def _body(svg: str) -> str:
    """What matplotlib wrote between <svg> and </svg>, with colours by name and hints for ids."""
    body = svg[svg.index('<g id="figure_1">') : svg.rindex("</svg>")]
    for name, paint in PAINT.items():
        body = body.replace(paint, f"var(--{name})")
    body = re.sub(rf'<g id="{HINT}(.*?)">', r"<g><title>\1</title>", body)
    body = re.sub(r"<defs>\s*<clipPath.*?</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r'(?<=<g) id=".*?"| clip-path=".*?"|; font-family: [^;"]*', "", body)
    return re.sub(r"\s+", " ", body).replace("> <", "><")


def _ticks(axes: Any, way: str, values: Sequence[float]) -> float:
    """Three to seven round numbers along an axis, from at or below the least of the values to at or
    above the greatest; a unit of the view box there.
    """
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(min(values), max(values))
    ticks = [round(float(tick), 12) for tick in found]
    axes.set(**{f"{way}ticks": ticks, f"{way}lim": (ticks[0], ticks[-1])})
    axes.set(**{f"{way}ticklabels": [f"{tick:,.10g}" for tick in ticks]})
    axes.grid(axis=way)
    return (ticks[-1] - ticks[0]) / HEIGHT


def _mark(axes: Any, x: float, words: str, rise: float = 8) -> None:
    axes.axvline(x, color=PAINT["soft"], linestyle=(0, (4, 4)), linewidth=1)
    above = {"xycoords": ("data", "axes fraction"), "color": PAINT["soft"]}
    _beside(axes, words, (x, 1), (3, rise), **above)


def _beside(
    axes: Any, words: str, point: tuple[float, float], by: tuple[float, float], **style: Any
) -> None:
    axes.annotate(words, point, by, textcoords="offset points", **{"va": "center"} | style)
