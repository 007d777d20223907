"""Every committed figure can be made again: its row names a command, and a commit that has it."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from draftsmith.bench import rows as bench_rows
from draftsmith.bench.evidence import (
    advised,
    distillation_page,
    head_page,
    judge_page,
    omni,
    online_choices,
    online_page,
    specdecpp_page,
)
from draftsmith.bench.speed import load, served
from draftsmith.decode.evaluate import metrics
from draftsmith.decode.predict import scaling_laws as scaling
from draftsmith.decode.report import results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
Rows = list[dict[str, Any]]
Source = Callable[[str, str], str | None]


def git(*arguments: str) -> str | None:
    """What git says; None where it fails or isn't there."""
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def source_at(commit: str, script: str) -> str | None:
    """A file as it was at a commit; None where it wasn't."""
    return git("show", f"{commit}:{script}")


def fault(row: dict[str, Any], source_of: Source) -> str:
    """Why a row can't be made again without saying so; empty where all is well."""
    if not row.get("repeatable", True):
        return "" if row.get("why") else "marked without a reason"
    if missing := [name for name in ("commit", "command", "machine") if not row.get(name)]:
        return f"without {', '.join(missing)}"
    if row["commit"].endswith("-dirty"):
        return "made with changes that were not committed"
    python, script, *arguments = shlex.split(row["command"])
    module = script == "-m"
    script = "draftsmith/__main__.py" if module else script
    text = source_of(row["commit"], script)
    if python != "python" or text is None:
        return f"{script} isn't in {row['commit']}"
    for bench in re.findall(r"^from draftsmith\.(bench[\w.]*) import", text, re.MULTILINE):
        text += source_of(row["commit"], f"{bench.replace('.', '/')}.py") or ""  # inherited ones
    names = [] if module else [a.partition("=")[0] for a in arguments if "=" in a]
    unknown = [name for name in names if not re.search(rf"^    {name}:", text, re.MULTILINE)]
    return f"{script} takes no {', '.join(unknown)}" if unknown else ""


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_row_names_what_makes_it(file: Path) -> None:
    if (git("rev-parse", "--is-shallow-repository") or "").strip() != "false":
        pytest.skip("no git history here: an archive, or a shallow clone")
    faults = {fault(row, source_at) for row in json.loads(file.read_text())}
    assert faults == {""}


def test_a_row_that_nothing_makes_is_found() -> None:
    """The check's own check: a good row, and one of each kind that was committed once."""
    text = "class Grid:\n    sizes: str\n    options: str\n"
    known = {("abc", "bench/x.py"): text, ("abc", "draftsmith/__main__.py"): ""}
    good = {"commit": "abc", "command": "python bench/x.py sizes=1 'options=steps=2 lr=1'"}
    good["machine"] = "m"

    def found(**changes: Any) -> str:
        return fault(good | changes, lambda *place: known.get(place))

    assert found() == "" and found(command="python -m draftsmith evaluate target=t") == ""
    assert found(commit="def") == "bench/x.py isn't in def"
    assert found(commit="abc-dirty") == "made with changes that were not committed"
    assert found(command="") == "without command" and found(commit=None) == "without commit"
    assert found(command="python bench/x.py options=steps=2 lr=1") == "bench/x.py takes no lr"
    assert found(commit="def", repeatable=False) == "marked without a reason"
    assert found(commit="def", repeatable=False, why="older than its script") == ""


def of(name: str) -> Rows:
    return json.loads((RESULTS / f"{name}.json").read_text())


def judged(rows: Rows) -> str:
    compared = [row for row in rows if row["what"] == "at equal tau"]
    return judge_page.page([row for row in rows if row not in compared], compared)


def scaled(rows: Rows) -> str:
    measured = [row for row in rows if "slope" not in row]
    return scaling.page(measured, scaling.all_fits(measured), "scaling")


PAGES: dict[str, Callable[[Rows], str]] = {
    "advice": advised.page,
    "distillation": distillation_page.page,
    "gsm8k": lambda rows: results.page("GSM8K, a 15M target", rows),
    "judge": judged,
    "load": load.page,
    "served": served.page,
    "omni": omni.page,
    "quickstart": lambda rows: results.page("Quickstart", rows),
    "scaling": scaled,
    "specdecpp": specdecpp_page.page,
    "trees": lambda rows: results.page("Trees, the quickstart's pair, 4 draft calls", rows),
}
SLOW_PAGES = {
    "heads": head_page.page,
    "online": online_page.page,
    "online-choices": online_choices.page,
}


@pytest.mark.parametrize(
    "name", [*PAGES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PAGES)]
)
def test_a_page_is_what_its_rows_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in SLOW_PAGES:  # of intervals that are made from the rows
        monkeypatch.setattr(metrics, "bootstraps", metrics.bootstraps.whole)  # type: ignore[attr-defined]
    made = (PAGES | SLOW_PAGES)[name](of(name))
    assert made == (RESULTS / f"{name}.md").read_text()


@pytest.mark.parametrize("name", ["cost", "decode", "gkd", "losses", "ranks"])
def test_a_table_of_ratios_is_what_its_rows_say(name: str) -> None:
    """All but the sentences about the run, which no row holds."""
    page, rows = (RESULTS / f"{name}.md").read_text(), of(name)
    assert bench_rows.source(rows) in page
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert table == bench_rows.markdown(bench_rows.HEAD, [bench_rows.cells(r) for r in rows])


def test_a_page_says_what_can_not_be_made_again() -> None:
    about = {"command": "python bench/x.py", "commit": "abc", "machine": "m"}
    lost = about | {"repeatable": False, "why": "older than its script"}
    words = bench_rows.source([about, lost, lost])
    assert words.startswith("`python bench/x.py` at commit abc on m.")
    assert words.endswith(" Not repeatable, 2 of 3 rows: older than its script.")


def test_of_two_intervals_the_wider_is_shown() -> None:
    alike = [{"gain": 1.0 + i / 100, "gain_interval": [0.8 + i / 100, 1.3]} for i in (0, 1)]
    assert specdecpp_page.wider(alike, "gain") == pytest.approx([0.805, 1.3])
    apart = [{"gain": gain, "gain_interval": [gain, gain]} for gain in (1.0, 2.0)]
    assert specdecpp_page.wider(apart, "gain") == [1.0, 2.0]


def test_a_turn_without_a_good_answer_has_no_interval() -> None:
    turns = [{"p50": 1.0, "p99": 2.0, "goodput": good, "tokens_per_s": 5.0} for good in (0.0, 3.0)]
    found = {(1.2, arm): turns for arm in served.ARMS}
    rows = [served.row(1.2, arm, found) for arm in served.ARMS]
    assert rows[0]["goodput_ratio"] == [1.0] and rows[0]["p50_ratio"][0] == 1
    about = {"how": "how", "capacity": 1.0, "lone_s": 0.1, "commit": "1", "machine": "m"}
    about |= {"command": "python bench/speed/served.py", "on": "twin"}
    text = served.page([row | about for row in rows])
    assert "| 1.5 (1.00) |" in text and "1.00 [1.00, 1.00]" in text and "nan" not in text
    none = [turn | {"goodput": 0.0} for turn in turns]
    assert served.row(1.2, "auto", {key: none for key in found})["goodput_ratio"] is None
