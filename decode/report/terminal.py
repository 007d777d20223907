"""An evaluation's tables for the terminal."""

import re
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftsmith.decode.report import figures, results
from draftsmith.decode.report.figures import FORMULAS, NAMES
from draftsmith.decode.report.schema import as_report
from draftsmith.printed import as_table

COLOURS = {"good": "green", "near": "yellow", "bad": "bold red", "note": "yellow"}
COMPARED = ("alpha", "tau", "speedup", "tokens_per_s", "loop_rate", "identical", "interval")
LISTED = 20  # divergences on the terminal; the files hold all


def table(values: dict[str, Any]) -> RenderableType:
    """For the terminal: each figure with its formula, categories, divergences, the verdict."""
    report = as_report(values)
    level, headline, detail = figures.verdict(report)
    lossy = "" if report.lossless else f"LOSSY {report.lossy} · "
    title = (
        f"{lossy}{report.drafter.path or report.drafter.kind} drafts for {report.target} · "
        f"{report.rule} · temperature {report.temperature:g} · {report.dtype}"
    )
    caption = Text(f"{NAMES['interval']}: {FORMULAS['interval']}")
    numbers = Table(title=Text(title), caption=caption, box=SIMPLE_HEAD)
    numbers.add_column("figure", no_wrap=True)
    numbers.add_column("value", style="bold", max_width=40)
    numbers.add_column("formula", style="dim", ratio=1)
    for name, value, interval, formula in figures.figures(report):
        numbers.add_row(Text(name), Text(f"{value} {interval}".rstrip()), Text(formula))
    parts: list[RenderableType] = [numbers]
    for title, rows in figures.category_tables(report).items():
        parts.append(as_table(figures.CATEGORY_COLUMNS, rows, ["category"], title=title))
    if rows := figures.difference_rows(report):
        left = f"{len(rows) - LISTED} more in report.json" if len(rows) > LISTED else None
        title = "where answers part from plain decoding's"
        parts.append(as_table(figures.DIFFERENCE_COLUMNS, rows[:LISTED], title=title, caption=left))
    if skipped := figures.sentence("left_out", report):
        parts.append(Text(skipped))
    parts.append(Text.assemble((headline, COLOURS[level]), ". ", detail))
    return Group(*parts)


def comparison(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of results.md in the 80 columns of a plain terminal: intervals stand below."""
    formulas = "\n".join(f"{NAMES[key]}: {FORMULAS[key]}" for key in COMPARED)
    return as_table(
        [name.replace(" ", "\n") for name in results.HEAD],
        ([re.sub(r" ([\[(])", r"\n\1", cell) for cell in results.cells(row)] for row in rows),
        ("drafter", "identical"),
        caption=Text(formulas, style="dim"),
        caption_justify="left",
        show_edge=False,
        pad_edge=False,
        padding=0,
    )
