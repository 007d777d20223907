"""The report of an evaluation: `report.json`, `report.html`, and the tables of the terminal."""

import json
import re
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftsmith.decode.report.figures import (
    CATEGORY_COLUMNS,
    DIVERGENCE_COLUMNS,
    FORMULAS,
    bracket,
    category_cells,
    divergence_cells,
    divergences_of,
    figures,
    left_out,
    number,
    share,
    tables_of,
    times_as,
    verdict,
)
from draftsmith.decode.report.page import page
from draftsmith.decode.report.schema import ordered, schema_problems

__all__ = ["FORMULAS", "comparison", "schema_problems", "table", "write"]

COLOURS = {"good": "green", "near": "yellow", "bad": "bold red", "note": "yellow"}
COMPARED = {
    "alpha": "alpha",
    "tau": "tau",
    "speed-up": "speedup",
    "tokens/s": "tokens_per_s",
    "loop rate": "loop_rate",
    "same output": "identical",
    "[low, high]": "interval",
}
LISTED = 20  # divergences on the terminal; the files hold all


def write(report: dict[str, Any], folder: Path) -> None:
    """Write report.json and report.html into `folder`, each whole or not at all.

    report: the dict of `report_schema.SCHEMA`. More keys may be in it; of these, the page shows
    `example` {prompt, pieces [[text, from the draft?], ...]}, `rules` {rule: tau} or null, and
    `seconds` (of the whole evaluation). The formulas are added.
    """
    problems = schema_problems(report)
    assert not problems, "not a report:\n" + "\n".join(problems)
    text = json.dumps(
        ordered(report | {"formulas": FORMULAS}), indent=1, ensure_ascii=False, allow_nan=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "report.json", text + "\n")
    _replace(folder / "report.html", page(report))


def table(report: dict[str, Any]) -> RenderableType:
    """For the terminal: each figure with its formula, categories, divergences, the verdict."""
    level, headline, detail = verdict(report)
    drafter = report["drafter"]
    lossy = "" if report["lossless"] else f"LOSSY {report['lossy']} · "
    title = (
        f"{lossy}{drafter['path'] or drafter['kind']} drafts for {report['target']} · "
        f"{report['rule']} · temperature {report['temperature']:g} · {report['dtype']}"
    )
    numbers = Table(
        title=Text(title), caption=Text(f"[low, high]: {FORMULAS['interval']}"), box=SIMPLE_HEAD
    )
    numbers.add_column("figure", no_wrap=True)
    numbers.add_column("value", style="bold", max_width=40)
    numbers.add_column("formula", style="dim", ratio=1)
    for row in figures(report):
        numbers.add_row(
            Text(row.name), Text(f"{row.value} {row.interval}".rstrip()), Text(row.formula)
        )
    parts: list[RenderableType] = [numbers]
    for title, categories in tables_of(report).items():
        parts.append(_categories(title, categories))
    if report["divergences"]:
        parts.append(_divergences(report["divergences"]))
    if left_out(report):
        parts.append(Text(left_out(report)))
    parts.append(Text.assemble((headline, COLOURS[level]), ". ", detail))
    return Group(*parts)


def comparison(reports: dict[str, dict[str, Any]]) -> Table:
    """One row a report, grouped by temperature, otherwise in their order.

    reports: by arm (`before`, `after`, `ngram`). Of a longer key (`before/t1`, `before, temperature
    1`) the arm is what stands before the first slash or comma.
    """
    dtypes = " / ".join(dict.fromkeys(report["dtype"] for report in reports.values()))
    formulas = "\n".join(f"{name}: {FORMULAS[key]}" for name, key in COMPARED.items())
    result = Table(
        caption=Text(formulas, style="dim"),
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),  # eight columns in the 80 of a plain terminal
    )
    for heading in ("T", "arm"):
        result.add_column(heading, no_wrap=True)
    for heading in ("alpha", "tau", f"speed-up\n{dtypes}", "tokens/s\nplain"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("loop\nrate", justify="right", no_wrap=True)
    result.add_column("same\noutput", no_wrap=True)
    previous = None
    for name, report in sorted(reports.items(), key=lambda item: item[1]["temperature"]):
        temperature, speeds = report["temperature"], report["tokens_per_s"]
        if previous not in (None, temperature):
            result.add_section()
        result.add_row(
            "" if temperature == previous else f"{temperature:g}",
            Text(re.split("[/,]", name)[0]),
            _two_lines(number(report["alpha"], 3), bracket(report["alpha_interval"], 3)),
            _two_lines(number(report["tau"]), bracket(report["tau_interval"])),
            _two_lines(times_as(report["speedup"]), bracket(report["speedup_interval"])),
            _two_lines(number(speeds["speculative"], 1), number(speeds["plain"], 1)),
            share(report["loop_rate"]),
            _identical(report),
        )
        previous = temperature
    return result


def _two_lines(above: str, below: str) -> Text:
    return Text.assemble((above, "bold"), "\n" if below else "", (below, "dim"))


def _identical(report: dict[str, Any]) -> Text:
    level, identical = verdict(report).level, report["identical"]
    colour = COLOURS[level]
    if not report["lossless"]:
        return Text("lossy", colour)
    if identical is None:
        return Text("in law" if level == "good" else "not\nchecked", colour)
    ties = sum(d["near_tie"] for d in divergences_of(report, identical))
    words = f"{identical['same']}/{identical['total']}\n{identical['dtype']}"
    return Text(f"{words}\n{ties} ties" if ties else words, colour)


def _categories(title: str, categories: dict[str, Any]) -> Table:
    result = Table(title=title, box=SIMPLE_HEAD)
    result.add_column("category")
    for heading in CATEGORY_COLUMNS:
        result.add_column(heading, justify="right")
    for name, one in categories.items():
        result.add_row(Text(name), *category_cells(one))
    return result


def _divergences(rows: list[dict[str, Any]]) -> Table:
    left = f"{len(rows) - LISTED} more in report.json" if len(rows) > LISTED else None
    result = Table(title="where answers part from plain decoding's", caption=left, box=SIMPLE_HEAD)
    for heading in DIVERGENCE_COLUMNS:
        result.add_column(heading, justify="right")
    for row in rows[:LISTED]:
        result.add_row(*divergence_cells(row))
    return result


def _replace(path: Path, text: str) -> None:
    half = path.with_name(f".{path.name}.part")
    half.write_text(text, encoding="utf-8")
    half.replace(path)
