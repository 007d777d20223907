"""A running batch that requests enter and leave at any step.

Each step admits waiting requests into free rows, or launches one round for all rows. Rounds are
heard at once, or one round late where the device runs ahead of the host. One thread owns a session.

Shapes: R rows just admitted, N prompt tokens.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from draftsmith.decode.drafting.base import Admitted, Drafter
from draftsmith.decode.engine.grammar import ruled
from draftsmith.decode.engine.hearing import Finished, Flight, Hearing, News
from draftsmith.decode.engine.request import HEARD, Request, lag_of
from draftsmith.decode.engine.round import DecodeBatch
from draftsmith.decode.policies.policy import Load
from draftsmith.decode.sampling import BatchParams, choose, together, told_log_probs

if TYPE_CHECKING:
    from draftsmith.decode.engine.decoder import Decoder


class Session(Hearing):
    """context: tokens that a row may hold, prompt and answer; finished: called as requests end by
    themselves, in `step`; narrow: on a CPU, where every row costs, a round computes rows up to the
    last busy one (a power of two of them, or three quarters of one): bf16 then rounds differently
    with who else is there.
    """

    def __init__(
        self,
        decoder: "Decoder",
        batch: DecodeBatch,
        context: int,
        finished: Finished | None = None,
        *,
        narrow: bool = False,
    ) -> None:
        self.decoder, self.batch, self.context = decoder, batch, context
        self.finished = finished
        self.flight: Flight | None = None
        self.narrow = narrow and decoder.runner.device.type == "cpu"
        self._parts: dict[int, DecodeBatch] = {}  # of the batch, by their rows
        self.launched, self.due, self.lag = 0, 0, 0.0  # due: the round before which to ask for it
        # A core that others want too takes turns, and policies weigh some rounds against others.
        here = decoder.runner.device.type == "cpu" and decoder.runner.leader is None
        self.clock = time.thread_time if here else time.perf_counter  # of rounds

    @property
    def running(self) -> int:
        return len(self.batch.rows.busy)

    @property
    def busy(self) -> bool:
        return bool(self.batch.rows.waiting or self.running)

    def submit(self, request: Request) -> None:
        """Let a request wait for a free row. ValueError for more than the session's rows hold."""
        length = len(request.completion.prompt_tokens) + request.limit
        most = self.batch.rows.stop_ids_BM.shape[1]
        if length > self.context or len(request.stop_ids) > most:
            raise ValueError(
                f"prompt {request.completion.index}: got {length} tokens with the answer's and "
                f"{len(request.stop_ids)} ids that end it, expected at most {self.context} and "
                f"{most} in this session; open it with a larger max_length, or ask for less"
            )
        self.batch.rows.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a request that waits or runs; no more is heard of it."""
        rows = self.batch.rows
        if request in rows.waiting:
            rows.waiting.remove(request)
        elif request in rows.requests:
            rows.release(rows.requests.index(request))
        else:
            return  # it has ended already
        request.finish(aborted=True)

    def swap_drafter(self, drafter: Drafter) -> None:
        """`Decoder.swap_drafter`, between two steps."""
        if self.flight is not None and self.flight.ready is not None:
            self.flight.ready.synchronize()  # its round reads the old weights
        self.decoder.swap_drafter(drafter)
        self._parts = {}

    @torch.inference_mode()
    def close(self) -> None:
        """Let the decoder go; requests on their way are forgotten."""
        self.batch.rows.reset()
        self.flight = None
        self.decoder.release()

    def step(self) -> list[News]:
        """Admit what waits, or advance every row by a round. ValueError where another stream has
        taken the drafter meanwhile.
        """
        decoder, batch = self.decoder, self.batch
        if not self.busy:
            self.flight = None
            return []
        if not decoder.owns_drafter(batch):
            raise ValueError(
                "this stream's drafter has been given to another decoder meanwhile; finish or "
                "close one stream first, or load the drafter twice"
            )
        if batch.rows.waiting and batch.rows.free:
            return self.admit()
        requests = batch.rows.requests
        grammars = [None if request is None else request.grammar for request in requests]
        batch.grammars = grammars if any(grammars) else None
        if batch.grammars is not None and self.flight is not None:
            last, self.flight = self.flight, None
            return self.hear(last)
        launched: Flight | None = self.launch()
        if decoder.late and batch.grammars is None:
            self.flight, launched = launched, self.flight
        return [] if launched is None else self.hear(launched)

    def launch(self) -> Flight:
        """Set off one round."""
        decoder, requests = self.decoder, list(self.batch.rows.requests)
        if self.launched >= self.due:
            self.lag, self.due = self._lag(), self.launched + HEARD
        self.batch.listed = most_listed(requests)
        part, began = self._part(), self.clock()
        load = Load(len(part.rows.lens_B), self.running, self.lag)
        plan = None if decoder.drafter is None else decoder.policy.next_plan(load)
        ahead = 0 if self.flight is None else self.flight.told.levels + 1
        top = ahead + max((r.length for r in requests if r is not None), default=1)
        device = decoder.runner.device
        on_cuda = device.type == "cuda"
        # Captures and events belong to the current device.
        with torch.cuda.device(device) if on_cuda else nullcontext():
            # Late, what is read now is still being read as the round begins.
            waited = plan is not None and part.owed is not None and bool(part.owed.prompts)
            steady = not (waited and decoder.late)
            if plan is not None:
                decoder.stepper.catch_up(part, top)
            if plan is not None and decoder.stepper.between(part, plan, top):
                self._parts = {}
                part = self._part()
            started = self.clock()
            if decoder.graphs is not None:
                told = decoder.graphs.step(self.batch, plan, top)
                steady &= decoder.graphs.steady
            else:
                at = part, plan, top, decoder.policy
                told = decoder.stepper.several(*at) or decoder.stepper.step(*at)
            if plan is None and (owed := self.batch.owed) is not None:
                owed.take(told.owes, replayed=decoder.graphs is not None)
            self.launched += max(1, len(told.several))
            table, ready = told.table, None
            if decoder.late and on_cuda:
                table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
                table.copy_(told.table, non_blocking=True)
                ready = torch.cuda.Event()
                ready.record()
        return Flight(told, table, ready, plan, requests, load, began, started if steady else None)

    def _lag(self) -> float:
        """As of `Load`, by what each row has kept so far."""
        rows = self.batch.rows
        if self.narrow or rows.waiting or not self.decoder.policy.rests:
            return 0.0
        return lag_of([r.completion.counters for r in rows.requests if r is not None])

    @torch.inference_mode()
    def admit(self) -> list[News]:
        """Prefill as many waiting prompts as rows are free; each gets its first token."""
        decoder, batch, rows = self.decoder, self.batch, self.batch.rows
        runner, device = decoder.runner, decoder.runner.device
        started = time.perf_counter()
        free = rows.free[: len(rows.waiting)]
        requests = [rows.waiting.popleft() for _ in free]
        prompts = [torch.tensor(request.completion.prompt_tokens) for request in requests]
        rows_R = torch.tensor(free, device=device)
        lens_R = torch.tensor(list(map(len, prompts)), device=device)
        tokens_RN = pad_sequence(prompts, batch_first=True).to(device)
        batch.pool.clear(rows_R)
        logits_RV, taps = runner.prefill(batch.pool, rows_R, tokens_RN, lens_R)
        seeds_R = torch.tensor([request.seed for request in requests], device=device)
        params = together([request.params for request in requests], device)
        race_RLV = decoder.stepper.race(seeds_R, lens_R[:, None], params)
        ruled_RV = logits_RV
        if any(grammars := [request.grammar for request in requests]):
            root_1 = torch.full((1,), -1)
            ruled_RV = ruled(logits_RV[:, None], grammars, tokens_RN[:, :1], root_1)[:, 0]
        p_logits_RV = params.transform(ruled_RV)
        pending_R = choose(p_logits_RV, None if race_RLV is None else race_RLV[:, 0])
        rows.admit(rows_R, lens_R, pending_R, requests)
        self.heard = None
        both = (None, taps) if isinstance(taps, tuple) else (taps, None)
        admitted = Admitted(rows_R, tokens_RN, lens_R, pending_R, *both)
        if (drafter := decoder.drafter) is not None:
            busy = [*rows.busy, *free]
            rests = not decoder.policy.will_draft(Load(self._width(busy), len(busy)))
            asleep = (rests or decoder.policy.asleep) and not drafter.remembers
            owed, began = batch.owed, self.clock()
            waits = owed is not None and owed.admit(admitted, rows.busy, asleep=asleep)
            if not waits:
                drafter.prefill(admitted := admitted.padded())
            decoder.policy.admit(len(requests), None if waits else self.clock() - began)
        if batch.harvest is not None:
            batch.harvest.admit(admitted.padded())
        top, listed_RW = most_listed(requests), None
        if top is not None:
            listed_RW = told_log_probs(logits_RV, pending_R, top).cpu()
        firsts, active = pending_R.tolist(), rows.active_B[rows_R].tolist()
        broken = p_logits_RV.amax(-1).isnan().tolist()
        now = time.perf_counter()
        news = []
        for i, (row, request) in enumerate(zip(free, requests, strict=True)):
            rows.requests[row] = request
            request.started = now
            request.completion.counters.prefill_seconds = now - started
            news.append(self._news(row, [firsts[i]], 0, active=active[i], bad=broken[i]))
            if listed_RW is not None:
                request.take_listed(listed_RW[i : i + len(news[-1][1])])
        batch.params = self._params(len(rows.requests))
        self._parts = {}
        return news

    def _params(self, rows: int) -> BatchParams:
        """Of the first rows; one that nobody holds may sample as any other does."""
        held = self.batch.rows.requests[:rows]
        some = next((r.params for r in held if r is not None), None)
        if some is None:
            return self.batch.params
        of_B = [some if request is None else request.params for request in held]
        return together(of_B, self.decoder.runner.device)

    def _width(self, busy: Sequence[int]) -> int:
        """Rows that a round computes."""
        every = len(self.batch.rows.requests)
        return min(every, computed(max(busy, default=0) + 1)) if self.narrow else every

    def _part(self) -> DecodeBatch:
        """What a round computes: the batch, or its first rows."""
        batch, rows = self.batch, self._width(self.batch.rows.busy)
        if rows == len(batch.rows.requests):
            return batch
        if rows not in self._parts:
            self._parts[rows] = batch.first(rows, self._params(rows), self.decoder.drafter)
        self._parts[rows].listed, self._parts[rows].grammars = batch.listed, batch.grammars
        return self._parts[rows]


def computed(rows: int) -> int:
    """As many at least: a power of two, or three quarters of one. Policies learn of each size."""
    power = 1 << (rows - 1).bit_length()
    return 3 * power // 4 if rows <= 3 * power // 4 else power


def sizes(most: int) -> list[int]:
    """All numbers of rows that are computed for up to so many."""
    return sorted({computed(rows) for rows in range(1, most + 1)})


def most_listed(requests: Iterable[Request | None]) -> int | None:
    """The most likeliest tokens that any of them wants listed; None where none wants anything."""
    return max((r.top for r in requests if r is not None and r.top is not None), default=None)
