"""What `auto` makes of its first drafts, when they aren't as those that follow."""

import numpy as np

from draftsmith.decode.policies.load import Auto
from draftsmith.decode.policies.policy import Load, Outcome
from draftsmith.decode.tree_shapes import chain_plan
from tests.tools.machines import rounds


def test_what_the_first_draft_sets_up_does_not_put_off_the_next() -> None:
    """A hundred plain rounds, before eight drafts of which nothing is kept; all others pay."""
    for seed in range(8):
        noise, policy, drafted = np.random.default_rng(seed), Auto(chain_plan(4)), 0
        for _ in range(1000):
            plan = policy.next_plan(Load(1, 1))
            [path] = rounds(plan, [0.6] * 4, 1, noise) if plan is None or drafted >= 8 else [()]
            own = 1.0 if plan is None else 1.1 + 0.15 * plan.levels + 0.02 * noise.exponential()
            whole = own + 100 * (plan is not None and drafted < 2)
            drafted += plan is not None
            levels = 0 if plan is None else plan.levels
            policy.observe(Outcome(plan, levels, [path], None, Load(1, 1), own, None, whole))
        assert drafted > 500


def test_a_way_that_had_few_drafts_is_not_given_up_for_what_another_had() -> None:
    """A store that never knows anything, beside a draft that pays; of its first four nothing is
    kept.
    """
    for seed in range(8):
        noise, policy, drafted = np.random.default_rng(seed), Auto(chain_plan(16)), 0
        policy.choose_among({1: 0, 2: 5}, 10)
        for _ in range(1000):
            plan = policy.next_plan(Load(1, 1))
            usual = plan is not None and plan.by == 0
            levels = min(4, plan.levels) if plan is not None and usual else 0
            path: tuple[int, ...] = ()
            if usual and drafted >= 4:
                [path] = rounds(chain_plan(levels), [0.55] * 4, 1, noise)
            own = 1.0 if plan is None else (1.15 + 0.2 * levels if usual else 1.05)
            own += 0.02 * noise.exponential()
            drafted += usual
            policy.observe(Outcome(plan, levels, [path], None, Load(1, 1), own, None, own))
        assert drafted > 500
