"""How to draft with this drafter, here: what each depth, policy and tree would give.

    speed-up(way) = measured speed-up x tau(way) / tau x t(round as run) / t(round of that way)
    tau(k)        = 1 + sum over i <= k of the share of rounds that kept at least i drafted tokens

K = 0 is plain decoding. Depths are foretold from the run's counts, and by times of isolated
forwards (policies/timing.py); those that weren't drafted by the conditional acceptance of the last
that was. Policies and other trees are replayed on the run's answers (`replay`), which only answers
that don't depend on the drafter allow. What the loop adds to isolated forwards is known of the
depth that was run, and timed at the first and the last one on a few prompts; between these it grows
evenly. The best is then run, and where nothing pays K = 1, if it might. Beside a drafter by `auto`
the same was run by a fixed depth, of which all this is said; `auto` itself is what was measured.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.decode.engine.settings import DecodeSettings
from draftsmith.decode.engine.several import rounds_at_once
from draftsmith.decode.evaluate import metrics, speed
from draftsmith.decode.evaluate.arms import Arm, Arms, Evaluation, Loaded, steady_arm, time_arms
from draftsmith.decode.evaluate.replay import replay
from draftsmith.decode.policies.foretold import extended, taus
from draftsmith.decode.policies.policy import Costs
from draftsmith.decode.policies.timing import measured_costs
from draftsmith.decode.prompts.prompts import Prompt
from draftsmith.decode.report.schema import pays
from draftsmith.decode.tree_shapes import PUBLISHED, Plan
from draftsmith.printed import bracket

Values = dict[str, Any]
BEYOND = 4  # depths foretold past those that were drafted
REPLAYED = 32  # prompts, or batches of them, that are replayed
PROBED = 8  # on which depths other than the one that was run are timed
UNTRAINED = ("confidence", "entropy", "depth")  # policies by the draft's law alone
DYNAMIC = "dynamic:4,4,17"
CALIBRATED = "tree.json"  # where a drafter folder may keep the tree that `calibrate` found


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
        return taus(extended(share_D, max(len(share_D), len(self.cost_K))))

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
    """The report's `advice`: `depths`, a row for every K, policy and tree (tau, foretold speed-up,
    its 95% interval over prompts or batches, what was measured where it was); the `best` K, `tree`
    and `policy`, and what was measured with them; `served_K`, the best of a chain alone, which is
    what servers draft; and `says`, a sentence for a user. None where nothing can be foretold.
    """
    plain, drafted = timed[None], timed[name]
    own, spec = pair.steady.decoding[name], steady_arm(pair, timed, name)
    depths, others = candidates(settings, pair.steady, name)
    if spec is None or not (depths or others):
        return None
    ways = [*depths, *others]
    costs = costs_of(settings, pair, name, spec, [how.plan for how in ways])
    every, taus = np.arange(len(spec.tokens)), []
    gains: list[Callable[[np.ndarray], np.ndarray]] = []
    if depths:
        cost_K = rounds_of(settings, pair, name, prompts, timed, depths, costs, tick)
        found = counted(spec, settings.batch_size, own.plan.levels, cost_K)
        taus, gains = [*found.taus(every)], [found.gains]
    if others:
        told, gain = replayed(settings, pair, name, [own, *others], spec, costs, tick)
        taus, gains = [*taus, *told], [*gains, gain]

    def speedups(groups: np.ndarray) -> np.ndarray:
        return speed.speedup(plain, spec, groups) * np.concatenate([of(groups) for of in gains])

    between = metrics.bootstraps(speedups, len(every)) if len(every) > 1 else None
    rows: list[Values] = [row_of(0, "", "", 1.0, 1.0, None)]
    for i, (how, speedup) in enumerate(zip(ways, speedups(every), strict=True)):
        interval = None if between is None else between[:, i].tolist()
        rows.append(row_of(how.plan.levels, how.tree, how.policy, taus[i], speedup, interval))
        if (how.plan, how.policy) == (own.plan, own.policy):
            rows[-1] |= as_measured(speed.speedups(plain, spec, settings.batch_size))

    if spec is not drafted:
        rows.append(as_run(settings, pair.decoding[name], plain, drafted))

    def measure(row: Values) -> None:
        if row["measured"] is None:
            how = ways[rows.index(row) - 1]
            again = timed_by(settings, pair, name, {name: how}, prompts, tick)
            row |= as_measured(speed.speedups(again[None], again[name], settings.batch_size))

    best = chosen(rows, measure)
    servable = [row for row in rows[1:] if (row["tree"], row["policy"]) == ("chain", "fixed")]
    served = max(servable or [best], key=lambda row: row["speedup"])
    advice = {"depths": rows, "best": best["K"], "served_K": served["K"]}
    advice["foretold"] = best["speedup"]
    advice["acceptance_by_position"] = metrics.acceptance_by_position(spec.counters)[0]
    advice |= {key: best[key] for key in ("tree", "policy", "measured", "measured_interval")}
    advice["pays"] = bool(best["K"]) and pays(best["measured"], best["measured_interval"])
    if advice["pays"]:
        says = f"draft with {in_words(best)}: {_speed_of(best)}"
    elif best["K"] and best["measured"] > 1:
        fast = f"{in_words(best)}: {_speed_of(best)}"
        says = f"not decided whether drafting pays here ({fast}): give more prompts"
    else:
        says = _why_not(rows, best, costs, ways[0].plan)
    return advice | {"says": says}


def candidates(
    settings: Evaluation, pair: Loaded, name: str
) -> tuple[list[DecodeSettings], list[DecodeSettings]]:
    """What the counts of a run foretell, every depth of its tree; and what only a replay does:
    policies at the deepest of these, published, dynamic and calibrated trees, and if the run had a
    policy every depth too.
    """
    own, drafter = pair.decoding[name], pair.drafters[name]
    levels = own.plan.levels
    asks_load = own.policy.partition(":")[0] in ("auto", "table")  # a replay has none
    if not levels or asks_load or drafter.remembers:  # it would find its own answers
        return [], []
    deepest = min(levels + BEYOND, drafter.levels)
    last = deepest if own.plan.is_chain else levels
    depths = [replace(own, K=k, policy="fixed") for k in range(1, last + 1)]
    if not settings.comparable:
        return (depths if own.policy == "fixed" else []), []
    policies = ["cost", *(UNTRAINED if drafter.samples else ())]
    policies += ["acceptance"] if drafter.acceptance else []
    chain = replace(own, tree="chain", policy="fixed", rule="coupled", K=deepest)
    others = [replace(chain, policy=policy) for policy in policies]
    if drafter.trees:
        kept = Path(pair.folders.get(name, "")) / CALIBRATED
        trees = [*PUBLISHED, DYNAMIC, *([str(kept)] if kept.is_file() else [])]
        uncut = [replace(chain, tree=tree, K=None) for tree in trees]
        others += [how.reaching(drafter.levels) for how in uncut]
    if not own.plan.is_chain:
        others += [replace(chain, K=k) for k in range(1, deepest + 1)]
    if own.policy != "fixed":
        depths, others = [], [*depths, own, *others]
    new = {(how.plan, how.policy): how for how in reversed([*depths, *others])}
    return depths, [how for how in others if new[how.plan, how.policy] is how]


def replayed(
    settings: Evaluation,
    pair: Loaded,
    name: str,
    ways: Sequence[DecodeSettings],
    spec: Arm,
    costs: Costs,
    tick: Callable[[], None],
) -> tuple[list[float], Callable[[np.ndarray], np.ndarray]]:
    """Of all ways but the first, as run: tau, and over some of the groups how many times as many
    tokens a second.
    """
    decoders = []
    for how in ways:
        made = replace(pair, decoding={name: how}).decoder(settings, name, fast=False)
        if made.policy.priced:
            made.policy.costs = costs
        decoders.append(made)
    own, many = decoders[0], (settings.batch_size, settings.params, ways[0].plan.nodes)
    at_once = ways[0].plan.is_chain and rounds_at_once(own.runner, *many)[0] > 1
    questions = spec.questions[: REPLAYED * settings.batch_size]
    base, *arms = replay(decoders, questions, settings.params, settings.batch_size, costs, tick)
    # What ran faster than it can one round at a time made several a call, as trees don't.
    ran, again = sum(spec.seconds[: len(base.seconds)]), sum(base.seconds)
    if at_once and ran < again:
        base.seconds = [seconds * ran / again for seconds in base.seconds]

    def gain(groups: np.ndarray) -> np.ndarray:
        first = groups[groups < REPLAYED]
        return np.array([speed.speedup(base, arm, first) for arm in arms])

    return [metrics.block_efficiency(arm.counters) for arm in arms], gain


def chosen(rows: Sequence[Values], measure: Callable[[Values], None]) -> Values:
    """The row to advise, measured: the one foretold to be best, unless it can't pay; where it
    doesn't, K = 1 if that might; or `auto`, if it was measured to be better. rows: plain decoding
    first, then K = 1.
    """
    tried: list[Values] = []
    foretold = [row for row in rows[1:] if row["policy"] != "auto"]
    for row in (max(foretold, key=lambda row: row["speedup"]), rows[1]):
        if row["speedup"] > 1 or row["interval"] is None or row["interval"][1] >= 1:
            measure(row)
            tried.append(row)
            if row["measured"] > 1:
                break
    tried += [row for row in rows if row["policy"] == "auto"]
    return max(tried, key=lambda row: row["measured"], default=rows[0])


def row_of(
    K: int, tree: str, policy: str, tau: float, speedup: float, interval: list[float] | None
) -> Values:
    """A row of `depths`, not measured."""
    row = {"K": K, "tree": tree, "policy": policy, "tau": float(tau), "speedup": float(speedup)}
    return row | {"interval": interval, "measured": None, "measured_interval": None}


def as_run(settings: Evaluation, how: DecodeSettings, plain: Arm, spec: Arm) -> Values:
    """The row of what was run beside what the others are counted from."""
    found = speed.speedups(plain, spec, settings.batch_size)
    tau, between = metrics.block_efficiency(spec.counters), found["speedup_interval"]
    row = row_of(how.plan.levels, how.tree, how.policy, tau, found["speedup"], between)
    return row | as_measured(found)


def as_measured(found: Values) -> Values:
    """What `speed.speedups` found, as a row has it."""
    return {"measured": found["speedup"], "measured_interval": found["speedup_interval"]}


def in_words(row: Values) -> str:
    """How to ask for a row."""
    tree = "" if row["tree"] == "chain" else f" tree={row['tree']}"
    return f"K={row['K']}{tree}" + ("" if row["policy"] == "fixed" else f" policy={row['policy']}")


def costs_of(
    settings: Evaluation, pair: Loaded, name: str, spec: Arm, plans: Sequence[Plan]
) -> Costs:
    """What rounds of these cost at the run's mean context; on a CPU each has a pass of its own."""
    answers = spec.completions
    twice = sum(2 * len(c.prompt_tokens) + len(c.tokens) for c in answers) // len(answers)
    runner, drafter = pair.decoder(settings, None).runner, pair.drafters[name]
    largest = max(plans, key=lambda plan: plan.nodes)
    passes = {plan.nodes for plan in plans} if settings.device == "cpu" else ()
    return measured_costs(runner, drafter, largest, settings.batch_size, twice, passes)


