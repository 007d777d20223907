"""An evaluation's files: report.json, and report.html, which needs nothing from outside."""

import json
import math
import unicodedata
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from draftsmith.decode.report import figures
from draftsmith.decode.report.charts import LyingBar, Series, columns, inline, lanes
from draftsmith.decode.report.figures import FORMULAS, verdict
from draftsmith.decode.report.printed import TIMES, duration, number, short, times_as
from draftsmith.decode.report.schema import NamedDrafter, Report, as_report
from draftsmith.models.disk.store import write_atomically

PLAIN = 1.0  # the speed-up of plain decoding
SIGNS_OF_SPACE = {"\n": "⏎", "\t": "⇥"}


def write(values: dict[str, Any], folder: Path) -> None:
    """Write report.json and report.html into `folder`, each whole or not at all.

    values: what `schema.Report` holds, and more if need be. The formulas are added.
    """
    report = as_report(values)
    values = values | {"formulas": FORMULAS}
    known = [key for key in Report._fields if key in values]
    ordered = {key: values[key] for key in [*known, *sorted(values.keys() - known)]}
    text = json.dumps(ordered, indent=1, ensure_ascii=False, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "report.json", f"{text}\n".encode())
    write_atomically(folder / "report.html", page(report).encode())


def page(report: Report) -> str:
    """The whole report.html."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"visible": visible, "words": _words}
    path = report.drafter.path
    return templates.get_template("page.html.jinja").render(
        report=report,
        drafter=PurePath(path).name if path else report.drafter.kind,
        target=PurePath(report.target).name,
        headline=_headline(report),
        charts=[draw(report) for draw in (by_position, histogram, speedup, one_round)],
        figures=figures,
    )


def visible(text: str) -> Markup:
    """Escaped text in which no character hides: line ends, tabs, controls, marks of direction."""

    def shown(character: str) -> Markup:
        if sign := SIGNS_OF_SPACE.get(character):
            return Markup(f'<span class="sign-of-space">{sign}</span>{character}')
        # Controls, formats (zero width, direction), surrogates, odd line ends, no-break spaces.
        odd = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        if odd or character == "\u00a0":
            return Markup(f'<span class="code-point">&lt;U+{ord(character):04X}&gt;</span>')
        return escape(character)

    return Markup("").join(map(shown, text))


def _headline(report: Report) -> str:
    # Without an interval nothing is clear.
    low, high = report.speedup_interval or (-math.inf, math.inf)
    words = ": no clear difference from plain decoding"
    if verdict(report).level == "bad":
        words = " the speed, but not the target's output"
    elif low > PLAIN:
        words = " the speed of plain decoding"
    elif high < PLAIN:
        words = ": slower than plain decoding"
    lossy = "" if report.lossless else f", LOSSY ({report.lossy})"
    return times_as(report.speedup) + words + lossy


def _words(value: Any) -> str:
    if isinstance(value, NamedDrafter):
        value = value._asdict()
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    return short(value) if isinstance(value, float) else str(value)


# ------------------------------------------------- the charts; empty where nothing can be drawn


def by_position(report: Report) -> str:
    by_drafted, by_reached = report.acceptance_by_position, report.acceptance_conditional
    if not by_drafted:
        return ""
    series = [
        Series("of rounds that drafted it", "a", by_drafted, "{:.2f}".format),
        Series("of rounds that got there", "b", by_reached, "{:.2f}".format),
    ]
    places = [str(i + 1) for i in range(len(by_drafted))]
    axes: Any = {"x_label": "drafted position", "y_label": "share accepted"}
    return inline(columns("Acceptance by position", places, series, **axes, top=1.0))


def histogram(report: Report) -> str:
    total = sum(report.accepted_histogram)
    if not total:
        return ""
    shares = [100 * n / total for n in report.accepted_histogram]
    series = Series(
        "share of rounds", "a", shares, lambda v: f"{v:.0f}%" if v >= 1 else f"{v:.1g}%"
    )
    places = [str(i) for i in range(len(shares))]
    axes: Any = {"x_label": "accepted tokens", "y_label": "% of rounds"}
    return inline(columns("Accepted drafted tokens a round", places, [series], **axes))


def speedup(report: Report) -> str:
    bars = {
        "measured": report.speedup,
        "measured, Spec-Bench way": report.speedup_specbench,
        "ideal = tau · t_plain / (t_verify + K · t_draft + t_extend)": report.ideal_speedup,
        "MBSU = tau / (1 + K · c_bytes)": report.mbsu,
    }
    rows = [
        LyingBar(name, [(css, value, "")], times_as(value))
        for css, (name, value) in zip("abcd", bars.items(), strict=True)
        if value is not None
    ]
    rows[0] = rows[0]._replace(interval=report.speedup_interval)
    label = "times plain decoding"
    if report.speedup_interval:
        label += f"; whisker: 95% interval over {'prompts' if report.batch == 1 else 'batches'}"
    heading = "Speed-up: measured against ideal"
    return inline(lanes(heading, rows, x_label=label, reference=(PLAIN, "plain")))


def one_round(report: Report) -> str:
    times, tau = report.times, number(report.tau)
    if times.draft is None:
        return ""
    drafting = report.K * times.draft + (times.extend or 0.0)
    plain, draft, check = (1e3 * s for s in (report.tau * times.plain, drafting, times.verify))
    parts = [("b", draft, f"draft {draft:.3g}"), ("a", check, f"verify {check:.3g}")]
    product = f"{tau} {TIMES} {duration(times.plain)}"
    rows = [
        LyingBar(f"{tau} tokens, plain", [("d", plain, product)], f"{plain:.3g} ms"),
        LyingBar(f"{tau} tokens, one round", parts, f"{draft + check:.3g} ms"),
    ]
    return inline(lanes("One round, in isolated forwards", rows, x_label="milliseconds"))
