"""What a round's forwards cost on this machine, for the policy that weighs them."""

from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.measure import forward_call, median_times
from draftsmith.decode.policy import Costs
from draftsmith.decode.runner import Runner
from draftsmith.decode.tree_plan import Plan

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 5


def measured_costs(target: Runner, drafter: Drafter, plan: Plan, rows: int, context: int) -> Costs:
    """Median seconds of forwards of 1, 2, 4, ... tokens a row, up to the plan's nodes, after half
    of `context` tokens. A drafter without a model of its own costs nothing.
    """
    half = max(1, context // 2)
    sizes = [size for size in SIZES if size < 2 * plan.nodes]
    calls = {f"verify {n}": forward_call(target, batch=rows, length=n, context=half) for n in sizes}
    draft = getattr(drafter, "runner", None)
    if draft is not None:
        for n in sizes:
            calls[f"draft {n}"] = forward_call(draft, batch=rows, length=n, context=half)
    times = median_times(calls, target.device, REPEATS)
    return Costs(
        tuple(sizes),
        tuple(times[f"verify {n}"] for n in sizes),
        tuple(times.get(f"draft {n}", 0.0) for n in sizes),
    )
