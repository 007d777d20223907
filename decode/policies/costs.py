"""What a round's forwards cost on this machine, for the policy that weighs them."""

from typing import Any

from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.policies.policy import Costs
from draftsmith.decode.policies.timing import (
    Call,
    draft_call,
    forward_call,
    graphed,
    median_times,
    with_room,
)
from draftsmith.decode.tree_shapes import Plan

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 5


def measured_costs(target: Runner, drafter: Drafter, plan: Plan, rows: int, context: int) -> Costs:
    """Median seconds of forwards of 1, 2, 4, ... tokens a row, up to the plan's nodes, after half
    of `context` tokens, or as many as leave the largest size room in the models' own contexts. A
    drafter without a model of its own costs nothing.

    A draft call of so many nodes is the second one of a round less the first: heads know the root's
    law before any is fed; what a round spends on that is spent in `extend`.
    """
    sizes = [size for size in SIZES if size < 2 * plan.nodes]
    room = min(target.context, drafter.context) - sizes[-1] - 1
    half = max(1, min(context // 2, room))
    slots = half + 1 + sizes[-1]
    pool = target.pool(rows, slots)
    calls: dict[str, Call] = {}
    at: dict[str, Any] = {"batch": rows, "context": half}
    for n in sizes:
        calls[f"verify {n}"] = forward_call(target, length=n, pool=pool, **at)
    if drafter.size is not None:
        twin = with_room(drafter, rows, slots)
        for n in (0, *sizes):
            fed = (1, n)[: 1 + (n > 0 and drafter.levels > 1)]
            calls[f"draft {n}"] = draft_call(twin, fed, device=target.device, **at)
    times = median_times(
        {name: graphed(call, target.device) for name, call in calls.items()}, target.device, REPEATS
    )
    first = times.get("draft 0", 0.0) if drafter.levels > 1 else 0.0
    return Costs(
        tuple(sizes),
        tuple(times[f"verify {n}"] for n in sizes),
        tuple(max(times.get(f"draft {n}", 0.0) - first, 0.0) for n in sizes),
    )
