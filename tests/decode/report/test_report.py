"""The report: sound or refused, every number with its formula, on the terminal and in the file."""

import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from rich.console import Console, RenderableType
from sample_reports import (
    REPORTS,
    TASK,
    Report,
    a_full_report,
    a_lossy_report,
    a_report,
    an_ngram_report,
    differing,
    divergence,
)

from draftsmith.decode.report import figures, results
from draftsmith.decode.report.figures import FORMULAS
from draftsmith.decode.report.page import write
from draftsmith.decode.report.schema import Report as Schema
from draftsmith.decode.report.schema import as_report, schema_problems
from draftsmith.decode.report.terminal import comparison, table


def keys(kind: Any, prefix: str = "") -> Iterator[str]:
    """Every key that a sound report must have, those of the objects in it dotted."""
    for name, field in kind.model_fields.items():
        if not field.is_required():
            continue  # it may be absent
        yield prefix + (field.alias or name)
        for inner in (field.annotation, *get_args(field.annotation)):
            if hasattr(inner, "model_fields") and get_origin(field.annotation) not in (list, dict):
                yield from keys(inner, f"{name}.")


KEYS = list(keys(Schema))


def printed(what: RenderableType, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(what)
    return console.export_text()


# ------------------------------------------------------------------------------------ the schema


@pytest.mark.parametrize("name", REPORTS)
def test_sound_reports_have_no_problems(name: str) -> None:
    assert schema_problems(REPORTS[name]()) == []


@pytest.mark.parametrize("key", KEYS)
def test_every_missing_key_is_named(key: str) -> None:
    report = a_full_report()
    outer, _, inner = key.rpartition(".")
    del (report[outer] if outer else report)[inner]
    assert [problem.split(":")[0] for problem in schema_problems(report)] == [key]


# Whatever stands in policy and tree is right.
@pytest.mark.parametrize("key", [key for key in KEYS if key not in ("policy", "tree")])
def test_every_wrong_type_is_named(key: str) -> None:
    report = a_full_report()
    outer, _, inner = key.rpartition(".")
    (report[outer] if outer else report)[inner] = object()
    assert [problem.split(": ")[0] for problem in schema_problems(report)] == [key]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tau": float("nan")}, "tau: got nan: .* a finite number"),
        ({"tau": True}, "tau: got True: .* a valid number"),
        ({"tau_interval": [2.4, 2.1]}, "tau_interval: got .2.4, 2.1.: .*expected .low, high."),
        ({"alpha": 1.1}, "alpha: got 1.1: .* less than or equal to 1"),
        ({"n_prompts": 4.0}, "n_prompts: got 4.0: .* a valid integer"),
        ({"alpha": None}, "alpha: got None, but alpha_interval"),
        ({"acceptance_conditional": [0.75]}, "got 2, 1 and 3 values, expected D, D and D . 1"),
        ({"accepted_histogram": [1, 2]}, "got 2, 2 and 2 values"),
        ({"n_prompts": 5}, "categories: got 4 prompts in them, expected n_prompts = 5"),
        (
            {"categories": {"a": {"tau": 2.0, "n_prompts": 4}}},
            "categories.a.speedup: .* required",
        ),
        ({"categories": {"a": 3}}, "categories.a: got 3: .* a valid dictionary"),
        ({"lossless": False}, "lossless: got False with lossy = ''"),
        ({"lossless": False, "lossy": "typical"}, "a lossy run: got neither task nor agreement"),
        ({"specbench": {"qa": {"tau": 2.0}}}, "specbench.qa.speedup: got .* required"),
        ({"divergences": [{"prompt": 1}]}, r"divergences.0.position: got .* required"),
    ],
)
def test_what_cannot_be_is_named(changes: Report, problem: str) -> None:
    problems = schema_problems(a_report(**changes))
    assert any(re.match(f".*{problem}", line) for line in problems), problems


def test_a_difference_that_is_not_listed_is_a_problem() -> None:
    report = a_report()
    report["identical"]["same"] = 3
    assert "1 answers differ in float32, but 0 are listed" in schema_problems(report)[0]
    # One in the dtype of the speed run doesn't count for it.
    report["divergences"] = [divergence("bfloat16", near_tie=False)]
    assert schema_problems(report)
    report["divergences"].append(divergence("float32", near_tie=True))
    assert not schema_problems(report)


