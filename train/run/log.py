"""What a run shows and writes: metrics.jsonl, a progress bar or plain lines, a tracker."""

import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from draftsmith.command import kinds
from draftsmith.models.disk.read_lm import first_line
from draftsmith.models.disk.store import read_lines, write_atomically
from draftsmith.progress import LINE_SECONDS
from draftsmith.train.run.settings import Settings, setting

SHOWN = ("loss", "alpha", "grad_norm")
Tracker = Callable[[dict[str, Any], int], None]


class Log:
    """Writes one record a step to `metrics` and shows where the run is.

    metrics: the metrics.jsonl to append to, None on all but the main process; records after `step`
    are dropped first, since a resumed run will write them again. step, steps: the last finished
    one, and the run's length. lap: the steps between two goals of a run that has no end, which
    time left counts to; 0: to the end. limit: the seconds that are left of a run that ends by the
    clock, 0 of others. tracker: receives each record and its step, too.
    """

    def __init__(
        self,
        metrics: Path | None,
        *,
        step: int,
        steps: int,
        lap: int = 0,
        limit: float = 0.0,
        tracker: Tracker | None = None,
        console: Console | None = None,
    ) -> None:
        self._file = None
        if metrics:
            keep_through(metrics, step)
            self._file = metrics.open("a", encoding="utf-8")
        self._tracker, self._steps, self._lap, self._limit = tracker, steps, lap, limit
        self._seconds, self._tokens, self._trained = 0.0, 0, 0
        self._last_line = time.monotonic()
        self.console = console or Console(quiet=metrics is None)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(
            *columns,
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=max(0, step), figures="")

    def __enter__(self) -> "Log":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._file:
            self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Write the record of one step: `step`, `tokens`, `seconds`, and any other numbers."""
        if not self._file:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._tracker:
            self._tracker(record, record["step"])
        self._seconds += record.get("seconds", 0.0)
        self._tokens += record.get("tokens", 0)
        self._trained += "tokens" in record
        held_out = [f"{k}={v:.4f}" for k, v in record.items() if k.startswith("eval_")]
        figures = " ".join(f"{k}={record[k]:.4f}" for k in SHOWN if k in record)
        step, speed = record["step"], ""
        if self._seconds:
            ahead = self._lap - step % self._lap if self._lap else self._steps - step
            goal = " to the next evaluation" if self._lap else ""
            seconds = ahead * self._seconds / self._trained
            if self._limit:
                seconds = max(0.0, self._limit - self._seconds)
            left = f"{seconds:,.0f} s left{goal}"
            speed = f"{self._tokens / self._seconds:,.0f} tokens/s, {left}"
        self._bar.update(self._task, completed=step, figures=f"{figures} {speed}")
        due = time.monotonic() - self._last_line > LINE_SECONDS and not self.console.is_terminal
        if due or held_out or step == self._steps:
            of = "" if self._limit else f"/{self._steps}"
            line = f"step {step}{of} {figures} {' '.join(held_out)} {speed}"
            self.console.print(" ".join(line.split()), highlight=False, soft_wrap=True)
            self._last_line = time.monotonic()


def keep_through(metrics: Path, step: int) -> None:
    """Drop the records after `step`, and a last line that was cut off."""
    if metrics.exists():
        kept = [json.dumps(line) + "\n" for line in read_lines(metrics) if line["step"] <= step]
        write_atomically(metrics, "".join(kept).encode())


def open_tracker(accelerator: Accelerator, folder: Path, settings: Settings, step: int) -> None:
    """Begin the run in the tracker that the accelerator was made with, if any; or go on with it
    after `step`, where its tracker can. ValueError for one that isn't set up.
    """
    name, main = settings.track, accelerator.is_main_process
    stored = folder / f"{name}_id"
    known = stored.read_text() if stored.exists() else ""
    ident = known or secrets.token_hex(4)
    own = {"name": folder.name, "resume": "allow"}
    how: dict[str, dict[str, Any]] = {
        "wandb": own | {"dir": str(folder), "id": ident},
        "trackio": own,
        "tensorboard": {"purge_step": step + 1},
        "mlflow": {"run_name": folder.name, "run_id": known or None},
    }
    values = {key: setting(settings, key) for key in kinds(type(settings))}
    plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in values.items()}
    errors: tuple[type[Exception], ...] = (ConnectionError,)
    if name == "wandb":
        from wandb.errors import Error

        errors += (Error,)
    try:
        accelerator.init_trackers("draftsmith", None if known else plain, how)
    except errors as error:
        raise ValueError(
            f"track: got {name}, which doesn't begin ({first_line(error)}); expected one that is "
            "set up: log in to it, or keep its records here, as WANDB_MODE=offline does"
        ) from error
    if main and accelerator.trackers and not known:
        made = accelerator.trackers[0]
        stored.write_text(made.tracker.info.run_id if name == "mlflow" else ident)


def close_tracker(accelerator: Accelerator) -> None:
    """The end of what `open_tracker` began; `end_training` would end the processes' group, too."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers.clear()
