"""The decoding loop: draft, verify, commit; over batches whose rows come and go on their own.

    decoder = Decoder.from_pretrained("target", "drafter", K=4)
    decoder.generate(["def main("], SamplingParams(max_new_tokens=64))

The answer is a function of target, prompt and seed alone. `drafter=None` is plain decoding through
the same code with nothing drafted.

Shapes: B rows, R of them just admitted, L = D + 1 tokens that one round can emit, V vocabulary.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.base import ANY_DEPTH, Drafter, shape_of
from draftsmith.decode.drafters.lm import context_of
from draftsmith.decode.drafters.load import load_decoded, load_drafter
from draftsmith.decode.engine import memory
from draftsmith.decode.engine.graphs import Graphs
from draftsmith.decode.engine.harvest import Harvest
from draftsmith.decode.engine.recorder import Recorder
from draftsmith.decode.engine.request import (
    Completion,
    Event,
    Prompt,
    Request,
    eos_ids,
    open_request,
)
from draftsmith.decode.engine.round import DecodeBatch, Stepper
from draftsmith.decode.engine.rows import Rows
from draftsmith.decode.engine.session import Finished, News, Session
from draftsmith.decode.engine.settings import (
    DecodeSettings,
    check_acceptance,
    check_drafter,
    check_recording,
    check_rule,
)
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.forward.size import available
from draftsmith.decode.policies.policy import Acceptance, Cost, make_policy
from draftsmith.decode.policies.timing import measured_costs
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.verify.rules import RULES
from draftsmith.models.target import TargetSpec
from draftsmith.models.tokenizer import vocab_size

MOST_STOPS = 16  # ids that may end one request of a session
# Which batch a drafter works for: decoders may share a drafter, one at a time.
_works_for: "weakref.WeakKeyDictionary[Any, weakref.ref[DecodeBatch]]" = weakref.WeakKeyDictionary()


class Decoder:
    """A target, its tokenizer and, unless decoding is plain, a drafter; settings by name, see
    `DecodeSettings`.

    The models given are read and never changed: neither their weights, nor how they attend in
    passes of their own. Weights changed in place, by operations that autograd would see, are
    followed; after other changes, as of a layer replaced, make a new Decoder.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None = None,
        recorder: Recorder | None = None,
        **settings: Any,
    ) -> None:
        self.settings = DecodeSettings(**settings).reaching(
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
        # A body that is shared out over processes gathers its weights as it runs.
        fast = fast and not isinstance(self.runner.body, FSDPModule)
        self.late = fast and self.runner.device.type == "cuda"
        if self.late:
            for runner in (self.runner, getattr(drafter, "runner", None)):
                if runner is not None:
                    runner.compile()
        # A policy that is asked after each call decides on the host: nothing to capture.
        self.graphs = Graphs(self.stepper) if self.late and self.policy.enough is None else None
        self.memory: memory.MemoryPlan | None = None  # of the last call
        self._batch: DecodeBatch | None = None
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

        settings: of `DecodeSettings`. Errors of `load_drafter` and `load_decoded` pass.
        """
        model, tokenizer = load_decoded(TargetSpec(target, dtype=dtype), device)
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

    def open_session(
        self,
        rows: int,
        max_len: int,
        *,
        finished: Finished | None = None,
        harvest: bool = False,
    ) -> Session:
        """A batch that stays open: requests of any sampling parameters enter it at any step.

        rows: that decode at a time; max_len: tokens of the longest, prompt and answer; finished:
        called as requests end, with what the target knew of their answers where `harvest` asks for
        it. Close it before anything else is decoded. ValueError for a rule by rejection, whose
        answers would depend on the drafter.
        """
        how = self.settings
        if not RULES[how.rule].identical or how.same_shape or how.lossy:
            raise ValueError(
                f"session: got rule={how.rule}, lossy={how.lossy!r}, "
                f"same_shape={how.same_shape}, expected rule=coupled alone: a session's "
                "answers are the target's, whatever drafts them"
            )
        self._enter()
        try:
            length = min(max_len, self.context)
            # The largest that its rows may ask for: a prompt of nearly all, filters that sort.
            widest = SamplingParams(temperature=0.5, top_p=0.5)
            work = self._work(rows, length - 1, 1, widest)
            batch = self._ready(work, MOST_STOPS, [])
        except BaseException:
            self.release()
            raise
        if harvest:
            hidden, like = self.runner.config.hidden_size, batch.pool.kv_2LBSHE
            taps = hidden * len(self.runner.taps)
            batch.harvest = Harvest(rows, batch.pool.slots, hidden, taps, like)
        return Session(self, batch, length, finished, narrow=True)

    def swap_drafter(self, drafter: Drafter) -> None:
        """Put a drafter of the same shape in the place of this one, between two rounds. Rows on
        their way go on: what they are made of stays as the old weights left it, so only how much
        is accepted may change, never an answer.

        Raises ValueError for a drafter of another kind or shape; the old one then stays.
        """
        old = self.drafter
        here, there = shape_of(old), shape_of(drafter)
        if old is None or here != there:
            raise ValueError(
                f"swap_drafter: got a drafter of {there}, expected one of {here}: rows are being "
                "decoded with it; start anew for another kind or size"
            )
        if isinstance(self.policy, Acceptance):
            self.policy.read_by(check_acceptance(drafter), self.runner.device)
        for name in drafter.held:
            if hasattr(old, name):
                setattr(drafter, name, getattr(old, name))
        if self.late and (runner := getattr(drafter, "runner", None)) is not None:
            runner.compile()
        if self.graphs is not None:
            self.graphs.forget()
        self.drafter = self.stepper.drafter = drafter
        if self._batch is not None:
            _works_for[drafter] = weakref.ref(self._batch)

    def _run(
        self, prompts: Sequence[Prompt], params: SamplingParams, indices: Sequence[int] | None
    ) -> Iterator[News]:
        self._enter()
        try:
            session = self._open(prompts, params, indices)
            while session.busy:
                yield from session.step()
        finally:
            self.release()

    def _enter(self) -> None:
        if self._decoding:
            raise ValueError(
                "this decoder is in the middle of another stream, whose rows its drafter holds; "
                "finish or close that stream first, or make a second Decoder with a drafter of its "
                "own"
            )
        self._decoding = True

    def release(self) -> None:
        """A stream has ended: the next one may begin."""
        self._decoding = False

    def owns_drafter(self, batch: DecodeBatch) -> bool:
        """Whether the drafter's state is that of this batch (always, without a drafter)."""
        if self.drafter is None:
            return True
        holder = _works_for.get(self.drafter)
        return holder is not None and holder() is batch

    def _open(
        self, prompts: Sequence[Prompt], params: SamplingParams, indices: Sequence[int] | None
    ) -> Session:
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
                end_ids=self.eos_ids,
            )
            for i, prompt in enumerate(prompts)
        ]
        rows = max(1, min(self.settings.batch_size, len(requests)))
        prompt = max((len(r.completion.prompt_tokens) for r in requests), default=1)
        work = self._work(rows, prompt, max((r.limit for r in requests), default=1), params)
        stops = len(params.stop_token_ids) + len(self.eos_ids)
        batch = self._ready(work, stops, requests)
        return Session(self, batch, self.context)

    def _ready(self, work: memory.Work, stops: int, requests: Sequence[Request]) -> DecodeBatch:
        """A batch with these requests waiting, and a policy that knows what calls cost."""
        with torch.inference_mode():
            batch = self._make_room(work, stops)
            batch.rows.waiting.extend(requests)
        if isinstance(self.policy, Cost) and self.policy.costs is None and self.drafter is not None:
            self.policy.costs = measured_costs(
                self.runner, self.drafter, self.policy.plans[-1], work.rows, work.prompt + work.new
            )
        return batch

    def _work(self, rows: int, prompt: int, new: int, params: SamplingParams) -> memory.Work:
        lossy = self.stepper.acceptance
        return memory.Work(
            rows,
            prompt=prompt,
            new=new,
            vocab=self.vocab_size,
            params=params,
            tree=None if self.drafter is None else self.policy.plans[-1],
            rule=self.settings.rule,
            lossy=lossy is not None and lossy.needs_q,
        )

    def _make_room(self, work: memory.Work, stops: int) -> DecodeBatch:
        """The batch of the last call where it fits, so that recordings of its rounds stay good;
        else a new one. ValueError, naming what would fit, where memory doesn't hold it.
        """
        draft = None if self.drafter is None else self.drafter.size
        planned = memory.plan(work, memory.ModelSize.of(self.runner), draft)
        free = available(self.runner.device)
        old = self._batch
        roomy = old is not None and old.pool.rows == work.rows and old.pool.slots >= work.slots
        wide = old is not None and old.rows.stop_ids_BM.shape[1] >= stops
        if old is not None and roomy and wide and self.owns_drafter(old):
            # The keys and values have their place already.
            self.memory = memory.check(planned, None if free is None else free + planned.kv)
            old.rows.reset()
            old.params, old.harvest = work.params, None
            return old
        # Let the old room go before the new one is weighed.
        old = self._batch = None
        if self.graphs is not None:
            self.graphs.forget()
        if self.drafter is not None:
            self.drafter.release()
        self.memory = memory.check(planned, available(self.runner.device))
        batch = DecodeBatch(
            Rows(work.rows, stops, self.runner.device),
            self.runner.pool(work.rows, work.slots),
            work.params,
        )
        if self.drafter is not None:
            self.drafter.reset(work.rows, batch.pool.slots)
            _works_for[self.drafter] = weakref.ref(batch)
        self._batch = batch
        return batch
