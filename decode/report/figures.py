"""The figures of a report in words: their names, formulas, printed values, and the verdict.

The terminal and the HTML page both read them from here, so that a number never stands without the
formula it was made by. figures.txt says how each is printed, its name and its formula, in reading
order; sentences.jinja holds the verdict's words. p is the target's law, q the draft's, both after
temperature, top-k, top-p.
"""

import math
from itertools import starmap
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from draftsmith import printed
from draftsmith.decode.report.schema import CategoryRow, Report, differences_of
from draftsmith.decode.verify.rules import RULES
from draftsmith.printed import bracket, number, share, thousandths, times_as

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: str(name).endswith(".html.jinja"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals["infinity"] = math.inf
TEMPLATES.filters["times"] = times_as

LINES = Path(__file__).with_name("figures.txt").read_text("utf-8").splitlines()
ENTRIES = [line.split(" | ") for line in LINES]
SHOWN = {key: getattr(printed, words) for key, words, *_ in ENTRIES if words != "-"}
NAMES = {key.partition(".")[0]: name for key, _, name, _ in ENTRIES}
FORMULAS = {key.partition(".")[0]: formula for key, _, _, formula in ENTRIES}
CATEGORY_COLUMNS = ("category", "prompts", "tau", "speed-up", "speed-up, Spec-Bench way")
NEAR = "near-tie in fp32"
DIFFERENCE_COLUMNS = ("prompt", "answer token", "dtype", "baseline", "fp32 margin", NEAR)


class Figure(NamedTuple):
    """One printed number: its name, its value with the interval if it has one, its formula."""

    name: str
    value: str
    interval: str
    formula: str


class IdentityVerdict(NamedTuple):
    """Is the output the target's? level: `good`, `near` (but for near-ties), `bad`, `note`."""

    level: str
    headline: str
    detail: str


def named(key: str, value: str, interval: str = "", of: str = "") -> Figure:
    """What `value` is called and how it is made; of: which one, where there are several."""
    name = key.partition(".")[0]
    return Figure(", ".join(filter(None, (NAMES[name], of))), value, interval, FORMULAS[name])


def figure(report: Report, key: str) -> Figure:
    """The figure at a key of SHOWN."""
    value = attrgetter(key.replace("t_", "times.") if key.startswith("t_") else key)(report)
    digits = 3 if SHOWN[key] is thousandths else 2
    interval = bracket(getattr(report, f"{key}_interval", None), digits)
    return named(key, SHOWN[key](value), interval, key.partition(".")[2])


def figures(report: Report) -> list[Figure]:
    """Every figure of a report, in reading order; absent ones as an em dash."""
    tau, *others = (figure(report, key) for key in SHOWN)
    if one := report.drafting:
        words = f"tau {number(one['tau'])}, {times_as(one['speedup'])}"
        between = bracket(one["speedup_interval"])
        others.append(named("drafting", words, between, f"K={one['K']}"))
    if report.rules:
        taus = " · ".join(f"{rule} {number(tau)}" for rule, tau in report.rules.items())
        others.append(named("rules", taus))
    return [tau, *quality(report), *others]


def quality(report: Report) -> list[Figure]:
    """What the answers are worth, where that is known or may differ from the target's own."""
    found = []
    if task := report.task:
        plain = f"(plain {share(task.plain)}, n = {task.n})"
        found.append(named("task", share(task.speculative), plain, task.name))
        between = bracket(task.difference_interval, 3)
        found.append(named("task", f"{task.difference:+.3f}", between, "minus plain's"))
    elif not report.lossless:
        found.append(named("task", "no known answers"))
    if same := report.agreement:
        between = bracket(same.interval, 3)
        found.append(named("agreement", thousandths(same.share), between))
    return found


def sentence(name: str, *about: Any) -> str:
    """A macro of sentences.jinja on one line, as plain text."""
    macros: Any = TEMPLATES.get_template("sentences.jinja").module
    return " ".join(getattr(macros, name)(*about).split())


def verdict(report: Report) -> IdentityVerdict:
    """What the run proved about its output, in two lines."""
    checkable = report.temperature == 0 or RULES[report.rule].identical
    compared = report.identical
    listed = differences_of(report, compared) if compared else []
    excused = sum(one.near_tie for one in listed)
    return IdentityVerdict(*sentence("verdict", report, checkable, excused).split(" | ", 2))


def category_tables(report: Report) -> dict[str, list[tuple[str, ...]]]:
    """The tables by category that have rows, by their titles, in CATEGORY_COLUMNS."""
    tables = {
        "By category": report.categories,
        "By category, as Spec-Bench groups them": report.specbench,
    }

    def cells(name: str, row: CategoryRow) -> tuple[str, ...]:
        speeds = map(times_as, (row.speedup, row.speedup_specbench))
        return (name, number(row.n_prompts), number(row.tau), *speeds)

    return {title: list(starmap(cells, rows.items())) for title, rows in tables.items() if rows}


def difference_rows(report: Report) -> list[tuple[str, ...]]:
    """The listed differences in words, in DIFFERENCE_COLUMNS."""
    return [
        (str(d.prompt), str(d.position), d.dtype, d.baseline, f"{d.margin:.2e}", near)
        for d in report.divergences
        for near in ["yes" if d.near_tie else "no"]
    ]
