"""A report as one HTML file that needs nothing else: no script, font or picture from outside."""

import math
import unicodedata
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from draftsmith.decode.report import figures
from draftsmith.decode.report.figures import Figure, figure, quality, verdict
from draftsmith.decode.report.page_charts import PLAIN, page_charts
from draftsmith.decode.report.printed import number, short, times_as
from draftsmith.decode.report.schema import NamedDrafter, Report

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
        charts=page_charts(report),
        figures=figures,
    )


def visible(text: str) -> Markup:
    """Escaped text in which no character hides: line ends, tabs, controls, marks of direction."""
    return Markup("").join(map(_visible_character, text))


def _visible_character(character: str) -> Markup:
    if character in SIGNS_OF_SPACE:
        sign = SIGNS_OF_SPACE[character]
        return Markup(f'<span class="sign-of-space">{sign}</span>{character}')
    # Controls, formats (zero width, direction), surrogates, odd line ends, no-break spaces.
    odd = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    if odd or character == "\u00a0":
        return Markup(f'<span class="code-point">&lt;U+{ord(character):04X}&gt;</span>')
    return escape(character)


def _headline(report: Report) -> str:
    # Without an interval nothing is clear.
    low, high = report.speedup_interval or (-math.inf, math.inf)
    headline = times_as(report.speedup)
    if verdict(report).level == "bad":
        headline += " the speed, but not the target's output"
    elif low > PLAIN:
        headline += " the speed of plain decoding"
    elif high < PLAIN:
        headline += ": slower than plain decoding"
    else:
        headline += ": no clear difference from plain decoding"
    return headline if report.lossless else f"{headline}, LOSSY ({report.lossy})"


def _cards(report: Report) -> list[Figure]:
    speed = figure(report, "tokens_per_s.speculative")
    plain = f"plain decoding: {number(report.tokens_per_s.plain, 1)}"
    return [
        figure(report, "speedup")._replace(name="Speed-up"),
        figure(report, "tau")._replace(name="Block efficiency tau"),
        *quality(report),  # tau never stands without what the answers are worth
        figure(report, "alpha")._replace(name="Acceptance alpha"),
        speed._replace(name="Tokens per second", interval=plain),
    ]


def _words(value: Any) -> str:
    if isinstance(value, dict | NamedDrafter):
        pairs = value.items() if isinstance(value, dict) else vars(value).items()
        return ", ".join(f"{k} {v}" for k, v in pairs if v is not None)
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    return short(value) if isinstance(value, float) else str(value)
