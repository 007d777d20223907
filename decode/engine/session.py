"""A running batch that requests enter and leave at any step.

Each step admits waiting requests into free rows, or launches one round for all rows. Rounds are
heard at once, or one round late where the device runs ahead of the host. One thread owns a session.

Shapes: R rows just admitted, N prompt tokens.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.decode.drafters.base import Admitted, Drafter
from draftsmith.decode.engine.graphs import Graphs
from draftsmith.decode.engine.harvest import Harvested
from draftsmith.decode.engine.recorder import Recorder
from draftsmith.decode.engine.request import Request
from draftsmith.decode.engine.round import DecodeBatch, Stepper, Told
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.policies.policy import Outcome, Policy
from draftsmith.decode.sampling import BatchParams, choose, together
from draftsmith.decode.tree_shapes import Plan, rank_path

News = tuple[Request, list[int], bool]  # its new tokens, and whether that was its end
Finished = Callable[[Request, Harvested | None], None]


class Decoding(Protocol):
    """What a session needs of its decoder."""

    runner: Runner
    drafter: Drafter | None
    policy: Policy
    recorder: Recorder | None
    stepper: Stepper
    graphs: Graphs | None
    late: bool

    def owns_drafter(self, batch: DecodeBatch) -> bool: ...

    def swap_drafter(self, drafter: Drafter) -> None: ...

    def release(self) -> None: ...


@dataclass
class Flight:
    """A round on its way: what it will tell, and whom its rows served when it set off."""

    told: Told
    table: Tensor  # of `told`, on the host once `ready`
    ready: torch.cuda.Event | None
    plan: Plan | None
    requests: list[Request | None]


class Session:
    """context: tokens that a row may hold, prompt and answer; finished: called as requests end by
    themselves, in `step`; narrow: on a CPU, where every row costs, a round computes no more rows
    than up to the last busy one (a power of two of them). Row sizes then depend on who else is
    there, and with them the rounding of bf16.
    """

    def __init__(
        self,
        decoder: Decoding,
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

    @property
    def waiting(self) -> int:
        return len(self.batch.rows.waiting)

    @property
    def running(self) -> int:
        return len(self.batch.rows.busy)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, request: Request) -> None:
        """Let a request wait for a free row. ValueError for more than the session's rows hold."""
        length = len(request.completion.prompt_tokens) + request.limit
        most = self.batch.rows.stop_ids_BM.shape[1]
        if length > self.context or len(request.stop_ids) > most:
            raise ValueError(
                f"prompt {request.completion.index}: got {length} tokens with the answer's and "
                f"{len(request.stop_ids)} ids that end it, expected at most {self.context} and "
                f"{most} in this session; open it with a larger max_len, or ask for less"
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
        launched: Flight | None = self.launch()
        if decoder.late:
            self.flight, launched = launched, self.flight
        return [] if launched is None else self.hear(launched)

    def launch(self) -> Flight:
        """Set off one round."""
        decoder, batch, rows = self.decoder, self.batch, self.batch.rows
        plan = None if decoder.drafter is None else decoder.policy.next_plan()
        ahead = 0 if self.flight is None else self.flight.told.levels + 1
        top = ahead + max((r.length for r in rows.requests if r is not None), default=1)
        device = decoder.runner.device
        on_cuda = device.type == "cuda"
        # Captures and events belong to the current device.
        with torch.cuda.device(device) if on_cuda else nullcontext():
            if decoder.graphs is not None:
                told = decoder.graphs.step(batch, plan, top)
            else:
                told = decoder.stepper.step(self._part(), plan, top, decoder.policy)
            table, ready = told.table, None
            if decoder.late and on_cuda:
                table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
                table.copy_(told.table, non_blocking=True)
                ready = torch.cuda.Event()
                ready.record()
        return Flight(told, table, ready, plan, list(rows.requests))

    def hear(self, flight: Flight) -> list[News]:
        """Take in what a round tells."""
        rows, told = self.batch.rows, flight.told
        if flight.ready is not None:
            flight.ready.synchronize()
        table = flight.table.tolist()  # the round's only reading of the device
        now = time.perf_counter()
        length = told.levels + 1
        news, paths = [], []
        for row, request in enumerate(flight.requests):
            if request is None or rows.requests[row] is not request:
                continue  # ended while this round was on its way
            *_, accepted, n_new, active, bad = table[row]
            if bad:
                news.append(self._fail(row))
                continue
            kept, stopped = request.cut(table[row][:n_new])
            made = request.completion
            made.counters.record(told.levels, accepted, len(kept), told.nodes)
            made.counters.decode_seconds = now - request.started
            made.accepted += [i < accepted for i in range(len(kept))]
            made.corrected += [i == accepted < told.levels for i in range(len(kept))]
            paths.append(rank_path(flight.plan, table[row][length + 1 : length + 1 + accepted]))
            news.append(self._deliver(row, kept, ended=stopped or not active))
        if flight.plan is not None:
            self.decoder.policy.observe(Outcome(flight.plan, told.levels, paths))
        return news

    @torch.inference_mode()
    def admit(self) -> list[News]:
        """Prefill as many waiting prompts as rows are free; each gets its first token."""
        decoder, batch, rows = self.decoder, self.batch, self.batch.rows
        runner, device = decoder.runner, decoder.runner.device
        started = time.perf_counter()
        free = rows.free[: len(rows.waiting)]
        requests = [rows.waiting.popleft() for _ in free]
        prompts = [request.completion.prompt_tokens for request in requests]
        lens = [len(prompt) for prompt in prompts]
        rows_R = torch.tensor(free, device=device)
        lens_R = torch.tensor(lens, device=device)
        tokens_RN = torch.tensor(
            [prompt + [0] * (max(lens) - len(prompt)) for prompt in prompts], device=device
        )
        batch.pool.clear(rows_R)
        logits_RV, taps_RNU = runner.prefill(batch.pool, rows_R, tokens_RN, lens_R)
        seeds_R = torch.tensor([request.seed for request in requests], device=device)
        params = together([request.params for request in requests], device)
        race_RLV = decoder.stepper.race(seeds_R, lens_R[:, None], params)
        p_logits_RV = params.transform(logits_RV)
        pending_R = choose(p_logits_RV, None if race_RLV is None else race_RLV[:, 0])
        rows.admit(rows_R, lens_R, pending_R, requests)
        admitted = Admitted(rows_R, tokens_RN, lens_R, pending_R, taps_RNU)
        if decoder.drafter is not None:
            decoder.drafter.prefill(admitted)
        if batch.harvest is not None:
            batch.harvest.admit(admitted)
        firsts, active = pending_R.tolist(), rows.active_B[rows_R].tolist()
        broken = p_logits_RV.amax(-1).isnan().tolist()
        now = time.perf_counter()
        news = []
        for i, (row, request) in enumerate(zip(free, requests, strict=True)):
            rows.requests[row] = request
            request.started = now
            request.completion.counters.prefill_seconds = now - started
            if broken[i]:
                news.append(self._fail(row))
                continue
            request.completion.accepted.append(False)
            request.completion.corrected.append(False)
            kept, stopped = request.cut([firsts[i]])
            news.append(self._deliver(row, kept, ended=stopped or not active[i]))
        batch.params = self._params(len(rows.requests))
        self._parts = {}
        return news

    def _params(self, rows: int) -> BatchParams:
        """Of the first rows; one that nobody holds may sample as any other does."""
        of = {i: r.params for i, r in enumerate(self.batch.rows.requests[:rows]) if r is not None}
        if not of:
            return self.batch.params
        some = next(iter(of.values()))
        every = [of.get(row, some) for row in range(rows)]
        return together(every, self.decoder.runner.device)

    def _part(self) -> DecodeBatch:
        """What a round computes: the batch, or its first rows."""
        batch = self.batch
        used = max(batch.rows.busy, default=0) + 1
        rows = 1 << (used - 1).bit_length()
        if not self.narrow or rows >= len(batch.rows.requests):
            return batch
        if rows not in self._parts:
            drafter = self.decoder.drafter
            self._parts[rows] = batch.first(rows, self._params(rows), drafter)
        return self._parts[rows]

    def _deliver(self, row: int, tokens: list[int], *, ended: bool) -> News:
        """Hand tokens to the row's request; at its end, free the row."""
        request = self.batch.rows.requests[row]
        assert request is not None
        request.completion.tokens += tokens
        if ended:
            self._end(row)
        return request, tokens, ended

    def _fail(self, row: int) -> News:
        """End a request whose logits are not numbers."""
        request = self.batch.rows.requests[row]
        assert request is not None
        completion = request.completion
        at = len(completion.prompt_tokens) + len(completion.tokens)
        error = f"prompt {completion.index}: got NaN logits at position {at}, expected numbers; "
        self._end(row, f"{error}look at the target's weights, or try a wider dtype")
        return request, [], True

    def _end(self, row: int, error: str = "") -> None:
        """Free a row whose request has ended."""
        request = self.batch.rows.requests[row]
        assert request is not None
        self.batch.rows.release(row)
        request.finish(error)
        if self.decoder.recorder is not None:
            self.decoder.recorder.finish(request.completion.index, error)
        if self.finished is not None and not error:
            harvest = self.batch.harvest
            found = None if harvest is None else harvest.of(row, request.completion)
            self.finished(request, found)
