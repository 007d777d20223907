"""Is the output the plain decoder's, token by token? And where it isn't: a near-tie, or a bug?

Plain autoregressive decoding, slow and obvious: what every other path must equal.

One sequence at a time, transformers' own cache, its own forward; nothing shared with the engine but
the transform and the noise.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from draftsmith.decode.engine.request import Completion
from draftsmith.decode.sampling import (
    SamplingParams,
    choose,
    request_race,
)

NEAR_TIE = 1e-4  # fp32 logits closer than this may be swapped by the rounding of another shape


@dataclass(frozen=True)
class FirstDifference:
    """The first token at which two answers to one prompt differ. margin: between the best and the
    second best score at that context in fp32; near_tie: the margin is below 1e-4 and fp64 confirms
    it between the same two tokens; baseline: the plain decoding it was compared with.
    """

    prompt: int
    position: int
    dtype: str
    margin: float
    near_tie: bool
    baseline: str = "native"


def divergences(
    expected: Sequence[Completion],
    got: Sequence[Completion],
    exact_target: PreTrainedModel,
    params: SamplingParams,
    *,
    vocab_size: int,
    dtype: str,
    baseline: str = "native",
) -> list[FirstDifference]:
    """Every prompt whose two answers differ, with the margins of `exact_target` (fp32) there."""
    found = []
    double: PreTrainedModel | None = None
    for want, have in zip(expected, got, strict=True):
        if want.tokens == have.tokens:
            continue
        at = first_difference(want.tokens, have.tokens)
        context = want.prompt_tokens + want.tokens[:at]
        _, margin = top_two(exact_target, context, params, vocab_size=vocab_size, index=want.index)
        near = margin < NEAR_TIE
        if near:
            double = double or copy.deepcopy(exact_target).double()
            tokens, margin_64 = top_two(
                double, context, params, vocab_size=vocab_size, index=want.index
            )
            pair = {*want.tokens[at : at + 1], *have.tokens[at : at + 1]}
            near = margin_64 < NEAR_TIE and pair == set(tokens)
        found.append(FirstDifference(want.index, at, dtype, margin, near, baseline))
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first index at which two sequences differ (the shorter one's length, if one begins the
    other).
    """
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def verdict(
    found: Sequence[FirstDifference], total: int, *, dtype: str, baseline: str
) -> dict[str, Any]:
    """The report's `identical` entry. excused: differences at confirmed near-ties."""
    return {
        "dtype": dtype,
        "baseline": baseline,
        "same": total - len(found),
        "excused": sum(d.near_tie for d in found),
        "total": total,
        "worst_margin": max((d.margin for d in found), default=None),
    }


def as_rows(found: Sequence[FirstDifference]) -> list[dict[str, Any]]:
    return [asdict(d) for d in found]


@torch.inference_mode()
def plain_decode(
    model: PreTrainedModel,
    prompt: list[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    stop_ids: tuple[int, ...],
    index: int = 0,
) -> list[int]:
    """The tokens that follow `prompt`, a stop token included; index: the prompt's global number."""
    cache = DynamicCache(config=model.config)
    fed = list(prompt)
    tokens: list[int] = []
    while len(tokens) < params.max_new_tokens:
        out = model(torch.tensor([fed], device=model.device), past_key_values=cache)
        logits_V = params.transform(out.logits[0, -1, :vocab_size])
        position_1 = torch.tensor([len(prompt) + len(tokens)], device=model.device)
        race_1V = request_race(params, index, position_1, vocab_size)
        tokens.append(int(choose(logits_V, None if race_1V is None else race_1V[0])))
        if tokens[-1] in stop_ids:
            break
        fed = tokens[-1:]
    return tokens


@torch.inference_mode()
def top_two(
    model: PreTrainedModel,
    context: list[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    index: int,
) -> tuple[tuple[int, int], float]:
    """The best and second best token after `context` (prompt and answer so far) with the request's
    noise, and by how much the best one wins: log p - log E, greedy: the logits. In the model's
    dtype.
    """
    logits_V = model(torch.tensor([context], device=model.device)).logits[0, -1, :vocab_size]
    score_V = params.transform(logits_V)
    position_1 = torch.tensor([len(context)], device=model.device)
    race_1V = request_race(params, index, position_1, vocab_size)
    score_V = score_V if race_1V is None else score_V - race_1V[0]
    best = score_V.topk(2)
    first, second = best.indices.tolist()
    return (first, second), float(best.values[0] - best.values[1])
