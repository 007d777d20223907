"""Policies that ask how much there is to do, against machines and drafts that are known."""

from collections import Counter

import numpy as np
import pytest

from draftsmith.decode.policies.choice import make_policy
from draftsmith.decode.policies.clock import Clock
from draftsmith.decode.policies.load import Auto
from draftsmith.decode.policies.policy import Costs, Load, Outcome, Policy
from draftsmith.decode.tree_shapes import DynamicTree, Plan, chain_plan
from tests.tools.machines import ROUNDS, decoded, expected, flat_then_linear, rounds

CHANCES = [0.84, 0.75, 0.7, 0.7, 0.65]
BETWEEN = [pytest.param(rows, marks=pytest.mark.slow) for rows in (3, 16)]
MACHINES = {
    "weights": (flat_then_linear(1.0, 0.05), [0.8, 0.75, 0.7, 0.6, 0.5, 0.4]),
    "costly draft": (flat_then_linear(1.0, 0.46), [0.7] * 6),
    "bad draft": (flat_then_linear(1.0, 0.1), [0.15] * 6),
    "small model": (flat_then_linear(0.8, 0.2, knee=4), [0.6] * 6),
    "free draft": (flat_then_linear(1.0, 0.0), [0.9] * 6),
}


@pytest.mark.parametrize("rows", [1, 64, *BETWEEN])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("whole", [chain_plan(6), DynamicTree(6, 4, 24)], ids=["chain", "dynamic"])
def test_never_slower_than_plain_and_near_the_best(whole: Plan, machine: str, rows: int) -> None:
    """Never slower from the first round on; near the best, in the mean over streams, as soon as
    enough was tried.
    """
    seconds, chances = MACHINES[machine]
    count, plain, found = ROUNDS if rows < 16 else ROUNDS // 4, 1 / seconds(rows, None), []
    for seed in range(0, 8, 2):
        policy = Auto(whole)
        first = decoded(policy, rows, seconds, chances, count=count, seed=seed)
        later = decoded(policy, rows, seconds, chances, count=count, seed=seed + 1)
        fixed = [expected(plan, chances) / seconds(rows, plan) for plan in policy.plans]
        assert min(first, later) >= 0.98 * plain
        found.append(later / max(plain, *fixed))
    assert np.mean(found) >= 0.975


