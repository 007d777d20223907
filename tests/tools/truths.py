"""Prompts, ways of sampling, and the plain answers that every way of decoding must give."""

from functools import cache

from plain_decoding import plain_decode
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.sampling import SamplingParams

PROMPTS = [
    "def main(",
    "import os, sys\nfor x in",
    "a",
    "class Foo:\n    def __init__(self, name):\n",
]


SETTINGS = [
    SamplingParams(max_new_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, max_new_tokens=40, seed=7),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, max_new_tokens=40, seed=8),
]


def truths(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, params: SamplingParams
) -> list[list[int]]:
    """Found once for each state of a target's weights."""
    return [list(answer) for answer in _found(target, changes(target), tokenizer, params)]


def changes(target: PreTrainedModel) -> int:
    """A number that grows when weights are changed in place."""
    return sum(p._version for p in target.parameters())


@cache
def _found(
    target: PreTrainedModel, state: int, tokenizer: PreTrainedTokenizerBase, params: SamplingParams
) -> list[list[int]]:
    stops = () if params.ignore_eos else (0,)
    return [
        plain_decode(
            target,
            tokenizer(text).input_ids,
            params,
            vocab_size=len(tokenizer),
            stop_ids=stops,
            index=i,
        )
        for i, text in enumerate(PROMPTS)
    ]
