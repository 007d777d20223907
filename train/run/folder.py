"""The run folder: a kill, a full disk or a second run loses nothing of it.

<run>/recipe.yaml        the resolved recipe; a run with another one is refused
      metrics.jsonl      one line a step
      checkpoints/step-XXXXXX/    the last two complete ones; a half-written one is never seen
      best/weights.safetensors    the weights with the best held-out value so far
      done.json          written last, when the result is saved
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from draftsmith.models.disk.store import hold, settle, what_differs, write_atomically

KEPT_CHECKPOINTS = 2
# Keys that went, by what they were where nobody set them, as old recipes have them.
GONE = {"head.freeze_head": False, "head.through": False}
# Where the run lies, what it prints and who watches it don't change what it computes.
FREE_KEYS = {"out", "track", "show", "plan", "cache.offload_target", "heldout.batch_size"}
# How a step is divided may change on the way; checkpoint.load says when that is exact.
DIVISION_KEYS = {"batch_size", "accumulation", "processes", "allow_resize"}


class Run:
    """One run folder, opened by every process of a run; only the main process writes.

    recipe: resolved, as YAML; main: whether this is the main process; defaults: of the settings, as
    YAML: what a run did by default that was begun before a setting was there. ValueError: the
    folder belongs to another recipe, holds a model (a drafter, say), or another process is writing
    to it now.
    """

    def __init__(self, folder: str | Path, recipe: str, *, main: bool, defaults: str = "") -> None:
        self.folder, self.main = Path(folder), main
        self.checkpoints, self.cache = self.folder / "checkpoints", self.folder / "cache"
        self.metrics = self.folder / "metrics.jsonl"
        self.best = self.folder / "best" / "weights.safetensors"
        if (self.folder / "config.json").exists():
            raise ValueError(
                f"out: got {folder}, which holds a model; expected a folder of the run's own, in "
                "which it writes its result beside what it needs to go on; choose another"
            )
        if main:
            advice = "wait for it or stop it, or give this run a folder of its own with out=..."
            self._lock = hold(self.folder, advice, again=True)
            self.checkpoints.mkdir(exist_ok=True)
            self.best.parent.mkdir(exist_ok=True)
            for half in self.checkpoints.glob(".step-*"):
                shutil.rmtree(half)
        stored = self.folder / "recipe.yaml"
        free = FREE_KEYS if self.finished() else FREE_KEYS | DIVISION_KEYS
        changed = ["it is new"]
        if stored.exists():
            old, new, default = map(flat, (stored.read_text(), recipe, defaults))
            before, after = default | old, default | new
            for key, value in GONE.items():
                if before.get(key) == value and key not in after:
                    del before[key]
            if before.get("entry") != after.get("entry"):  # then every key differs
                before, after = ({"entry": one.get("entry")} for one in (before, after))
            changed = what_differs(before, after, free)
        if changed and (self.latest() or self.finished()):
            raise ValueError(
                f"{folder} holds a run with another recipe ({'; '.join(changed)}). Repeat its "
                "command to resume it, choose another folder with out=..., or delete this one"
            )
        if changed and main:
            # A run that failed before its first checkpoint: nothing of it is worth an error.
            shutil.rmtree(self.cache, ignore_errors=True)
            write_atomically(stored, recipe.encode())
        if main:
            self.cache.mkdir(exist_ok=True)

    def close(self) -> None:
        """Let another process use the folder; the end of the process does the same."""
        if self.main:
            self._lock.release(force=True)

    def finished(self) -> dict[str, Any] | None:
        """The summary that `finish` wrote, or None while the run isn't done."""
        done = self.folder / "done.json"
        return json.loads(done.read_text()) if done.exists() else None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Mark the run as done: its result is saved, the same command has nothing to do."""
        if self.main:
            content = json.dumps(dict(summary), indent=1)
            write_atomically(self.folder / "done.json", content.encode())

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(reversed(self._complete()), None)

    def staging(self, step: int) -> Path:
        """The folder to write the checkpoint of `step` into, before `commit`."""
        return self.checkpoints / f".step-{step:06d}"

    def commit(self, step: int) -> None:
        """Make the staged checkpoint of `step` the latest one, and drop the oldest."""
        settle(self.staging(step), self.checkpoints / f"step-{step:06d}")
        for old in self._complete()[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)

    def _complete(self) -> list[Path]:
        """All complete checkpoints, by their steps: names of seven digits sort otherwise."""
        return sorted(self.checkpoints.glob("step-*"), key=lambda path: int(path.name[5:]))

    def save_best(self, weights: dict[str, Tensor], step: int) -> None:
        """Keep `weights` (no two of which share memory) as the best ones, found at `step`."""
        write_atomically(self.best, save(weights, metadata={"step": str(step)}))

    def load_best(self, module: nn.Module) -> int:
        """Load the best weights into `module`, and return the step they are from."""
        with safe_open(self.best, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            step = int(file.metadata()["step"])
        missing, unknown = module.load_state_dict(weights, strict=False)
        # Tied tensors are in the file once, under one of their names.
        state = module.state_dict()
        loaded = {state[name].data_ptr() for name in weights}
        absent = [name for name in missing if state[name].data_ptr() not in loaded]
        assert not absent and not unknown, f"{self.best} lacks {absent}, has {unknown}"
        return step


def flat(text: str) -> dict[str, Any]:
    """The settings of a YAML text by their full names."""
    flat: dict[str, Any] = {}
    left = [("", yaml.safe_load(text) or {})]
    while left:
        prefix, tree = left.pop()
        for key, value in tree.items():
            if isinstance(value, dict):
                left.append((f"{prefix}{key}.", value))
            else:
                flat[f"{prefix}{key}"] = value
    return flat
