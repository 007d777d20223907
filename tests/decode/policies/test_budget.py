"""Verifying another part of each row's draft: whose law that keeps, and what it does to rounds."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from enumeration import CPU, enumerate_rule, joint_of, toy
from recurrent_targets import recurrent
from scripted import Bushy
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.rows import Settled
from draftsmith.decode.engine.settings import DecodeSettings
from draftsmith.decode.policies.budget import Shares, Survival, Toll, likeliest, worth
from draftsmith.decode.policies.choice import make_policy
from draftsmith.decode.policies.policy import Load, Outcome
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import WITH_REPLACEMENT, TokenTree, chain
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.decode.verify.rules import RULES

param, slow = pytest.param, pytest.mark.slow
NAMES = "budget", "auto"
Scheduler = Callable[[np.ndarray], np.ndarray]  # survival_BN -> verified_B


def law_error(
    rule: str, scheduler: Scheduler, *, drawn: bool, levels: int = 2, vocab: int = 2, seed: int = 0
) -> float:
    """The largest error of the joint law of two rows, each of a draft of its own, of which a
    scheduler sees both; drawn: chances are q of the drawn token, else of the likeliest one.
    """
    verify, topology = RULES[rule].verify, chain(levels, CPU)
    p, q = (
        [toy(seed + 10 * row + k, vocab, levels + 1, sharp) for row in range(2)]
        for k, sharp in ((0, 1.5), (100, 1.0))
    )
    words = list(itertools.product(range(vocab), repeat=levels))

    def ends(row: int, word: tuple[int, ...], verified: int) -> Tensor:
        this = torch.tensor((0, *word))
        how: dict[str, Any] = {"share": lambda drafts_RN: (drafts_RN == this).all(1).double()}

        def cut(tree: TokenTree, *rest: Any) -> Any:
            parts_R = torch.full((len(tree.tokens_BN),), verified)
            return verify(replace(tree, verified_B=parts_R), *rest)

        return enumerate_rule(cut, topology, WITH_REPLACEMENT, p[row], q[row], **how).joint

    def chances(row: int, word: tuple[int, ...]) -> list[float]:
        made = [1.0]
        for depth in range(levels):
            law_V = q[row][depth][word[:depth]]
            made.append(made[-1] * float(law_V[word[depth]] if drawn else law_V.max()))
        return made

    joint: Tensor | float = 0.0
    known: dict[Any, Tensor] = {}
    for both in itertools.product(words, repeat=2):
        verified_B = scheduler(np.array([chances(row, word) for row, word in enumerate(both)]))
        for row in range(2):
            key = row, both[row], int(verified_B[row])
            known.setdefault(key, None)  # type: ignore[arg-type]
            if known[key] is None:
                known[key] = ends(*key)
        one, two = (known[row, both[row], int(verified_B[row])] for row in range(2))
        joint = joint + one.flatten()[:, None] * two.flatten()
    wanted = [joint_of(tables, levels + 1).flatten() for tables in p]
    return float((joint - wanted[0][:, None] * wanted[1]).abs().max())


def top(each: float) -> Scheduler:
    return lambda survival_BN: likeliest(survival_BN, round(2 * each))


def priced(least: float) -> Scheduler:
    return lambda survival_BN: worth(survival_BN, least)


def best_now(survival_BN: np.ndarray) -> np.ndarray:
    """The most tokens a second by this round's chances, over every number of tokens, three of which
    cost what one does: a token's successor, which depends on it, then decides on both.
    """
    seconds = np.array([1.0, 1.9, 1.9, 1.9, 9.0])
    tokens = 2 + np.concatenate([[0], np.cumsum(-np.sort(-survival_BN[:, 1:], axis=None))])
    return top(int((tokens / seconds).argmax()) / 2)(survival_BN)


@pytest.mark.parametrize("rule", ["leviathan", "block"])
@pytest.mark.parametrize("seed", [0, param(1, marks=slow), param(2, marks=slow)])
def test_a_choice_by_what_lies_before_keeps_the_law(rule: str, seed: int) -> None:
    for least in (0.3, 0.5, 0.7):
        assert law_error(rule, priced(least), drawn=False, seed=seed) < 1e-12
    for each in (0, 0.5, 1, 1.5, 2):
        assert law_error(rule, top(each), drawn=False, seed=seed) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["leviathan", "block"])
def test_of_longer_drafts_too(rule: str) -> None:
    assert law_error(rule, priced(0.4), drawn=False, levels=3) < 1e-12
    assert law_error(rule, priced(0.3), drawn=False, vocab=3) < 1e-12


@pytest.mark.parametrize("rule", ["leviathan", "block"])
def test_the_drawn_tokens_chances_do_not(rule: str) -> None:
    """TETRIS, and one threshold on the same chances: why settings refuse them."""
    tetris = max(law_error(rule, top(0.5), drawn=True, seed=seed) for seed in (0, 2))
    threshold = max(law_error(rule, priced(0.5), drawn=True, seed=seed) for seed in (0, 2))
    assert tetris > 3e-2 and threshold > 3e-2


@pytest.mark.parametrize("rule", ["leviathan", "block"])
def test_nor_does_an_argmax_over_chances_of_now(rule: str) -> None:
    """Why a token's worth is weighed by rounds that are over."""
    assert max(law_error(rule, best_now, drawn=False, seed=seed) for seed in (0, 1)) > 1e-2


