"""What is measured apart from the decoding loop: isolated forwards, and teacher-forced acceptance.

Shapes: B rows, N tokens, F nodes fed, T positions, L = D + 1 tokens that one round can emit, U
width of the taps' states side by side, V vocabulary.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from draftsmith.decode.drafters.base import Admitted, Drafter, Frontier, Kept, Round
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.recording import WARM_UP, CudaRecorder
from draftsmith.decode.forward.runner import Runner, Seen, round_up
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import COUPLED
from draftsmith.decode.tree_shapes import Plan, chain_plan

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

    draft: the mean of a round's draft calls; extend: the pass by which heads take the round's
    states in, None for drafters without taps.

    plan: the tree that is drafted; batch, context, prompt, nodes: the run's mean rows, tokens in
    the KV, tokens of a prompt, and tokens of a round's verification, the root included.
    """
    at: dict[str, Any] = {"batch": batch, "context": context}
    calls = {
        "plain": forward_call(target, length=1, **at),
        "verify": forward_call(target, length=nodes, tree=not plan.is_chain, **at),
    }
    if drafter.size is None:
        calls["draft"] = propose_call(drafter, plan, **at, device=target.device)
    else:
        twin = with_room(drafter, batch, context + plan.slots + 1)
        calls["draft"] = draft_call(twin, plan.fed, **at, device=target.device)
        if drafter.taps:
            calls["extend"] = extend_call(twin, target, plan.levels + 1, **at)
    calls = {name: graphed(call, target.device) for name, call in calls.items()}
    calls["prefill"] = prefill_call(target, batch=batch, length=prompt)
    times: dict[str, Any] = {"extend": None} | median_times(calls, target.device)
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
    tree whose tokens see the first one and themselves (its form doesn't change the work). pool: to
    use, of `batch` rows and at least `context + length` slots; else one of its own.
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


def with_room(drafter: Drafter, rows: int, slots: int) -> Drafter:
    """The drafter with a state of its own: a decoder may be using the one it has."""
    twin = copy.copy(drafter)
    twin.reset(rows, slots)
    return twin


def draft_call(
    twin: Drafter, fed: Sequence[int], *, batch: int, context: int, device: torch.device
) -> Call:
    """The draft calls of one round after `context` tokens; they feed so many nodes a row at each
    level, children of the root that see it and themselves (their form doesn't change the work).
    """
    request = round_of(chain_plan(len(fed)), batch, context, device)
    request = replace(request, top=context + sum(fed))
    frontiers, before = [], 0
    for depth, nodes in enumerate(fed):
        tokens_BF = torch.ones(batch, nodes, dtype=torch.int64, device=device)
        slot_F = before + torch.arange(nodes, device=device)
        before += nodes
        frontier = Frontier(depth, tokens_BF, None, slot_F)
        if depth and max(fed) > 1:
            slot_M = torch.arange(before, device=device)
            block_FM = (slot_M == 0) | (slot_M == slot_F[:, None])
            of_BF, depth_M = torch.zeros_like(tokens_BF), slot_M.clamp(max=1)
            frontier = Frontier(depth, tokens_BF, of_BF, slot_F, block_FM, depth_M)
        frontiers.append(frontier)

    def call() -> None:
        feed = twin.feed(request)
        assert feed is not None, f"a drafter of kind {twin.kind} has a model and no draft calls"
        for frontier in frontiers:
            feed(frontier)

    return call


def extend_call(twin: Drafter, target: Runner, window: int, *, batch: int, context: int) -> Call:
    """Taking in a round that kept `window` tokens after `context` ones."""
    width, device = len(twin.taps) * target.config.hidden_size, target.device
    tokens_BL = torch.ones(batch, window, dtype=torch.int64, device=device)
    taps_BLU = torch.ones(batch, window, width, dtype=target.dtype, device=device)
    lens_B = torch.full((batch,), context, device=device)
    kept = Kept(tokens_BL, torch.full_like(lens_B, window), None, lens_B, taps_BLU, context)
    return lambda: twin.extend(kept)


def propose_call(
    drafter: Drafter, plan: Plan, *, batch: int, context: int, device: torch.device
) -> Call:
    """One proposal after `context` equal tokens, from a state of its own."""
    twin = with_room(drafter, batch, context + plan.slots + 1)
    request = round_of(plan, batch, context, device)
    ones_BN = torch.ones(batch, context, dtype=torch.int64, device=device)
    rows_B = torch.arange(batch, device=device)
    twin.prefill(Admitted(rows_B, ones_BN, request.lens_B, request.pending_B))
    return lambda: twin.propose(request)


def round_of(plan: Plan, batch: int, context: int, device: torch.device) -> Round:
    """A greedy round of rows of `context` tokens."""
    lens_B = torch.full((batch,), context, device=device)
    return Round(
        plan=plan,
        lens_B=lens_B,
        pending_B=torch.ones_like(lens_B),
        active_B=torch.ones_like(lens_B, dtype=torch.bool),
        top=context,
        params=SamplingParams(),
        law=COUPLED,
        race_BDV=None,
        seeds_B=None,
    )


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
