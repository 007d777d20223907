"""What a round's forwards cost on this machine, for the policy that weighs them."""

from typing import Any

from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.measure import forward_call, graphed, median_times
from draftsmith.decode.policy import Costs
from draftsmith.decode.runner import Runner
from draftsmith.decode.tree_plan import Plan

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 5


def measured_costs(target: Runner, drafter: Drafter, plan: Plan, rows: int, context: int) -> Costs:
    """Median seconds of forwards of 1, 2, 4, ... tokens a row, up to the plan's nodes, after half
    of `context` tokens, or as many as leave the largest size room in the models' own contexts. A
    drafter without a model of its own costs nothing.
    """
    sizes = [size for size in SIZES if size < 2 * plan.nodes]
    runners: dict[str, Runner] = {"verify": target}
    if hasattr(drafter, "runner"):
        runners["draft"] = drafter.runner
    room = min(runner.context for runner in runners.values()) - sizes[-1]
    half = max(1, min(context // 2, room))
    calls = {}
    for name, runner in runners.items():
        at: dict[str, Any] = {"batch": rows, "context": half}
        at["pool"] = runner.pool(rows, half + sizes[-1])
        for n in sizes:
            calls[f"{name} {n}"] = graphed(forward_call(runner, length=n, **at), target.device)
    times = median_times(calls, target.device, REPEATS)
    return Costs(
        tuple(sizes),
        tuple(times[f"verify {n}"] for n in sizes),
        tuple(times.get(f"draft {n}", 0.0) for n in sizes),
    )
