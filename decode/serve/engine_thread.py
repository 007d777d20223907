"""The engine thread of a server: it alone owns the running batches, and everything reaches it
through an inbox.

A lane is one drafter's batch; all lanes share the target, and those with work step in turn. News
of a request go to its listener, which is called on the engine thread and must not block.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from draftsmith.command import out_of_memory
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Harvested
from draftsmith.decode.engine.request import Counters, Event, Request
from draftsmith.decode.engine.session import Session
from draftsmith.decode.evaluate.metrics import total
from draftsmith.decode.serve.prometheus import Metrics
from draftsmith.decode.serve.replies import ApiError


@dataclass
class Lane:
    """One drafter's batch. tag: as requests name it; model: the name it answers to; version: of its
    draft, 0 for the one that it began with; on_way: answers submitted and not ended; ended: answers
    that have, and past: what was counted of them; written: tokens of all.
    """

    tag: str
    model: str
    decoder: Decoder
    session: Session
    version: int = 0
    on_way: int = 0
    ended: int = 0
    written: int = 0
    past: Counters = field(default_factory=Counters)

    @property
    def running(self) -> int:
        return min(self.on_way, self.session.running)

    @property
    def draft(self) -> dict[str, str | int | None]:
        """Which one decodes, as clients are told."""
        drafter = self.decoder.drafter
        kind = None if drafter is None else drafter.kind
        return {"tag": self.tag, "kind": kind, "version": self.version}

    @property
    def waiting(self) -> int:
        return self.on_way - self.running


@dataclass(eq=False)
class Job:
    """One answer on its way, the index-th of its HTTP request. listener: hears of every step where
    it is streamed, of the end alone where not, or why there is none. arrived: time.perf_counter()
    when the server got the request.
    """

    lane: Lane
    request: Request
    index: int
    listener: Callable[[Event | ApiError], None]
    stream: bool
    arrived: float = field(default_factory=time.perf_counter)
    version: int | None = None  # of the draft that was in use at its first token


Harvest = Callable[[Lane, int, Request, Harvested], None]
Made = TypeVar("Made")


class Service:
    """The engine thread and the door to it; all methods may be called by any thread. max_queue:
    answers of a lane that may wait beyond those that fill its rows.
    """

    def __init__(self, metrics: Metrics, *, rows: int, max_queue: int) -> None:
        self.metrics, self.rows = metrics, rows
        self.most = rows + max_queue  # answers of one lane that may be on their way
        self.lanes: dict[str, Lane] = {}
        self.error = ""
        self.lack: BaseException | None = None  # of memory, which ended the engine
        self.draining = self._stopped = False
        self.on_death: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._jobs: dict[int, Job] = {}  # by the identity of their requests
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def state(self) -> str:
        return "failed" if self.error else "draining" if self.draining else "ok"

    def add_lane(
        self,
        tag: str,
        model: str,
        decoder: Decoder,
        max_length: int,
        harvest: Harvest | None = None,
    ) -> None:
        """A lane for this decoder, before `start`; errors of `open_session` pass. harvest: called
        on the engine thread with what is to be learned from a finished request, and the version of
        the draft that it began with.
        """
        assert not self._thread.is_alive(), "lanes are added before the engine starts"

        def finished(request: Request, found: Harvested | None) -> None:
            if harvest is not None and found is not None:
                version = self._jobs[id(request)].version
                harvest(lane, lane.version if version is None else version, request, found)

        session = decoder.open_session(
            batch_size=self.rows,
            max_length=max_length,
            finished=finished,
            harvest=harvest is not None,
        )
        lane = self.lanes[tag] = Lane(tag, model, decoder, session)
        self.metrics.watch(model, lane)

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take in all answers of one request, or none: ApiError 429 where the queue is full, 503
        when the server is about to end, 500 after the engine thread ended by an error.
        """
        lane = jobs[0].lane
        with self._changed:
            if self.error:
                raise ApiError(500, self.error, code="engine_died")
            if self.draining:
                raise ApiError(503, "the server is shutting down", code="draining")
            if lane.on_way + len(jobs) > self.most:
                why = f"{lane.on_way} of at most {self.most} answers are on their way; come back"
                raise ApiError(429, why, code="queue_full")
            lane.on_way += len(jobs)
            self._jobs |= {id(job.request): job for job in jobs}
            self._inbox += [partial(lane.session.submit, job.request) for job in jobs]
            self._changed.notify_all()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End answers that nobody waits for any more; those that have ended stay as they are."""

        def end() -> None:
            for job in jobs:
                if id(job.request) in self._jobs:
                    job.lane.session.cancel(job.request)
                    self._leave(job)

        self._ask(end)

    def swap(self, lane: Lane, drafter: Drafter, version: int) -> None:
        """Decode with another version of the lane's draft from the next step on."""

        def take() -> None:
            try:
                lane.session.swap_drafter(drafter)
            except ValueError as error:
                self.metrics.refused(lane.model, version, str(error))
            else:
                lane.version = version
                self.metrics.swapped(lane.model, version)

        self._ask(take)

    def counted(self, lane: Lane) -> Counters:
        """What the lane's decoding did until now, answers on their way included."""
        with self._changed:
            on_way = [job.request for job in self._jobs.values() if job.lane is lane]
            return total([lane.past, *(request.completion.counters for request in on_way)])

    def drain(self, seconds: float) -> bool:
        """Take nothing new, and wait for what is on its way; whether all of it ended in time."""
        with self._changed:
            self.draining = True
            return self._changed.wait_for(
                lambda: bool(self.error) or not any(lane.on_way for lane in self.lanes.values()),
                timeout=seconds,
            )

    def stop(self) -> None:
        """End the engine thread, and with it what is still on its way."""
        with self._changed:
            self.draining = self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def between_steps(self, what: Callable[[], Made]) -> Made:
        """What `what` gives, called on the engine thread. ApiError 503 where the server is about to
        end, 500 after the engine thread ended by an error.
        """
        made: list[Made] = []

        def ask() -> None:
            made.append(what())
            with self._changed:
                self._changed.notify_all()

        self._ask(ask)
        with self._changed:
            self._changed.wait_for(lambda: bool(made or self.error or self._stopped))
        if made:
            return made[0]
        if self.error:
            raise ApiError(500, self.error, code="engine_died")
        raise ApiError(503, "the server is shutting down", code="draining")

    def _ask(self, what: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(what)
            self._changed.notify_all()

    # What follows runs on the engine thread.

    def _run(self) -> None:
        try:
            while self._work():
                for lane in self.lanes.values():
                    if lane.session.busy:
                        for request, tokens, ended in lane.session.step():
                            self._tell(request, tokens, ended=ended)
        except (RuntimeError, MemoryError) as error:
            self._fail(error)
            if not out_of_memory(error):
                raise
            self.lack = error  # told by who waits for this thread
            return
        except BaseException as error:
            self._fail(error)
            raise
        # Because the server ends, whatever became of the decoding.
        self._lose_all(503, "the server was stopped", "draining")

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            what = type(error).__name__
            self.error = f"the engine has stopped by an error ({what}); see the log"
            self._changed.notify_all()
        self._lose_all(500, self.error, "decoding_failed")
        self.on_death()

    def _work(self) -> bool:
        """Do what the inbox says, once there is any or a lane has work; False at the end."""

        def due() -> bool:
            busy = any(lane.session.busy for lane in self.lanes.values())
            return bool(self._inbox) or self._stopped or busy

        with self._changed:
            self._changed.wait_for(due)
            inbox, self._inbox = self._inbox, deque()
            stopped = self._stopped
        for what in inbox:
            what()
        return not stopped

    def _tell(self, request: Request, tokens: list[int], *, ended: bool) -> None:
        job, made = self._jobs[id(request)], request.completion
        if tokens and job.version is None:
            job.version = job.lane.version
            self.metrics.prompt.labels(job.lane.model).inc(len(made.prompt_tokens))
            self.metrics.first.labels(job.lane.model).observe(time.perf_counter() - job.arrived)
        self.metrics.generated.labels(job.lane.model).inc(len(tokens))
        job.lane.written += len(tokens)
        text = request.next_text(finished=ended) if job.stream else ""
        if ended:
            self._leave(job)
        if made.error:
            job.listener(ApiError(500, made.error, code="decoding_failed"))
        elif ended or job.stream:
            listed = made.listed[len(made.tokens) - len(tokens) :]
            job.listener(Event(job.index, tokens, text, made if ended else None, listed))

    def _leave(self, job: Job) -> None:
        lane, made = job.lane, job.request.completion
        self.metrics.ended(lane.model, made, time.perf_counter() - job.arrived)
        with self._changed:
            del self._jobs[id(job.request)]
            lane.past = total([lane.past, made.counters])
            lane.ended += 1
            lane.on_way -= 1
            self._changed.notify_all()

    def _lose_all(self, status: int, why: str, code: str) -> None:
        """The end of everything on its way. Nothing can be submitted any more."""
        for job in list(self._jobs.values()):
            job.request.finish(aborted=True)
            self._leave(job)
            job.listener(ApiError(status, why, code=code))
