"""Rows recorded while decoding, in shards on disk, for scorers to be trained on and policies tuned.

    <folder>/trace.json                what the rows are, and of each shard its prompts and size
             trace-00000.safetensors   columns whose first axis is rows

A prompt's rows lie whole in one shard, and the manifest is renamed into place after each, so a kill
costs the prompts since the last shard. Drafted tokens give these columns (n rows, each a node of a
round's tree, its root left out):

    prompt i64, round i32        whose, and which of its rounds
    node, parent, depth i16      in the round's tree; parent 0 is the root, depth counts from 1
    position, token i32          where the token stands in the text, and which it is
    log_q, log_p f32             of the token where it was drawn, after the one transform
    entropy f32                  of q there, nats
    lead f32                     the token's score less the best other token's: how it won its race
    kept, on_path bool           the rule keeps it if its parent is kept; all before it are kept
    draft_state bf16 [n, H]      what the draft's LM head made that q of
    token_state bf16 [n, H]      the draft's state once it has read the token (`mixing.py` alone)
    target_state bf16 [n, Ht]    the target's at the token, after the final norm
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftsmith.models.disk.atomic import write_atomically
from draftsmith.models.disk.read_lm import read_json

__all__ = ["KINDS", "Trace", "TraceWriter", "read_traces"]

SCHEMA = 1
MANIFEST = "trace.json"
KINDS = ("decoder", "mixed", "judge")
SHARD_ROWS = 1 << 14
# Where things lie, and which code wrote them, doesn't change what they are.
NOT_COMPARED = ("path", "name", "commit")


class Trace(NamedTuple):
    """about: as its writer was given it; columns: each [n, ...], rows in the order of writing."""

    about: dict[str, Any]
    columns: dict[str, Tensor]


class TraceWriter:
    """Writes a folder, or goes on with one that was begun.

    Args:
        about: `kind` (of KINDS), `target` (a fingerprint), `drafter` and `settings`: all that
            decides the rows, in JSON.
        max_bytes: of the rows; a prompt that would exceed it is not taken.
        shard_rows: a shard is written once it holds as many.

    Raises ValueError for an unknown kind, a folder of other rows (naming what differs), and a shard
    that is missing, cut or foreign.
    """

    def __init__(
        self,
        folder: str | Path,
        about: dict[str, Any],
        *,
        max_bytes: int,
        shard_rows: int = SHARD_ROWS,
    ) -> None:
        if about.get("kind") not in KINDS:
            raise ValueError(f"trace: got kind {about.get('kind')!r}, expected one of {KINDS}")
        self.folder, self.max_bytes, self.shard_rows = Path(folder), max_bytes, shard_rows
        self.folder.mkdir(parents=True, exist_ok=True)
        about = json.loads(json.dumps(about))
        self.manifest: dict[str, Any] = {"schema": SCHEMA, "about": about, "columns": {}}
        self.manifest |= {"shards": [], "empty": []}
        if (self.folder / MANIFEST).exists():
            self.manifest = _read_manifest(self.folder)
            _check_same(self.folder, self.manifest["about"], about)
            for shard in self.manifest["shards"]:
                _opened(self.folder, self.manifest, shard)
        shards = self.manifest["shards"]
        self.done = {prompt for shard in shards for prompt in shard["prompts"]}
        self.done |= set(self.manifest["empty"])
        self.bytes = sum(shard["bytes"] for shard in shards)
        self.rows = sum(shard["rows"] for shard in shards)
        self.full = False
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
        shapes = {name: [_dtype(c), *c.shape[1:]] for name, c in sorted(columns.items())}
        known = self.manifest["columns"] = self.manifest["columns"] or shapes
        assert shapes == known, f"prompt {prompt}: got columns {shapes}, expected {known}"
        size = sum(column.nbytes for column in columns.values())
        self._largest = max(self._largest, size)
        if self.bytes + size > self.max_bytes:
            self.full = True
            return
        self.done.add(prompt)
        self.bytes, self.rows = self.bytes + size, self.rows + count
        self.full = self.bytes + self._largest > self.max_bytes
        self._waiting[prompt] = columns
        if sum(len(waiting["prompt"]) for waiting in self._waiting.values()) >= self.shard_rows:
            self._write()

    def close(self) -> None:
        """Write what is waiting."""
        self._write()

    def _write(self) -> None:
        shards = self.manifest["shards"]
        if self._waiting:
            parts = self._waiting.values()
            tensors = {
                name: torch.cat([part[name] for part in parts]).cpu().contiguous()
                for name in self.manifest["columns"]
            }
            shard: dict[str, Any] = {
                "file": f"trace-{len(shards):05d}.safetensors",
                "rows": len(tensors["prompt"]),
                "bytes": sum(column.nbytes for column in tensors.values()),
                "prompts": list(self._waiting),
            }
            content = save(tensors, {"of": _mark(self.manifest, shard)})
            write_atomically(self.folder / shard["file"], content)
            shards.append(shard | {"size": len(content)})
            self._waiting = {}
        write_atomically(self.folder / MANIFEST, json.dumps(self.manifest, indent=1).encode())


def read_traces(
    folder: str | Path, columns: Sequence[str] | None = None, kind: str | None = None
) -> Trace:
    """The rows of a folder: all columns, or those named.

    Raises ValueError for a folder without a trace or without rows, one of another kind or schema, a
    column that it lacks, and a shard that is missing, cut or foreign.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
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
        opened = _opened(folder, manifest, shard)
        for name, column in found.items():
            column[at : at + shard["rows"]] = opened.get_tensor(name)
        at += shard["rows"]
    return Trace(manifest["about"], found)


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"got {folder} without {MANIFEST}; expected the folder of a trace, as python -m "
            "draftsmith trace writes it; check the path"
        )
    manifest = read_json(folder / MANIFEST)
    if manifest.get("schema") != SCHEMA:
        raise ValueError(
            f"got {folder / MANIFEST} of schema {manifest.get('schema')!r}, expected {SCHEMA}; "
            "trace again with this version"
        )
    return manifest