@pytest.mark.parametrize("hits", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("good", [0.3, 0.95])
def test_ways_that_read_nothing_are_weighed_beside_the_usual(hits: float, good: float) -> None:
    """A store that draws many a blank, which takes time too, and ends drafts early, beside a draft
    that costs much: what promises most tokens a second with all that is chosen, or near it.
    """
    whole = chain_plan(6)
    policy, noise = Auto(whole), np.random.default_rng(0)
    policy.choose_among({1: 0, 2: 5}, 10)
    assert {plan.by for plan in policy.plans} == {0, 1} and policy.plans[-1] == whole

    def turn(plan: Plan | None) -> tuple[int, int, float]:
        """Levels, tokens kept, seconds."""
        if plan is None or plan.by == 0:
            levels, chance, draft, looks = 0 if plan is None else plan.levels, 0.3, 0.5, 0.0
        else:
            found = min(4, plan.levels)
            levels, chance, draft, looks = int(noise.random() < hits) * found, good, 0.0, 0.15
        kept = int(noise.geometric(1 - chance)) - 1
        return levels, min(kept, levels), 1 + looks + (draft + 0.08) * levels

    def rate(rounds: list[tuple[int, int, float]]) -> float:
        return sum(1 + kept for _, kept, _ in rounds) / sum(seconds for *_, seconds in rounds)

    made, chosen = [], Counter[int | None]()
    for i in range(3000):
        plan = policy.next_plan(Load())
        levels, kept, seconds = turn(plan)
        paths, measured = [(0,) * kept], seconds * (1 + 0.02 * noise.exponential())
        policy.observe(Outcome(plan, levels, paths, None, Load(), measured))
        made += [(levels, kept, seconds)] if i > 500 else []
        chosen[None if plan is None else plan.by] += 1
    each = {plan: rate([turn(plan) for _ in range(3000)]) for plan in (*policy.plans, None)}
    assert rate(made) >= 0.97 * max(each.values())
    assert chosen[0] < 200 and (hits * good < 0.2 or chosen[1] > 2000)
    assert hits or chosen[None] > 2500


@pytest.mark.parametrize("name", ["auto", "cost"])
def test_depths_that_were_not_asked_for_in_a_long_time_can_still_be(name: str) -> None:
    """After more rounds than fading counts outlast; ways that are heard of twice are there once."""
    policy = make_policy(name, chain_plan(4))
    policy.choose_among({1: 0}, 10)
    policy.choose_among({1: 0}, 10)
    assert len(set(policy.plans)) == len(policy.plans)
    counts = policy.counts[0] if isinstance(policy, Auto) else policy.counts  # type: ignore[attr-defined]
    short = counts.plans[1]
    for _ in range(200):
        for _ in range(30):
            policy.observe(Outcome(short, 2, [(0,)] * 32, load=Load(32, 32)))
        counts.settle()
    tokens = counts.expected()
    assert counts.reached_D.tolist() == [1.0] * 4
    assert 1.9 < tokens[counts.plans[0]] < 2 and 1.9 < tokens[counts.plans[3]] < 3
    policy.observe(Outcome(None, 0, [()]))
    assert not counts.news


def test_it_follows_a_draft_that_gets_worse_and_better() -> None:
    """Through the rounds in which nothing is drafted, too."""
    seconds = MACHINES["weights"][0]
    policy = make_policy("auto", chain_plan(4))
    good = decoded(policy, 4, seconds, [0.8] * 4)
    bad = decoded(policy, 4, seconds, [0.01] * 4)
    again = decoded(policy, 4, seconds, [0.8] * 4, count=2 * ROUNDS)
    assert good > 2 and bad > 0.97 and again > 0.9 * good


def test_a_chain_and_a_tree_count_what_was_kept() -> None:
    """Of a tree's kept nodes those that a smaller one would hold."""
    policy = make_policy("auto", DynamicTree(3, 2, 8))
    assert isinstance(policy, Auto)
    for _ in range(500):
        policy.observe(Outcome(policy.plans[-1], 3, [(1, 3, 6)]))
    policy.counts[0].settle()
    tokens = policy.counts[0].expected()
    by_shape = {(p.levels, p.nodes): tokens[p] for p in policy.plans if p is not None}
    assert by_shape[3, 8] > 3.9 and by_shape[1, 2] > 1.9
    assert by_shape[3, 4] == pytest.approx(3, abs=0.1)  # nodes 1 and 3, not 6
    assert by_shape[3, 2] == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("name", ["fixed", "auto", "cost", "cut", "table:1-2=4,3-=0"])
def test_what_a_policy_says_will_stay_stays(name: str) -> None:
    """Through as many rounds; and drafts that pay stay for several at a time."""
    tree: Plan = DynamicTree(4, 2, 8) if name == "cut" else chain_plan(4)
    policy, seconds = make_policy(name, tree), MACHINES["weights"][0]
    policy.costs = Costs((1, 64), (1.0, 1.6), (0.05, 0.05))
    noise, left, before, longest = np.random.default_rng(0), 0, None, 0
    for _ in range(600):
        plan = policy.next_plan(Load(2, 2))
        assert plan == before or not left
        before, left = plan, max(left, policy.stays) - 1
        longest = max(longest, policy.stays if plan is not None else 0)
        paths, levels = list(rounds(plan, [0.8] * 4, 2, noise)), plan.levels if plan else 0
        policy.observe(Outcome(plan, levels, paths, None, Load(2, 2), seconds(2, plan)))
    assert longest == 1 if name == "cut" else longest >= 8


def test_a_table_is_read_by_rows() -> None:
    policy = make_policy("table:1-2=4,3-8=1,9-=0", chain_plan(4))
    found = [policy.next_plan(Load(64, running)) for running in (1, 2, 3, 8, 9, 1000)]
    assert [0 if plan is None else plan.levels for plan in found] == [4, 4, 1, 1, 0, 0]


@pytest.mark.parametrize(
    "text", ["", "1-4=2", "2-=1", "1-4=2,6-=1", "1-=5", "1-=x", "1-=2,9-=0", "1-0=2,1-=1", "4"]
)
def test_a_table_with_gaps_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"policy table: got .* expected ranges of rows from 1 on"):
        make_policy(f"table:{text}", chain_plan(4))