def test_each_comparison_lists_its_own_differences() -> None:
    """What parts from the same shapes isn't excused by what parts from native plain decoding."""
    report = a_full_report()
    report["identical_same_shape"]["same"] = 3
    report["divergences"] = [divergence("bfloat16", near_tie=False)]
    assert "identical_same_shape: 1 answers differ" in schema_problems(report)[0]
    report["divergences"].append(divergence("bfloat16", near_tie=False, baseline="same-shape"))
    assert not schema_problems(report)
    detail = figures.verdict(as_report(report)).detail
    assert "3 of 4 answers equal those of plain decoding through the drafter's rounds" in detail
    assert "no proof" in detail


# ------------------------------------------------------------------------------------- the files


def test_the_file_is_json_with_stable_keys(tmp_path: Path) -> None:
    report = a_report()
    shuffled = dict(sorted(report.items(), key=lambda item: item[0][::-1]))
    write(report, tmp_path / "a" / "b")
    write(shuffled, tmp_path / "c")
    text = (tmp_path / "a" / "b" / "report.json").read_text("utf-8")
    assert text == (tmp_path / "c" / "report.json").read_text("utf-8")
    read = json.loads(text)
    assert read == report | {"formulas": FORMULAS}
    top = [key for key in KEYS if "." not in key]
    assert list(read)[: len(top)] == top and schema_problems(read) == []
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "report.html",
        "report.json",
    ]


def test_a_failed_write_leaves_the_last_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(a_report(), tmp_path)
    before = (tmp_path / "report.json").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(a_report(seed=1), tmp_path)
    assert (tmp_path / "report.json").read_bytes() == before


def test_an_unsound_report_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="tau: got nan"):
        write(a_report(tau=float("nan")), tmp_path)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------- numbers and formulas


@pytest.mark.parametrize("name", REPORTS)
def test_the_terminal_shows_each_figure_with_its_formula(name: str) -> None:
    report = REPORTS[name]()
    lines = [" ".join(line.split()) for line in printed(table(report)).splitlines()]
    for row in figures.figures(as_report(report)):
        assert row.formula in FORMULAS.values()
        first = row.value.split("  ")[0]
        whole = [line for line in lines if line.startswith(f"{row.name} {first}")]
        assert len(whole) == 1 and whole[0].endswith(row.formula), row
        assert row.interval in whole[0]


def test_figures_are_what_the_report_says() -> None:
    values = {
        row.name: f"{row.value} {row.interval}".strip()
        for row in figures.figures(as_report(a_report()))
    }
    assert values["tau, block efficiency"] == "2.25 [2.10, 2.40]"
    assert values["alpha, acceptance"] == "0.791 [0.779, 0.803]"
    assert values["coupled acceptance"] == "0.654"
    assert values["speed-up"] == "1.63\u00d7 [1.54, 1.71]"
    assert values["tokens/s, speculative"] == "345.6"
    assert (values["t_plain"], values["t_prefill"]) == ("4.31 ms", "112 ms")
    assert values["efficiency"] == "99.0%" and values["loop rate"] == "8.3%"
    assert values["rounds by accepted"] == "10  12  18"
    assert values["tau by rule"] == "coupled 2.25 · block 2.37"
    batched = {row.name: row for row in figures.figures(as_report(REPORTS["one batch"]()))}
    assert batched["speed-up"][1:3] == ("1.63\u00d7", "")
    assert batched["speed-up, Spec-Bench way"].value == "—"
    # Each number of the report is a figure: take one away, and something else is printed.
    absent = {row.name: row.value for row in figures.figures(as_report(an_ngram_report()))}
    assert {name for name, value in absent.items() if value == "—"} >= {
        *("alpha, acceptance", "coupled acceptance", "draft acceptance rate", "c", "MBSU"),
        *("ideal speed-up", "efficiency", "t_draft", "acceptance by position"),
    }


@pytest.mark.parametrize(
    ("report", "level", "words"),
    [
        (a_report(), "good", "4 of 4 answers equal those of native plain decoding"),
        (
            differing(divergence("float32", near_tie=True)),
            "near",
            "the other 1 parts at a near-tie",
        ),
        (
            differing(divergence("float32", near_tie=True), divergence("float32", near_tie=False)),
            "bad",
            "1 of the others part where there is no near-tie",
        ),
        # Ties of the speed run excuse nothing in fp32.
        (
            differing(divergence("float32", near_tie=False), divergence("bfloat16", near_tie=True)),
            "bad",
            "3 of 4",
        ),
        (differing(divergence("bfloat16", near_tie=False)), "good", "4 of 4"),
        (a_report(rule="block", temperature=1.0, identical=None), "good", "keeps the target's"),
        (a_report(identical=None), "note", "nobody checked"),
        (a_lossy_report(), "note", "the target would not have emitted"),
        (
            a_full_report(),
            "good",
            "In bfloat16, 4 of 4 answers equal those of plain decoding through",
        ),
    ],
)
def test_the_verdict(report: Report, level: str, words: str) -> None:
    assert not schema_problems(report)
    found = figures.verdict(as_report(report))
    assert found.level == level and words in found.detail
    terminal = " ".join(printed(table(report), 300).split())
    assert found.headline in terminal and found.detail in terminal


