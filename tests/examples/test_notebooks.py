"""The notebooks: all their cells run in order, and what they say is so."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from forked import run
from house_rules import ROOT
from sample_reports import a_lossy_report, a_report

from draftsmith.decode.policies.foretold import kept_shares, taus
from draftsmith.decode.report import results

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
BESIDE = ("categories", "accepted_histogram", "acceptance_conditional", "lossless", "times")


def cells(name: str, kind: str = "code") -> list[str]:
    """Of one kind, as texts."""
    whole = json.loads((ROOT / f"examples/{name}.ipynb").read_text("utf-8"))
    return ["".join(one["source"]) for one in whole["cells"] if one["cell_type"] == kind]


def ran(name: str, folder: Path, then: str, **said: str) -> tuple[str, Any]:
    """What the cells print in one namespace, in a process of their own; and after them an
    expression, by way of JSON. said: variables of the environment.
    """
    first = "import matplotlib\nmatplotlib.use('Agg')"  # no window
    last = f"import json\nprint('THEN', json.dumps({then}))"
    (folder / "cells.py").write_text("\n\n".join([first, *cells(name), last]))
    process = run([str(folder / "cells.py")], {"REPORTS": "", **said}, cwd=folder)
    assert process.returncode == 0, process.told
    told, _, value = process.out.rpartition("THEN ")
    return told, json.loads(value)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path: Path) -> None:
    """nbformat 4.5: as a reader opens it, nothing of anybody's machine in it."""
    whole = json.loads(path.read_text("utf-8"))
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5)
    assert whole["cells"][0]["source"][0].startswith("# ")
    ids = [one["id"] for one in whole["cells"]]
    assert len({*ids}) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", one) for one in ids)
    code = [one for one in whole["cells"] if one["cell_type"] == "code"]
    assert all(one["outputs"] == [] and one["execution_count"] is None for one in code)
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert any(f"examples/{path.name}" in page.read_text("utf-8") for page in pages)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_files_that_it_names_are_there(path: Path) -> None:
    text = "\n".join(cells(path.stem, "markdown"))
    named = re.findall(r"`((?:decode|models|train)/[\w/]+\.\w+|CONTRIBUTING\.md)`", text)
    own = "decode/untrained/successors.py"  # what the reader would write
    assert named and all((ROOT / file).is_file() for file in named if file != own)


def test_a_drafter_is_added_and_changes_no_answer(tmp_path: Path) -> None:
    then = "[list(taus.values()), tau(mistaken), len({tuple(one.tokens) for one in plain}), "
    then += "answers(None, 0.0)[0].tokens != plain[0].tokens, type(by_name).__name__]"
    told, (found, wrong, unlike, heated, name) = ran("add_a_drafter", tmp_path, then)
    assert told.count("the same, tau") == 5
    greedy, greedy_batch, *_ = found
    assert greedy == greedy_batch > 1.2 > wrong >= 1
    # Answers that were all alike would be equal whatever was drafted.
    assert unlike == 4 and heated and name == "NamedSuccessors"


def test_reports_are_made_and_read(tmp_path: Path) -> None:
    then = "[[json.loads(Path(path).read_text()) for path in paths], said]"
    told, (reports, said) = ran("read_a_report", tmp_path, then)
    exits, ngram = reports
    assert list(said) == ["exit:2, T = 1", "ngram, T = 1"]
    assert told.count("12 of 12 equal plain decoding's") == 2
    assert exits["tau"] > 1.5 and exits["alpha"] > 0.4 and ngram["alpha"] is None
    for report in reports:
        low, high = report["tau_interval"]
        assert f"{report['tau']:8.3f} [{low:.2f}, {high:.2f}]" in told
        assert f"{report['speedup']:.2f} [{report['speedup_interval'][0]:.2f}" in told


def test_given_reports_and_comparisons_are_read(tmp_path: Path) -> None:
    """Of `evaluate` and of `compare`, side by side; a speed-up without an interval, a lossy run."""
    slow = a_report(speedup=0.5, speedup_interval=None, temperature=1.0, prompts="p")
    row = results.row("eagle3", slow) | {key: slow[key] for key in BESIDE}
    found = {"rows": [{"kind": "eagle3", "results": [row]}, {"kind": "mtp", "results": []}]}
    paths = [tmp_path / name for name in ("report.json", "compare.json", "lossy.json")]
    lossy = a_lossy_report(drafter={"kind": "lm", "path": "runs/b"}, speedup_interval=[0.9, 1.1])
    for path, values in zip(paths, (a_report(), found, lossy), strict=True):
        path.write_text(json.dumps(values))
    then = "[said, {name: list(one) for name, one in by_depth.items()}]"
    given = os.pathsep.join(map(str, paths))
    told, (said, by_depth) = ran("read_a_report", tmp_path, then, REPORTS=given)
    assert said == {
        "after, T = 0": "faster",
        "eagle3, T = 1": "slower",
        "b, T = 0": "no clear difference",
    }
    assert "b, T = 0: LOSSY" in told and "after, T = 0: 4 of 4 equal" in told
    assert "eagle3, T = 1: 0.50 [0.50, 0.50], slower" in told
    wanted = list(taus(kept_shares(slow["accepted_histogram"])))
    assert by_depth["eagle3, T = 1"] == wanted == [1.75, 2.2]
