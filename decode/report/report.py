"""The report of an evaluation: `report.json`, `report.html`, and the tables of the terminal."""

import json
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftsmith.decode.report.figures import (
    CATEGORY_COLUMNS,
    DIFFERENCE_COLUMNS,
    FORMULAS,
    category_tables,
    difference_rows,
    figures,
    left_out,
    verdict,
)
from draftsmith.decode.report.page import page
from draftsmith.decode.report.printed import bracket, number, share, times_as
from draftsmith.decode.report.schema import Report, as_report, differences_of
from draftsmith.models.disk.atomic import write_atomically

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


def write(values: dict[str, Any], folder: Path) -> None:
    """Write report.json and report.html into `folder`, each whole or not at all.

    values: what `schema.Report` holds, and more if need be. The formulas are added.
    """
    report = as_report(values)
    known = [one.name for one in fields(report) if one.name in values]
    rest = sorted({"formulas", *values} - set(known))
    values = values | {"formulas": FORMULAS}
    ordered = {key: values[key] for key in [*known, *rest]}
    text = json.dumps(ordered, indent=1, ensure_ascii=False, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "report.json", f"{text}\n".encode())
    write_atomically(folder / "report.html", page(report).encode())


def table(values: dict[str, Any]) -> RenderableType:
    """For the terminal: each figure with its formula, categories, divergences, the verdict."""
    report = as_report(values)
    level, headline, detail = verdict(report)
    lossy = "" if report.lossless else f"LOSSY {report.lossy} · "
    title = (
        f"{lossy}{report.drafter.path or report.drafter.kind} drafts for {report.target} · "
        f"{report.rule} · temperature {report.temperature:g} · {report.dtype}"
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
    for title, rows in category_tables(report).items():
        parts.append(_listed(title, CATEGORY_COLUMNS, rows))
    if rows := difference_rows(report):
        left = f"{len(rows) - LISTED} more in report.json" if len(rows) > LISTED else None
        title = "where answers part from plain decoding's"
        parts.append(_listed(title, DIFFERENCE_COLUMNS, rows[:LISTED], left))
    if left_out(report):
        parts.append(Text(left_out(report)))
    parts.append(Text.assemble((headline, COLOURS[level]), ". ", detail))
    return Group(*parts)


def comparison(reports: dict[str, dict[str, Any]]) -> Table:
    """One row a report, grouped by temperature, otherwise in their order.

    reports: by arm (`before`, `after`, `ngram`). Of a longer key (`before/t1`, `before, temperature
    1`) the arm is what stands before the first slash or comma.
    """
    arms = [(re.split("[/,]", name)[0], as_report(values)) for name, values in reports.items()]
    dtypes = " / ".join(dict.fromkeys(report.dtype for _, report in arms))
    formulas = "\n".join(f"{name}: {FORMULAS[key]}" for name, key in COMPARED.items())
    result = Table(
        caption=Text(formulas, style="dim"),
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),  # eight columns in the 80 of a plain terminal
    )
    result.add_column("T", no_wrap=True)
    result.add_column("arm", no_wrap=True)
    for heading in ("alpha", "tau", f"speed-up\n{dtypes}", "tokens/s\nplain", "loop\nrate"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("same\noutput", no_wrap=True)
    previous = None
    for arm, report in sorted(arms, key=lambda one: one[1].temperature):
        temperature, speeds = report.temperature, report.tokens_per_s
        if previous not in (None, temperature):
            result.add_section()
        result.add_row(
            "" if temperature == previous else f"{temperature:g}",
            Text(arm),
            _two_lines(number(report.alpha, 3), bracket(report.alpha_interval, 3)),
            _two_lines(number(report.tau), bracket(report.tau_interval)),
            _two_lines(times_as(report.speedup), bracket(report.speedup_interval)),
            _two_lines(number(speeds.speculative, 1), number(speeds.plain, 1)),
            share(report.loop_rate),
            _identical(report),
        )
        previous = temperature
    return result


def _two_lines(above: str, below: str) -> Text:
    return Text.assemble((above, "bold"), "\n" if below else "", (below, "dim"))


def _identical(report: Report) -> Text:
    level, identical = verdict(report).level, report.identical
    if not report.lossless:
        words = "lossy"
    elif identical is None:
        words = "in law" if level == "good" else "not\nchecked"
    else:
        ties = sum(one.near_tie for one in differences_of(report, identical))
        words = f"{identical.same}/{identical.total}\n{identical.dtype}"
        words += f"\n{ties} ties" if ties else ""
    return Text(words, COLOURS[level])


def _listed(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None
) -> Table:
    result = Table(title=title, caption=caption, box=SIMPLE_HEAD)
    for heading in columns:
        result.add_column(heading, justify="left" if heading == "category" else "right")
    for row in rows:
        result.add_row(*map(Text, row))
    return result
