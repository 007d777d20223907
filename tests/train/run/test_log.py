"""What a run shows and writes down."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bigram import settings
from forked import run
from rich.console import Console

from draftsmith.train.run.launch import start
from draftsmith.train.run.log import Log, keep_through, open_tracker

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


JOB = """
import sys
from bigram import Bigram, Sequences, settings
from draftsmith.train.run.folder import Run
from draftsmith.train.run.launch import start
from draftsmith.train.run.loop import fit
out, name, steps = sys.argv[1:]
config = settings(out, track=name, steps=int(steps), save_every=1)
fit(start(config), Bigram(), Sequences(), config, Run(out, "lr: 1", main=True))
"""


def tracked(out: Path, name: str) -> None:
    """Two steps, and in another process a third."""
    for steps in ("2", "3"):
        done = run(["-c", JOB, str(out), name, steps])
        assert done.returncode == 0, done.err


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs pip install 'draftsmith[track]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked(tmp_path, "wandb")
    [ident] = (tmp_path / "wandb_id").read_text().split()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{ident}/run-{ident}.wandb"))) == 2


@pytest.mark.slow
def test_tensorboard_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "draftsmith")).Reload()
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").open()]
    shown = [(one.step, one.value) for one in events.Scalars("loss")]
    assert shown == [(i, pytest.approx(loss)) for i, loss in enumerate(losses, 1)]


def test_mlflow_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs pip install mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracked(tmp_path, "mlflow")
    run, metric = (tmp_path / "mlflow_id").read_text(), "loss"
    kept = mlflow.MlflowClient(f"file://{tmp_path}/mlruns").get_metric_history(run, metric)
    assert [one.step for one in kept] == [1, 2, 3]


def test_a_tracker_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.raises(ValueError, match=r"track: got mlflow, .*: pip install mlflow$"):
        start(settings(tmp_path, track="mlflow"))


def test_a_tracker_that_is_not_set_up(tmp_path: Path) -> None:
    def begin(*_: object) -> None:
        raise ConnectionError("no API key")

    asked: Any = SimpleNamespace(is_main_process=True, trackers=[], init_trackers=begin)
    with pytest.raises(ValueError, match=r"track: got mlflow, which doesn't begin \(no API key\);"):
        open_tracker(asked, tmp_path, settings(tmp_path, track="mlflow"), 0)