def random_parts(seed: int) -> Any:
    """What shares a tree out by chance; and how many nodes it gave."""
    draw, given = np.random.default_rng(seed), set()

    def share(tree: TokenTree, active_B: Tensor) -> TokenTree:
        rows, nodes = tree.tokens_BN.shape
        verified_B = draw.integers(1, nodes + 1, rows)
        given.update(verified_B.tolist())
        depth_B = torch.from_numpy(verified_B)
        return replace(tree, sure_BN=torch.zeros(rows, nodes), verified_B=depth_B)

    return share, given


@pytest.mark.parametrize("params", [replace(p, max_new_tokens=24) for p in SETTINGS])
@pytest.mark.parametrize("tree", ["chain", "eagle-25"])
@pytest.mark.parametrize("rows", [param(1, marks=slow), 3, param(16, marks=slow)])
def test_no_answer_changes_whatever_is_verified(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tree: str,
    rows: int,
    params: SamplingParams,
) -> None:
    """Of a model's drafts, and of nearly right ones; rows come and go. With every node that passes
    taken, verified or not, other answers come.
    """
    texts = PROMPTS * (1 + rows // 4)
    expected = truths(tiny_target, tiny_tokenizer, params, texts)
    for drafter in (tiny_target, tiny_draft):
        decoder = Decoder(
            tiny_target,
            tiny_tokenizer,
            LMDrafter(drafter, len(tiny_tokenizer)),
            tree=tree,
            K=3,
            batch_size=rows,
        )
        decoder.policy.share, given = random_parts(rows)
        assert [c.tokens for c in decoder.generate(texts, params)] == expected
        assert len(given) > 2


def test_a_part_that_is_not_honoured_changes_answers(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broken twin: rules that accept what was never verified."""
    settled = Settled.at_once
    whole = {"verified_B": None}
    monkeypatch.setattr(
        Settled, "at_once", lambda rows, tree, *rest: settled(rows, replace(tree, **whole), *rest)
    )
    decoder = Decoder(
        tiny_target,
        tiny_tokenizer,
        LMDrafter(tiny_target, len(tiny_tokenizer)),
        policy="tetris",
        batch_size=3,
    )
    decoder.policy.share, _ = random_parts(0)
    params = replace(SETTINGS[0], max_new_tokens=24)
    with pytest.raises((AssertionError, IndexError)):
        done = decoder.generate(PROMPTS, params)
        assert [c.tokens for c in done] == truths(tiny_target, tiny_tokenizer, params)


@pytest.mark.parametrize("policy", ["budget", "tetris:1.5"])
@pytest.mark.parametrize("params", [replace(p, max_new_tokens=24) for p in SETTINGS])
def test_no_answer_changes_by_chances(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    policy: str,
    params: SamplingParams,
) -> None:
    """Of drafters that say how sure they are, and of those that don't."""
    expected = truths(tiny_target, tiny_tokenizer, params)
    answers = {
        tuple(tiny_tokenizer(t).input_ids): e for t, e in zip(PROMPTS, expected, strict=True)
    }
    vocab = len(tiny_tokenizer)
    drafters: list[Drafter] = [LMDrafter(tiny_draft, vocab), Bushy("half", answers, vocab)]
    for drafter in drafters:
        decoder = Decoder(tiny_target, tiny_tokenizer, drafter, policy=policy, batch_size=3)
        if isinstance(decoder.policy, Shares):
            decoder.policy.next_plan = lambda *_: chain_plan(4)  # type: ignore[method-assign]
            decoder.policy._costs = lambda: Toll(0.4, 1.0)  # type: ignore[method-assign]
        assert [c.tokens for c in decoder.generate(PROMPTS, params)] == expected


def test_a_target_with_a_state_verifies_rows_as_wide_as_the_tree(
    tiny_tokenizer: PreTrainedTokenizerBase, tiny_draft: PreTrainedModel
) -> None:
    target, params = recurrent("bamba"), SamplingParams(max_new_tokens=12, ignore_eos=True)
    drafter = LMDrafter(tiny_draft, len(tiny_tokenizer))
    decoder = Decoder(target, tiny_tokenizer, drafter, policy="tetris", batch_size=3)
    decoder.policy.share, _ = random_parts(1)
    done = decoder.generate(PROMPTS, params)
    assert [c.tokens for c in done] == truths(target, tiny_tokenizer, params)


@pytest.mark.parametrize("rule", ["leviathan", "block"])
def test_rules_by_rejection_decode_parts(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, rule: str
) -> None:
    """Of the target's own drafts all that is verified is kept."""
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    how: dict[str, Any] = {"policy": "budget", "rule": rule, "batch_size": 2, "K": 3}
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, **how)
    decoder.policy.next_plan = lambda *_: chain_plan(3)  # type: ignore[method-assign]
    decoder.policy.share, _ = random_parts(2)
    params = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3, ignore_eos=True)
    for made in decoder.generate(PROMPTS, params):
        assert made.counters.nodes > 0 and not any(made.corrected)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"policy": "tetris", "rule": "leviathan"}, "would bias; use rule=coupled, or policy=bud"),
        ({"policy": "budget", "rule": "recursive"}, "got rule=recursive, lossy='', which parts"),
        ({"policy": "budget", "lossy": "typical", "allow_lossy": True}, "would bias"),
        ({"policy": "budget", "tree": "eagle-25"}, "got a tree of 26 nodes, expected a chain"),
        ({"policy": "budget", "tree": "dynamic:3,3,9"}, "or policy=cut for a dynamic tree"),
        ({"policy": "tetris:9"}, "expected 0 to the 4 that are drafted"),
    ],
)
def test_what_would_be_biased_is_refused(how: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        DecodeSettings(**how)


def test_who_learns_from_all_that_is_verified_is_refused(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafter = Bushy("half", {}, len(tiny_tokenizer))
    drafter.chooses = True
    with pytest.raises(ValueError, match="learns from every token that is verified"):
        Decoder(tiny_target, tiny_tokenizer, drafter, policy="budget")


def best_by_force(survival_BN: np.ndarray, token: float, rate: float) -> float:
    gains = survival_BN[:, 1:] - token * rate
    return sum(max(0.0, *np.cumsum(row)) for row in gains)


def test_shares_are_the_best_there_are() -> None:
    """Against every prefix of every row: of three rows of four tokens."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        survival_BN = np.concatenate([np.ones((3, 1)), draw.random((3, 4))], 1)
        costs = Toll(float(draw.random()), float(draw.random()) * 2)
        verified_B = worth(survival_BN.copy(), costs.token * costs.rate)
        got = sum(
            float((row[1:n] - costs.token * costs.rate).sum())
            for row, n in zip(survival_BN, verified_B, strict=True)
        )
        assert got == pytest.approx(best_by_force(survival_BN, *costs))
        chains_BN = survival_BN.cumprod(1)
        each = likeliest(chains_BN, 6)
        kept = sum(float(row[1:n].sum()) for row, n in zip(chains_BN, each, strict=True))
        assert sum(each - 1) == 6
        assert kept == pytest.approx(np.sort(chains_BN[:, 1:], axis=None)[-6:].sum())


def test_chances_are_learned() -> None:
    """A draft that is surer than it should be, the more so the deeper it is; and one of which only
    depths are known.
    """
    draw, truth = np.random.default_rng(1), np.array([0.8, 0.3, -0.4, -1.0])
    told, silent = Survival(3), Survival(3)
    for _ in range(200):
        log_odds_BD = draw.normal(1.0, 2.0, (24, 3))
        sure_BD = -np.log1p(np.exp(-log_odds_BD))
        chance_BD = 1 / (1 + np.exp(-truth[0] * log_odds_BD - truth[1:]))
        kept_B = (draw.random((24, 3)) < chance_BD).cumprod(1).sum(1)
        tried_B = np.minimum(kept_B + 1, draw.integers(0, 4, 24))
        told.take(sure_BD, tried_B, kept_B)
        silent.take(np.full((24, 3), np.log(0.5)), tried_B, kept_B)
    assert np.abs(told.weights - truth).max() < 0.3
    shares = silent.chance(np.full((1, 3), np.log(0.5)))[0]
    assert (np.diff(shares) < 0).all()


def simulated(policy: Any, rows: int, token: float, rounds: int = 400) -> float:
    """Tokens a second where a round takes 1, a draft call .02 and each token `token`, and half of
    the rows are sure of their drafts: .95 of these are kept, .2 of the others.
    """
    draw = np.random.default_rng(0)
    tokens = took = 0.0
    for _ in range(rounds):
        plan = policy.next_plan(Load(rows, rows))
        levels, shared, chance_B = 0, None, np.where(draw.random(rows) < 0.5, 0.95, 0.2)
        paths, verified_B = [()] * rows, np.ones(rows, np.int64)
        if plan is not None:
            levels = plan.levels
            topology = chain(levels, CPU)
            sure_BN = torch.from_numpy(np.log(np.repeat(chance_B[:, None], levels + 1, 1)))
            sure_BN[:, 0] = 0
            blank_BN = torch.zeros(rows, levels + 1, dtype=torch.int64)
            tree = TokenTree(blank_BN, topology, WITH_REPLACEMENT, sure_BN=sure_BN)
            verified_B = np.full(rows, levels + 1)
            if policy.share is not None:
                tree = policy.share(tree, torch.ones(rows, dtype=torch.bool))
                shared = tree.parts
                verified_B = shared[1]
            right_BN = draw.random((rows, levels)) < chance_B[:, None]
            kept_B = np.minimum(right_BN.cumprod(1).sum(1), verified_B - 1)
            paths = [(0,) * int(kept) for kept in kept_B]
        seconds = 1 + 0.02 * levels + token * float(verified_B.sum())
        tokens += rows + sum(map(len, paths))
        took += seconds
        load = Load(rows, rows)
        policy.observe(Outcome(plan, levels, paths, None, load, seconds, shared))
    return tokens / took


@pytest.mark.parametrize(
    ("rows", "token"), [(4, 1 / 16), param(16, 1 / 16, marks=slow), param(64, 1 / 64, marks=slow)]
)
def test_it_pays_where_rows_differ_and_tokens_cost(rows: int, token: float) -> None:
    """More than `auto`, which verifies alike for all rows; where tokens are free, about as much."""
    plan = chain_plan(4)
    for cost, least in ((token, 1.1), (0.0, 0.93)):
        shared, alike = (simulated(make_policy(name, plan), rows, cost) for name in NAMES)
        assert shared > least * alike