def rounds_of(
    settings: Evaluation,
    pair: Loaded,
    name: str,
    prompts: Sequence[Prompt],
    timed: Arms,
    depths: Sequence[DecodeSettings],
    costs: Costs,
    tick: Callable[[], None],
) -> np.ndarray:
    """Seconds of a round of each depth: of its isolated forwards, and what rounds take beyond. That
    is known of the depth that was run, and of the first and the last by PROBED batches of prompts,
    in turns with plain decoding by which another moment's speed is told; in between a line.
    """
    own, size, spec = pair.steady.decoding[name], settings.batch_size, steady_arm(pair, timed, name)
    ends = {str(how.plan.levels): how for how in (depths[0], depths[-1]) if how.plan != own.plan}
    assert spec is not None
    measured = {own.plan: seconds_a_round(spec, size)}
    if ends:
        again = timed_by(settings, pair, name, ends, prompts[: PROBED * size], tick)
        slower = seconds_a_round(again[None], size) / seconds_a_round(timed[None], size)
        if slower:  # 0 where every one of these answers ended with its first token
            measured |= {
                how.plan: seconds_a_round(again[K], size) / slower for K, how in ends.items()
            }
    isolated_K = np.array([costs.of(how.plan) for how in depths])
    beyond = sorted((plan.levels, took - costs.of(plan)) for plan, took in measured.items())
    beyond_K = np.interp([how.plan.levels for how in depths], *np.array(beyond).T)
    # Times that don't fit together must not make a round of no time.
    return np.maximum(isolated_K + beyond_K, min(*isolated_K, *measured.values()))


