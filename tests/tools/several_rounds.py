"""Rounds that are several a call: texts, ways to sample, and what answers say beside their time."""

import ctypes
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS

from draftsmith.decode.drafting.base import Round
from draftsmith.decode.engine import round as rounds
from draftsmith.decode.engine import rows
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.forward import compiled
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import TokenTree

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


def drafted_in_rounds(drafter: Any, request: Round, like: TokenTree) -> torch.Tensor:
    """A chain's tokens [B, N] as a call of C++ drafts them, greedily."""
    lens_B, topology = request.lens_B, like.topology
    B, N = like.tokens_BN.shape
    tokens_BN, logits_BNV = torch.empty(B, N, dtype=torch.int64), torch.zeros(B, N, 10)
    state = lens_B, request.pending_B, lens_B, lens_B, request.active_B
    given = tokens_BN, topology.parent, topology.depth, logits_BNV, None
    made_here = torch.zeros(B, 0), lens_B, torch.zeros(B, 2 * N + 4), None, None, None
    how = drafter.in_rounds(N, 0.0)  # held: the call is given addresses
    draft, _, own = how.call
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(draft.value)
    whole = rows.round_of((*given, *state, *made_here), N)
    called(ctypes.cast(own, ctypes.c_void_p), ctypes.addressof(whole))
    return tokens_BN
