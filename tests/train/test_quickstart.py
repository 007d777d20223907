"""The quickstart from end to end with few steps: every command, folder and file it promises."""

import json
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

from draftsmith.decode.report.schema import schema_problems

ROOT = Path(__file__).resolve().parents[2]


def test_quickstart_runs_and_writes_its_reports(tmp_path: Path) -> None:
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
    with subprocess.Popen(
        [*command, *small],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as again:
        assert again.stdout is not None
        finished = (line for line in again.stdout if "is finished: nothing to do" in line)
        assert len(list(islice(finished, 1))) == 1
        os.killpg(again.pid, signal.SIGKILL)
