"""Rows recorded while decoding, in shards on disk, for scorers to be trained on and policies tuned.

    <folder>/trace.json                what the rows are, and of each shard its prompts and size
             trace-00000.safetensors   columns whose first axis is rows

A prompt's rows lie whole in one shard, and the manifest is renamed into place after each, so a kill
costs the prompts since the last shard. Each row is a drafted node of a round's tree; its columns
are those of `engine/recorder.py` (numbers as i16, i32 or f32, states as bf16) and

    prompt i64                   whose
    token_state bf16 [n, H]      the draft's state once it has read the token (`mixed_rows` alone)
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.command import check_one_of
from draftsmith.decode.drafting.base import Drafter
from draftsmith.models.disk.store import Manifest, hold, open_shard, save_shard
from draftsmith.models.scorers import weights_mark

KINDS = ("decoder", "mixed", "judge")
SHARD_ROWS = 1 << 14
REMEDY = "copy it again, or delete the folder and trace anew"
# Where things lie, and which code wrote them, doesn't change what they are.
MANIFEST = Manifest(
    "trace.json", "draftsmith trace", schema=1, decides="about", free=("path", "name", "commit")
)


class Trace(NamedTuple):
    """about: as its writer was given it; columns: each [n, ...], rows in the order of writing."""

    about: dict[str, Any]
    columns: dict[str, Tensor]


@dataclass(eq=False)
class TraceWriter:
    """Writes a folder, or goes on with one that was begun. about: `kind` (of KINDS), `target` (a
    fingerprint), `drafter` and `settings`: all that decides the rows, in JSON; max_bytes: of the
    rows; shard_rows: a shard is written once it holds as many.

    Raises ValueError for an unknown kind, a folder of other rows (naming what differs) or that
    another process writes to, and a shard that is missing, cut or foreign.
    """

    folder: Path
    about: dict[str, Any]
    max_bytes: int
    shard_rows: int = SHARD_ROWS

    def __post_init__(self) -> None:
        check_one_of("kind", self.about["kind"], KINDS)
        self._lock = hold(self.folder, "wait for it, or give this run a folder of its own")
        begun = {"about": self.about, "columns": {}, "shards": [], "empty": []}
        self.manifest = MANIFEST.claim(self.folder, begun)
        self.done, self.bytes, self.full = set(self.manifest["empty"]), 0, False
        for shard in self.manifest["shards"]:
            with open_shard(self.folder / shard["file"], REMEDY, of=_mark(self.manifest, shard)):
                self.done.update(shard["prompts"])
                self.bytes += shard["bytes"]
        self._largest = 0  # bytes of a prompt of this run
        self._waiting: dict[int, dict[str, Tensor]] = {}

    def add(self, prompt: int, columns: dict[str, Tensor]) -> None:
        """Take all rows of a prompt, once; their column `prompt` is set here. Where they would
        exceed `max_bytes` they are left out, and the writer is `full`.
        """
        assert prompt not in self.done, f"prompt {prompt} is in {self.folder} already"
        count = len(next(iter(columns.values()), ()))
        if not count:
            self.manifest["empty"].append(prompt)
            self.done.add(prompt)
            return
        columns = columns | {"prompt": torch.full((count,), prompt)}
        shapes = {
            name: [str(column.dtype).removeprefix("torch."), *column.shape[1:]]
            for name, column in sorted(columns.items())
        }
        known = self.manifest["columns"] = self.manifest["columns"] or shapes
        assert shapes == known, f"prompt {prompt}: got columns {shapes}, expected {known}"
        size = sum(column.nbytes for column in columns.values())
        self._largest = max(self._largest, size)
        if self.bytes + size > self.max_bytes:
            self.full = True
            return
        self.done.add(prompt)
        self.bytes += size
        self.full = self.bytes + self._largest > self.max_bytes
        self._waiting[prompt] = columns
        if sum(len(waiting["prompt"]) for waiting in self._waiting.values()) >= self.shard_rows:
            self._write()

    def close(self) -> None:
        """Write what is waiting, and let another process write."""
        self._write()
        self._lock.release(force=True)

    def _write(self) -> None:
        shards, parts = self.manifest["shards"], self._waiting
        if parts:
            names = self.manifest["columns"]
            tensors = {name: torch.cat([part[name] for part in parts.values()]) for name in names}
            shard: dict[str, Any] = {
                "file": f"trace-{len(shards):05d}.safetensors",
                "rows": len(tensors["prompt"]),
                "bytes": sum(column.nbytes for column in tensors.values()),
                "prompts": list(parts),
            }
            save_shard(self.folder / shard["file"], tensors, of=_mark(self.manifest, shard))
            shards.append(shard)
            self._waiting = {}
        MANIFEST.write(self.folder, self.manifest)


def read_traces(
    folder: str | Path, columns: Sequence[str] | None = None, kind: str | None = None
) -> Trace:
    """The rows of a folder: all columns, or those named.

    Raises ValueError for a folder without a trace or without rows, one of another kind or schema, a
    column that it lacks, and a shard that is missing, cut or foreign.
    """
    folder = Path(folder)
    manifest = MANIFEST.read(folder)
    if kind not in (None, manifest["about"]["kind"]):
        raise ValueError(
            f"got {folder}, a trace of kind {manifest['about']['kind']!r}, expected {kind!r}; give "
            "a folder of that kind"
        )
    rows = sum(shard["rows"] for shard in manifest["shards"])
    if not rows:
        raise ValueError(f"got {folder}, a trace without rows; expected some: trace more prompts")
    known = manifest["columns"]
    missing = [name for name in columns or () if name not in known]
    if missing:
        raise ValueError(
            f"got {folder} without the columns {', '.join(missing)}, expected them beside "
            f"{', '.join(known)}; record them with another source of rows"
        )
    found = {
        name: torch.empty(rows, *known[name][1:], dtype=getattr(torch, known[name][0]))
        for name in columns or known
    }
    at = 0
    for shard in manifest["shards"]:
        with open_shard(folder / shard["file"], REMEDY, of=_mark(manifest, shard)) as opened:
            for name, column in found.items():
                column[at : at + shard["rows"]] = opened.get_tensor(name)
        at += shard["rows"]
    return Trace(manifest["about"], found)


def made_by(folder: str, drafter: Drafter) -> dict[str, str]:
    """What a manifest says of the drafter in a folder."""
    return {"path": folder, "kind": drafter.kind, "mark": weights_mark(folder)}


def _mark(manifest: dict[str, Any], shard: dict[str, Any]) -> str:
    """What a shard says of itself: which rows of which prompts it holds."""
    says = [manifest["about"], shard["file"], shard["rows"], shard["prompts"]]
    return hashlib.sha256(json.dumps(says, sort_keys=True).encode()).hexdigest()
