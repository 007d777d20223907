"""The report of an evaluation: `report.json`, `report.html`, and the tables of the terminal."""

import json
import re
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from draftsmith.decode.report import figures
from draftsmith.decode.report.figures import FORMULAS, NAMES, verdict
from draftsmith.decode.report.page import page
from draftsmith.decode.report.printed import bracket, number, share, times_as
from draftsmith.decode.report.schema import Report, as_report, differences_of
from draftsmith.models.disk.store import write_atomically

COLOURS = {"good": "green", "near": "yellow", "bad": "bold red", "note": "yellow"}
COMPARED = ("alpha", "tau", "speedup", "tokens_per_s", "loop_rate", "identical", "interval")
LISTED = 20  # divergences on the terminal; the files hold all


def write(values: dict[str, Any], folder: Path) -> None:
    """Write report.json and report.html into `folder`, each whole or not at all.

    values: what `schema.Report` holds, and more if need be. The formulas are added.
    """
    report = as_report(values)
    values = values | {"formulas": FORMULAS}
    known = [one.name for one in fields(report) if one.name in values]
    ordered = {key: values[key] for key in [*known, *sorted(values.keys() - known)]}
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
    caption = Text(f"{NAMES['interval']}: {FORMULAS['interval']}")
    numbers = Table(title=Text(title), caption=caption, box=SIMPLE_HEAD)
    numbers.add_column("figure", no_wrap=True)
    numbers.add_column("value", style="bold", max_width=40)
    numbers.add_column("formula", style="dim", ratio=1)
    for name, value, interval, formula in figures.figures(report):
        numbers.add_row(Text(name), Text(f"{value} {interval}".rstrip()), Text(formula))
    parts: list[RenderableType] = [numbers]
    for title, rows in figures.category_tables(report).items():
        parts.append(_listed(title, figures.CATEGORY_COLUMNS, rows))
    if rows := figures.difference_rows(report):
        left = f"{len(rows) - LISTED} more in report.json" if len(rows) > LISTED else None
        title = "where answers part from plain decoding's"
        parts.append(_listed(title, figures.DIFFERENCE_COLUMNS, rows[:LISTED], left))
    if skipped := figures.left_out(report):
        parts.append(Text(skipped))
    parts.append(Text.assemble((headline, COLOURS[level]), ". ", detail))
    return Group(*parts)


def comparison(reports: dict[str, dict[str, Any]]) -> Table:
    """One row a report, grouped by temperature, otherwise in their order.

    reports: by arm (`before`, `after`, `ngram`). Of a longer key (`before/t1`, `before, temperature
    1`) the arm is what stands before the first slash or comma.
    """
    arms = [(re.split("[/,]", name)[0], as_report(values)) for name, values in reports.items()]
    dtypes = " / ".join(dict.fromkeys(report.dtype for _, report in arms))
    formulas = "\n".join(f"{NAMES[key]}: {FORMULAS[key]}" for key in COMPARED)
    result = Table(
        caption=Text(formulas, style="dim"),
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),  # eight columns in the 80 of a plain terminal
    )
    numbers = ("alpha", "tau", f"speed-up\n{dtypes}", "tokens/s\nplain", "loop\nrate")
    for heading in ("T", "arm", *numbers, "same\noutput"):
        side: JustifyMethod = "right" if heading in numbers else "left"
        result.add_column(heading, justify=side, no_wrap=True)
    by_temperature = sorted(arms, key=lambda one: one[1].temperature)
    for temperature, group in groupby(by_temperature, lambda one: one[1].temperature):
        for nth, (arm, report) in enumerate(group):
            speeds = report.tokens_per_s
            pairs = (
                (number(report.alpha, 3), bracket(report.alpha_interval, 3)),
                (number(report.tau), bracket(report.tau_interval)),
                (times_as(report.speedup), bracket(report.speedup_interval)),
                (number(speeds.speculative, 1), number(speeds.plain, 1)),
            )
            cells = [Text.assemble((above, "bold"), "\n", (below, "dim")) for above, below in pairs]
            first = "" if nth else f"{temperature:g}"
            result.add_row(first, Text(arm), *cells, share(report.loop_rate), _identical(report))
        result.add_section()
    return result


def _identical(report: Report) -> Text:
    level, identical = verdict(report).level, report.identical
    words = "in law" if level == "good" else "not\nchecked"
    if not report.lossless:
        words = "lossy"
    elif identical is not None:
        ties = sum(one.near_tie for one in differences_of(report, identical))
        words = f"{identical.same}/{identical.total}\n{identical.dtype}"
        words += f"\n{ties} ties" * bool(ties)
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
