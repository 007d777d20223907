"""A server's side of learning: finished requests go into a buffer on disk, and new versions of the
drafts come from another. Neither is ever waited for by decoding.
"""

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.engine.harvest import Harvested
from draftsmith.decode.engine.request import Request
from draftsmith.decode.serve.buffer import ReplayBuffer, as_served
from draftsmith.decode.serve.engine_thread import Lane, Service
from draftsmith.decode.serve.prometheus import Metrics
from draftsmith.decode.serve.versions import Versions

log = logging.getLogger("draftsmith")

POLL_S = 1.0  # between two looks at which version to serve
FLUSH_S = 30.0  # the longest that an ending server writes what it still holds
HELD = 64  # finished requests that wait for the disk; with states, megabytes each

Load = Callable[[str], Drafter | None]


class DraftWatcher:
    """Looks for new versions of the lanes' drafts and loads them on a thread of its own; the engine
    takes each into use between two steps. first: by tag, the drafter that version 0 is.
    """

    def __init__(self, service: Service, online: Path, first: dict[str, str], load: Load) -> None:
        self.service, self.first, self.load = service, first, load
        self.versions = {tag: Versions(online / tag) for tag in first}
        self._seen = dict.fromkeys(first, 0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draft-watcher", daemon=True)

    def start(self) -> None:
        """Take what is current into use, then go on looking."""
        for tag in self.first:
            self.look(tag)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            for tag in self.first:
                self.look(tag)

    def look(self, tag: str) -> None:
        """Take a lane's current version into use, unless that has been done or tried."""
        lane = self.service.lanes[tag]
        version = -1
        try:
            version, path = self.versions[tag].current()
            if version == self._seen[tag]:
                return
            drafter = self.load(self.first[tag] if path is None else str(path))
        except (ValueError, OSError, RuntimeError) as error:  # the last: no memory for it
            if version != self._seen[tag]:
                self.service.metrics.refused(lane.model, version, str(error))
        else:
            assert drafter is not None, "a lane that learns has a drafter"
            self.service.swap(lane, drafter, version)
        self._seen[tag] = version


# A finished request as the engine hands it over, with the version of the draft that it began with.
Finished = tuple[Lane, int, Request, Harvested]


class BufferWriter:
    """Writes finished requests on a thread of its own; what comes while `HELD` of them wait is
    dropped and counted. requests: of a lane that stay, half of them the newest.
    """

    def __init__(self, online: Path, metrics: Metrics, *, keep_top_k: int, requests: int) -> None:
        self.online, self.metrics = online, metrics
        self.keep_top_k, self.requests = keep_top_k, requests
        self._buffers: dict[str, ReplayBuffer] = {}
        self._queue: queue.Queue[Finished | None] = queue.Queue(HELD)
        self._thread = threading.Thread(target=self._run, name="buffer-writer", daemon=True)

    def add_lane(self, tag: str) -> None:
        """Before `start`. ValueError where another process writes to the tag's buffer."""
        newest = self.requests // 2
        how = {"recent": newest, "reservoir": self.requests - newest}
        self._buffers[tag] = ReplayBuffer(self.online / tag / "buffer", **how)
        self._buffers[tag].open_for_writing()

    def start(self) -> None:
        self._thread.start()

    def offer(self, lane: Lane, version: int, request: Request, harvested: Harvested) -> None:
        """Have a finished request written, or dropped: returns at once. On the engine thread."""
        try:
            self._queue.put_nowait((lane, version, request, harvested))
        except queue.Full:
            self.metrics.dropped(lane.model, queue.Full(f"{HELD} others wait for the disk"))

    def stop(self) -> None:
        """Write what is held, then let the buffers go."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=FLUSH_S)
                self._thread.join(FLUSH_S)
            except queue.Full:
                log.warning("finished requests are lost: the disk is too slow")
        for buffer in self._buffers.values():
            buffer.close()

    def _run(self) -> None:
        while (finished := self._queue.get()) is not None:
            try:
                self._write(*finished)
            except (OSError, RuntimeError) as error:  # no room on the disk, or in memory
                self.metrics.dropped(finished[0].model, error)

    def _write(self, lane: Lane, version: int, request: Request, harvested: Harvested) -> None:
        runner = lane.decoder.runner
        states, k = bool(runner.taps), self.keep_top_k
        served = as_served(request, harvested, runner, k=k, version=version, states=states)
        if served is not None:
            self._buffers[lane.tag].add(served)
            self.metrics.kept(lane.model)
