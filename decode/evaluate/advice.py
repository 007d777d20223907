"""How many tokens to draft with this drafter, here: what every depth would give, from what was run.

    speed-up(k) = measured speed-up x tau(k) / tau x t(round as run) / t(round of depth k)
    tau(k)      = 1 + sum over i <= k of the share of rounds that kept at least i drafted tokens

K = 0 is plain decoding. Times are those of isolated forwards (policies/timing.py); what the loop
adds to them is in the measured speed-up, and taken to grow with the round. Depths that weren't
drafted are foretold by the conditional acceptance of the last that was. The best depth is then run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draftsmith.decode.evaluate import metrics, speed
from draftsmith.decode.evaluate.arms import Arm, Arms, Evaluation, Loaded, time_arms
from draftsmith.decode.policies.policy import Costs
from draftsmith.decode.policies.timing import measured_costs
from draftsmith.decode.prompts.prompts import Prompt
from draftsmith.decode.tree_shapes import Plan, chain_plan

Values = dict[str, Any]
BEYOND = 4  # depths foretold past those that were drafted


@dataclass(frozen=True)
class Depths:
    """What a run says of every depth. kept_GD, reached_GD: by group and depth, rounds that kept, or
    drafted, as many levels; cost_K: seconds of a round of each depth, those beyond D foretold.
    """

    kept_GD: np.ndarray
    reached_GD: np.ndarray
    cost_K: np.ndarray

    def taus(self, groups: np.ndarray) -> np.ndarray:
        """tau of each depth from 1 on, over some of the groups."""
        share_D = self.kept_GD[groups].sum(0) / self.reached_GD[groups].sum(0).clip(1)
        last = share_D[-1] / share_D[-2] if len(share_D) > 1 and share_D[-2] else share_D[-1]
        beyond = range(1, len(self.cost_K) - len(share_D) + 1)
        return 1 + np.cumsum([*share_D, *(share_D[-1] * last**k for k in beyond)])

    def gains(self, groups: np.ndarray) -> np.ndarray:
        """Tokens a second of each depth, as a multiple of those of the depth that was run."""
        rate_K = self.taus(groups) / self.cost_K
        return rate_K / rate_K[self.kept_GD.shape[1] - 1]


def advise(
    settings: Evaluation,
    pair: Loaded,
    name: str,
    prompts: Sequence[Prompt],
    timed: Arms,
    tick: Callable[[], None],
) -> Values | None:
    """The report's `advice`: `depths` (K, tau, foretold speed-up, its 95% interval over prompts or
    batches), the `best` K, what was then measured with it, and `says`, a sentence for a user. None
    for a policy that chooses its own depths.
    """
    plan, drafter = pair.decoding[name].plan, pair.drafters[name]
    if settings.policy != "fixed" or plan.levels < 1:
        return None
    spec, plain = timed[name], timed[None]
    plans = [plan.cut(k) for k in range(1, plan.levels + 1)]
    if plan.is_chain:
        deepest = min(plan.levels + BEYOND, drafter.levels)
        plans += [chain_plan(k) for k in range(plan.levels + 1, deepest + 1)]
    costs = costs_of(settings, pair, name, spec, plans[-1])
    cost_K = np.array([costs.of(one) for one in plans])
    found = counted(spec, settings.batch_size, plan.levels, cost_K)

    def speedups(groups: np.ndarray) -> np.ndarray:
        return speed.speedup(plain, spec, groups) * found.gains(groups)

    every = np.arange(len(found.kept_GD))
    between = metrics.bootstraps(speedups, len(every)) if len(every) > 1 else None
    depths: list[Values] = [{"K": 0, "tau": 1.0, "speedup": 1.0, "interval": None}]
    for k, (tau, speedup) in enumerate(zip(found.taus(every), speedups(every), strict=True)):
        told = {"K": k + 1, "tau": float(tau), "speedup": float(speedup)}
        depths.append(told | {"interval": None if between is None else between[:, k].tolist()})
    best = max(depths, key=lambda one: one["speedup"])
    if best["K"] not in (0, plan.levels):
        decoding = {name: replace(pair.decoding[name], K=best["K"])}
        alone = replace(pair, drafters={name: drafter}, decoding=decoding)
        again = time_arms(replace(settings, baseline="native"), alone, prompts, tick)
        spec, plain = again[name], again[None]
    measured: Values = speed.speedups(plain, spec, settings.batch_size) if best["K"] else {}
    advice: Values = {"depths": depths, "best": best["K"], "foretold": best["speedup"]}
    advice["measured"] = measured.get("speedup")
    advice["measured_interval"] = measured.get("speedup_interval")
    paid = f"draft K={best['K']}: {_speed_of(advice)}" if pays(advice) else ""
    return advice | {"says": paid or _why_not(advice, costs, plans[0])}


def costs_of(settings: Evaluation, pair: Loaded, name: str, spec: Arm, largest: Plan) -> Costs:
    """What rounds up to the largest cost at the run's mean context."""
    answers = spec.completions
    twice = sum(2 * len(c.prompt_tokens) + len(c.tokens) for c in answers) // len(answers)
    runner = pair.decoder(settings, None).runner
    return measured_costs(runner, pair.drafters[name], largest, settings.batch_size, twice)