def _opened(folder: Path, manifest: dict[str, Any], shard: dict[str, Any]) -> Any:
    """A shard's file, once it is known to be the one that was written."""
    file = folder / shard["file"]
    size = file.stat().st_size if file.is_file() else None
    if size != shard["size"]:
        cut = f"cut or foreign: {size} bytes, {shard['size']} were written"
        raise _damaged(file, "missing" if size is None else cut)
    try:
        opened = safe_open(file, "pt")
    except (OSError, SafetensorError) as error:
        raise _damaged(file, f"cut ({error})") from error
    if (opened.metadata() or {}).get("of") != _mark(manifest, shard):
        raise _damaged(file, "of another trace")
    return opened


def _damaged(file: Path, what: str) -> ValueError:
    return ValueError(
        f"{file}: got a shard that is {what}, expected it as it was written; copy it again, or "
        "delete the folder and trace anew"
    )


def _mark(manifest: dict[str, Any], shard: dict[str, Any]) -> str:
    """What a shard says of itself: which rows of which prompts it holds."""
    says = [manifest["about"], shard["file"], shard["rows"], shard["prompts"]]
    return hashlib.sha256(json.dumps(says, sort_keys=True).encode()).hexdigest()


def _check_same(folder: Path, found: dict[str, Any], given: dict[str, Any]) -> None:
    differ = _differences(found, given)
    if differ:
        raise ValueError(
            f"{folder} holds another trace ({'; '.join(differ)}); expected the same target, "
            "drafter and settings to go on with it; restore those, or give this run a folder of "
            "its own"
        )


def _differences(found: Any, given: Any, where: str = "") -> list[str]:
    """What differs between two JSON objects, by name, in words."""
    if isinstance(found, dict) and isinstance(given, dict):
        names = [name for name in {**found, **given} if name not in NOT_COMPARED]
        inner = [(found.get(name), given.get(name), f"{where} {name}".strip()) for name in names]
        return [line for part in inner for line in _differences(*part)]
    words = [value[:12] if isinstance(value, str) else value for value in (given, found)]
    return [] if found == given else [f"{where}: got {words[0]}, there {words[1]}"]


def _dtype(column: Tensor) -> str:
    return str(column.dtype).removeprefix("torch.")
