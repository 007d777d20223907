"""Files and folders that are whole on the disk or not there, and what those share that a later run
goes on with: whose they are, one writer.

    <folder>/<manifest>.json      what decides the content; who comes with something else is refused
             *.safetensors        shards: tensors, and a mark of what they belong to
             *.jsonl              records, a line each
             .lock                held by the process that writes, and holding its number

A kill at any moment leaves shards and manifests as they were or new, and of lines at most a torn
last one, which is dropped.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftsmith.models.disk.read_lm import read_json

LOCK = ".lock"


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, also after a crash, sees the old content or the new one.
    Raises OSError where the disk is full; the old content is untouched.
    """
    half = path.with_name(f".{path.name}.half")
    try:
        with half.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        half.unlink(missing_ok=True)
        raise
    half.replace(path)
    flush(path.parent)


def settle(written: Path, final: Path) -> None:
    """Give a written folder its name, which nothing may have, once all of it is on the disk."""
    _flush_all(written)
    written.rename(final)
    flush(final.parent)


def previous(folder: Path) -> Path:
    """Where a kill in the middle of `whole_folder`'s end leaves what was in `folder` before."""
    return folder.with_name(f".{folder.name}.previous")


@contextlib.contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `final` once it is complete on disk.

    An error leaves `final` as it was, and nothing beside it. Between the two renames at the end
    there is no `final`: after a kill just then the next call puts the one before back.
    """
    half, before = final.with_name(f".{final.name}.half"), previous(final)
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    try:
        if not final.exists() and before.exists():
            before.rename(final)
        yield half
        _flush_all(half)
        if final.exists():
            shutil.rmtree(before, ignore_errors=True)
            final.rename(before)
        try:
            half.rename(final)
        except OSError:
            if before.exists():
                before.rename(final)
            raise
        flush(final.parent)
        shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _flush_all(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        flush(path)


@dataclass(frozen=True)
class Manifest:
    """The file that says what a folder was begun with.

    by: what writes such folders, in words; schema: of the file, None where it names none; decides:
    the part that decides the content, the whole file where empty; free: names in it that may
    change, at any depth.
    """

    name: str
    by: str
    schema: int | None = None
    decides: str = ""
    free: Collection[str] = ()

    def is_in(self, folder: str | Path) -> bool:
        return (Path(folder) / self.name).is_file()

    def claim(self, folder: Path, content: dict[str, Any]) -> dict[str, Any]:
        """Begin a folder with this content, or go on with it: what its manifest says then.
        ValueError for a folder that was begun with something else, naming what differs.
        """
        schema = {"schema": self.schema} if self.schema else {}
        content = json.loads(json.dumps(schema | content))
        if not self.is_in(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.write(folder, content)
            return content
        found = self.read(folder)
        differ = what_differs(self._deciding(found), self._deciding(content), self.free)
        if differ:
            raise ValueError(
                f"{folder} was begun with other settings ({'; '.join(differ)}); restore those, "
                "choose another folder, or delete this one to begin anew"
            )
        return found

    def read(self, folder: Path) -> dict[str, Any]:
        """The content. Raises ValueError for a folder without one, or one of another schema."""
        file = folder / self.name
        if not self.is_in(folder):
            raise ValueError(
                f"{folder}: got no {self.name}, expected a folder that {self.by} wrote"
            )
        found = read_json(file)
        if found.get("schema") != self.schema or not isinstance(self._deciding(found), dict):
            raise ValueError(
                f"{file}: got schema {found.get('schema')!r} of {', '.join(found)}; expected "
                f"{self.schema} with {self.decides!r}, as this version of {self.by} writes it; "
                "make it again in another folder"
            )
        return found

    def write(self, folder: Path, content: dict[str, Any]) -> None:
        write_atomically(folder / self.name, json.dumps(content, indent=1).encode() + b"\n")

    def _deciding(self, content: dict[str, Any]) -> Any:
        return content.get(self.decides) if self.decides else content


def what_differs(found: Any, given: Any, free: Collection[str] = (), name: str = "") -> list[str]:
    """What differs between two JSON objects, by full names, in words; an absent entry is None."""
    if isinstance(found, dict) and isinstance(given, dict):
        keys = [k for k in sorted({**found, **given}) if found.get(k) != given.get(k)]
        parts = [
            (found.get(k, "absent"), given.get(k, "absent"), free, f"{name}.{k}".removeprefix("."))
            for k in keys
            if k not in free
        ]
        return [line for part in parts for line in what_differs(*part)]
    # Of a checksum its beginning.
    short = [
        v[:12] if isinstance(v, str) and len(v) > 31 and v.isalnum() else v for v in (found, given)
    ]
    return [f"{name}: {short[0]} there, {short[1]} now"]


def hold(folder: Path, advice: str, *, name: str = LOCK, again: bool = False) -> BaseFileLock:
    """Become the one process that writes, until `release()`, or the process or the lock is gone.
    advice: what to do where another has it (ValueError); again: this process may have it already,
    for instance after an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / name, thread_local=False, is_singleton=again)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        owner = (folder / name).read_text() or "unknown"
        raise ValueError(f"{folder} is being written by process {owner}; {advice}") from error
    (folder / name).write_text(str(os.getpid()))
    return lock


class Gone(ValueError, FileNotFoundError):
    """A shard that isn't there."""


def save_shard(path: Path, tensors: dict[str, Tensor], **says: str) -> None:
    """Write a shard, or, on a full disk (OSError), nothing; says: its metadata, `of` among it."""
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(whole, says))


@contextlib.contextmanager
def open_shard(path: Path, remedy: str, of: str = "") -> Iterator[Any]:
    """A shard's file, whose mark begins with `of`. Read within: what isn't found in it is damage.
    ValueError for a file that is cut or another's, and `Gone`.
    """
    try:
        with safe_open(path, "pt") as shard:
            if not (shard.metadata() or {}).get("of", "").startswith(of):
                raise ValueError("it belongs to other content")
            yield shard
    except FileNotFoundError as error:
        raise Gone(f"{path}: got a shard that is missing; {remedy}") from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: got a shard that is cut or foreign ({error!r}), expected it as it was "
            f"written; {remedy}"
        ) from error


@contextlib.contextmanager
def appending(path: Path, advice: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives a function that writes a record through to the operating system. advice: as in `hold`,
    where another process writes to the file.
    """
    lock = hold(path.parent, advice, name=f".{path.stem}{LOCK}")
    try:
        with path.open("a+b") as file:
            file.seek(0)
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))

            def append(record: dict[str, Any]) -> None:
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                file.flush()

            yield append
    finally:
        lock.release()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, without a torn last one. ValueError for a spoiled line, by number."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # torn by a kill, or being written this moment
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{path}:{number}: not JSON ({error}); remove the line to have it redone"
                ) from error
