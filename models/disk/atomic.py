"""Getting what was written onto the disk."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


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
    """Give a folder that has been written its name, once all of it is on the disk. Nothing may have
    that name.
    """
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
