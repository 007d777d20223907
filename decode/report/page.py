"""An evaluation's files: report.json, and report.html, which needs nothing from outside.

The page is page.html.jinja, which also says what each chart draws.
"""

import json
import unicodedata
from pathlib import Path, PurePath
from typing import Any

from markupsafe import Markup, escape

from draftsmith.decode.report import charts, figures, printed
from draftsmith.decode.report.schema import REPORT_KEYS, Report, as_report
from draftsmith.models.disk.store import write_atomically

SIGNS_OF_SPACE = {"\n": "⏎", "\t": "⇥"}


def write(values: dict[str, Any], folder: Path) -> None:
    """Write report.json and report.html into `folder`, each whole or not at all.

    values: what `schema.Report` holds, and more if need be. The formulas are added.
    """
    report = as_report(values)
    values = values | {"formulas": figures.FORMULAS}
    known = [key for key in REPORT_KEYS if key in values]
    ordered = {key: values[key] for key in [*known, *sorted(values.keys() - known)]}
    text = json.dumps(ordered, indent=1, ensure_ascii=False, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "report.json", f"{text}\n".encode())
    write_atomically(folder / "report.html", page(report).encode())


def page(report: Report) -> str:
    """The whole report.html."""
    figures.TEMPLATES.filters |= {"visible": visible, "words": _words}
    path, rounds = report.drafter.path, report.accepted_histogram
    return figures.TEMPLATES.get_template("page.html.jinja").render(
        report=report,
        drafter=PurePath(path).name if path else report.drafter.kind,
        target=PurePath(report.target).name,
        charts=charts,
        shares=[100 * n / max(1, sum(rounds)) for n in rounds],
        percent=lambda share: f"{share:.0f}%" if share >= 1 else f"{share:.1g}%",
        figures=figures,
        printed=printed,
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


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    return printed.short(value) if isinstance(value, float) else str(value)
