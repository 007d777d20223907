"""The stores of looked-up drafters in a server: one for all lanes whose drafters name it.

    draftsmith serve target=TARGET drafter=suffix:FILE drafters='["head=suffix:FILE+FOLDER"]'

A named file is loaded at the start, or begun where there is none, and kept by this server alone. It
is written at the server's end and on request: whole or not at all, so that a kill leaves what was
acknowledged last. Decoding waits for a copy in memory, not for the disk.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.decode.drafters.load import STORED, composed
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.serve.engine_thread import Service
from draftsmith.decode.serve.replies import ApiError
from draftsmith.decode.untrained.composite import CompositeDrafter
from draftsmith.decode.untrained.texts import StoredDrafter, claimed

log = logging.getLogger("draftsmith")


class Store:
    """What some drafters have in common; path: of its file, None where it has none. ValueError
    where another process keeps the file.
    """

    def __init__(self, path: Path | None, tokenizer: str, service: Service) -> None:
        self.path, self.tokenizer, self.service = path, tokenizer, service
        self.tags: list[str] = []  # of the lanes whose drafters have it in common
        self.shared: Any = None
        self.mark = ""
        self._lock = None if path is None else claimed(path)
        self._writing = threading.Lock()

    @property
    def drafters(self) -> list[Drafter]:
        """The lanes' own of now, which learned versions take the places of."""
        now = [self.service.lanes[tag].decoder.drafter for tag in self.tags]
        return [drafter for drafter in now if drafter is not None]

    def add(self, tag: str, stored: StoredDrafter) -> None:
        """ValueError where the lane's store can't be that of the ones before."""
        if not self.tags:
            self.shared, self.mark = stored.store, stored.mark
        if stored.mark != self.mark:
            raise ValueError(
                f"drafters: got {tag} with the store {self.path} of another lane, whose draft has "
                "another tokenizer; expected a file of its own"
            )
        stored.store = self.shared
        self.tags.append(tag)

    def keep(self, *, forget: bool = False) -> None:
        """Write what is known by now, or, where it has no file, only `forget`. ApiError where the
        server is about to end or the disk is full: the file is then as it was.
        """
        with self._writing:  # of two at once the later one is written later
            stored = self.service.between_steps(partial(self._copied, forget))
            try:
                self._write(stored)
            except OSError as error:
                why = f"the store wasn't written, its file is as it was: {error.strerror}"
                raise ApiError(500, why, code="store_not_written") from error

    def close(self) -> None:
        """Write it a last time, once the engine thread has ended, and let the file go."""
        if self._lock is None:
            return
        try:
            if not self.service.error:
                self._write(self._copied(forget=False))
        except OSError as error:
            log.warning("%s is as it was last saved: %s", self.path, error)
        finally:
            self._lock.release()

    def _copied(self, forget: bool) -> dict[str, Tensor]:
        for drafter in self.drafters:
            drafter.forget() if forget else stored_in(drafter).settle()
        stored = {} if self.path is None else stored_in(self.drafters[0]).stored()
        return {name: part.to("cpu", copy=True) for name, part in stored.items()}

    def _write(self, stored: dict[str, Tensor]) -> None:
        if self.path is not None:
            stored_in(self.drafters[0]).write(self.path, self.tokenizer, stored)


def stored_in(drafter: Drafter) -> StoredDrafter:
    """It, or its part that has a store."""
    looked = drafter.looked if isinstance(drafter, CompositeDrafter) else drafter
    assert isinstance(looked, StoredDrafter), "its name says so"
    return looked


class Stores:
    """load: `load_drafter` of a name; tokenizer: the fingerprint of the target's; of: by tag."""

    def __init__(
        self, service: Service, load: Callable[[str], Drafter | None], tokenizer: str
    ) -> None:
        self.service, self.load, self.tokenizer = service, load, tokenizer
        self.of: dict[str, Store] = {}
        self._named: dict[tuple[str, Path | str], Store] = {}

    def drafter(self, tag: str, name: str) -> Drafter | None:
        """A lane's drafter, with the store that it names. Errors of `load_drafter` and `Store`."""
        kind, _, file = (composed(name)[0] or name).partition(":")
        if kind not in STORED:
            return self.load(name)
        path = Path(file).resolve() if file else None
        if path is not None:
            self._store(kind, path)  # claimed before it is read
            if not path.exists():
                log.info("%s isn't there: begun with nothing", path)
                name = name.replace(f":{file}", "", 1)
        drafter = self.load(name)
        assert drafter is not None, "its name says so"
        stored = stored_in(drafter)
        self.of[tag] = self._store(kind, path or stored.mark)
        self.of[tag].add(tag, stored)
        return drafter

    def _store(self, kind: str, of: Path | str) -> Store:
        """That of a file, or of all drafters without one that have the same mark."""
        if (kind, of) not in self._named:
            path = of if isinstance(of, Path) else None
            self._named[kind, of] = Store(path, self.tokenizer, self.service)
        return self._named[kind, of]

    def close(self) -> None:
        for store in self._named.values():
            store.close()
