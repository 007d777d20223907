"""The decoding loop: draft, verify, commit; over batches whose rows come and go on their own.

    decoder = Decoder.from_pretrained("target", "drafter", K=4)
    decoder.generate(["def main("], SamplingParams(max_new_tokens=64))

The answer is a function of target, prompt and seed alone. `drafter=None` is plain decoding through
the same code with nothing drafted.

Shapes: B rows, R of them just admitted, L = D + 1 tokens that one round can emit, V vocabulary.
"""

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode import memory
from draftsmith.decode.compatible import (
    check_acceptance,
    check_drafter,
    check_recording,
    check_rule,
)
from draftsmith.decode.costs import measured_costs
from draftsmith.decode.drafters.base import ANY_DEPTH, Admitted, Drafter
from draftsmith.decode.drafters.lm import context_of
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.graphs import Graphs
from draftsmith.decode.policy import Acceptance, Cost, Outcome, make_policy
from draftsmith.decode.recorder import Recorder
from draftsmith.decode.request import Completion, Event, Prompt, Request, eos_ids, open_request
from draftsmith.decode.rows import Rows
from draftsmith.decode.runner import Runner
from draftsmith.decode.sampling import SamplingParams, choose
from draftsmith.decode.settings import Settings
from draftsmith.decode.step import Batch, Stepper, Told
from draftsmith.decode.tree_plan import Plan, rank_path
from draftsmith.models.target import TargetSpec, check_split, load_target
from draftsmith.models.tokenizer import vocab_size

# Which batch a drafter works for: decoders may share a drafter, one at a time.
_works_for: "weakref.WeakKeyDictionary[Any, weakref.ref[Batch]]" = weakref.WeakKeyDictionary()


@dataclass
class _Flight:
    """A round on its way: what it will tell, and whom its rows served when it set off."""

    told: Told
    table: Tensor  # of `told`, on the host once `ready`
    ready: torch.cuda.Event | None
    plan: Plan | None
    requests: list[Request | None]


