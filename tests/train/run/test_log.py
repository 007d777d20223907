"""What a run shows and writes down."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.train.run.log import Log, keep_through, wandb_tracker

RECORDS = [
    {"step": 0, "eval_alpha": 0.25},
    {"step": 1, "loss": 2.5, "alpha": 0.5, "tokens": 100, "seconds": 0.5, "grad_norm": 1.0},
    {"step": 2, "loss": 2.0, "alpha": 0.6, "tokens": 300, "seconds": 0.5, "eval_alpha": 0.5},
]


def shown(path: Path, *, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, color_system=None)
    with Log(path, step=-1, steps=4, console=console) as log:
        for record in RECORDS:
            log.write(record)
    return out.getvalue()


def test_records_and_plain_lines(tmp_path: Path) -> None:
    """Without a terminal: no bar, and a line where something was measured."""
    path = tmp_path / "metrics.jsonl"
    text = shown(path, terminal=False)
    assert [json.loads(line) for line in path.read_text().splitlines()] == RECORDS
    assert text.splitlines() == [
        "step 0/4 eval_alpha=0.2500",
        "step 2/4 loss=2.0000 alpha=0.6000 eval_alpha=0.5000 400 tokens/s, 1 s left",
    ]


def test_the_bar_of_a_terminal(tmp_path: Path) -> None:
    text = shown(tmp_path / "metrics.jsonl", terminal=True)
    assert "loss=2.0000 alpha=0.6000 400 tokens/s, 1 s left" in text
    assert "2/4" in text


def test_other_processes_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(None, step=-1, steps=4) as log:
        log.write(RECORDS[1])
        log.console.print("a table")
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_later_records_and_a_torn_line_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    shown(path, terminal=False)
    with path.open("a") as file:
        file.write('{"step": 3, "loss"')
    keep_through(path, 1)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
    keep_through(path, -1)
    assert path.read_text() == ""


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs pip install 'draftsmith[track]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    code = f"""
from pathlib import Path
from draftsmith.train.run.log import wandb_tracker
track = wandb_tracker(Path({str(tmp_path)!r}), {{"lr": 0.1}})
for step in range(3):
    track({{"step": step, "loss": 1.0 / (step + 1)}})
"""
    for _ in range(2):  # the second is a resumed run: the same id
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    [ident] = (tmp_path / "wandb_id").read_text().split()
    assert list((tmp_path / "wandb").glob(f"offline-run-*-{ident}/run-{ident}.wandb"))


def test_wandb_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install 'draftsmith\[track\]'"):
        wandb_tracker(tmp_path, {})