def timed_by(
    settings: Evaluation,
    pair: Loaded,
    name: str,
    ways: dict[str, DecodeSettings],
    prompts: Sequence[Prompt],
    tick: Callable[[], None],
) -> Arms:
    """Plain decoding and a drafter by each of these ways, in turns."""
    drafters = {way: copy.copy(pair.drafters[name]) for way in ways}  # a state each
    alone = replace(pair, drafters=drafters, decoding=ways, fixed={})
    return time_arms(replace(settings, baseline="native"), alone, prompts, tick)


def seconds_a_round(arm: Arm, size: int) -> float:
    """Of prompts that shared batches of `size`, which last as long as their slowest row."""
    rounds = [one.rounds for one in arm.counters]
    slowest = sum(max(rounds[i : i + size]) for i in range(0, len(rounds), size))
    return sum(arm.seconds) / max(1, slowest)


def counted(spec: Arm, size: int, levels: int, cost_K: np.ndarray) -> Depths:
    """Of an arm that drafted `levels` levels, and whose prompts shared batches of `size`."""
    counters = spec.counters
    groups = [metrics.total(counters[i : i + size]) for i in range(0, len(counters), size)]
    kept_GD, reached_GD = np.zeros((2, len(groups), levels))
    for g, one in enumerate(groups):
        for i, rounds in enumerate(one.reached):
            kept_GD[g, i], reached_GD[g, i] = sum(one.histogram[i + 1 :]), rounds
    return Depths(kept_GD, reached_GD, cost_K)