@pytest.mark.parametrize("counted", [True, False])
def test_plain_rounds_right_after_a_draft_say_nothing(
    counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine on which the first two take longer; they would, if they counted."""
    if not counted:
        monkeypatch.setattr(Auto, "COLD", 0)
    since = 9

    def seconds(rows: int, plan: Plan | None) -> float:
        nonlocal since
        since = 0 if plan is not None else since + 1
        return 1.5 if plan is not None else 1.3 if since <= 2 else 1.0

    policy, told, settle = Auto(chain_plan(2)), set(), Clock.settle

    def hears(clock: Clock, best: Plan | None) -> None:
        told.update(one.seconds for one in clock.news if one.made is None)
        settle(clock, best)

    monkeypatch.setattr(Clock, "settle", hears)
    for seed in range(40):
        decoded(policy, 1, seconds, [0.45, 0.45], jitter=0.0, count=25, seed=seed)
    assert told == ({1.0} if counted else {1.0, 1.3})


@pytest.mark.parametrize("slow", [2, 4])
def test_the_first_plain_rounds_may_be_slow_ones(slow: int) -> None:
    """Drafting loses 8%, and doesn't look well for long: the first two don't count, and the first
    that do are looked at again.
    """
    rates = []
    for seed in range(5):
        done = 0

        def seconds(rows: int, plan: Plan | None) -> float:
            nonlocal done
            done += 1
            return 1.5 if plan is not None else 1.7 if done <= slow else 1.0

        rates.append(decoded(Auto(chain_plan(1)), 1, seconds, [0.38], seed=seed, count=200))
    assert np.mean(rates) > 0.96


def test_a_spell_in_which_plain_rounds_were_slow_is_got_over() -> None:
    """Four times slower for a while, in plain rounds alone; drafting loses, then and later."""
    policy, spell = Auto(chain_plan(4)), 4.0

    def seconds(rows: int, plan: Plan | None) -> float:
        return spell if plan is None else 2.5

    decoded(policy, 1, seconds, [0.5] * 4, count=100)
    assert policy.paces[1].best is not None
    spell = 1.0
    decoded(policy, 1, seconds, [0.5] * 4, count=200)
    assert decoded(policy, 1, seconds, [0.5] * 4) > 0.98


def test_a_machine_that_was_slow_at_first_is_got_over() -> None:
    """In every round, all first trials among them, of a block drafter: one pass, little a token."""
    rates = []
    for seed in range(16):
        done = 0

        def seconds(rows: int, plan: Plan | None) -> float:
            nonlocal done
            done += 1
            return (1.0 if plan is None else 1.57 + 0.26 * plan.levels) * (1.7 if done <= 20 else 1)

        policy = Auto(chain_plan(5))
        decoded(policy, 1, seconds, CHANCES, seed=seed, count=100)
        rates.append(decoded(policy, 1, seconds, CHANCES, seed=seed, count=500))
    best = decoded(Policy(chain_plan(4)), 1, seconds, CHANCES, count=4000)
    assert np.mean(rates) > 0.965 * best


def test_what_lies_around_trials_is_paid_for_before_the_next() -> None:
    """Drafts that nearly pay by their own seconds, each with ten plain rounds' around it."""
    for seed in range(8):
        policy, how = Auto(chain_plan(4)), {"seed": seed, "count": 3000, "around": 10}
        rate = decoded(policy, 4, lambda _, p: 3.5 if p else 1.0, [0.65] * 4, **how)
        assert rate > 0.975 and len(policy.paces[4].asked) > 1


def test_rounds_that_get_faster_through_each_answer() -> None:
    """By caches that warm up: what was tried doesn't come to look fast, or slow, by it."""
    rates = list[float]()
    for policy in (make_policy("table:1-=0", chain_plan(4)), *(Auto(chain_plan(4)) for _ in "abc")):
        done = 0

        def seconds(rows: int, plan: Plan | None) -> float:
            nonlocal done
            done += 1
            work = 1.0 if plan is None else 1.5 + 0.3 * plan.levels
            return work * (0.85 + 0.5 * 0.85 ** (done % 47))

        rates.append(decoded(policy, 4, seconds, [0.45] * 4, count=6000, seed=len(rates)))
    assert min(rates[1:]) > 0.98 * rates[0]


def test_a_table_says_of_rows_that_decode_whether_they_will_draft() -> None:
    policy = make_policy("table:1-8=4,9-=0", chain_plan(4))
    assert policy.will_draft(Load(32, 2)) and not policy.will_draft(Load(32, 9))
    auto = Auto(chain_plan(4))
    assert not auto.will_draft(Load(8, 5))
    auto.paces[8].choice = chain_plan(2)
    assert auto.will_draft(Load(8, 5)) and not auto.will_draft(Load(6, 5))
    assert Policy(chain_plan(4)).will_draft(Load(32, 32))
