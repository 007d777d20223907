"""What a drafter's answers are: plain decoding's, token by token? If not: by a near-tie, or a bug?

And how good: exact match on worked maths, agreement with the plain answers. A lossy run changes the
answers, so its tau is shown beside one of these, never alone.
"""

import copy
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.metrics import paired_difference, ratio_interval
from draftsmith.decode.prompts.prompts import Prompt
from draftsmith.decode.report.schema import AnswerDifference
from draftsmith.decode.sampling import SamplingParams, request_race

NEAR_TIE = 1e-4  # fp32 logits closer than this may be swapped by the rounding of another shape
TASKS = ("", "gsm8k")
MARK = "####"  # GSM8K's worked answers end in a line "#### 18"
# A sign counts where nothing stands before it that it could be subtracted from.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-+\u2212])?[$\u20ac\u00a3]?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)"
)


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
            if double is None:  # a target in several processes stays as it is
                split = hasattr(exact_target, "leader")
                double = exact_target if split else copy.deepcopy(exact_target).double()
            best, margin_64 = top_two(double, *request)
            pair = {*want.tokens[at : at + 1], *have.tokens[at : at + 1]}
            near = margin_64 < NEAR_TIE and pair == best
        words = {"dtype": dtype, "baseline": baseline}
        new = AnswerDifference(
            prompt=want.index, position=at, margin=margin, near_tie=near, **words
        )
        found.append(new)
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


def final_number(text: str) -> Decimal | None:
    """The number an answer ends in: after the first #### that has one, else the last of the text;
    None without any. Commas between thousands, currencies, and zeros after the point are nothing.
    """
    marked = [NUMBER.match(part.lstrip()) for part in text.split(MARK)[1:]]
    found = next(filter(None, [*marked, *reversed(list(NUMBER.finditer(text)))]), None)
    if found is None:
        return None
    value = Decimal(found["digits"].replace(",", ""))
    return -value if found["sign"] in ("-", "\u2212") else value


def known_answer(prompt: Prompt) -> Decimal | None:
    """What a right answer ends in, where the prompt's own has a #### line."""
    return final_number(prompt.answer) if MARK in prompt.answer else None


def exact_match(
    prompts: Sequence[Prompt],
    plain: Sequence[Sequence[Completion]],
    spec: Sequence[Sequence[Completion]],
) -> dict[str, Any] | None:
    """The report's `task` entry, over the prompts whose known answer has a #### line; None where no
    prompt has. plain, spec: the answers to each prompt's turns, of which the first counts.
    """
    rows = [
        [float(final_number(turns[0].text) == known) for turns in answers]
        for prompt, *answers in zip(prompts, plain, spec, strict=True)
        if (known := known_answer(prompt)) is not None
    ]
    if not rows:
        return None
    before, after = zip(*rows, strict=True)
    n, ones = len(rows), [1.0] * len(rows)
    difference, interval = paired_difference((after, ones), (before, ones))
    return {
        "name": "gsm8k",
        "n": n,
        "plain": sum(before) / n,
        "speculative": sum(after) / n,
        "difference": difference,
        "difference_interval": interval,
    }


def agreement(
    plain: Sequence[Sequence[Completion]], spec: Sequence[Sequence[Completion]]
) -> dict[str, Any]:
    """The report's `agreement` entry, of the answers to each prompt's turns."""
    same, longer = [], []
    for answers in zip(plain, spec, strict=True):
        pairs = [(p.tokens, s.tokens) for p, s in zip(*answers, strict=True)]
        same.append(float(sum(first_difference(*pair) for pair in pairs)))
        longer.append(float(sum(max(map(len, pair)) for pair in pairs)))
    return {"share": sum(same) / sum(longer), "interval": ratio_interval(same, longer)}
