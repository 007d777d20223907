"""A replay on known answers counts what the decoder counts that gave them."""

from dataclasses import replace

import pytest
from eagle_drafts import VOCAB, counting
from tiny_hydra import layer
from tiny_llama import build_llama
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafters.load import drafter_of
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.replay import replay
from draftsmith.decode.policies.policy import Costs
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.untrained.exits import ExitsDrafter
from draftsmith.decode.untrained.ngram import NgramDrafter
from draftsmith.models.heads.kangaroo import Kangaroo
from draftsmith.models.heads.medusa import Medusa, MedusaConfig

COSTS = Costs((1, 64), (1.0, 1.0), (0.0, 0.0))
UNTIMED = {"prefill_seconds": 0.0, "decode_seconds": 0.0}
WAYS = {
    "chain": {"K": 4},
    "eagle-25": {"tree": "eagle-25"},
    "dynamic": {"tree": "dynamic:3,3,9"},
    "confidence": {"policy": "confidence:0.02", "K": 5},
    "entropy": {"policy": "entropy:0.02,0.6", "K": 5},
    "depth": {"policy": "depth:0.01", "K": 5},
}


def pair_of(
    kind: str, target: PreTrainedModel, draft: PreTrainedModel
) -> tuple[PreTrainedModel, Drafter]:
    """A target and a drafter, of heads one that is often right."""
    if kind == "lm":
        return target, LMDrafter(draft, VOCAB)
    if kind == "native":  # several rounds are one call
        target = build_llama(VOCAB, layers=2, hidden=128, seed=0).requires_grad_(False).bfloat16()
        return target, LMDrafter(target, VOCAB)
    if kind == "eagle1":
        target, head = counting(wrong=0.35)
        return target, drafter_of(head, target, VOCAB)
    if kind == "medusa":
        head = Medusa(MedusaConfig(hidden=target.config.hidden_size, rows=VOCAB, heads=5))
        return target, drafter_of(head.eval().requires_grad_(False), target, VOCAB)
    if kind == "kangaroo":
        kangaroo = Kangaroo(layer(vocab_size=VOCAB), 2).init_from(target)
        return target, drafter_of(kangaroo.eval().requires_grad_(False), target, VOCAB)
    if kind == "exits":
        return target, ExitsDrafter(target, VOCAB, [2, 1])
    return target, NgramDrafter()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        *(("lm", 1), ("lm", 3), ("native", 1), ("eagle1", 3), ("medusa", 1), ("ngram", 1)),
        *(("kangaroo", 3), pytest.param("exits", 1, marks=pytest.mark.slow), ("exits", 3)),
    ],
)
def test_a_replay_counts_what_decoding_does(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    temperature: float,
    kind: str,
    batch: int,
) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=12, ignore_eos=True, seed=5)
    prompts = [[5, 9, 30, 5, 9], [7] * 9, [8, 3]]
    target, drafter = pair_of(kind, tiny_target, tiny_draft)
    ways = WAYS if drafter.trees else {"chain": WAYS["chain"]}
    ways = ways | {"exits": {"policy": "exits", "K": 5}} if drafter.ways else ways
    for name, how in ways.items():
        decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=batch, **how)
        done = decoder.generate(prompts, params)
        # Counts only: not from the run's own, and by a policy that begins anew.
        blank = [[replace(answer, counters=type(answer.counters)())] for answer in done]
        again = Decoder(target, tiny_tokenizer, drafter, batch_size=batch, **how)
        [arm] = replay([again], blank, params, batch, COSTS, lambda: None)
        for one, other in zip(arm.completions, done, strict=True):
            counts = [replace(c.counters, **UNTIMED) for c in (one, other)]
            assert counts[0] == counts[1] and one.tokens == other.tokens, (name, one.index)
        assert sum(arm.tokens) == sum(c.counters.emitted for c in done)
        most = max if batch > 1 else sum
        assert sum(arm.seconds) >= most(c.counters.rounds for c in done)
