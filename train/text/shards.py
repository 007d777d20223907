"""The shards of a streamed corpus, read through `datasets` in a seeded order, from any place on.

A corpus is files (.jsonl, .json, .txt, .parquet; the first three also as .gz, .bz2, .xz, .zst)
named by a path, a glob or a folder; a data set of the hub; or the training side of `stdlib`.
A shard is one file, or one of the shards in which the hub keeps a data set.
"""

import glob
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow

from draftsmith.decode.prompts.rows import Row, parse
from draftsmith.decode.prompts.sources import hub_dataset, present
from draftsmith.decode.prompts.splits import load_rows

KINDS = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
PACKED = (".gz", ".bz2", ".xz", ".zst")
LIBRARY_SHARDS = 16
# What the readers raise for a broken file; a file without rows ends `datasets` in StopIteration.
CORRUPT = (
    *(ValueError, OSError, EOFError, StopIteration),
    *(zlib.error, lzma.LZMAError, pyarrow.ArrowException),
)


class Shard(NamedTuple):
    """`open` gives a `datasets.IterableDataset`; a shard without a path is not on this machine."""

    name: str
    open: Callable[[], Any]
    path: Path | None = None


def shards_of(source: str) -> list[Shard]:
    """The shards of a corpus in the order of their names; empty files are left out. ValueError: no
    such file, one of another kind, none at all, or the hub is out of reach.
    """
    path = Path(source)
    if source == "stdlib":
        return _library()
    if path.is_dir():
        paths = sorted(p for p in path.rglob("*") if _kind(p))
    elif path.is_file():
        paths = [path]
    elif glob.has_magic(source):
        paths = sorted(map(Path, glob.glob(source, recursive=True)))
    elif path.suffix or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ValueError(f"corpus: got {source!r}, which does not exist; expected files")
    else:
        return _split(source, hub_dataset(source, "corpus", streaming=True))
    for path in paths:
        if not _kind(path):
            kinds = f"{', '.join(KINDS)}, all but the last also with {', '.join(PACKED)}"
            raise ValueError(f"corpus: got {path}, expected {kinds}")
        if path.suffix == ".zst" and "zstd" not in fsspec.available_compressions():
            raise ValueError(f"corpus: {path} needs `pip install zstandard`")
    found = [Shard(str(p), partial(_open_file, p), p) for p in paths if p.stat().st_size]
    if not found:
        raise ValueError(f"corpus: {source!r} holds no file with anything in it")
    return found


@dataclass(eq=False)
class ShardReader:
    """The documents of one corpus that one process reads, epoch after epoch.

    With as many shards as processes or more, each has shards of its own; with fewer, all read all
    of them, and each keeps every `world`-th row. The order of an epoch's shards is a function of
    (seed, epoch); a shard is read from its beginning to its end.
    """

    source: str  # the corpus, as messages name it
    shards: list[Shard]  # all of it
    rank: int
    world: int
    seed: int
    skip_corrupt: bool  # go on with the next shard where one is broken, and name it in `skipped`
    left_out: frozenset[str]  # texts of rows that aren't given, since figures are taken on them

    def __post_init__(self) -> None:
        enough = len(self.shards) >= self.world
        self.mine = self.shards[self.rank :: self.world] if enough else self.shards
        self.one_of, self.offset = (1, 0) if enough else (self.world, self.rank)
        self.epoch = self.place = self.index = 0  # index: rows of the shard that are read
        self.skipped: list[str] = []
        self.notes: list[str] = []
        self._resume: dict[str, Any] | None = None  # of the shard, where it is half read
        self._data: Any = None

    def state(self) -> dict[str, Any]:
        """Where the reader is, as JSON can hold it. Between two rows."""
        place = {"epoch": self.epoch, "place": self.place, "index": self.index}
        shard = self._resume if self._data is None else self._data.state_dict()
        return place | {"shard": shard, "skipped": list(self.skipped)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same corpus, process and seed. Before the first row."""
        self.epoch, self.place, self.index = state["epoch"], state["place"], state["index"]
        self._resume, self.skipped = state["shard"], list(state["skipped"])

    def told(self) -> list[str]:
        """What happened since it was asked last, for whoever shows it."""
        told, self.notes = self.notes, []
        return told

    def rows(self) -> Iterator[Row | None]:
        """Rows without end; None after each epoch. Blank documents are left out. ValueError: a
        corrupt shard (file and line), a row of another layout, an empty epoch.
        """
        while True:
            from_start, given = self.place == self.index == 0, False
            order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.mine))
            while self.place < len(order):
                for row in self._shard(self.mine[order[self.place]]):
                    given = True
                    yield row
                self.place, self.index = self.place + 1, 0
                self._resume = self._data = None
            if from_start and not given:
                raise ValueError(f"corpus: an epoch of {self.source!r} has no document to train on")
            self.epoch, self.place = self.epoch + 1, 0
            yield None
            self.notes.append(f"{self.source} is used up and begins again: epoch {self.epoch + 1}")

    def _shard(self, shard: Shard) -> Iterator[Row]:
        for fields in self._fields(shard):
            self.index += 1
            if self.index % self.one_of != self.offset % self.one_of:
                continue
            row = parse(present(fields), f"{shard.name}, row {self.index}")
            if not row.blank and row.text not in self.left_out:
                yield row

    def _fields(self, shard: Shard) -> Iterator[dict[str, Any]]:
        try:
            data = shard.open()
            if self._resume:
                data.load_state_dict(self._resume)
            for fields in data:
                self._data = data
                yield fields
        except CORRUPT as error:
            path = shard.path  # without one it may be out of reach, which isn't corrupt
            skip = self.skip_corrupt and not (isinstance(error, OSError) and path is None)
            line = first_bad_line(path) if path and _kind(path) == "json" else 0
            where = f"{shard.name}:{line}" if line else shard.name
            what = f"{where}: a corrupt shard ({type(error).__name__}: {error})"
            if not skip:
                raise ValueError(
                    f"{what}; mend it or take it away, or say skip_corrupt=true to go on without "
                    "the rest of it"
                ) from error
            self.notes.append(f"{what}; the rest of it is skipped")
            if shard.name not in self.skipped:
                self.skipped.append(shard.name)


def first_bad_line(path: Path) -> int:
    """The number of the first line that isn't JSON, or can't be read; 0 if none is."""
    number = 1
    try:
        with fsspec.open(str(path), "rb", compression="infer") as file:
            for line in file:
                if line.strip():
                    json.loads(line)
                number += 1
    except CORRUPT:
        return number
    return 0


def _kind(path: Path) -> str:
    inner = Path(path.stem) if path.suffix in PACKED else path
    kind = KINDS.get(inner.suffix, "")
    return "" if kind == "parquet" and inner != path else kind


def _open_file(path: Path) -> Any:
    from datasets import load_dataset

    # A text file is one document.
    how = {"sample_by": "document"} if _kind(path) == "text" else {}
    name = glob.escape(str(path.resolve()))
    return load_dataset(_kind(path), data_files=name, split="train", streaming=True, **how)


def _library() -> list[Shard]:
    from datasets import Dataset

    texts = [row.completion for row in load_rows("stdlib", "train")]
    data = Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=LIBRARY_SHARDS)
    return _split("stdlib", data)


def _split(source: str, data: Any) -> list[Shard]:
    many = data.num_shards
    return [
        Shard(f"{source} (shard {i + 1} of {many})", partial(data.shard, num_shards=many, index=i))
        for i in range(many)
    ]
