"""The decoding loop: draft, verify, commit; over batches whose rows come and go on their own.

    decoder = Decoder.from_pretrained("target", "drafter", K=4)
    decoder.generate(["def main("], SamplingParams(max_new_tokens=64))

The answer is a function of target, prompt and seed alone. `drafter=None` is plain decoding through
the same code with nothing drafted.

Shapes: B rows, R of them just admitted, L = D + 1 tokens that one round can emit, V vocabulary.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.draft_lms.lm import weights_read
from draftsmith.decode.drafters.load import load_decoded, load_drafter
from draftsmith.decode.drafting.base import ANY_DEPTH, Drafter, shape_of
from draftsmith.decode.drafting.owed import STATES, Owed
from draftsmith.decode.engine import memory
from draftsmith.decode.engine.graphs import Graphs
from draftsmith.decode.engine.recorder import Harvest, Recorder
from draftsmith.decode.engine.request import Completion, Event, Prompt, eos_ids, open_request
from draftsmith.decode.engine.round import DecodeBatch, Stepper
from draftsmith.decode.engine.rows import Rows
from draftsmith.decode.engine.session import Finished, News, Session
from draftsmith.decode.engine.settings import DecodeSettings
from draftsmith.decode.engine.several import MOST, SHARED
from draftsmith.decode.forward.kv import context_of
from draftsmith.decode.forward.runner import Runner, in_parts
from draftsmith.decode.forward.size import available
from draftsmith.decode.policies.choice import make_policy
from draftsmith.decode.policies.policy import Acceptance
from draftsmith.decode.policies.timing import measured_costs
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.verify.rules import RULES
from draftsmith.models.target import TargetSpec
from draftsmith.models.tokenizer import vocab_size

Indices = Sequence[int] | None
MOST_STOPS = 16  # ids that may end one request of a session
# Which batch a drafter works for: decoders may share a drafter, one at a time.
_works_for: "weakref.WeakKeyDictionary[Any, weakref.ref[DecodeBatch]]" = weakref.WeakKeyDictionary()


def compile_runner(drafter: Drafter | None) -> None:
    held = [getattr(drafter, name, None) for name in ("runner", "whole")]
    held += getattr(drafter, "parts", {}).values()
    for runner in {id(one): one for one in held if one is not None}.values():
        runner.compile()


class Decoder:
    """A target, its tokenizer and, unless decoding is plain, a drafter; settings: `DecodeSettings`.

    The models given are never changed: neither their weights, nor how they attend in passes of
    their own. Weights changed in place, by operations that autograd would see, are followed; after
    other changes, as of a layer replaced, make a new Decoder.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None = None,
        recorder: Recorder | None = None,
        **settings: Any,
    ) -> None:
        levels, taps = (ANY_DEPTH, ()) if drafter is None else (drafter.levels, drafter.taps)
        self.settings = DecodeSettings(**settings).reaching(levels)
        self.tokenizer, self.vocab_size = tokenizer, vocab_size(tokenizer)
        how = self.vocab_size, self.settings.attention, taps
        self.runner = Runner(target, *how, recurrent=True)
        self.drafter, self.recorder = drafter, recorder
        self.policy = make_policy(self.settings.policy, self.settings.plan)
        lossy = self.settings.acceptance
        lossy = None if lossy is None else lossy.ready(target, tokenizer)
        self.stepper = Stepper(self.runner, drafter, self.settings, lossy, recorder)
        self.context = context_of(target)
        if drafter is not None:
            self.context = min(self.context, drafter.context)
            self.settings.check_drafter(drafter, self.vocab_size, self.context)
            if drafter.shares and self.runner.leader is not None:
                raise in_parts(drafter.kind)
            self._judge_by(drafter)
        if recorder is not None:
            self.settings.check_recording(drafter)
        self.eos_ids = eos_ids(target, tokenizer)
        # A body that is shared out over processes gathers its weights as it runs, or sums.
        shared_out = isinstance(self.runner.body, FSDPModule) or self.runner.leader is not None
        fast = self.settings.fast and not shared_out
        fast = fast and not (drafter is not None and drafter.host)
        # On a CPU a round is over when its call returns: reading it late would only waste one.
        self.late = fast and recorder is None and self.runner.device.type == "cuda"
        if self.late:
            self.runner.compile()
            compile_runner(drafter)
        # A policy that is asked in a round decides on the host: nothing to capture.
        self.graphs = Graphs(self.stepper) if self.late and not self.policy.asked else None
        self.memory: memory.MemoryPlan | None = None  # of the last call
        self._batch: DecodeBatch | None = None
        self._decoding = False

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        drafter: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        parallel: int = 1,
        allow_target_mismatch: bool = False,
        **settings: Any,
    ) -> "Decoder":
        """Load a target folder, in `parallel` processes, and, beside it, a drafter folder, "ngram",
        or None for plain decoding. settings: of `DecodeSettings`. Errors of `load_drafter` and
        `load_decoded` pass.
        """
        model, tokenizer = load_decoded(TargetSpec(target, dtype=dtype, parallel=parallel), device)
        loaded = load_drafter(
            drafter, model, tokenizer, allow_target_mismatch=allow_target_mismatch
        )
        return cls(model, tokenizer, loaded, **settings)

    @classmethod
    def of(cls, settings: Any, **others: Any) -> "Decoder":
        """What a command's settings name; others: of `from_pretrained`, in place of theirs."""
        how = asdict(DecodeSettings.of(settings))
        how |= {"device": settings.device, "dtype": settings.dtype}
        return cls.from_pretrained(settings.target, settings.drafter, **how | others)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        indices: Indices = None,
        tick: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """The completions, in the order of the prompts (texts or token ids). indices: each prompt's
        global number, from which its noise seed is made; by default 0, 1, ... tick: called as each
        ends.

        ValueError for an empty prompt or one that leaves no room in the context. A prompt whose
        logits turn out broken (NaN) ends with finish_reason "error"; the others go on.
        """
        done, session = [], self._open(prompts, params, indices)
        if not params.stop:  # which is looked for between calls; nobody else asks before the end
            session.batch.longest = SHARED
        for request, _, end in self._run(session):
            if end:
                done.append(request.completion)
                if tick:
                    tick()
        return sorted(done, key=lambda made: made.index)

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams, indices: Indices = None
    ) -> Iterator[Event]:
        """An Event for each request after each call of rounds. Text comes in whole characters."""
        for request, tokens, finished in self._run(self._open(prompts, params, indices)):
            text = request.next_text(finished)
            completion = request.completion if finished else None
            yield Event(request.completion.index, tokens, text, completion)

    def open_session(
        self,
        batch_size: int,
        max_length: int,
        *,
        finished: Finished | None = None,
        harvest: bool = False,
    ) -> Session:
        """A batch that stays open: requests of any sampling parameters enter it at any step. Close
        it before anything else is decoded.

        batch_size: rows that decode at a time; max_length: tokens of the longest, prompt and
        answer; finished: called as requests end, with what the target knew of their answers if
        `harvest`. ValueError for a rule by rejection, whose answers would depend on the drafter.
        """
        how = self.settings
        if not RULES[how.rule].identical or how.same_shape or how.lossy:
            raise ValueError(
                f"session: got rule={how.rule}, lossy={how.lossy!r}, "
                f"same_shape={how.same_shape}, expected rule=coupled alone: a session's "
                "answers are the target's, whatever drafts them"
            )
        length = min(max_length, self.context)
        # The largest that its rows may ask for: a prompt of nearly all, filters that sort.
        widest = SamplingParams(temperature=0.5, top_p=0.5)
        batch = self._make_room(batch_size, length - 1, 1, widest, MOST_STOPS)
        self._decoding = True
        if harvest:
            hidden, taps = self.runner.config.hidden_size, len(self.runner.taps)
            batch.harvest = Harvest(batch.pool, hidden, taps * hidden)
        return Session(self, batch, length, finished, narrow=True)

    def swap_drafter(self, drafter: Drafter) -> None:
        """Put a drafter of the same shape in the place of this one, between two rounds. Rows on
        their way go on with the state that the old weights left: only how much is accepted may
        change, never an answer. ValueError for another kind or shape; the old one then stays.
        """
        old = self.drafter
        here, there = shape_of(old), shape_of(drafter)
        if old is None or here != there:
            raise ValueError(
                f"swap_drafter: got a drafter of {there}, expected one of {here}: rows are being "
                "decoded with it; start anew for another kind or size"
            )
        self._judge_by(drafter)
        drafter.succeed(old)
        if self.late:
            compile_runner(drafter)
        if self.graphs is not None:
            self.graphs.forget()
        self.drafter = self.stepper.drafter = drafter
        if self._batch is not None:
            _works_for[drafter] = weakref.ref(self._batch)

    def _judge_by(self, drafter: Drafter) -> None:
        """Let a policy read the drafter's acceptance head, where it asks for one, and its ways."""
        self.policy.choose_among(drafter.ways, weights_read(self.runner.model))
        if not isinstance(self.policy, Acceptance):
            return
        if drafter.acceptance is None:
            raise ValueError(
                f"policy acceptance: got a drafter of kind {drafter.kind} without an acceptance "
                "head, expected one in its folder's acceptance/; train one with train/scorers.py, "
                "or use policy=confidence"
            )
        self.policy.read_by(drafter.acceptance, self.runner.device)

    def _run(self, session: Session) -> Iterator[News]:
        self._decoding = True
        try:
            while session.busy:
                yield from session.step()
        finally:
            self.release()

    def release(self) -> None:
        """A stream has ended: the next one may begin."""
        self._decoding = False

    def owns_drafter(self, batch: DecodeBatch) -> bool:
        """Whether the drafter's state is that of this batch (always, without a drafter)."""
        holder = None if self.drafter is None else _works_for.get(self.drafter)
        return self.drafter is None or (holder is not None and holder() is batch)

    def _open(self, prompts: Sequence[Prompt], params: SamplingParams, indices: Indices) -> Session:
        self.settings.check_rule(self.drafter, params, self.stepper.rule(params).identical)
        if params.json_schema and self.settings.lossy:
            got = f"json_schema: got one with lossy={self.settings.lossy!r}, which passes any token"
            raise ValueError(f"{got}; expected lossless decoding; leave lossy out")
        indices = range(len(prompts)) if indices is None else indices
        if len(indices) != len(prompts):
            raise ValueError(f"indices: got {len(indices)} for {len(prompts)} prompts")
        opened = partial(open_request, tokenizer=self.tokenizer, params=params)
        opened = partial(opened, context=self.context, end_ids=self.eos_ids)
        requests = list(map(opened, prompts, range(len(prompts)), indices))
        rows = max(1, min(self.settings.batch_size, len(requests)))
        longest = max((len(r.completion.prompt_tokens) for r in requests), default=1)
        new = max((r.limit for r in requests), default=1)
        stops = len(params.stop_token_ids) + len(self.eos_ids)
        batch = self._make_room(rows, longest, new, params, stops)
        batch.rows.waiting.extend(requests)
        return Session(self, batch, self.context)

    @torch.inference_mode()
    def _make_room(
        self, rows: int, prompt: int, new: int, params: SamplingParams, stops: int
    ) -> DecodeBatch:
        """A batch for so many rows of such lengths, and a policy that knows what calls cost: the
        batch of the last call where it fits, so that recordings of its rounds stay good. stops: ids
        that may end one request. ValueError, naming what would fit, where memory doesn't hold it.
        """
        if self._decoding:
            raise ValueError(
                "this decoder is in the middle of another stream, whose rows its drafter holds; "
                "finish or close that stream first, or make a second Decoder with a drafter of its "
                "own"
            )
        drafter, device = self.drafter, self.runner.device
        # What waited is taken in together, in slots beyond the tokens.
        waits = STATES if drafter is not None and drafter.owes and self.policy.rests else 0
        work = memory.Work(
            rows,
            prompt=prompt,
            new=new,
            vocab=self.vocab_size,
            params=params,
            tree=None if drafter is None else self.policy.plans[-1],
            rule=self.settings.rule,
            lossy=self.settings.needs_q,
            scratch=0 if drafter is None else drafter.scratch,
            waits=waits if drafter is not None and drafter.shares else 0,
        )
        draft = None if drafter is None else drafter.size
        planned = memory.plan(work, memory.ModelSize.of(self.runner), draft)
        batch = self._batch
        if batch is not None and batch.holds(rows, work.slots, stops) and self.owns_drafter(batch):
            free = available(device)
            # The keys and values have their place already.
            self.memory = memory.check(planned, None if free is None else free + planned.kv)
            batch.rows.reset()
            batch.params, batch.harvest, batch.longest = params, None, MOST
        else:
            # Let the old room go before the new one is weighed.
            batch = self._batch = None
            if self.graphs is not None:
                self.graphs.forget()
            if drafter is not None:
                drafter.release()
            self.memory = memory.check(planned, available(device))
            pool = self.runner.pool(rows, work.slots)
            batch = self._batch = DecodeBatch(Rows(rows, stops, device), pool, params)
            if drafter is not None:
                if drafter.shares:
                    drafter.share(pool)
                else:
                    drafter.reset(rows, pool.slots + waits)
                _works_for[drafter] = weakref.ref(batch)
        if waits:
            batch.owed = Owed(batch.rows.lens_B, taps=bool(self.runner.taps))
        if self.policy.priced and self.policy.costs is None and drafter is not None:
            largest = self.policy.plans[-1]
            self.policy.costs = measured_costs(self.runner, drafter, largest, rows, prompt + new)
        return batch
