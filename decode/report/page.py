"""A report as one HTML file that needs nothing else: no script, font or picture from outside."""

import math
import unicodedata
from collections.abc import Sequence
from html import escape
from pathlib import PurePath
from typing import Any

from draftsmith.decode.report.charts import PLAIN, charts
from draftsmith.decode.report.figures import (
    CATEGORY_COLUMNS,
    DIVERGENCE_COLUMNS,
    FORMULAS,
    Figure,
    bracket,
    category_cells,
    divergence_cells,
    figures,
    left_out,
    number,
    quality,
    short,
    tables_of,
    times_as,
    verdict,
)
from draftsmith.decode.report.style import STYLE

SIGNS = {"good": "✓", "near": "≈", "bad": "✗", "note": "!"}
SHOWN_DIVERGENCES = 12
SETTINGS = (
    *(
        "target",
        "drafter",
        "prompts",
        "rule",
        "lossy",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "stop",
        "seed",
        "K",
        "N",
        "policy",
        "tree",
        "attention",
    ),
    *("max_new_tokens", "batch", "context", "n_prompts", "device", "dtype", "threads", "seconds"),
    *("versions", "commit", "command"),
)


def page(report: dict[str, Any]) -> str:
    """The whole page. report: one that `report_schema.schema_problems` finds sound."""
    body = [
        _header(report),
        _verdict(report),
        _cards(report),
        f'<div class="charts">{charts(report)}</div>',
        _example(report.get("example")),
        _figures(figures(report)),
        _categories(report),
        _divergences(report["divergences"]),
        _settings(report),
    ]
    title = escape(f"{_drafter_name(report)} on {PurePath(report['target']).name}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} · Draftsmith</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def visible(text: str) -> str:
    """Escaped text in which no character hides: line ends, tabs, controls, marks of direction."""
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    if character == "\n":
        return '<span class="sign-of-space">⏎</span>\n'
    if character == "\t":
        return '<span class="sign-of-space">⇥</span>\t'
    # Controls, formats (zero width, direction), surrogates, odd line ends, no-break spaces.
    odd = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    if odd or character == "\u00a0":
        return f'<span class="code-point">&lt;U+{ord(character):04X}&gt;</span>'
    return escape(character)


def _header(report: dict[str, Any]) -> str:
    # Without an interval nothing is clear.
    low, high = report["speedup_interval"] or (-math.inf, math.inf)
    if verdict(report).level == "bad":
        headline = f"{times_as(report['speedup'])} the speed, but not the target's output"
    elif low > PLAIN:
        headline = f"{times_as(report['speedup'])} the speed of plain decoding"
    elif high < PLAIN:
        headline = f"{times_as(report['speedup'])}: slower than plain decoding"
    else:
        headline = f"{times_as(report['speedup'])}: no clear difference from plain decoding"
    if not report["lossless"]:
        headline += f", LOSSY ({report['lossy']})"
    chips = {
        "drafter": report["drafter"]["kind"],
        "rule": report["rule"],
        "temperature": f"{report['temperature']:g}",
        "K": short(report["K"]),
        "batch": number(report["batch"]),
        "dtype": report["dtype"],
        "device": report["device"],
        "prompts": number(report["n_prompts"]),
    }
    items = "".join(f"<li>{k} <b>{escape(str(v))}</b></li>" for k, v in chips.items())
    return (
        '<header><p class="eyebrow">Draftsmith · evaluation</p>'
        f"<h1>{escape(headline)}</h1>"
        f'<p class="lead">Drafter <b>{escape(_drafter_name(report))}</b>, target '
        f"<b>{escape(PurePath(report['target']).name)}</b></p>"
        f'<ul class="chips">{items}</ul></header>'
    )


def _drafter_name(report: dict[str, Any]) -> str:
    drafter = report["drafter"]
    return PurePath(drafter["path"]).name if drafter["path"] else str(drafter["kind"])


def _verdict(report: dict[str, Any]) -> str:
    level, headline, detail = verdict(report)
    return (
        f'<div class="verdict {level}"><span class="sign" aria-hidden="true">{SIGNS[level]}</span>'
        f"<div><strong>{escape(headline)}</strong><p>{escape(detail)}</p>"
        f"<p>{escape(left_out(report))}</p></div></div>"
    )


def _cards(report: dict[str, Any]) -> str:
    speeds = report["tokens_per_s"]
    speedup, tau = times_as(report["speedup"]), number(report["tau"])
    plain = f"plain decoding: {number(speeds['plain'], 1)}"
    cards = [
        Figure("Speed-up", speedup, bracket(report["speedup_interval"]), FORMULAS["speedup"]),
        Figure("Block efficiency tau", tau, bracket(report["tau_interval"]), FORMULAS["tau"]),
        *quality(report),  # tau never stands without what the answers are worth
        Figure(
            "Acceptance alpha",
            number(report["alpha"], 3),
            bracket(report["alpha_interval"], 3),
            FORMULAS["alpha"],
        ),
        Figure(
            "Tokens per second", number(speeds["speculative"], 1), plain, FORMULAS["tokens_per_s"]
        ),
    ]
    return '<div class="cards">{}</div>'.format(
        "".join(
            f'<div class="card"><p class="eyebrow">{card.name}</p>'
            f'<p class="value">{card.value}</p><p class="between">{card.interval}</p>'
            f'<p class="formula">{escape(card.formula)}</p></div>'
            for card in cards
        )
    )


def _example(example: dict[str, Any] | None) -> str:
    if not example:
        return ""
    pieces = "".join(
        f'<span class="{"drafted" if drafted else "written"}">{visible(text)}</span>'
        for text, drafted in example["pieces"]
    )
    drafted = sum(bool(flag) for _, flag in example["pieces"])
    return (
        "<section><h2>An example</h2>"
        f'<p class="caption">{drafted} of {len(example["pieces"])} tokens came from the draft.</p>'
        '<div class="legend mono"><span class="prompt">prompt</span>'
        '<span class="drafted">&nbsp;drafted, accepted&nbsp;</span>'
        '<span class="written">the target\'s own</span></div>'
        '<pre class="example mono">'
        f'<span class="prompt">{visible(example["prompt"])}</span>{pieces}</pre></section>'
    )


def _figures(rows: Sequence[Figure]) -> str:
    cells = "".join(
        f'<tr><td class="k">{escape(row.name)}</td>'
        f'<td class="v{" long" if len(row.value) > 24 else ""}">{escape(row.value)} '
        f'<span>{row.interval}</span></td><td class="f">{escape(row.formula)}</td></tr>'
        for row in rows
    )
    return (
        f'<section><h2>Figures</h2><p class="caption">In brackets: {FORMULAS["interval"]}.</p>'
        "<table><thead><tr><th>name</th><th>value</th><th>formula</th></tr></thead>"
        f"<tbody>{cells}</tbody></table></section>"
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, words: int) -> str:
    """The first `words` columns hold words, the others numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = ["", ' class="n"']
        parts = [
            f"<{tag}{kinds[i >= words]}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(headings, 'th')}</thead><tbody>{body}</tbody></table>"


def _categories(report: dict[str, Any]) -> str:
    found = []
    for title, rows in tables_of(report).items():
        cells = [(name, *category_cells(row)) for name, row in rows.items()]
        table = _table(("category", *CATEGORY_COLUMNS), cells, words=1)
        found.append(f"<section><h2>{title}</h2>{table}</section>")
    return "".join(found)


def _divergences(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    table = _table(DIVERGENCE_COLUMNS, [divergence_cells(row) for row in rows], words=0)
    if len(rows) > SHOWN_DIVERGENCES:
        table = f"<details><summary>all {len(rows)}</summary>{table}</details>"
    return (
        '<section><h2>Where answers part</h2><p class="caption">The first differing token of each '
        "answer, and by how much the target's best token led there in fp32. Products of one token "
        "and of many round differently, so near-ties fall either way; in bf16 ties are common.</p>"
        f"{table}</section>"
    )


def _settings(report: dict[str, Any]) -> str:
    cells = "".join(
        f'<tr><td class="k">{name}</td><td class="w mono">{visible(_words(report[name]))}</td></tr>'
        for name in SETTINGS
        if report.get(name) not in (None, "", [])
    )
    return f"<section><h2>Settings and versions</h2><table><tbody>{cells}</tbody></table></section>"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    return short(value) if isinstance(value, float) else str(value)
