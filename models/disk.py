"""Getting what was written onto the disk."""

import os
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

    Raises:
        OSError: the disk is full; the old content is untouched.
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
    for path in [*written.rglob("*"), written]:
        flush(path)
    written.rename(final)
    flush(final.parent)
