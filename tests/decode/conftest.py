"""A small pair whose rounds may be several a call, and how many each call made."""

from typing import Any

import pytest
import torch
from several_rounds import Pair
from tiny_llama import build_llama
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.engine import round as rounds


@pytest.fixture(scope="module")
def pair(tiny_tokenizer: PreTrainedTokenizerBase) -> Pair:
    target = build_llama(len(tiny_tokenizer), layers=3, hidden=128, seed=0)
    return target.requires_grad_(False).bfloat16(), tiny_tokenizer


@pytest.fixture(scope="module")
def near(pair: Pair) -> PreTrainedModel:
    """A draft of which some tokens are kept."""
    model = build_llama(len(pair[1]), layers=3, hidden=128, seed=0).requires_grad_(False)
    noise = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=noise)
    return model.bfloat16()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rounds each call makes."""
    counts, several = list[int](), rounds.several

    def counted(*args: Any) -> Any:
        found = several(*args)
        counts.append(len(found[0]))
        return found

    monkeypatch.setattr(rounds, "several", counted)
    return counts
