"""What the forwards of a round cost on this machine, measured apart from the decoding loop.

Shapes: B rows, N tokens, F nodes fed, L = D + 1 tokens that one round can emit, U width of the
taps' states side by side.
"""

import copy
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from draftsmith.decode.drafting.base import Admitted, Drafter, Frontier, Kept, Round
from draftsmith.decode.forward.kv import KVPool, round_up
from draftsmith.decode.forward.runner import WARM_UP, CudaRecorder, Runner, Seen
from draftsmith.decode.policies.policy import Costs
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import COUPLED
from draftsmith.decode.tree_shapes import Plan, chain_plan

REPEATS, SHORT = 50, 25
TURNS, LEAST, LONGEST = 100, 12, 20.0  # of `least_times`: turns, and seconds for all of them
SANE, TRIES = 0.7, 3  # of the time of one token: what no larger pass takes less than
LEVELS = 5  # of the chain by which a level's share is found
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # tokens a row, of `measured_costs`

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
    """Seconds (`least_times`) of the forwards a round is made of; the report's `times`. draft: the
    mean of a round's draft calls; extend: the pass by which heads take the round's states in, None
    for drafters without taps.

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
        by = chain_call if plan.is_chain and drafter.native is not None else draft_call
        calls["draft"] = by(twin, plan.fed, **at, device=target.device)
        if drafter.taps:
            calls["extend"] = extend_call(twin, target, plan.levels + 1, **at)
    calls = recorded(calls, target, drafter)
    calls["prefill"] = prefill_call(target, batch=batch, length=prompt)
    times: dict[str, Any] = {"extend": None} | least_times(calls, target.device, SHORT)
    times["draft"] /= plan.levels
    return times


def recorded(calls: dict[Any, Call], target: Runner, drafter: Drafter) -> dict[Any, Call]:
    """The calls as `graphed`, where they can be: a split target's followers hear of no replay."""
    if drafter.host or target.leader is not None:
        return calls
    return {name: graphed(call, target.device) for name, call in calls.items()}


