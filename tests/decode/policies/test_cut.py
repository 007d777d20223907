"""The policy that cuts a grown tree where its nodes stop paying."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.policies.choice import make_policy
from draftsmith.decode.policies.policy import Costs, Outcome
from draftsmith.decode.policies.priced import CutGrown
from draftsmith.decode.tree_shapes import DynamicTree, chain_plan

TREE = DynamicTree(3, 3, 12)
SIZES = (1, 2, 4, 8, 16)


def priced(verify: tuple[float, ...], draft: float) -> CutGrown:
    policy = CutGrown(TREE)
    policy.costs = Costs(SIZES, verify, (draft,) * len(SIZES))
    return policy


def falling(*chances: float) -> torch.Tensor:
    """Log chances of twelve nodes, the root's first."""
    whole = [1.0, *chances, *[1e-6] * (11 - len(chances))]
    return torch.tensor([whole]).log()


@pytest.mark.parametrize("params", [replace(p, max_new_tokens=20) for p in SETTINGS[:2]])
def test_no_answer_changes_at_any_size(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    params,
) -> None:
    """Every size in turn, none included, and rounds that draft nothing."""
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(
        tiny_target, tiny_tokenizer, drafter, tree="dynamic:3,3,12", policy="cut", batch_size=3
    )
    policy = decoder.policy
    assert isinstance(policy, CutGrown)
    policy.costs = Costs(SIZES, (1.0,) * 5, (1.0,) * 5)
    sizes, plans = itertools.cycle([1, 12, 2, 5, 9, 3]), itertools.cycle([TREE, None, TREE, TREE])
    asked = []
    policy.keep = lambda scores, active: asked.append(next(sizes)) or asked[-1]
    policy.next_plan = lambda *_: next(plans)  # type: ignore[method-assign]
    done = decoder.generate(PROMPTS, params)
    assert [c.tokens for c in done] == truths(tiny_target, tiny_tokenizer, params)
    assert set(asked) == {1, 2, 3, 5, 9, 12}


def test_it_verifies_what_pays_and_no_more() -> None:
    scores, active = falling(0.9, 0.8, 0.5, 0.4, 0.3, 0.2, 0.1), torch.tensor([True])
    free = priced((1.0, 1.0, 1.0, 1.0, 1.0), 0.1)
    assert free._keep(scores, active) == 12
    dear = priced((1.0, 2.0, 4.0, 8.0, 16.0), 0.0)
    assert dear._keep(scores, active) == 1
    bend = priced((1.0, 1.0, 1.0, 3.0, 9.0), 0.1)
    assert bend._keep(scores, active) == 3  # of 1, 2, 3, 5, 9, 12: the last before the bend


def heard(policy: CutGrown, kept: int, rows: int = 1) -> None:
    policy.observe(Outcome(TREE, TREE.levels, [(0,) * kept] * rows))


def test_the_rate_so_far_decides_not_the_round_alone() -> None:
    """A poor round beside good ones ends early: its time is worth more in the next round."""
    poor, good = falling(0.3, 0.2), falling(*[0.95] * 11)
    active = torch.tensor([True])
    verify, draft = (1.0, 1.25, 1.5, 1.5, 1.5), 0.5
    alone, after = priced(verify, draft), priced(verify, draft)
    for _ in range(20):
        assert after._keep(good, active) == 12
        heard(after, 10)
    assert alone._keep(poor, active) > after._keep(poor, active) == 1


def test_promises_that_are_not_kept_count_less() -> None:
    """A draft that is sure and wrong is verified less, then not at all."""
    sure, active = falling(*[0.99] * 11), torch.tensor([True])
    policy, plans, sizes = priced((1.0, 1.05, 1.1, 1.3, 1.7), 0.05), [], []
    for _ in range(60):
        plans.append(policy.next_plan())
        if plans[-1] is not None:
            sizes.append(policy._keep(sure, active))
            heard(policy, 0)
    assert sizes[0] == 12 and plans[-1] is None and plans.count(None) > 30


def test_idle_and_broken_rows_have_no_say() -> None:
    scores = torch.cat([falling(0.9, 0.9, 0.9), torch.full((1, 12), torch.nan), falling(0.001)])
    verify = (1.0, 1.2, 1.4, 1.8, 2.6)
    alone = priced(verify, 0.1)._keep(scores[:1], torch.tensor([True]))
    assert priced(verify, 0.1)._keep(scores, torch.tensor([True, False, False])) == alone
    assert priced(verify, 0.1)._keep(scores[1:2], torch.tensor([True])) == 1


def test_where_drafting_never_pays_it_rests_and_tries_again() -> None:
    active = torch.tensor([True])
    policy, plans = priced((1.0, 2.0, 3.0, 5.0, 9.0), 1.0), []
    for _ in range(2 * (CutGrown.RETRY + 4)):
        plans.append(policy.next_plan())
        if plans[-1] is not None:
            policy._keep(falling(0.1), active)
            heard(policy, 0)
    drafted = [i for i, plan in enumerate(plans) if plan is not None]
    tried = [*range(CutGrown.HEAR), CutGrown.HEAR + CutGrown.RETRY]
    assert drafted == [*tried, tried[-1] + CutGrown.RETRY + 1][: len(drafted)]


def test_it_is_asked_in_the_middle_of_rounds() -> None:
    """So that none is recorded as a graph, which asks nobody."""
    asked = {name: make_policy(name, TREE).asked for name in ("fixed", "confidence", "cut")}
    assert asked == {"fixed": False, "confidence": True, "cut": True}


def test_it_wants_a_tree_with_an_order() -> None:
    with pytest.raises(ValueError, match="expected tree=dynamic"):
        make_policy("cut", chain_plan(4))
