"""What is measured apart from the decoding loop: isolated forwards, and teacher-forced acceptance.

Shapes: B rows, N tokens, T positions, V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.decode.drafters.lm import LMDrafter
from draftsmith.decode.request import Completion
from draftsmith.decode.runner import Runner, Seen, round_up
from draftsmith.decode.sampling import (
    SamplingParams,
    choose,
    request_race,
    transform,
)

REPEATS = 50


Call = Callable[[], object]


def forward_call(runner: Runner, *, batch: int, length: int, context: int) -> Call:
    """One forward, LM head included, of `length` tokens a row after `context` tokens."""
    pool = runner.pool(batch, context + length)
    tokens_BN = torch.ones(batch, length, dtype=torch.int64, device=runner.device)
    lens_B = torch.full((batch,), context, device=runner.device)
    positions_BN = lens_B[:, None] + torch.arange(length, device=runner.device)
    width = min(round_up(context + length), pool.slots)

    def call() -> None:
        seen = Seen(lens_B, width)
        runner.logits(runner.verify(pool, tokens_BN, positions_BN, positions_BN, seen))

    return call


def prefill_call(runner: Runner, *, batch: int, length: int) -> Call:
    """A prefill of `batch` prompts of `length` tokens."""
    pool = runner.pool(batch, length)
    tokens_BN = torch.ones(batch, length, dtype=torch.int64, device=runner.device)
    rows_B = torch.arange(batch, device=runner.device)
    lens_B = torch.full((batch,), length, device=runner.device)
    return lambda: runner.prefill(pool, rows_B, tokens_BN, lens_B)


@torch.inference_mode()
def median_times(
    calls: dict[str, Call], device: torch.device, repeats: int = REPEATS
) -> dict[str, float]:
    """Median seconds of each call, in turns of six in a row so that a machine's drift falls on all
    alike; the first of each turn finds the caches as another call left them and is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    while min(map(len, seconds.values())) < repeats:
        for name, call in calls.items():
            for repeat in range(6):
                started = time.perf_counter()
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if repeat:
                    seconds[name].append(time.perf_counter() - started)
    return {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}


@dataclass(frozen=True)
class TeacherForced:
    """Of one prompt, over its answer's positions: the sum of alpha, of coupled agreement, their
    count.
    """

    alpha: float
    coupled: float
    positions: int


@torch.inference_mode()
def teacher_forced(
    target: Runner,
    drafter: LMDrafter,
    completions: list[Completion],
    params: SamplingParams,
    batch: int = 8,
) -> list[TeacherForced]:
    """Acceptance on the contexts that the target itself wrote (`completions`, of plain decoding).

    alpha is sum_v min(p, q) after the transform, at temperature 0 the agreement of argmaxes;
    coupled is whether both pick the same token with the request's own noise.
    """
    results = []
    for start in range(0, len(completions), batch):
        group = completions[start : start + batch]
        texts = [torch.tensor(c.prompt_tokens + c.tokens) for c in group]
        ids_BT = pad_sequence(texts, batch_first=True).to(target.device)
        p_BTV = full_logits(target, ids_BT, params)
        q_BTV = full_logits(drafter.runner, ids_BT, params)
        for row, completion in enumerate(group):
            first = len(completion.prompt_tokens)
            here = slice(first - 1, first - 1 + len(completion.tokens))
            results.append(
                _one(p_BTV[row, here], q_BTV[row, here], first, completion.index, params)
            )
    return results


def full_logits(runner: Runner, ids_BT: Tensor, params: SamplingParams) -> Tensor:
    """Transformed logits [B, T, V] of right-padded rows, in one causal pass."""
    hidden_BTH = runner.body(input_ids=ids_BT, use_cache=False).last_hidden_state
    logits_BTV = runner.logits(hidden_BTH)
    return transform(logits_BTV, params.temperature, params.top_k, params.top_p)


def _one(
    p_TV: Tensor, q_TV: Tensor, first: int, index: int, params: SamplingParams
) -> TeacherForced:
    length, vocab = p_TV.shape
    if params.greedy:
        agreed = float((p_TV.argmax(-1) == q_TV.argmax(-1)).sum())
        return TeacherForced(agreed, agreed, length)
    alpha = torch.minimum(p_TV.softmax(-1), q_TV.softmax(-1)).sum()
    positions_T = torch.arange(first, first + length, device=p_TV.device)
    race_TV = request_race(params, index, positions_T, vocab)
    coupled = (choose(p_TV, race_TV) == choose(q_TV, race_TV)).sum()
    return TeacherForced(float(alpha), float(coupled), length)