def measured_costs(
    target: Runner,
    drafter: Drafter,
    plan: Plan,
    rows: int,
    context: int,
    passes: Collection[int] = (),
) -> Costs:
    """Seconds (`least_times`) of forwards of 1, 2, 4, ... tokens a row, up to the plan's nodes,
    after half of `context` tokens, or as many as leave the largest size room in the models' own
    contexts. A drafter without a model of its own costs nothing. passes: further sizes of the
    target's pass, whose time grows by steps, not evenly, where its products do. ValueError: times
    that can't be true.

    A draft call of so many nodes is the second one of a round: heads know the root's law before any
    is fed; what a round spends on that is spent in `extend`. Of drafters of one pass the first call
    is timed too, with `extend`.
    """
    sizes = tuple(size for size in SIZES if size < 2 * plan.nodes)
    room = min(target.context, drafter.context) - max(sizes[-1], LEVELS) - 1
    half = max(1, min(context // 2, room))
    slots = half + 1 + max(sizes[-1], LEVELS)
    pool = target.pool(rows, slots)
    at: dict[str, Any] = {"batch": rows, "context": half}
    nodes = sorted({*sizes, *passes})
    calls: dict[Any, Call] = {n: forward_call(target, length=n, pool=pool, **at) for n in nodes}
    if drafter.size is not None:
        twin = with_room(drafter, rows, slots)
        for n in sizes:
            fed = (*[1] * drafter.stride, n) if drafter.levels > drafter.stride else (1,)
            calls["draft", n] = LastDraftCall(twin, fed, device=target.device, **at)
        if drafter.native is not None:
            for levels in (1, LEVELS):
                calls["chain", levels] = chain_call(twin, (1,) * levels, device=target.device, **at)
        if drafter.one_pass:
            calls["first"] = LastDraftCall(twin, (1,), plan, device=target.device, **at)
            calls["extend"] = extend_call(twin, target, plan.levels + 1, **at)
    calls = recorded(calls, target, drafter)
    for _ in range(TRIES):
        times = least_times(calls, target.device)
        least = min(times[n] for n in nodes)
        if least >= SANE * times[1]:
            break
    else:
        raise ValueError(
            f"costs: measured {1e3 * times[1]:.3g} ms for one token a row and {1e3 * least:.3g} ms "
            f"for more, {TRIES} times over, which can't be; expected a steady machine: stop what "
            "else runs, or give each process its own cores (threads=1)"
        )
    level = None
    if drafter.native is not None:
        level = max(0.0, times["chain", LEVELS] - times["chain", 1]) / (LEVELS - 1)
    drafts = [times.get(("draft", n), 0.0) / drafter.stride for n in sizes]
    first = times["first"] + times["extend"] if drafter.one_pass else None
    between = tuple(float(draft) for draft in np.interp(nodes, sizes, drafts))
    return Costs(tuple(nodes), tuple(times[n] for n in nodes), between, first, level)


@torch.inference_mode()
def graphed(call: Call, device: torch.device) -> Call:
    """On CUDA a recording of the call, as rounds run there; elsewhere the call itself."""
    if device.type != "cuda":
        return call
    if isinstance(call, LastDraftCall):
        call.ready()  # once: replays read what it left
    for _ in range(WARM_UP):
        call()
    replay = CudaRecorder()(call)

    def again(held: Call = call) -> object:  # a recording keeps none of what it reads; `held` does
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
    tree whose tokens see the first one and themselves (its form doesn't change the work). pool: one
    with room for them, else one of its own.
    """
    pool = runner.pool(batch, context + length) if pool is None else pool
    tokens_BN = torch.ones(batch, length, dtype=torch.int64, device=runner.device)
    lens_B = torch.full((batch,), context, device=runner.device)
    step_N = depth_N = torch.arange(length, device=runner.device)
    block = None
    if tree:
        depth_N, block = step_N.clamp(max=1), (step_N == 0) | (step_N == step_N[:, None])
    seen = Seen(lens_B, min(round_up(context + length), pool.slots), block, depth_N)
    positions_BN, slots_BN = lens_B[:, None] + depth_N, lens_B[:, None] + step_N

    def call() -> None:
        hidden_BNH, _ = runner.verify(pool, tokens_BN, positions_BN, slots_BN, seen)
        runner.logits(hidden_BNH)

    return call


def with_room(drafter: Drafter, rows: int, slots: int) -> Drafter:
    """The drafter with a state of its own: a decoder may be using the one it has."""
    twin = copy.copy(drafter)
    twin.reset(rows, slots)
    return twin


def draft_call(twin: Drafter, fed: Sequence[int], **at: Any) -> Call:
    """The draft calls of one round, as `LastDraftCall` describes them."""
    last = LastDraftCall(twin, fed, **at)

    def call() -> None:
        last.ready()
        last()

    return call


def chain_call(
    twin: Drafter, fed: Sequence[int], *, batch: int, context: int, device: torch.device
) -> Call:
    """A chain of so many levels, as a round drafts it."""
    request = round_of(chain_plan(len(fed)), batch, context, device)
    return lambda: twin.propose(request)


class LastDraftCall:
    """The last of a round's draft calls after `context` tokens; `ready` makes those before it. They
    feed so many nodes a row at each level, children of the root that see it and themselves (their
    form doesn't change the work). plan: that the round asks for, by default just these levels.
    """

    def __init__(
        self,
        twin: Drafter,
        fed: Sequence[int],
        plan: Plan | None = None,
        *,
        batch: int,
        context: int,
        device: torch.device,
    ) -> None:
        plan = plan or chain_plan(len(fed))
        request = round_of(plan, batch, context, device)
        self.twin = twin
        self.request = replace(request, top=context + max(sum(fed), plan.slots))
        self.frontiers = []
        for depth, nodes in enumerate(fed):
            slot_M = torch.arange(sum(fed[: depth + 1]), device=device)
            tokens_BF = torch.ones(batch, nodes, dtype=torch.int64, device=device)
            frontier = Frontier(depth, tokens_BF, None, slot_M[-nodes:])
            if depth and max(fed) > 1:
                block_FM = (slot_M == 0) | (slot_M == frontier.slot_F[:, None])
                of_BF, depth_M = torch.zeros_like(tokens_BF), slot_M.clamp(max=1)
                frontier = frontier._replace(of_BF=of_BF, block=block_FM, depth_M=depth_M)
            self.frontiers.append(frontier)

    def ready(self) -> None:
        """Make the calls before it, from the state that the drafter has of its rows."""
        feed = self.twin.feed(self.request)
        assert feed is not None, f"a drafter of kind {self.twin.kind} has a model, no draft calls"
        for frontier in self.frontiers[:-1]:
            feed(frontier)
        self.feed = feed

    def __call__(self) -> None:
        self.feed(self.frontiers[-1])


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
    ones_B = torch.ones_like(lens_B)
    return Round(plan, lens_B, ones_B, ones_B.bool(), context, SamplingParams(), COUPLED)


def prefill_call(runner: Runner, *, batch: int, length: int) -> Call:
    """A prefill of `batch` prompts of `length` tokens."""
    pool = runner.pool(batch, length)
    tokens_BN = torch.ones(batch, length, dtype=torch.int64, device=runner.device)
    rows_B = torch.arange(batch, device=runner.device)
    lens_B = torch.full((batch,), length, device=runner.device)
    return lambda: runner.prefill(pool, rows_B, tokens_BN, lens_B)


@torch.inference_mode()
def median_times(
    calls: dict[Any, Call], device: torch.device, repeats: int = REPEATS
) -> dict[Any, float]:
    """Median seconds of each call, in turns of six in a row so that a machine's drift falls on all
    alike; the first of each turn finds the caches as another call left them and is not counted.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    while min(map(len, seconds.values())) < repeats:
        for name, call in calls.items():
            seconds[name] += [clocked(call, device) for _ in range(6)][1:]
    return {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}


@torch.inference_mode()
def least_times(
    calls: dict[Any, Call], device: torch.device, turns: int = TURNS
) -> dict[Any, float]:
    """What each call takes while nothing else runs: the least of its seconds in many short turns,
    two in a row after one that isn't counted. Six measurements each on a machine shared by six: by
    medians c differed by 98% (a draft LM) and 65% (EAGLE-3), by the least of the same calls by 7%
    and 10%, by lowest deciles by 7% and 14%.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    ends = time.perf_counter() + LONGEST
    for turn in range(turns):
        if turn >= LEAST and time.perf_counter() > ends:
            break
        for name, call in calls.items():
            seconds[name] += [clocked(call, device) for _ in range(3)][1:]
    return {name: min(values) for name, values in seconds.items()}


def clocked(call: Call, device: torch.device) -> float:
    """Seconds of a call, to the end of what it began on the device; of a last draft call without
    those before it.
    """
    if isinstance(call, LastDraftCall):
        call.ready()
        synchronise(device)
    started = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - started


def synchronise(device: torch.device) -> None:
    """Wait for what was begun on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
