"""A server's side of learning: finished requests go into a buffer on disk, and new versions of the
drafts come from another. Neither is ever waited for by decoding.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draftsmith.decode.drafters.load import moved
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.recorder import Harvested
from draftsmith.decode.engine.request import Request
from draftsmith.decode.serve.buffer import ReplayBuffer, as_served
from draftsmith.decode.serve.engine_thread import Lane, Service
from draftsmith.decode.serve.versions import Versions

log = logging.getLogger("draftsmith")

POLL_S = 1.0  # between two looks at which version to serve
FLUSH_S = 30.0  # the longest that an ending server writes what it still holds
HELD = 64  # finished requests that wait for the disk; with states, megabytes each


@dataclass(eq=False)
class Learning:
    """Writes finished requests on one thread, and on another looks for new versions of the lanes'
    drafts, which the engine takes into use between two steps.
    """

    service: Service
    online: Path
    load: Callable[[str], Drafter | None]
    keep_top_k: int
    requests: int  # of a lane that stay, half of them the newest

    def __post_init__(self) -> None:
        self.first: dict[str, str] = {}  # by tag, the drafter that version 0 is
        self._seen: dict[str, int] = {}
        self._buffers: dict[str, ReplayBuffer] = {}
        # With the version of the draft that the request began with.
        self._queue: queue.Queue[tuple[Lane, int, Request, Harvested] | None] = queue.Queue(HELD)
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="draft-watcher", daemon=True)
        self._writer = threading.Thread(target=self._write, name="buffer-writer", daemon=True)

    def add_lane(self, tag: str, path: str) -> None:
        """Before `start`. ValueError where another process writes to the tag's buffer."""
        newest = self.requests // 2
        buffer = ReplayBuffer(
            self.online / tag / "buffer", recent=newest, reservoir=self.requests - newest
        )
        buffer.open_for_writing()
        self.first[tag], self._seen[tag], self._buffers[tag] = path, 0, buffer

    def start(self) -> None:
        """Take what is current into use, then go on looking."""
        self._writer.start()
        for tag in self.first:
            self._look(tag)
        self._watcher.start()

    def stop(self) -> None:
        """Write what is held, then let the buffers go."""
        self._stopped.set()
        if self._watcher.is_alive():
            self._watcher.join()
        if self._writer.is_alive():
            try:
                self._queue.put(None, timeout=FLUSH_S)
                self._writer.join(FLUSH_S)
            except queue.Full:
                log.warning("finished requests are lost: the disk is too slow")
        for buffer in self._buffers.values():
            buffer.close()

    def offer(self, lane: Lane, version: int, request: Request, harvested: Harvested) -> None:
        """Have a finished request written, or dropped while `HELD` wait. On the engine thread."""
        try:
            self._queue.put_nowait((lane, version, request, harvested))
        except queue.Full:
            why = queue.Full(f"{HELD} others wait for the disk")
            self.service.metrics.dropped(lane.model, why)

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            for tag in self.first:
                self._look(tag)

    def _look(self, tag: str) -> None:
        """Take a lane's current version into use, unless that has been done or tried."""
        lane, version = self.service.lanes[tag], -1
        try:
            version, path = Versions(self.online / tag).current()
            if version == self._seen[tag]:
                return
            drafter = self.load(moved(self.first[tag], path))
            assert drafter is not None, "a lane that learns has a drafter"
            self.service.swap(lane, drafter, version)
        except (ValueError, OSError, RuntimeError) as error:  # the last: no memory for it
            if version != self._seen[tag]:
                self.service.metrics.refused(lane.model, version, str(error))
        self._seen[tag] = version

    def _write(self) -> None:
        metrics, k = self.service.metrics, self.keep_top_k
        while (finished := self._queue.get()) is not None:
            lane, version, request, harvested = finished
            runner = lane.decoder.runner
            try:
                states = bool(runner.taps)
                served = as_served(request, harvested, runner, k=k, version=version, states=states)
                if served is not None:
                    self._buffers[lane.tag].add(served)
                    metrics.kept.labels(lane.model).inc()
            except (OSError, RuntimeError) as error:  # no room on the disk, or in memory
                metrics.dropped(lane.model, error)