class Decoder:
    """A target, its tokenizer and, unless decoding is plain, a drafter; settings by name, see
    `Settings`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None = None,
        recorder: Recorder | None = None,
        **settings: Any,
    ) -> None:
        self.settings = Settings(**settings).reaching(
            ANY_DEPTH if drafter is None else drafter.levels
        )
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size(tokenizer)
        taps = () if drafter is None else drafter.taps
        self.runner = Runner(target, self.vocab_size, self.settings.attention, taps)
        self.drafter = drafter
        self.policy = make_policy(self.settings.policy, self.settings.plan)
        self.recorder = recorder
        self.stepper = Stepper(self.runner, drafter, self.settings, self.vocab_size, recorder)
        if self.stepper.acceptance is not None:
            self.stepper.acceptance = self.stepper.acceptance.ready(target, tokenizer)
        self.context = context_of(target)
        if drafter is not None:
            self.context = min(self.context, drafter.context)
            check_drafter(self.settings, drafter, self.vocab_size, self.context)
            if isinstance(self.policy, Acceptance):
                self.policy.read_by(check_acceptance(drafter), self.runner.device)
        if recorder is not None:
            check_recording(self.settings, drafter)
        self.eos_ids = eos_ids(target, tokenizer)
        # On a CPU a round is over when its call returns: reading it late would only waste one.
        fast = self.settings.fast and recorder is None
        self.late = fast and self.runner.device.type == "cuda"
        if self.late:
            for runner in (self.runner, getattr(drafter, "runner", None)):
                if runner is not None:
                    runner.compile()
        # A policy that is asked after each call decides on the host: nothing to capture.
        self.graphs = Graphs(self.stepper) if self.late and self.policy.enough is None else None
        self.memory: memory.MemoryPlan | None = None  # of the last call
        self._batch: Batch | None = None
        self._decoding = False

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        drafter: str | None = None,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        allow_target_mismatch: bool = False,
        **settings: Any,
    ) -> "Decoder":
        """Load a target folder and, beside it, a drafter folder, "ngram", or None for plain
        decoding.

        settings: of `Settings`. Errors of `open_drafter` and `load_target` pass.
        """
        model, tokenizer = load_target(TargetSpec(target, dtype=dtype), torch.device(device))
        check_split(model)
        loaded = load_drafter(
            drafter, model, tokenizer, allow_target_mismatch=allow_target_mismatch
        )
        return cls(model, tokenizer, loaded, **settings)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        indices: Sequence[int] | None = None,
    ) -> list[Completion]:
        """The completions, in the order of the prompts (texts or token ids).

        indices: each prompt's global number, from which its noise seed is made; by default 0, 1,
        ... ValueError for an empty prompt or one that leaves no room in the context. A prompt whose
        logits turn out broken (NaN) ends with finish_reason "error"; the others go on.
        """
        done = {}
        for request, _, finished in self._run(prompts, params, indices):
            if finished:
                done[request.completion.index] = request.completion
        return [done[index] for index in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        indices: Sequence[int] | None = None,
    ) -> Iterator[Event]:
        """Yields an Event for each request after each round, as tokens are emitted. Text comes in
        whole characters: bytes of an unfinished one are held back.
        """
        for request, tokens, finished in self._run(prompts, params, indices):
            text = request.next_text(finished)
            completion = request.completion if finished else None
            yield Event(request.completion.index, tokens, text, completion)

    def _run(
        self, prompts: Sequence[Prompt], params: SamplingParams, indices: Sequence[int] | None
    ) -> Iterator[tuple[Request, list[int], bool]]:
        """Yields (request, its new tokens, whether that was its end)."""
        if self._decoding:
            raise ValueError(
                "this decoder is in the middle of another stream, whose rows its drafter holds; "
                "finish or close that stream first, or make a second Decoder with a drafter of its "
                "own"
            )
        self._decoding = True
        try:
            yield from self._rounds(self._open(prompts, params, indices))
        finally:
            self._decoding = False

    def _rounds(self, batch: Batch) -> Iterator[tuple[Request, list[int], bool]]:
        """Launch rounds and deliver what they tell: at once, or one round late, so that the device
        never waits for the host.
        """
        rows = batch.rows
        flight: _Flight | None = None
        while rows.waiting or rows.busy:
            if not self._owns_drafter(batch):
                raise ValueError(
                    "this stream's drafter has been given to another decoder meanwhile; finish or "
                    "close one stream first, or load the drafter twice"
                )
            if rows.waiting and rows.free:
                yield from self._admit(batch)
                continue
            launched = self._launch(batch, flight)
            if self.late:
                flight, launched = launched, flight
            if launched is not None:
                yield from self._hear(batch, launched)

    def _owns_drafter(self, batch: Batch) -> bool:
        """Whether the drafter's state is that of this batch (always, without a drafter)."""
        if self.drafter is None:
            return True
        holder = _works_for.get(self.drafter)
        return holder is not None and holder() is batch

    def _launch(self, batch: Batch, flight: _Flight | None) -> _Flight:
        rows = batch.rows
        plan = None if self.drafter is None else self.policy.next_plan()
        ahead = 0 if flight is None else flight.told.levels + 1
        top = ahead + max((r.length for r in rows.requests if r is not None), default=1)
        on_cuda = self.runner.device.type == "cuda"
        # Captures and events belong to the current device.
        with torch.cuda.device(self.runner.device) if on_cuda else nullcontext():
            if self.graphs is not None:
                told = self.graphs.step(batch, plan, top)
            else:
                told = self.stepper.step(batch, plan, top, self.policy)
            table, ready = told.table, None
            if self.late and on_cuda:
                table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
                table.copy_(told.table, non_blocking=True)
                ready = torch.cuda.Event()
                ready.record()
        return _Flight(told, table, ready, plan, list(rows.requests))

    def _hear(self, batch: Batch, flight: _Flight) -> Iterator[tuple[Request, list[int], bool]]:
        rows, told = batch.rows, flight.told
        if flight.ready is not None:
            flight.ready.synchronize()
        table = flight.table.tolist()  # the round's only reading of the device
        now = time.perf_counter()
        length = told.levels + 1
        paths = []
        for row, request in enumerate(flight.requests):
            if request is None or rows.requests[row] is not request:
                continue  # ended while this round was on its way
            *_, accepted, n_new, active, bad = table[row]
            if bad:
                yield self._fail(batch, row)
                continue
            kept, stopped = request.cut(table[row][:n_new])
            counters = request.completion.counters
            counters.record(told.levels, accepted, len(kept), told.nodes)
            counters.decode_seconds = now - request.started
            request.completion.accepted += [i < accepted for i in range(len(kept))]
            paths.append(rank_path(flight.plan, table[row][length + 1 : length + 1 + accepted]))
            yield self._deliver(batch, row, kept, ended=stopped or not active)
        if flight.plan is not None:
            self.policy.observe(Outcome(flight.plan, told.levels, paths))

    def _open(
        self, prompts: Sequence[Prompt], params: SamplingParams, indices: Sequence[int] | None
    ) -> Batch:
        identical = self.stepper.rule(params).identical
        check_rule(self.settings, self.drafter, params, identical=identical)
        if indices is not None and len(indices) != len(prompts):
            raise ValueError(f"indices: got {len(indices)} for {len(prompts)} prompts")
        requests = [
            open_request(
                prompt,
                i,
                i if indices is None else indices[i],
                tokenizer=self.tokenizer,
                params=params,
                context=self.context,
                end_ids=() if params.ignore_eos else self.eos_ids,
            )
            for i, prompt in enumerate(prompts)
        ]
        stops = (
            params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self.eos_ids)
        )
        rows = max(1, min(self.settings.batch_size, len(requests)))
        work = self._work(rows, requests, params)
        with torch.inference_mode():
            batch = self._make_room(work, frozenset(stops))
            batch.rows.waiting.extend(requests)
        if isinstance(self.policy, Cost) and self.policy.costs is None and self.drafter is not None:
            self.policy.costs = measured_costs(
                self.runner, self.drafter, self.policy.plans[-1], rows, work.prompt + work.new
            )
        return batch

    def _work(self, rows: int, requests: Sequence[Request], params: SamplingParams) -> memory.Work:
        acceptance = self.settings.acceptance
        return memory.Work(
            rows,
            prompt=max((len(r.completion.prompt_tokens) for r in requests), default=1),
            new=max((r.limit for r in requests), default=1),
            vocab=self.vocab_size,
            params=params,
            tree=None if self.drafter is None else self.policy.plans[-1],
            rule=self.settings.rule,
            lossy=acceptance is not None and acceptance.needs_q,
        )

    def _make_room(self, work: memory.Work, stops: frozenset[int]) -> Batch:
        """The batch of the last call where it fits, so that recordings of its rounds stay good;
        else a new one. ValueError, naming what would fit, where memory doesn't hold it.
        """
        draft = None if self.drafter is None else self.drafter.size
        planned = memory.plan(work, memory.ModelSize.of(self.runner), draft)
        free = memory.available(self.runner.device)
        old = self._batch
        roomy = old is not None and old.pool.rows == work.rows and old.pool.slots >= work.slots
        if old is not None and roomy and old.rows.stop_ids == stops and self._owns_drafter(old):
            # The keys and values have their place already.
            self.memory = memory.check(planned, None if free is None else free + planned.kv)
            old.rows.reset()
            old.params = work.params
            return old
        # Let the old room go before the new one is weighed.
        old = self._batch = None
        if self.graphs is not None:
            self.graphs.forget()
        if self.drafter is not None:
            self.drafter.release()
        self.memory = memory.check(planned, memory.available(self.runner.device))
        batch = Batch(
            Rows(work.rows, stops, self.runner.device),
            self.runner.pool(work.rows, work.slots),
            work.params,
        )
        if self.drafter is not None:
            self.drafter.reset(work.rows, batch.pool.slots)
            _works_for[self.drafter] = weakref.ref(batch)
        self._batch = batch
        return batch

    @torch.inference_mode()
    def _admit(self, batch: Batch) -> list[tuple[Request, list[int], bool]]:
        """Prefill as many waiting prompts as rows are free; each gets its first token."""
        rows, device, params = batch.rows, self.runner.device, batch.params
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
        logits_RV, taps_RNU = self.runner.prefill(batch.pool, rows_R, tokens_RN, lens_R)
        seeds_R = torch.tensor([request.seed for request in requests], device=device)
        race_RLV = self.stepper.race(seeds_R, lens_R[:, None], params)
        p_logits_RV = params.transform(logits_RV)
        pending_R = choose(p_logits_RV, None if race_RLV is None else race_RLV[:, 0])
        rows.admit(rows_R, lens_R, pending_R, requests)
        if self.drafter is not None:
            self.drafter.prefill(Admitted(rows_R, tokens_RN, lens_R, pending_R, taps_RNU))
        firsts, active = pending_R.tolist(), rows.active_B[rows_R].tolist()
        broken = p_logits_RV.amax(-1).isnan().tolist()
        now = time.perf_counter()
        news = []
        for i, (row, request) in enumerate(zip(free, requests, strict=True)):
            rows.requests[row] = request
            request.started = now
            request.completion.counters.prefill_seconds = now - started
            if broken[i]:
                news.append(self._fail(batch, row))
                continue
            request.completion.accepted.append(False)
            kept, stopped = request.cut([firsts[i]])
            news.append(self._deliver(batch, row, kept, ended=stopped or not active[i]))
        return news

    def _deliver(
        self, batch: Batch, row: int, tokens: list[int], *, ended: bool
    ) -> tuple[Request, list[int], bool]:
        """Hand tokens to the row's request; at its end, free the row."""
        request = batch.rows.requests[row]
        assert request is not None
        request.completion.tokens += tokens
        if ended:
            self._end(batch, row)
        return request, tokens, ended

    def _fail(self, batch: Batch, row: int) -> tuple[Request, list[int], bool]:
        """End a request whose logits are not numbers."""
        request = batch.rows.requests[row]
        assert request is not None
        completion = request.completion
        at = len(completion.prompt_tokens) + len(completion.tokens)
        error = f"prompt {completion.index}: got NaN logits at position {at}, expected numbers; "
        self._end(batch, row, f"{error}look at the target's weights, or try a wider dtype")
        return request, [], True

    def _end(self, batch: Batch, row: int, error: str = "") -> None:
        """Free a row whose request has ended."""
        request = batch.rows.requests[row]
        assert request is not None
        batch.rows.release(row)
        request.finish(batch.rows.stop_ids, error)
        if self.recorder is not None:
            self.recorder.finish(request.completion.index, error)
