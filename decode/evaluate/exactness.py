"""Is the output the plain decoder's, token by token? And where it isn't: a near-tie, or a bug?"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.decode.engine.request import Completion
from draftsmith.decode.report.schema import AnswerDifference, Count
from draftsmith.decode.sampling import SamplingParams, request_race

NEAR_TIE = 1e-4  # fp32 logits closer than this may be swapped by the rounding of another shape


def divergences(
    expected: Sequence[Completion],
    got: Sequence[Completion],
    exact_target: PreTrainedModel,
    params: SamplingParams,
    *,
    vocab_size: int,
    dtype: str,
    baseline: str = "native",
) -> list[AnswerDifference]:
    """Every prompt whose two answers differ, with the margins of `exact_target` (fp32) there."""
    found = []
    double: PreTrainedModel | None = None
    for want, have in zip(expected, got, strict=True):
        if want.tokens == have.tokens:
            continue
        at = first_difference(want.tokens, have.tokens)
        request = want.prompt_tokens + want.tokens[:at], params, vocab_size, want.index
        _, margin = top_two(exact_target, *request)
        near = margin < NEAR_TIE
        if near:
            double = double or copy.deepcopy(exact_target).double()
            best, margin_64 = top_two(double, *request)
            pair = {*want.tokens[at : at + 1], *have.tokens[at : at + 1]}
            near = margin_64 < NEAR_TIE and pair == best
        place = Count(want.index), Count(at)
        found.append(AnswerDifference(*place, dtype, margin, near, baseline))
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first index at which two sequences differ; the length of one that begins the other."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))


def verdict(
    found: Sequence[AnswerDifference], total: int, *, dtype: str, baseline: str
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


@torch.inference_mode()
def top_two(
    model: PreTrainedModel, context: list[int], params: SamplingParams, vocab_size: int, index: int
) -> tuple[set[int], float]:
    """The two best tokens after `context` (prompt and answer so far) with the request's noise, and
    by how much the best one wins: log p - log E, greedy: the logits. In the model's dtype.
    """
    logits_V = model(torch.tensor([context], device=model.device)).logits[0, -1, :vocab_size]
    score_V = params.transform(logits_V)
    position_1 = torch.tensor([len(context)], device=model.device)
    race_1V = request_race(params, index, position_1, vocab_size)
    best = (score_V if race_1V is None else score_V - race_1V[0]).topk(2)
    return set(best.indices.tolist()), float(best.values[0] - best.values[1])
