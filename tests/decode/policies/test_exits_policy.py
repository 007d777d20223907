"""DEL: which exit drafts and how far, by what every exit would have had kept; and that no answer
knows of it.
"""

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from counting import counting_target
from families import made
from peak_memory import GREEDY, LARGE, SAMPLED, model, peak
from rounds import record_rounds, started
from tiny_heads import words
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Kept
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import open_request
from draftsmith.decode.forward.size import at_once
from draftsmith.decode.policies.choice import make_policy
from draftsmith.decode.policies.exits import ExitPolicy, best_length
from draftsmith.decode.policies.policy import Outcome
from draftsmith.decode.policies.priced import parts
from draftsmith.decode.sampling import SamplingParams, log_race, position_keys
from draftsmith.decode.tree_shapes import DynamicTree, StaticTree, chain_plan, static_topology
from draftsmith.decode.untrained.exits import ExitsDrafter
from draftsmith.models.taps import target_states

WAYS = [replace(params, max_new_tokens=14) for params in SETTINGS]


@pytest.fixture(scope="module")
def target(tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Its first layer nearly counts, and so do both."""
    return counting_target(len(tiny_tokenizer), 328, blur=0.2)


def policy_of(reads: dict[int, int], whole: int, most: int, scale: float = 1.0) -> ExitPolicy:
    policy = ExitPolicy(chain_plan(most), scale)
    policy.choose_among(reads, whole)
    return policy


def rate(alpha: float, d: int, read: float, whole: float) -> float:
    return float(sum(alpha**i for i in range(d + 1)) / (whole + d * read))


def test_the_length_is_the_best_of_all() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        alpha, read, whole = draw.random(), draw.random() * 40, 1 + draw.random() * 40
        got, length = best_length(alpha, read, whole, 17)
        rates = [rate(alpha, d, read, whole) for d in range(18)]
        assert got == pytest.approx(max(rates)) and rates[length] == pytest.approx(max(rates))
    assert best_length(0.0, 1, 8, 17)[1] == 0 and best_length(1.0, 1, 8, 17)[1] == 17
    # The spec's example: 32 layers, exits after 2, 8 and 16 of them.
    found = {e: best_length(a, e, 32, 17) for e, a in ((2, 0.5), (8, 0.75), (16, 0.9))}
    assert max(found, key=lambda e: found[e]) == 2
    assert found[2] == (pytest.approx(0.0493, abs=1e-4), 3)


def news(*exits: tuple[float, float, float, float]) -> Tensor:
    return torch.tensor([[x for one in exits for x in one]], dtype=torch.float64)


def test_counts_and_choice_by_a_table_made_by_hand() -> None:
    policy = policy_of({2: 2, 4: 4}, 10, 6)
    policy.observe(Outcome(None, 0, [()], news((3, 2.7, 1, 0.2), (4, 3.6, 0, 0.0))))
    policy.observe(Outcome(chain_plan(2), 2, [(0,)], news((0, 0.0, 2, 0.6), (1, 0.5, 1, 0.3))))
    assert policy.sums[2] == pytest.approx([0.95 * 3, 0.95 * 2.7, 0.95 + 2, 0.95 * 0.2 + 0.6])
    seed = 0.95**2
    kept, missed = 0.95 * 4 + 1, 1.0
    assert policy.alpha(4) == pytest.approx((kept + seed / 2) / (kept + missed + seed))
    means = (0.95 * 3.6 + 0.5) / kept, 0.3
    assert policy.threshold(4) == pytest.approx(sum(means) / 2)
    best = max(
        ((e, d) for e in (2, 4) for d in range(7)),
        key=lambda one: rate(policy.alpha(one[0]), one[1], one[0], 10),
    )
    assert best[1] > 0
    assert policy.next_plan() == replace(chain_plan(best[1]), by=best[0])
    policy.observe(Outcome(None, 0, [], torch.empty(0, 8, dtype=torch.float64)))
    assert policy.alpha(4) == pytest.approx((kept + seed / 2) / (kept + missed + seed))


@pytest.mark.parametrize("right", [0, 1])
def test_sides_without_tokens_make_no_nan(right: int) -> None:
    """The other side's mean stands for one without tokens; without both nothing stops."""
    policy = policy_of({2: 2, 4: 4}, 10, 6)
    assert policy.threshold(2) == 0 and policy.next_plan() is not None
    one = (5.0, 4.0, 0.0, 0.0) if right else (0.0, 0.0, 5.0, 4.0)
    for _ in range(3000):  # and counts may fade away
        policy.observe(Outcome(None, 0, [()], news(one, (0, 0, 0, 0))))
        policy.next_plan()
    assert policy.threshold(2) == pytest.approx(0.8) and policy.threshold(4) == 0
    assert policy.alpha(2) == pytest.approx(right)
    assert np.isfinite([policy.alpha(4), *policy.sums[4]]).all()
    plan = policy.next_plan()
    assert (plan == replace(chain_plan(6), by=2)) if right else (plan is None or plan.by == 4)


@pytest.mark.parametrize(
    "alphas", [(0.5, 0.75, 0.9), (0.2, 0.9, 0.92), (0.1, 0.2, 0.95), (0.02, 0.03, 0.05)]
)
def test_it_finds_the_best_of_a_steady_stream(alphas: tuple[float, ...]) -> None:
    """Whatever it drafts meanwhile, every exit is counted."""
    reads, whole, draw = {2: 3, 8: 9, 16: 17}, 33, np.random.default_rng(0)
    policy, chosen = policy_of(reads, whole, 12), []
    for _ in range(120):
        plan = policy.next_plan()
        chosen.append(None if plan is None else (plan.by, plan.levels))
        kept = draw.binomial(256, alphas)
        found = [(k, 0.9 * k, 256 - k, 0.3 * (256 - k)) for k in kept]
        policy.observe(Outcome(plan, 1, [()], news(*found)))
    best = max(
        ((a, e, d) for a, e in zip(alphas, reads, strict=True) for d in range(13)),
        key=lambda one: rate(one[0], one[2], reads[one[1]], whole),
    )
    most = max(set(chosen[40:]), key=chosen[40:].count)
    if best[2] == 0:
        assert most is None
    else:
        assert most is not None and most[0] == best[1] and abs(most[1] - best[2]) <= 1
        worth = rate(alphas[list(reads).index(most[0])], most[1], reads[most[0]], whole)
        assert worth > 0.999 * rate(best[0], best[2], reads[best[1]], whole)


def test_the_exit_belongs_to_a_plan() -> None:
    """Recordings are kept by it; what is cut of it is drafted by the same."""
    for plan in (chain_plan(4), parts(DynamicTree(3, 3, 9))[-1]):
        other = replace(plan, by=2)
        assert other != plan and len({plan, other, replace(plan, by=2)}) == 2
        assert other.cut(2).by == 2 and other.cut(2).levels == 2
        assert all(part.by == 2 for part in parts(other))
    tree = StaticTree.from_paths([(0,), (1,), (0, 0)])
    assert static_topology(replace(tree, by=1), torch.device("cpu")).levels == 2


# ---- the drafter -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> ExitsDrafter:
    found = load_drafter("exits:1+2", target, tiny_tokenizer)
    assert isinstance(found, ExitsDrafter)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.no_grad()
def test_news_equals_a_table_made_token_by_token(
    target: PreTrainedModel, own: ExitsDrafter, temperature: float
) -> None:
    """Rows that kept 0, 1, 3 and all tokens of a round; a row of NaN beside them tells nothing."""
    params = SamplingParams(temperature)
    ids_BT = torch.arange(45).view(5, 9) * 7 % 320
    ids_BT[:, 4:] = ids_BT[:, 3:4] + torch.arange(1, 6)  # some of what it says
    taps_BTU = target_states(target, own.taps, input_ids=ids_BT).taps_BTF
    n_new_B, lens_B = torch.tensor([0, 1, 3, 5, 0]), torch.full((5,), 3)
    seeds_B = torch.arange(5)
    at_BL = lens_B[:, None] + torch.arange(5) + 1
    race_BLV = log_race(position_keys(seeds_B, at_BL), 320) if temperature else None
    taps_BLU = taps_BTU[:, 3:8].clone()
    taps_BLU[4] = torch.nan
    kept = Kept(ids_BT[:, 4:9], n_new_B, None, lens_B, taps_BLU)
    told_BX = own.extend(kept._replace(params=params, race_BLV=race_BLV))
    assert told_BX.dtype == torch.float64 and told_BX.shape == (5, 8)
    body, both = target.model, set()
    for row, exit in itertools.product(range(5), range(2)):
        wanted = [0.0] * 4
        for at in range(int(n_new_B[row])):
            state_H = taps_BLU[row, at, 32 * exit : 32 * exit + 32]
            logits_V = (target.lm_head.weight @ body.norm(state_H))[:320]
            scores_V = logits_V if race_BLV is None else logits_V - race_BLV[row, at]
            token = int(scores_V.argmax())
            side = 0 if token == int(kept.tokens_BL[row, at]) else 2
            both.add(side)
            wanted[side] += 1
            wanted[side + 1] += float(logits_V.softmax(-1)[token])
        got = told_BX[row, 4 * exit : 4 * exit + 4].tolist()
        assert got == pytest.approx(wanted, abs=1e-5)
    assert both == {0, 2} or temperature


def heard(decoder: Decoder) -> list[tuple[Outcome, int]]:
    """Outcomes as the policy hears them, and the exit that it had chosen."""
    found, policy = [], decoder.policy
    assert isinstance(policy, ExitPolicy)
    listens = policy.observe

    def observe(outcome: Outcome) -> None:
        found.append((outcome, policy.exit))
        listens(outcome)

    policy.observe = observe  # type: ignore[method-assign]
    return found


def wrong(found: list[tuple[Outcome, int]]) -> int:
    """Rows whose exit that drafted is told another number of kept tokens than were kept: one more
    is right where all that was drafted was kept, and the next would have been.
    """
    count = 0
    for outcome, exit in found:
        assert outcome.news is not None and len(outcome.news) == len(outcome.paths)
        for row_X, path in zip(outcome.news, outcome.paths, strict=True):
            kept, missed = row_X[4 * (exit - 1)], row_X[4 * (exit - 1) + 2]
            more = {len(path), len(path) + (len(path) == outcome.levels)}
            count += float(kept) not in more or float(kept + missed) != len(path) + 1
    return count


@pytest.mark.parametrize("params", WAYS[:2], ids=["greedy", "t1"])
def test_the_exit_that_drafts_is_told_what_was_kept(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    own: ExitsDrafter,
    params: SamplingParams,
) -> None:
    """Acceptance itself, at any temperature; the twin that compares likeliest tokens is told apart
    above 0.
    """
    params = replace(params, max_new_tokens=60, ignore_eos=True)
    plans = [replace(chain_plan(d), by=e) for d in (3, 1) for e in (1, 2)]

    class Blind(ExitsDrafter):
        def extend(self, kept: Kept) -> Tensor:
            return super().extend(kept._replace(race_BLV=None))

    blind = Blind(target, len(tiny_tokenizer), [1, 2])
    for drafter in (own, blind):
        decoder = Decoder(target, tiny_tokenizer, drafter, K=3, policy="exits:0", batch_size=3)
        turns, policy = itertools.cycle([*plans, None]), decoder.policy
        assert isinstance(policy, ExitPolicy)

        def next_plan(*_: Any, turns: Any = turns, policy: ExitPolicy = policy) -> Any:
            plan = next(turns)
            policy.exit = 1 if plan is None else plan.by
            return plan

        policy.next_plan = next_plan  # type: ignore[method-assign]
        found = heard(decoder)
        decoder.generate(PROMPTS, params)
        inside = found[:15]  # before a row ends by its length
        assert {outcome.levels for outcome, _ in inside} == {0, 1, 3}
        assert any(outcome.plan is None for outcome, _ in inside)
        assert (wrong(inside) > 0) == (drafter is blind and not params.greedy)


def test_no_answer_knows_of_it(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, own: ExitsDrafter
) -> None:
    """Rows come and go; whatever is chosen, and with every plan in turn, trees too."""
    trees: list[dict[str, Any]] = [{"K": 4}, {"tree": "eagle-25"}, {"tree": "dynamic:4,3,12"}]
    for params in WAYS:
        expected = truths(target, tiny_tokenizer, params)
        for policy, batch in (("exits", 3), ("exits:0", 1), ("exits:1.2", 4)):
            decoder = Decoder(target, tiny_tokenizer, own, K=4, policy=policy, batch_size=batch)
            assert [c.tokens for c in decoder.generate(PROMPTS, params)] == expected
        for tree in trees:
            decoder = Decoder(target, tiny_tokenizer, own, batch_size=3, **tree)
            plan = decoder.policy.plans[-1]
            turns = itertools.cycle([replace(plan.cut(d), by=e) for d in (4, 2) for e in (2, 1)])
            decoder.policy.next_plan = lambda *_, turns=turns: next(turns)  # type: ignore[method-assign]
            assert [c.tokens for c in decoder.generate(PROMPTS, params)] == expected, tree


def test_its_news_comes_beside_log_probabilities(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, own: ExitsDrafter
) -> None:
    """Of a session whose rows want them, some of them; the policy hears the same."""
    found = []
    for drafter, policy in ((None, "fixed"), (own, "exits:0")):
        decoder = Decoder(target, tiny_tokenizer, drafter, K=4, policy=policy)
        outcomes = heard(decoder) if drafter else []
        session = decoder.open_session(3, 200)
        given: dict[str, Any] = {"context": 200, "end_ids": decoder.eos_ids, "params": WAYS[1]}
        requests = [
            open_request(text, i, i, tokenizer=tiny_tokenizer, **given)
            for i, text in enumerate(PROMPTS)
        ]
        for request, top in zip(requests, (2, None, 0, 3), strict=True):
            request.top = top
            session.submit(request)
        while session.busy:
            session.step()
        assert not outcomes or wrong(outcomes[:4]) == 0
        found.append([(r.completion.tokens, r.completion.listed) for r in requests])
    for (tokens, listed), (others, theirs) in zip(*found, strict=True):
        assert tokens == others and len(listed) == len(theirs)
        for one, other in zip(listed, theirs, strict=True):
            assert one.log_p == pytest.approx(other.log_p, abs=1e-4)
            assert [i for i, _ in one.likeliest] == [i for i, _ in other.likeliest]


def test_it_learns_which_exit_is_worth_it(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, own: ExitsDrafter
) -> None:
    """The second layer of two adds nothing to a draft that reads it: it is the target itself."""
    long = replace(WAYS[0], max_new_tokens=60, ignore_eos=True)
    decoder = Decoder(target, tiny_tokenizer, own, K=6, policy="exits:0", batch_size=4)
    found = heard(decoder)
    decoder.generate(PROMPTS, long)
    policy = decoder.policy
    assert isinstance(policy, ExitPolicy)
    assert policy.alpha(2) > 0.99 and policy.alpha(1) < policy.alpha(2)
    assert policy.whole == policy.reads[2] > policy.reads[1]
    assert best_length(1.0, policy.reads[2], policy.whole, 6)[1] == 0
    alpha, read = policy.alpha(1), policy.reads[1]
    best = max(range(7), key=lambda d: rate(alpha, d, read, policy.whole))
    plan = policy.next_plan()
    assert (0 if plan is None else plan.levels) == best
    assert len(found) > 5


def test_a_round_never_reads_the_device_and_plans_are_recorded_apart(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, own: ExitsDrafter
) -> None:
    decoder = Decoder(target, tiny_tokenizer, own, batch_size=4, K=3, policy="exits:0")
    assert not decoder.policy.asked
    batch, plan = started(decoder, WAYS[1]).batch, replace(chain_plan(3), by=2)
    decoder.stepper.step(batch, plan, 64, None)  # a chain's topology is kept: not a fake one
    with FakeTensorMode(allow_non_fake_inputs=True):
        decoder.stepper.step(batch, plan, 64, None)
    decoder = Decoder(target, tiny_tokenizer, own, batch_size=2, K=3, policy="exits:0")
    turns = itertools.cycle([replace(chain_plan(3), by=e) for e in (1, 2)])
    decoder.policy.next_plan = lambda *_: next(turns)  # type: ignore[method-assign]
    decoder.late = True
    recordings = record_rounds(decoder)
    expected = truths(target, tiny_tokenizer, long := replace(WAYS[1], max_new_tokens=40))
    for _ in range(2):
        assert [c.tokens for c in decoder.generate(PROMPTS, long)] == expected
    assert len(recordings) == 2


@pytest.mark.parametrize("name", ["exits:1", "exits:1+3", "exits:0+1", "exits:1+1", "exits:1+x"])
def test_exits_that_are_not_there(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    with pytest.raises(ValueError, match=r"got exits:.*, expected several numbers of layers, 1 to"):
        load_drafter(name, target, tiny_tokenizer)


def test_what_it_cannot_choose_is_refused(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, own: ExitsDrafter
) -> None:
    one = load_drafter("exit:1", target, tiny_tokenizer)
    with pytest.raises(ValueError, match=r"drafter=exits:2\+4\+6"):
        Decoder(target, tiny_tokenizer, one, policy="exits")
    with pytest.raises(ValueError, match=r"got a tree and 1 times .* expected tree=chain"):
        Decoder(target, tiny_tokenizer, own, policy="exits", tree="eagle-25")
    with pytest.raises(ValueError, match="got a chain and -1 times"):
        make_policy("exits:-1", chain_plan(3))
    decoder = Decoder(target, tiny_tokenizer, own, policy="exits", rule="leviathan")
    decoder.generate(PROMPTS[:1], WAYS[0])
    with pytest.raises(ValueError, match="rule=leviathan at temperature 1, expected rule=coupled"):
        decoder.generate(PROMPTS[:1], WAYS[1])


def test_a_final_norm_that_is_not_found_is_refused() -> None:
    with pytest.raises(ValueError, match="no module `norm`"):
        ExitsDrafter(made("gpt-neox"), 320, [1, 2])
    assert set(ExitsDrafter(made("gemma3"), 320, [1, 2]).ways) == {1, 2}


@pytest.mark.parametrize(
    ("params", "K"),
    [
        (GREEDY, 7),
        (SAMPLED, 7),
        (SamplingParams(0.7, top_p=0.9, ignore_eos=True), 7),
        (GREEDY, 2),
    ],
)
def test_a_runs_peak_is_planned(params: SamplingParams, K: int) -> None:
    """Shadow logits beside the target's, of 32k tokens: exit by exit, or of two at once."""
    target = model(LARGE, 3)
    drafter = ExitsDrafter(target, LARGE, [1, 2, 3])
    assert at_once(8, K + 1) == (1 if K == 7 else 2)
    decoder = Decoder(target, words(LARGE), drafter, batch_size=8, K=K, policy="exits:0")
    decoder.policy.next_plan = lambda *_: replace(chain_plan(K), by=1)  # type: ignore[method-assign]

    def run() -> None:
        prompts = [[7 + row] * 10 for row in range(8)]
        stream = decoder.stream(prompts, replace(params, max_new_tokens=100))
        for _ in range(8 * 3):
            next(stream)
        stream.close()

    used = peak(run)
    assert decoder.memory is not None
    assert abs(decoder.memory.total / used - 1) < 0.05, (decoder.memory.total, used)
