"""Targets whose layers keep a state: the answers are transformers' own, whatever is drafted."""

import random
from functools import cache
from typing import Any

import pytest
import torch
from families import VOCAB
from plain_decoding import plain_decode
from recurrent_targets import RECURRENT, recurrent
from scripted import Bushy, Scripted
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.answers import divergences
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.untrained.ngram import NgramDrafter

GREEDY, COUPLED = SamplingParams(max_new_tokens=24), SamplingParams(1.0, max_new_tokens=24)
MODEL = cache(recurrent)


@cache
def prompts() -> list[list[int]]:
    """Of unequal lengths, one longer than the chunk that prompts are read by."""
    rng = random.Random(4)
    return [[rng.randrange(4, VOCAB) for _ in range(n)] for n in (3, 70, 1, 12, 5, 21)]


@cache
def by_transformers(family: str, params: SamplingParams) -> list[Completion]:
    """Greedy: `generate`; else plain decoding in the model's own cache. A prompt at a time."""
    made, model = [], MODEL(family)
    for index, prompt in enumerate(prompts()):
        if params.greedy:
            ids = torch.tensor([prompt])
            how: Any = {"attention_mask": torch.ones_like(ids), "do_sample": False}
            tokens = model.generate(ids, max_new_tokens=24, **how)[0, len(prompt) :].tolist()
        else:
            how = {"vocab_size": VOCAB, "stop_ids": (0,), "index": index}
            tokens = plain_decode(model, prompt, params, **how)
        made.append(Completion(index, prompt, tokens))
    return made


def truth(family: str, params: SamplingParams) -> dict[tuple[int, ...], list[int]]:
    return {tuple(c.prompt_tokens): c.tokens for c in by_transformers(family, params)}


def differing(
    model: PreTrainedModel, own: list[Completion], got: list[Completion], params: SamplingParams
) -> int:
    """Answers that differ beyond a confirmed near-tie."""
    found = divergences(own, got, model, params, vocab_size=VOCAB, dtype="float32")
    return sum(not d.near_tie for d in found)


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("family", RECURRENT)
def test_scripted_drafts_change_nothing(
    family: str, params: SamplingParams, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Chains and trees of which all, none or some is kept; rows that come and go."""
    model, own = MODEL(family), by_transformers(family, params)
    for made, mode, rows in [
        (Scripted, "right", 1),
        (Scripted, "half", 3),
        (Bushy, "right", 3),
        (Bushy, "half", 3),
        (Bushy, "wrong", 1),
        (Scripted, "eos", 3),
    ]:
        drafter = made(mode, truth(family, params), VOCAB)
        decoder = Decoder(model, tiny_tokenizer, drafter, K=4, batch_size=rows)
        got = decoder.generate(prompts(), params)
        assert differing(model, own, got, params) == 0, (mode, rows)
    got = Decoder(model, tiny_tokenizer, batch_size=3).generate(prompts(), params)
    assert differing(model, own, got, params) == 0
