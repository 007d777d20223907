"""What rounds take, on machines whose speed comes and goes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from draftsmith.decode.policies.clock import Clock, Timed
from draftsmith.decode.policies.load import Auto
from draftsmith.decode.policies.policy import Outcome, Policy
from draftsmith.decode.tree_shapes import Plan, chain_plan
from tests.tools.machines import ROUNDS, decoded

PLANS = (None, *(chain_plan(K) for K in range(1, 9)))
BEST = PLANS[3]
TRUE = {plan: 1.0 if plan is None else 1.1 + 0.22 * plan.levels for plan in PLANS}


def took(rows: int, plan: Plan | None) -> float:
    return TRUE[plan]


def told(clock: Clock, asked: list[Plan | None], seconds: list[float], best: Plan | None) -> None:
    """Of rounds that go on from the last."""
    at = clock.at + 1
    clock.news += [
        Timed(at + i, plan, plan, each)
        for i, (plan, each) in enumerate(zip(asked, seconds, strict=True))
    ]
    clock.settle(best)


def share(clock: Clock, plan: Plan | None) -> float:
    return clock.seconds()[plan] / clock.plain


def spells(length: int, seed: int) -> Iterator[float]:
    """How many times as long a round takes: once in a while 1.4 to 2.4, for so many in the mean."""
    noise = np.random.default_rng(seed)
    while True:
        yield from [1.0] * int(noise.exponential(3 * length))
        yield from [noise.uniform(1.4, 2.4)] * int(noise.exponential(length))


@pytest.mark.parametrize("length", [30, 100, 300])
def test_plans_are_told_apart_whatever_the_machine_does(length: int) -> None:
    """The best for 48 rounds, two others for 2, in spells and with noise, and interrupted."""
    off, deviation = [], []
    for seed in range(4):
        clock, noise, machine = Clock(PLANS), np.random.default_rng(seed), spells(length, seed)
        for turn in range(150):
            plan, count = (PLANS[noise.integers(len(PLANS))], 2) if turn % 3 else (BEST, 48)
            slow = [next(machine) * (1 + 0.05 * noise.exponential()) for _ in range(count)]
            slow[0] *= 3 if turn % 50 == 0 else 1
            told(clock, [plan] * count, [TRUE[plan] * each for each in slow], BEST)
        off.append([np.log(share(clock, plan) / TRUE[plan]) for plan in PLANS])
        deviation.append([clock.variance(plan, BEST) ** 0.5 for plan in PLANS])
    # A trial that met two leaps, one that it began with, may be believed.
    assert (np.abs(off) < 0.1 + 2 * np.array(deviation)).mean() > 0.95
    assert np.median(np.abs(off)) < 0.05 and np.median(deviation) < 0.12


def test_what_one_plan_takes_tells_of_its_like() -> None:
    clock = Clock(PLANS)
    told(clock, [None] * 8, [1.0] * 8, None)
    before = share(clock, PLANS[5])
    told(clock, [PLANS[8]] * 2, [6.0] * 2, None)
    told(clock, [None] * 8, [1.0] * 8, None)
    assert share(clock, PLANS[8]) > 5 and 1.4 * before < share(clock, PLANS[5]) < share(
        clock, PLANS[8]
    )
    assert clock.variance(PLANS[8], None) < 0.3 * clock.variance(PLANS[5], None)


def test_an_interruption_is_left_out_and_a_spell_is_the_machine_s() -> None:
    clock = Clock(PLANS)
    told(clock, [None] * 16 + [PLANS[2]] * 16, [1.0] * 16 + [1.5] * 16, None)
    before = share(clock, PLANS[2])
    for _ in range(3):  # one round a time, as they come
        told(clock, [PLANS[2]], [9.0], PLANS[2])
        assert clock.plain == pytest.approx(1.0, rel=0.05)
        told(clock, [PLANS[2]], [1.5], PLANS[2])
    told(clock, [PLANS[2]] * 16, [3.0] * 16, PLANS[2])
    assert clock.plain == pytest.approx(2.0, rel=0.05)
    assert share(clock, PLANS[2]) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("begins", ["with the trial", "after it"])
def test_a_trial_at_a_spell_s_beginning_is_found_out(begins: str) -> None:
    """By the best one's rounds after it; a plan that is slow by itself stays so."""
    clock, best = Clock(PLANS), PLANS[2]
    told(clock, [None] * 16 + [best] * 48, [1.0] * 16 + [1.5] * 48, best)
    trial = 2.0 if begins == "with the trial" else 1.0
    told(clock, [PLANS[3]] * 2, [1.8 * trial] * 2, best)
    told(clock, [best] * 48, [3.0] * 48, best)
    assert share(clock, PLANS[3]) == pytest.approx(1.8, rel=0.2)
    assert share(clock, best) == pytest.approx(1.5, rel=0.1)
    told(clock, [PLANS[4]] * 2, [12.0] * 2, best)
    told(clock, [best] * 48, [3.0] * 48, best)
    assert share(clock, PLANS[4]) > 5


@pytest.mark.parametrize("length", [30, 80, 300])
def test_auto_drafts_as_much_in_spells(length: int) -> None:
    """All rounds take longer for a while: what gives most doesn't change by it."""
    found, chances = [], [0.62] * 8
    best = max(decoded(Policy(plan), 1, took, chances, count=8000) for plan in PLANS[1:])
    for seed in range(8):
        policy, machine = Auto(chain_plan(8)), spells(length, seed)
        policy.observe = in_spells(policy.observe, machine)  # type: ignore[method-assign]
        decoded(policy, 1, took, chances, seed=seed, count=ROUNDS // 4)
        rate = decoded(policy, 1, took, chances, seed=seed, count=2 * ROUNDS)
        found.append(rate / best)
    assert min(found) > 0.9 and np.mean(found) > 0.965


def in_spells(observe: Callable[[Outcome], None], machine: Iterator[float]) -> Any:
    """Is told longer seconds."""

    def told_longer(outcome: Outcome) -> None:
        assert outcome.seconds is not None
        observe(outcome._replace(seconds=outcome.seconds * next(machine)))

    return told_longer
