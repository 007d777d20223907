"""Rounds that are several a call: a small pair, texts, ways to sample, how many each call made."""

from typing import Any

import pytest
import torch
from tiny_llama import build_llama
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS

from draftsmith.decode.engine import round as rounds
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.forward import compiled
from draftsmith.decode.sampling import SamplingParams

Pair = tuple[PreTrainedModel, PreTrainedTokenizerBase]
ROWS = 3
NEEDS = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        compiled.library() is None or compiled.library().most(0) < ROWS,
        reason="no C++ compiler, or products of so few tokens only",
    ),
]
TEXTS = [*PROMPTS, "while", "return self", "try:\n    pass\n"]
WAYS = {
    "greedy": SamplingParams(max_new_tokens=37, ignore_eos=True),
    "drawn": SamplingParams(1.0, max_new_tokens=37, seed=7),
    "warm": SamplingParams(0.7, max_new_tokens=21, seed=8, stop=("e", "or")),
    "filtered": SamplingParams(0.9, max_new_tokens=37, top_k=20, top_p=0.8),
    "ends": SamplingParams(1.3, max_new_tokens=37, stop_token_ids=tuple(range(40, 60))),
}


def small_pair(tokenizer: PreTrainedTokenizerBase) -> Pair:
    target = build_llama(len(tokenizer), layers=3, hidden=128, seed=0)
    return target.requires_grad_(False).bfloat16(), tokenizer


def near_to(pair: Pair) -> PreTrainedModel:
    """A draft of which some tokens are kept."""
    model = build_llama(len(pair[1]), layers=3, hidden=128, seed=0).requires_grad_(False)
    noise = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=noise)
    return model.bfloat16()


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "rounds_at_once", lambda *_: (0, 0))


def what(done: list[Completion]) -> list[Any]:
    """All that an answer says but its seconds."""
    for one in done:
        one.counters.prefill_seconds = one.counters.decode_seconds = 0.0
    return done


def rounds_a_call(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rounds each call makes, from now on."""
    counts, several = list[int](), rounds.several

    def counted(*args: Any) -> Any:
        found = several(*args)
        counts.append(len(found[0]))
        return found

    monkeypatch.setattr(rounds, "several", counted)
    return counts
