"""The quickstart from end to end with few steps: every command, folder and file it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.command import parse
from draftsmith.decode.report.schema import schema_problems
from draftsmith.train import distill, pretrain
from draftsmith.train.quickstart import ENTRIES, Quickstart, overrides

ROOT = Path(__file__).resolve().parents[2]
MAINS = {"pretrain": pretrain.main, "distill": distill.main}


def test_quickstart_runs_and_writes_its_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "draftsmith", "quickstart", f"out={tmp_path}", "steps=3"]
    small = ["limit=3", "max_new_tokens=8", "K=2"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [*command, *small], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for words in ("draftsmith train pretrain", "draftsmith train distill"):
        assert words in done.stdout
    for words in ("after - before at temperature 1: alpha", "held-out loss, nats a token"):
        assert words in done.stdout
    for arm in ("before", "after", "ngram"):
        for folder in (tmp_path / arm, tmp_path / arm / "t1"):
            report = json.loads((folder / "report.json").read_text())
            assert not schema_problems(report)
            assert report["identical"]["same"] + report["identical"]["excused"] == 3
            assert (folder / "report.html").exists()
    assert len(json.loads((tmp_path / "results.json").read_text())) == 6
    # Once more: what was trained isn't trained again.
    settings = parse(Quickstart, [f"out={tmp_path}", "steps=3", *small])
    for name, entry in ENTRIES.items():
        MAINS[entry](overrides(settings, name))
        assert "is finished: nothing to do" in capsys.readouterr().out
