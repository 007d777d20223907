"""What is measured apart from the decoding loop: isolated forwards, and teacher-forced acceptance.

Shapes: B rows, N tokens, T positions, V vocabulary.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.drafters.base import Admitted, Drafter, Round
from draftsmith.decode.drafters.lm import LMDrafter
from draftsmith.decode.graphs import WARM_UP, CudaRecorder
from draftsmith.decode.kv import KVPool
from draftsmith.decode.request import Completion
from draftsmith.decode.runner import Runner, Seen, round_up
from draftsmith.decode.sampling import SamplingParams, choose, request_race
from draftsmith.decode.token_tree import COUPLED
from draftsmith.decode.tree_plan import DynamicTree, Plan

REPEATS = 50


Call = Callable[[], object]


def isolated_times(
    target: Runner,
    drafter: Drafter,
    plan: Plan,
    *,
    batch: int,
    context: int,
    prompt: int,
    nodes: int,
) -> dict[str, Any]:
    """Median seconds of the forwards a round is made of; the report's `times`.

    Args:
        plan: the tree that is drafted: of its tokens a draft call feeds those of one level.
        batch, context, prompt: rows, tokens in the KV, tokens of a prompt: the run's means.
        nodes: tokens of a round's verification, the root included: the run's mean.
    """
    at: dict[str, Any] = {"batch": batch, "context": context}
    calls = {
        "plain": forward_call(target, length=1, **at),
        "verify": forward_call(target, length=nodes, tree=not plan.is_chain, **at),
    }
    if isinstance(drafter, LMDrafter):
        calls["draft"] = forward_call(drafter.runner, length=fed(plan), **at)
        calls["extend"] = forward_call(drafter.runner, length=2, **at)
    else:
        calls["draft"] = propose_call(drafter, plan, **at, device=target.device)
    calls = {name: graphed(call, target.device) for name, call in calls.items()}
    calls["prefill"] = prefill_call(target, batch=batch, length=prompt)
    times: dict[str, Any] = {"extend": None} | median_times(calls, target.device)
    if not isinstance(drafter, LMDrafter):
        times["draft"] /= plan.levels
    return times


@torch.inference_mode()
def graphed(call: Call, device: torch.device) -> Call:
    """On CUDA a recording of the call, as rounds run there; elsewhere the call itself."""
    if device.type != "cuda":
        return call
    for _ in range(WARM_UP):
        call()
    replay = CudaRecorder()(call)

    def again(held: Call = call) -> object:
        """Replays; a recording keeps none of the tensors that it reads, the held call does."""
        return replay()

    return again


def fed(plan: Plan) -> int:
    """Tokens that a draft call feeds, the mean over the levels of a tree; of a chain 1."""
    if isinstance(plan, DynamicTree):
        return plan.width
    return round(len(set(plan.parents[1:])) / plan.levels)


def forward_call(
    runner: Runner,
    *,
    batch: int,
    length: int,
    context: int,
    tree: bool = False,
    pool: KVPool | None = None,
) -> Call:
    """One forward, LM head included, of `length` tokens a row after `context` tokens: a chain, or a
    tree whose tokens see the first one and themselves (its form doesn't change the work).

    pool: to use, of `batch` rows and at least `context + length` slots; else one of its own.
    """
    pool = runner.pool(batch, context + length) if pool is None else pool
    device = runner.device
    tokens_BN = torch.ones(batch, length, dtype=torch.int64, device=device)
    lens_B = torch.full((batch,), context, device=device)
    step_N = torch.arange(length, device=device)
    slots_BN = lens_B[:, None] + step_N
    width = min(round_up(context + length), pool.slots)
    seen, positions_BN = Seen(lens_B, width), slots_BN
    if tree:
        depth_N = step_N.clamp(max=1)
        seen = Seen(lens_B, width, torch.eye(length, device=device).bool() | (step_N == 0), depth_N)
        positions_BN = lens_B[:, None] + depth_N

    def call() -> None:
        states = runner.verify(pool, tokens_BN, positions_BN, slots_BN, seen)
        runner.logits(states.hidden_BNH)

    return call


def propose_call(
    drafter: Drafter, plan: Plan, *, batch: int, context: int, device: torch.device
) -> Call:
    """One proposal after `context` equal tokens, from a state of its own."""
    drafter = copy.copy(drafter)  # a decoder may be using the drafter's own state
    rows_B = torch.arange(batch, device=device)
    lens_B = torch.full((batch,), context, device=device)
    ones_BN = torch.ones(batch, context, dtype=torch.int64, device=device)
    drafter.reset(batch, round_up(context + plan.slots + 1))
    drafter.prefill(Admitted(rows_B, ones_BN, lens_B, ones_BN[:, 0]))
    request = Round(
        plan=plan,
        lens_B=lens_B,
        pending_B=ones_BN[:, 0],
        active_B=torch.ones_like(lens_B, dtype=torch.bool),
        top=context,
        params=SamplingParams(),
        law=COUPLED,
        race_BDV=None,
        seeds_B=None,
    )
    return lambda: drafter.propose(request)


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
    target: Runner, drafter: LMDrafter, completions: list[Completion], params: SamplingParams
) -> list[TeacherForced]:
    """Acceptance on the contexts that the target itself wrote (`completions`, of plain decoding).

    alpha is sum_v min(p, q) after the transform, at temperature 0 the agreement of argmaxes;
    coupled is whether both pick the same token with the request's own noise.
    """
    results = []
    for completion in completions:
        ids_1T = torch.tensor([completion.prompt_tokens + completion.tokens], device=target.device)
        first = len(completion.prompt_tokens)
        p_TV, q_TV = (
            full_logits(runner, ids_1T, params)[0, first - 1 : -1]
            for runner in (target, drafter.runner)
        )
        results.append(_one(p_TV, q_TV, first, completion.index, params))
    return results


def full_logits(runner: Runner, ids_BT: Tensor, params: SamplingParams) -> Tensor:
    """Transformed logits [B, T, V] of right-padded rows, in one causal pass."""
    hidden_BTH = runner.body(input_ids=ids_BT, use_cache=False).last_hidden_state
    return params.transform(runner.logits(hidden_BTH))


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
