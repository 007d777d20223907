"""The quickstart from end to end with few steps: every command, folder and file it promises."""

import json
import sys
from pathlib import Path

import pytest
from launched_here import launched_here

import draftsmith.__main__ as front
from draftsmith.command import parse
from draftsmith.decode.prompts import sources
from draftsmith.decode.report.schema import schema_problems
from draftsmith.train import distill, pretrain, quickstart
from draftsmith.train.quickstart import ENTRIES, Quickstart, overrides

SHORT = ["text.max_length=64", "batch_size=4"]
FEW = {
    "pretrain": ["heldout_sequences=4"],
    "distill": ["heldout.limit=2", "heldout.max_new_tokens=8"],
}
MAINS = {"pretrain": pretrain.main, "distill": distill.main}


def shortened(settings: Quickstart, name: str) -> list[str]:
    """What the quickstart gives a recipe, in short sequences and with few that are held out."""
    return overrides(settings, name) + SHORT + FEW[ENTRIES[name]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are launched: each in this process, on a sixth of the corpus in short
    sequences. As processes of their own, as they are, test_claims.py (slow) runs them.
    """
    rows = sources.stdlib_rows
    monkeypatch.setattr(sources, "stdlib_rows", lambda root: rows(root)[::6])
    monkeypatch.setattr(quickstart, "overrides", shortened)

    return launched_here(monkeypatch, quickstart)


def test_quickstart_runs_and_writes_its_reports(
    tmp_path: Path,
    launches: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = [f"out={tmp_path}", "steps=2", "limit=2", "max_new_tokens=8", "K=2"]
    monkeypatch.setattr(sys, "argv", ["draftsmith", "quickstart", *argv])
    assert front.main() == 0
    told = capsys.readouterr().out
    assert [words[:2] for words in launches] == [["train", entry] for entry in ENTRIES.values()]
    for says in ("after - before at temperature 1: alpha", "held-out loss, nats a token"):
        assert says in told
    for arm in ("before", "after", "ngram"):
        for folder in (tmp_path / arm, tmp_path / arm / "t1"):
            report = json.loads((folder / "report.json").read_text())
            assert not schema_problems(report)
            assert report["identical"]["same"] + report["identical"]["excused"] == 2
            assert (folder / "report.html").exists()
    assert len(json.loads((tmp_path / "results.json").read_text())) == 6
    # Once more: what was trained isn't trained again.
    settings = parse(Quickstart, argv)
    for name, entry in ENTRIES.items():
        MAINS[entry](shortened(settings, name))
        assert "is finished: nothing to do" in capsys.readouterr().out