def counted(spec: Arm, size: int, levels: int, cost_K: np.ndarray) -> Depths:
    """Of an arm that drafted `levels` levels, and whose prompts shared batches of `size`."""
    counters = spec.counters
    groups = [metrics.total(counters[i : i + size]) for i in range(0, len(counters), size)]
    kept_GD, reached_GD = np.zeros((2, len(groups), levels))
    for g, one in enumerate(groups):
        for i, rounds in enumerate(one.reached):
            kept_GD[g, i], reached_GD[g, i] = sum(one.histogram[i + 1 :]), rounds
    return Depths(kept_GD, reached_GD, cost_K)


def pays(advice: Values) -> bool:
    """Whether drafting is faster than plain decoding, as measured with the advised K."""
    return bool(advice["best"]) and advice["measured"] > 1


def _speed_of(found: Values) -> str:
    low_high = found["measured_interval"]
    between = f" [{low_high[0]:.2f}, {low_high[1]:.2f}]" if low_high else ""
    return (
        f"{found['measured']:.2f}{between} times as fast as plain decoding "
        f"(foretold {found['foretold']:.2f})"
    )


def _why_not(advice: Values, costs: Costs, first: Plan) -> str:
    """Whether acceptance or cost is nearer to where K = 1, by the tree `first`, breaks even."""
    tau, speedup = advice["depths"][1]["tau"], advice["depths"][1]["speedup"]
    plain_s, verify_s = costs.verify[0], costs.verifying(first)
    accepted, c = tau - 1, (costs.of(first) - verify_s) / plain_s
    # A round takes tau / speed-up plain steps; what the loop adds to isolated forwards is a factor.
    wanted = tau / speedup - 1
    c_wanted = speedup * costs.of(first) / plain_s - verify_s / plain_s
    ways = []
    if 0 < wanted < 1:
        more = f"keep {100 * wanted:.0f}% of its first tokens, not {100 * accepted:.0f}%"
        says = f"it is accepted too seldom: it would have to {more}"
        ways.append((wanted / max(accepted, 1e-9), says))
    if c > 0 and c_wanted > 0:
        less = f"c = {c_wanted:.2f} of a plain step, not {c:.2f}"
        ways.append((c / c_wanted, f"a draft call costs too much: it would have to be {less}"))
    why = ", or ".join(way for _, way in sorted(ways)) or "a pass over two tokens costs too much"
    tried = f" (K={advice['best']}: {_speed_of(advice)})" if advice["best"] else ""
    return f"drafting doesn't pay here{tried}: {why}"
