"""Prompts, ways of sampling, and the plain answers that every way of decoding must give."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from plain_decoding import plain_decode
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams

Text = str | Sequence[int]

PROMPTS = [
    "def main(",
    "import os, sys\nfor x in",
    "a",
    "class Foo:\n    def __init__(self, name):\n",
]


SETTINGS = [
    SamplingParams(max_new_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, max_new_tokens=24, seed=7),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, max_new_tokens=24, seed=8),
]

LONGER = [replace(params, max_new_tokens=40) for params in SETTINGS]


def truths(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    texts: Sequence[Text] = PROMPTS,
) -> list[list[int]]:
    """Found once for each state of a target's weights."""
    asked = tuple(text if isinstance(text, str) else tuple(text) for text in texts)
    return [list(one) for one in _found(target, changes(target), tokenizer, params, asked)]


def changes_nothing(
    pair: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    drafter: Drafter,
    trials: Iterable[tuple[dict[str, Any], int, Sequence[SamplingParams]]],
    texts: Sequence[Text] = PROMPTS,
) -> None:
    """The drafter leaves the answers as they are, in trials of (how, rows, ways)."""
    for how, rows, ways in trials:
        decoder = Decoder(*pair, drafter, batch_size=rows, **how)
        for params in ways:
            done = decoder.generate(texts, params)
            assert [c.tokens for c in done] == truths(*pair, params, texts), (how, rows, params)


def changes(target: PreTrainedModel) -> int:
    """A number that grows when weights are changed in place."""
    return sum(p._version for p in target.parameters())


@cache
def _found(
    target: PreTrainedModel,
    state: int,
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    texts: tuple[str | tuple[int, ...], ...],
) -> list[list[int]]:
    stops = () if params.ignore_eos else (0,)
    ids = [tokenizer(text).input_ids if isinstance(text, str) else list(text) for text in texts]
    how: dict[str, Any] = {"vocab_size": len(tokenizer), "stop_ids": stops}
    return [plain_decode(target, one, params, index=i, **how) for i, one in enumerate(ids)]
