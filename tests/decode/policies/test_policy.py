"""Policies change how much is drafted and never what comes out; each does what its name says."""

from itertools import product

import pytest
import torch
from covering import covering
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafting.base import Call
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.policies.choice import make_policy
from draftsmith.decode.policies.policy import Costs, Depth, Entropy, Outcome
from draftsmith.decode.policies.priced import Cost, parts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import DynamicTree, StaticTree, chain_plan

COSTS = Costs((1, 2, 4, 8, 16, 32), (1.0, 1.1, 1.2, 1.5, 2.0, 3.0), (0.1,) * 6)
POLICIES = ["confidence:0.2", "entropy:0.1,0.5", "depth:0.1", "cost"]


@pytest.mark.parametrize(
    ("tree", "policy", "params"),
    [
        *covering(("chain", "eagle-25", "dynamic:4,3,12"), POLICIES, SETTINGS),
        *product(("dynamic:4,3,12",), ("gain:0.2",), SETTINGS),
    ],
)
def test_no_policy_changes_an_answer(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tree: str,
    policy: str,
    params: SamplingParams,
) -> None:
    expected = truths(tiny_target, tiny_tokenizer, params)
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, policy=policy, tree=tree, batch_size=3)
    if not params.greedy and policy == "cost":  # the greedy run measures them
        decoder.policy.costs = COSTS
    assert [c.tokens for c in decoder.generate(PROMPTS, params)] == expected


def test_gain_stops_where_another_call_promises_little() -> None:
    """Of a tree of three drafted nodes: the best three paths so far, of all calls of the round."""
    flat, plan = torch.zeros(1, 1, 50), DynamicTree(3, 2, 4)
    first, second = a_call([0.5], [0.6, 0.3], flat), a_call([0.5], [0.4, 0.2], flat, depth=1)
    third = a_call([0.5], [0.35, 0.1], flat, depth=2)
    for least, stops in ((0.41, (False, True)), (0.39, (False, False)), (0.91, (True, True))):
        policy = make_policy(f"gain:{least}", plan)
        assert policy.enough is not None
        for _ in range(2):  # another round begins anew
            # 0.9; of 0.6, 0.4, 0.3 it is 1.3, which is 0.4 more.
            assert tuple(bool(policy.enough(call)) for call in (first, second)) == stops
        # 0.6, 0.4, 0.35: 0.05 more.
        assert bool(policy.enough(third)) == (least > 0.05)
    with pytest.raises(ValueError, match=r"policy gain: got .* expected tree=dynamic"):
        make_policy("gain:0.1", chain_plan(4))


@pytest.mark.parametrize("rule", ["block", "leviathan"])
def test_an_early_end_is_fine_for_rules_by_rejection(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, rule: str
) -> None:
    """With p = q nearly everything drafted is kept, however short the draft."""
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    policy = "confidence:0.05"
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=6, policy=policy, rule=rule)
    counters = [c.counters for c in decoder.generate(PROMPTS, SETTINGS[1])]
    rounds = sum(c.rounds for c in counters)
    assert rounds < sum(c.drafted for c in counters) < 6 * rounds
    assert sum(c.emitted for c in counters) >= 0.95 * sum(c.drafted for c in counters)


def a_call(q: list[float], paths: list[float], logits: torch.Tensor, depth: int = 0) -> Call:
    """One row, one node fed; children of probability q, on paths of these chances."""
    of_BC = torch.zeros(1, len(paths), dtype=torch.int64)
    call = Call(depth, torch.ones(1, dtype=torch.bool), logits, logits, None, of_BC, of_BC)
    call.path_BC = torch.tensor([paths]).log()
    call.log_q_BC = torch.tensor([q]).log()
    return call


def test_confidence_depth_and_entropy_stop_where_they_should() -> None:
    flat, sharp = torch.zeros(1, 1, 50), torch.eye(50)[None, :1] * 20
    chain = chain_plan(4)
    for policy, call, stops in (
        (make_policy("confidence:0.4", chain), a_call([0.39], [0.9], flat), True),
        (make_policy("confidence:0.4", chain), a_call([0.41], [0.1], flat), False),
        (Depth(chain, 0.3), a_call([0.9], [0.29], flat), True),
        (Depth(chain, 0.3), a_call([0.1], [0.31], flat), False),
        # A beam of two: 0.2 + 0.15 is enough to go on, a third child doesn't count.
        (Depth(DynamicTree(3, 2, 5), 0.3), a_call([0.2] * 3, [0.2, 0.15, 0.1], flat), False),
        (Depth(DynamicTree(3, 2, 5), 0.36), a_call([0.2] * 3, [0.2, 0.15, 0.1], flat), True),
        # H = log 50 = 3.91: the bound is 1 - sqrt(0.2 * 3.91) = 0.116.
        (Entropy(chain, 0.2, 0.12), a_call([0.5], [0.5], flat), True),
        (Entropy(chain, 0.2, 0.11), a_call([0.5], [0.5], flat), False),
        (Entropy(chain, 0.2, 0.9), a_call([0.5], [0.5], sharp), False),
    ):
        assert policy.enough is not None
        assert policy.enough(call).tolist() == [stops]


def test_the_entropy_limit_follows_the_acceptance() -> None:
    policy = Entropy(chain_plan(4))
    for _ in range(50):
        policy.observe(Outcome(chain_plan(4), 4, [(0,) * 4]))
    assert policy.limit < 0.6
    for _ in range(200):
        policy.observe(Outcome(chain_plan(4), 4, [()]))
    assert policy.limit > 0.6


def test_costs_count_every_call_of_a_tree() -> None:
    costs = Costs((1, 2, 4, 8), (10.0, 11.0, 13.0, 17.0), (1.0, 1.5, 2.5, 4.5))
    assert costs.of(chain_plan(3)) == 3 * 1.0 + 13.0
    tree = StaticTree.from_paths([(0,), (1,), (2,), (0, 0), (1, 0), (2, 0)])
    assert costs.of(tree) == pytest.approx(1.0 + 2.0 + 16.0)
    assert costs.of(DynamicTree(2, 2, 4)) == pytest.approx(1.0 + 1.5 + 13.0)


@pytest.mark.parametrize(("kept", "best"), [(6, 6), (1, 1), (0, 1)])
def test_cost_finds_the_best_depth(kept: int, best: int) -> None:
    policy = Cost(chain_plan(6))
    policy.costs = Costs((1, 8), (10.0, 10.0), (2.0, 2.0))
    for _ in range(100):
        plan = policy.next_plan()
        policy.observe(Outcome(plan, plan.levels, [(0,) * min(kept, plan.levels)]))
    assert policy.next_plan().levels == best


def test_cost_prunes_branches_that_never_help() -> None:
    tree = StaticTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    policy = Cost(tree)
    policy.costs = Costs((1, 8), (10.0, 24.0), (1.0, 1.0))
    for _ in range(100):
        plan = policy.next_plan()
        policy.observe(Outcome(plan, plan.levels, [(0,) * plan.levels]))
    assert policy.next_plan() == chain_plan(3)


def test_parts_are_trees_of_every_depth_and_width() -> None:
    tree = StaticTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])
    found = parts(tree)
    assert found[-1] == tree and len(set(found)) == len(found) == 6
    assert found[0] == chain_plan(1)
    shapes = [(p.levels, p.nodes) for p in parts(DynamicTree(3, 2, 8))]
    assert shapes == [(1, 2), (1, 3), (2, 2), (2, 4), (2, 7), (3, 2), (3, 4), (3, 8)]
