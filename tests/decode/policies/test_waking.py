"""When `auto` lets a drafter sleep, when it wakes it, and what prompts take it."""

import numpy as np
import pytest

from draftsmith.decode.drafting.owed import NAP
from draftsmith.decode.policies.load import Auto
from draftsmith.decode.policies.policy import Load, Outcome
from draftsmith.decode.tree_shapes import Plan, chain_plan
from tests.tools.machines import decoded, flat_then_linear, rounds


def watched(policy: Auto) -> list[tuple[bool, bool]]:
    """Of each round that it is going to plan: whether it drafts nothing, and the drafter sleeps."""
    next_plan, seen = policy.next_plan, list[tuple[bool, bool]]()

    def told(load: Load) -> Plan | None:
        plan = next_plan(load)
        seen.append((plan is None, policy.asleep))
        return plan

    policy.next_plan = told  # type: ignore[method-assign, assignment]
    return seen


def test_the_drafter_hears_of_plain_rounds_that_are_only_tried() -> None:
    policy = Auto(chain_plan(1))
    asleep = watched(policy)
    decoded(policy, 1, lambda rows, plan: 1.0 if plan is None else 1.1, [0.3], seed=1)
    assert (True, False) in asleep[300:] and (True, True) not in asleep
    decoded(policy, 1, flat_then_linear(1.0, 0.05), [0.01])
    assert (True, True) in asleep


def test_the_drafter_sleeps_on_where_nothing_is_near_and_wakes_before_it_is_tried() -> None:
    """A round that drafts takes three plain ones, which no draft is worth; then, once what was
    timed is forgotten, it may be, and is tried.
    """
    policy, drafted = Auto(chain_plan(1)), 3.0
    seen = watched(policy)
    how = policy, 1, lambda rows, plan: 1.0 if plan is None else drafted
    decoded(*how, [0.1], count=3000, jitter=0.0)
    assert all(nap for _, nap in seen[100:])
    drafted, policy.paces[1].clock = 1.05, policy._pace().clock
    assert decoded(*how, [0.9], count=3000, jitter=0.0) > 1.5
    naps = [nap for _, nap in seen]
    assert not all(naps)
    for done, (plain, _) in enumerate(seen):
        if not plain and done >= 100:  # it has heard of all since it woke
            assert not any(naps[done + 1 - NAP : done + 1])


def test_a_drafter_that_sleeps_at_another_load_is_tried_all_the_same() -> None:
    """One row and two by turns: at two a draft never pays, at one it does from some round on."""
    policy, tried = Auto(chain_plan(1)), 0
    for done in range(8000):
        load = Load(1 + done % 2, 1 + done % 2)
        plan = policy.next_plan(load)
        drafted = 4.0 if load.rows == 2 else 2.0 if done < 2000 else 1.1
        tried += plan is not None and done > 2000 and load.rows == 1
        path = (0,) if plan is not None and done % 10 < 8 else ()
        took = 1.0 if plan is None else drafted
        levels = 0 if plan is None else 1
        policy.observe(Outcome(plan, levels, [path] * load.rows, None, load, took))
    assert tried > 1000


def test_drafts_that_become_good_are_found_by_calls_of_several_rounds() -> None:
    """Where a drafter slept: what its waking loses doesn't put off what it woke for."""
    for seed in range(8):
        noise, policy = np.random.default_rng(seed), Auto(chain_plan(4))
        left = tokens = took = 0
        for done in range(12_000):
            if not left:
                plan, slept = policy.next_plan(Load(1, 1)), policy.asleep
                left, around = min(policy.stays, 13), 10.0 if policy.plain or slept else 0.0
            left -= 1
            [path] = rounds(plan, [0.5 if done < 1_500 else 0.95] * 4, 1, noise)
            this, levels = (1.0, 0) if plan is None else (1.5 + 0.2 * plan.levels, plan.levels)
            own = this * (1 + 0.05 * noise.exponential())
            whole = own + (0.05 if plan is None else around)
            tokens, took = tokens + (done >= 6_000) * (1 + len(path)), took + (done >= 6_000) * this
            policy.observe(Outcome(plan, levels, [path], None, Load(1, 1), own, None, whole))
        assert tokens / took > 1.85


@pytest.mark.parametrize("prompt,drafts", [(0.2, True), (5.5, False), (8.0, False)])
def test_what_prompts_take_a_drafter_is_shared_out_over_answers(
    prompt: float, drafts: bool
) -> None:
    """A chain that gives a tenth more by its rounds, and answers of 48 tokens."""
    noise, policy, left, drafted, count = np.random.default_rng(0), Auto(chain_plan(1)), 0, 0, 4000
    for _ in range(count):
        if left <= 0:
            left = 48
            policy.admit(1, None if policy.asleep else prompt)
        plan = policy.next_plan(Load(1, 1))
        [path] = rounds(plan, [0.8], 1, noise)
        own = (1.0 if plan is None else 1.64) * (1 + 0.02 * noise.exponential())
        policy.observe(Outcome(plan, plan is not None, [path], None, Load(1, 1), own, None, own))
        left, drafted = left - 1 - len(path), drafted + (plan is not None)
    assert drafted > 0.5 * count if drafts else drafted < 0.1 * count


def test_prompts_that_find_nothing_ready_dont_count() -> None:
    """The first four take three times as long; a drafter that read no more would never hear it."""
    policy = Auto(chain_plan(1))
    for _ in range(Auto.READY):
        policy.admit(1, 6.0)
        assert policy.prompt == np.inf
    for seconds in (None, 2.0, 7.0):
        policy.admit(1, seconds)
    assert 2.0 < policy.prompt < 3.0


@pytest.mark.parametrize("rows", [1, 16])
def test_a_drafter_doesnt_sleep_at_first_where_a_tree_is_nearly_as_good(rows: int) -> None:
    """Until rows have decoded `AWAKE` times, as many rows sooner."""
    policy = Auto(chain_plan(1))
    seen = watched(policy)
    decoded(policy, rows, lambda _, plan: 1.7 if plan else 1.0, [0.6], count=2000)
    awake, naps = Auto.AWAKE // rows, [nap for _, nap in seen]
    assert not any(naps[:awake]) and sum(naps) > 1000


@pytest.mark.parametrize("long,drafts", [(6, False), (300, True)])
def test_what_waking_takes_is_weighed_against_how_long_so_many_rows_stay(
    long: int, drafts: bool
) -> None:
    """Drafts give a third more at one row and a third as much at four; after these the drafter has
    to hear of them, which takes ten plain rounds.
    """
    for seed in range(4):
        noise, policy, visits = (
            np.random.default_rng(seed),
            Auto(chain_plan(1)),
            12_000 // (long + 30),
        )
        drafted, took, tokens = 0, 0.0, 0
        for visit in range(visits):
            for rows, count in ((1, long), (4, 30)):
                slept = True
                for _ in range(count):
                    plan = policy.next_plan(Load(rows, rows))
                    paths = list(rounds(plan, [0.8], rows, noise))
                    own = 1.0 if plan is None else 1.35 if rows == 1 else 5.4
                    whole = own + 10 * (slept and plan is not None)
                    slept = plan is None
                    about = plan, int(plan is not None), paths, None, Load(rows, rows)
                    policy.observe(Outcome(*about, own, None, whole))
                    if visit > visits // 2 and rows == 1:
                        drafted, took = drafted + (plan is not None), took + whole
                        tokens += 1 + len(paths[0])
        assert tokens / took > (1.2 if drafts else 0.97)
        assert drafted > 0.9 * long * (visits // 2 - 1) if drafts else drafted < 0.1 * long * visits
