"""Rounds that are several a call: texts, ways to sample, and what answers say beside their time."""

from typing import Any

import pytest
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
        compiled.library() is None or compiled.library().most() < ROWS,
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


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "rounds_at_once", lambda *_: (0, 0))


def what(done: list[Completion]) -> list[Any]:
    """All that an answer says but its seconds."""
    for one in done:
        one.counters.prefill_seconds = one.counters.decode_seconds = 0.0
    return done
