"""The versions of a draft that learns: whole folders, and one small file that says which serves.

    versions/000001/    drafter folders, whole or absent; the last `KEPT` stay
    current.json        {"version": 1, "why": "..."}, replaced in one step

Version 0 is the drafter that the server was started with: it is never written here. A kill at any
moment leaves a current version that loads. One process publishes; any may read.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from draftsmith.models.disk.store import hold, settle, write_atomically
from draftsmith.models.heads.head import heads

KEPT = 4
ONE_LEARNER = (
    "expected one learner a tag: stop that one, or give tag= and drafter= of another of the "
    "server's drafts"
)


def learning_kinds() -> tuple[str, ...]:
    """The kinds of drafts that can learn from served requests."""
    return ("lm", "omni", *(kind for kind, cls in heads().items() if cls.kinds[kind].learns))


class Versions:
    """The versions in a folder, `<folder>/versions` and `<folder>/current.json`."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.versions = self.folder / "versions"
        self.file = self.folder / "current.json"

    def current(self) -> tuple[int, Path | None]:
        """What to serve, and its folder (None for 0); ValueError for what was changed by hand."""
        version = 0
        if self.file.exists():
            try:
                version = json.loads(self.file.read_text("utf-8"))["version"]
                if not isinstance(version, int) or version < 0:
                    raise KeyError(f"version {version!r}")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{self.file}: got {error!r}, expected {{"version": 1, "why": ...}} as '
                    "training wrote it; remove the file to serve the first drafter"
                ) from error
        path = self.path(version)
        if path is not None and not path.is_dir():
            raise ValueError(
                f"{self.file} names version {version}, but {path} is no folder; restore it, or "
                "remove the file to serve the first drafter"
            )
        return version, path

    def path(self, version: int) -> Path | None:
        """Where a version lies; None for version 0."""
        return self.versions / f"{version:06d}" if version else None

    def kept(self) -> list[int]:
        """The versions whose folders are there, oldest first."""
        return sorted(int(path.name) for path in self.versions.glob("[0-9]*"))

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """While this process is the one that publishes; ValueError where another one is."""
        lock = hold(self.folder, ONE_LEARNER, name=".learner")
        try:
            yield
        finally:
            lock.release()

    def publish(self, write: Callable[[Path], None], why: str, *, spare: int = 0) -> int:
        """Have `write` make a new version's folder, and serve it. Its errors pass: the version
        before then stays. spare: one that isn't dropped, however old.
        """
        version = max([*self.kept(), self.current()[0]]) + 1
        final = self.path(version)
        assert final is not None
        half = self.versions / f".{version:06d}.half"
        shutil.rmtree(half, ignore_errors=True)
        self.versions.mkdir(parents=True, exist_ok=True)
        write(half)
        settle(half, final)
        self.point(version, why)
        for old in self.kept()[:-KEPT]:
            if old != spare:
                shutil.rmtree(self.versions / f"{old:06d}")
        for left in self.versions.glob(".*.half"):  # by a kill
            shutil.rmtree(left)
        return version

    def point(self, version: int, why: str) -> None:
        """Serve an earlier version again, 0 for the first drafter; why: told to whoever reads.
        ValueError for one that isn't there any more.
        """
        path = self.path(version)
        if path is not None and not path.is_dir():
            raise ValueError(
                f"got version {version}, expected one of {[0, *self.kept()]} in {self.versions}"
            )
        content = json.dumps({"version": version, "why": why}).encode()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, content)
