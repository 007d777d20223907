"""A report as one HTML file that needs nothing else: no script, font or picture from outside."""

import math
import unicodedata
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from draftsmith.decode.report import figures
from draftsmith.decode.report.charts import LyingBar, Series, columns, inline, lanes
from draftsmith.decode.report.figures import Figure, figure, quality, verdict
from draftsmith.decode.report.printed import TIMES, duration, number, short, times_as
from draftsmith.decode.report.schema import NamedDrafter, Report

PLAIN = 1.0  # the speed-up of plain decoding
SIGNS = {"good": "✓", "near": "≈", "bad": "✗", "note": "!"}
SIGNS_OF_SPACE = {"\n": "⏎", "\t": "⇥"}


def page(report: Report) -> str:
    """The whole page."""
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
        signs=SIGNS,
        cards=_cards(report),
        charts=[draw(report) for draw in (by_position, histogram, speedup, one_round)],
        figures=figures,
    )


def visible(text: str) -> Markup:
    """Escaped text in which no character hides: line ends, tabs, controls, marks of direction."""
    shown = []
    for character in text:
        # Controls, formats (zero width, direction), surrogates, odd line ends, no-break spaces.
        odd = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        piece = escape(character)
        if sign := SIGNS_OF_SPACE.get(character):
            piece = Markup(f'<span class="sign-of-space">{sign}</span>{character}')
        elif odd or character == "\u00a0":
            piece = Markup(f'<span class="code-point">&lt;U+{ord(character):04X}&gt;</span>')
        shown.append(piece)
    return Markup("").join(shown)


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


def _cards(report: Report) -> list[Figure]:
    plain = f"plain decoding: {number(report.tokens_per_s.plain, 1)}"
    speed = figure(report, "tokens_per_s.speculative")
    return [
        figure(report, "speedup")._replace(name="Speed-up"),
        figure(report, "tau")._replace(name="Block efficiency tau"),
        *quality(report),  # tau never stands without what the answers are worth
        figure(report, "alpha")._replace(name="Acceptance alpha"),
        speed._replace(name="Tokens per second", interval=plain),
    ]


def _words(value: Any) -> str:
    if isinstance(value, NamedDrafter):
        value = asdict(value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    return short(value) if isinstance(value, float) else str(value)


# ------------------------------------------------- the charts; empty where nothing can be drawn


def by_position(report: Report) -> str:
    shares = {
        "of rounds that drafted it": report.acceptance_by_position,
        "of rounds that got there": report.acceptance_conditional,
    }
    series = [
        Series(name, css, values, [f"{v:.2f}" for v in values])
        for css, (name, values) in zip("ab", shares.items(), strict=True)
    ]
    places = [str(i + 1) for i in range(len(report.acceptance_by_position))]
    x_label, y_label = "drafted position", "share accepted"
    title = "Acceptance by position"
    chart = columns(title, places, series, x_label=x_label, y_label=y_label, top=1.0)
    return inline(chart) if places else ""


def histogram(report: Report) -> str:
    total = sum(report.accepted_histogram)
    if not total:
        return ""
    shares = [100 * n / total for n in report.accepted_histogram]
    labels = [f"{v:.0f}%" if v >= 1 else f"{v:.1g}%" for v in shares]
    series = [Series("share of rounds", "a", shares, labels)]
    places = [str(i) for i in range(len(shares))]
    x_label, y_label = "accepted tokens", "% of rounds"
    title = "Accepted drafted tokens a round"
    return inline(columns(title, places, series, x_label=x_label, y_label=y_label))


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