@pytest.mark.parametrize(
    ("report", "shown"),
    [
        (a_lossy_report(), ["no known answers", "0.812", "[0.700, 0.900]"]),
        (a_lossy_report(task=TASK), ["25.0% (plain 50.0%, n = 4)", "-0.250 [-0.750, 0.250]"]),
        (a_report(task=TASK), ["25.0% (plain 50.0%, n = 4)"]),
    ],
)
def test_tau_does_not_stand_alone(report: Report, shown: list[str]) -> None:
    """What the answers are worth comes right after tau; LOSSY stands in the first line."""
    assert not schema_problems(report)
    names = [row.name for row in figures.figures(as_report(report))]
    quality = [row.name for row in figures.quality(as_report(report))]
    assert quality and names[1 : 1 + len(quality)] == quality
    text = printed(table(report))
    assert all(words in text for words in shown)
    assert ("LOSSY typical:0.09,0.3" in text) != report["lossless"]
    assert not figures.quality(as_report(a_report()))


def test_a_speed_up_without_an_interval_stands_alone() -> None:
    report = REPORTS["one batch"]() | {"prompts": "some"}
    report["identical"]["excused"] = 0
    rows = [results.row("a", report)]
    text = results.page("One", rows)
    assert "| 2.25 [2.10, 2.40] | 1.63 | 346 (212) |" in text
    assert re.search(r" 2.25 +1.63 +346 ", printed(comparison(rows), width=80))


def test_what_was_skipped_is_said() -> None:
    report = REPORTS["Spec-Bench"]()
    text = " ".join(printed(table(report)).split())
    assert "2 of 6 prompts and 1 later turns of those decoded, which with 64 new" in text
    assert "exceed the context of 512" in text and "Skipped" not in printed(table(a_report()))
    assert re.search(r"mt_bench +3 +2.31 +1.70\S +1.61", text)


def test_the_terminal_takes_text_for_text() -> None:
    """Paths and categories in brackets are no markup, and divergences are counted."""
    report = REPORTS["many"]()
    report |= {"target": "runs/[red]target", "categories": {"[b]x": report["categories"]["code"]}}
    report["n_prompts"] = 3
    text = printed(table(report))
    assert "runs/[red]target" in text and "[b]x" in text
    assert "10 more in report.json" in text and "[low, high]" in text


def test_the_comparison_has_a_row_for_each_report_in_80_columns() -> None:
    near = differing(divergence("float32", near_tie=True))
    reports = [
        ("before", a_report(tau=1.91, tau_interval=[1.8, 2.0])),
        ("after", a_lossy_report(temperature=0.0)),
        ("before", near | {"temperature": 1.0}),
        ("ngram", an_ngram_report()),
    ]
    rows = []
    for arm, report in reports:
        if identical := report["identical"]:
            identical["excused"] = identical["total"] - identical["same"]
        rows.append(results.row(arm, report | {"prompts": "some"}))
    text = printed(comparison(rows), width=80)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    lines = [line for line in text.splitlines() if re.search("^[01] +(before|after|ngram)", line)]
    assert [tuple(line.split()) for line in lines] == [
        ("0", "before", "0.791", "1.91", "1.63", "346", "8%", "4", "of", "4"),
        ("0", "after", "0.791", "2.25", "1.63", "346", "8%", "LOSSY"),
        ("1", "before", "0.791", "2.25", "1.63", "346", "8%", "3", "of", "4,", "1"),
        ("1", "ngram", "—", "2.25", "1.63", "346", "8%", "not", "compared"),
    ]
    for part in ("[0.779, 0.803]", "[1.80, 2.00]", "(212)", "near-tie", "agreement"):
        assert part in text, part
    joined = " ".join(text.split())
    for key in ("alpha", "tau", "speedup", "tokens_per_s", "loop_rate", "identical", "interval"):
        assert FORMULAS[key] in joined, key
