"""An evaluation's files: report.json, and report.html, which needs nothing from outside.

The page is page.html.jinja, which also says what each chart draws.
"""

import json
from pathlib import Path, PurePath
from typing import Any

from markupsafe import Markup, escape

from draftsmith import printed
from draftsmith.decode.report import charts, figures
from draftsmith.decode.report.schema import REPORT_KEYS, Report, as_report
from draftsmith.models.disk.store import write_atomically

SIGNS_OF_SPACE = {"\n": "⏎", "\t": "⇥"}


def write(values: dict[str, Any], folder: Path) -> None:
    """Write report.json and report.html into `folder`, each whole or not at all.

    values: what `schema.Report` holds, and more if need be. The formulas are added.
    """
    report = as_report(values)
    values = values | {"formulas": figures.FORMULAS}
    ordered = {key: values[key] for key in (*REPORT_KEYS, *sorted(values)) if key in values}
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
    """Escaped text in which no character hides: controls, surrogates, marks of direction, spaces
    other than the usual one.
    """

    def shown(character: str) -> Markup:
        if character.isprintable():
            return escape(character)
        if sign := SIGNS_OF_SPACE.get(character):
            return Markup(f'<span class="sign-of-space">{sign}</span>{character}')
        return Markup(f'<span class="code-point">&lt;U+{ord(character):04X}&gt;</span>')

    return Markup("").join(map(shown, text))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    return printed.short(value) if isinstance(value, float) else str(value)