def _speed_of(row: Values) -> str:
    between = f" {bracket(row['measured_interval'])}".rstrip()
    found = f"{row['measured']:.2f}{between} times as fast as plain decoding"
    return found + ("" if row["policy"] == "auto" else f" (foretold {row['speedup']:.2f})")


def _why_not(rows: Sequence[Values], best: Values, costs: Costs, first: Plan) -> str:
    """Whether acceptance or cost is nearer to where K = 1, by the tree `first`, breaks even."""
    one = rows[1]
    tau, speedup = one["tau"], one["speedup"] if one["measured"] is None else one["measured"]
    plain_s, verify_s = costs.verify[0], costs.verifying(first)
    accepted, c = tau - 1, (costs.of(first) - verify_s) / plain_s
    # A round takes tau / speed-up plain steps; what it takes beyond its forwards is a factor here.
    wanted = tau / speedup - 1
    c_wanted = speedup * costs.of(first) / plain_s - verify_s / plain_s
    ways = []
    if 0 < wanted < 1:
        more = f"keep {100 * wanted:.0f}% of its first tokens, not {100 * accepted:.0f}%"
        says = f"it is accepted too seldom: it would have to {more}"
        ways.append((wanted / max(accepted, 1e-9), says))
    if c > 0 and c_wanted > 0:
        less = f"{c_wanted:.2f} of a plain step, not {c:.2f}"
        says = f"drafting one token costs too much: it would have to take {less}"
        ways.append((c / c_wanted, says))
    why = ", or ".join(way for _, way in sorted(ways)) or "a pass over two tokens costs too much"
    tried = [f"{in_words(best)}: {_speed_of(best)}"] if best["K"] else []
    if best["policy"] == "auto":  # which drafts little then
        deep = max((row for row in rows[1:] if row is not best), key=lambda row: row["speedup"])
        tried.append(f"{in_words(deep)}: {deep['speedup']:.2f} foretold")
    said = f" ({'; '.join(tried)})" if tried else ""
    return f"drafting doesn't pay here{said}: {why}"
