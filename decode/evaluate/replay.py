"""What an arm that wasn't run would draft and keep, on answers that are known.

Greedy, or with shared noise, an answer is the same whatever drafts it. So the decoder decodes with
a target that isn't computed, which says the answer's next token whatever it is asked; what a
drafter reads of its states comes of one pass over each answer. For drafters in its own keys and
values it is computed too, off the clock, to write these. All else is the decoder's own: any tree
and policy drafts, and is kept, as in a run. A round takes the target's isolated forward
(policies/timing.py), and what lies between two of them: the least of all rounds of as many nodes,
since a busy machine only ever adds; on CUDA, where rounds are recorded, isolated forwards alone.

Shapes: B rows, N nodes, R answers that were decoded together, T tokens of prompt and answer, U
width of the taps, V vocabulary.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig

from draftsmith.decode.drafting.base import picked
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.arms import Arm, answers
from draftsmith.decode.forward.kv import KVPool, SlotCache, round_up
from draftsmith.decode.forward.runner import Runner, States
from draftsmith.decode.policies.policy import Costs
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.models.taps import target_states

Rounds = list[tuple[int, float]]  # of each its nodes, and the seconds since the pass before


class KnownTarget(Runner):
    """A target that knows what comes, for rows that hold these answers in order. Its states [.., 1]
    are next tokens. shared: whether a drafter reads its keys and values. rounds: notes every pass.
    """

    native = None  # whose passes would be the target's own

    def __init__(self, runner: Runner, asked: Sequence[Completion], *, shared: bool) -> None:
        vars(self).update(vars(runner))
        self.shared = shared
        texts = [torch.tensor(a.prompt_tokens + a.tokens, device=self.device) for a in asked]
        self.next_RT = F.pad(pad_sequence(texts, batch_first=True), (0, 1))[:, 1:]
        self.taps_RTU: Tensor | None = None
        if self.taps:
            found = [target_states(self.model, self.taps, input_ids=ids[None]) for ids in texts]
            self.taps_RTU = pad_sequence([one.taps_BTF[0] for one in found], batch_first=True)
        self.rounds: Rounds = []
        self.ended = time.perf_counter()

    def pool(self, rows: int, slots: int) -> KVPool:
        """Of no layers, where nothing is read from it."""
        if self.shared:
            return super().pool(rows, slots)
        nothing = LlamaConfig(hidden_size=1, num_attention_heads=1, num_hidden_layers=0)
        return KVPool(
            nothing, rows=rows, slots=round_up(slots), dtype=self.dtype, device=self.device
        )

    def _pass(
        self, tokens_BN: Tensor, positions_BN: Tensor, cache: SlotCache, *, taps: bool = True
    ) -> States:
        self.rounds.append((tokens_BN.shape[1], time.perf_counter() - self.ended))
        if self.shared:
            super()._pass(tokens_BN, positions_BN, cache)
        at_BN = positions_BN.clamp(max=self.next_RT.shape[1] - 1)
        taps_BNU = None if self.taps_RTU is None else picked(self.taps_RTU, at_BN)
        next_BN1 = self.next_RT.gather(1, at_BN)[..., None]
        self.ended = time.perf_counter()
        return next_BN1, taps_BNU

    def logits(self, hidden: Tensor) -> Tensor:
        """0 for the token that comes, -inf for all others."""
        none = torch.full((*hidden.shape[:-1], self.head.size), -torch.inf, device=self.device)
        return none.scatter(-1, hidden, 0.0)


def replay(
    decoders: Sequence[Decoder],
    questions: Sequence[Sequence[Completion]],
    params: SamplingParams,
    batch: int,
    costs: Costs,
    tick: Callable[[], None],
) -> list[Arm]:
    """Each decoder's arm, taking turns on each group of `batch` prompts; all have one drafter, and
    decode nothing else from now on. questions: the answers to each prompt, turn by turn.
    """
    arms, runner = [Arm() for _ in decoders], decoders[0].runner
    shared = getattr(decoders[0].drafter, "shares", False)
    rounds: list[list[Rounds]] = [[] for _ in decoders]
    for start in range(0, len(questions), batch):
        together = questions[start : start + batch]
        for arm, own in zip(arms, rounds, strict=True):
            arm.tokens.append(0)
            own.append([])
        for turn in range(max(map(len, together))):
            asked = [turns[turn] for turns in together if turn < len(turns)]
            known = KnownTarget(runner, asked, shared=shared)
            for arm, own, decoder in zip(arms, rounds, decoders, strict=True):
                decoder.runner = decoder.stepper.runner = known
                known.rounds = []
                done = answers(decoder, {a.index: a.prompt_tokens for a in asked}, params, tick)
                arm.completions += done
                arm.tokens[-1] += sum(answer.counters.emitted for answer in done)
                own[-1] += known.rounds[1:]  # the first is the prefill
    for arm, own, decoder in zip(arms, rounds, decoders, strict=True):
        arm.seconds = seconds_of(own, decoder, costs)
    return arms


def seconds_of(groups: Sequence[Rounds], decoder: Decoder, costs: Costs) -> list[float]:
    """Of the rounds of each group of prompts. What a policy that cuts grown trees did between two
    passes isn't told by their sizes, so each of its rounds counts as it was clocked.
    """
    if decoder.policy.keep is not None:
        return [sum(costs.pass_of(nodes) + between for nodes, between in group) for group in groups]
    clocked: dict[int, list[float]] = defaultdict(list)
    for nodes, seconds in chain.from_iterable(groups):
        clocked[nodes].append(seconds)
    takes, whole = {}, decoder.settings.plan
    for nodes, times in clocked.items():
        verifying = float(np.interp(nodes, costs.nodes, costs.verify))
        between = min(times)
        if decoder.runner.device.type == "cuda":
            plan = whole if nodes == whole.nodes else chain_plan(max(1, nodes - 1))
            between = costs.of(plan) - costs.verifying(plan)
        takes[nodes] = verifying + between
    return [sum(takes[nodes] for nodes, _ in group) for group in groups]
