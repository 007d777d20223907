"""Every rule by rejection by exact enumeration on a toy vocabulary, and its broken twins."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from enumeration import CPU, enumerate_rule, error, joint_of, toy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftsmith.decode.token_tree import (
    COUPLED,
    DETERMINISTIC,
    LAST_DRAWN,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    TokenTree,
    Topology,
    chain,
)
from draftsmith.decode.verify import rules
from draftsmith.decode.verify.rules import (
    RULES,
    Noise,
    Rule,
    Verdict,
    block,
    k_seq,
    leviathan,
    recursive,
    traversal,
)

SHAPES = {
    "chain-1": ([-1, 0], 4),
    "chain-2": ([-1, 0, 1], 4),
    "chain-3": ([-1, 0, 1, 2], 3),
    "star-2": ([-1, 0, 0], 4),
    "star-3": ([-1, 0, 0, 0], 4),
    "fork": ([-1, 0, 0, 1, 2], 3),
    "bush": ([-1, 0, 0, 1, 1, 2, 2], 3),
    "uneven": ([-1, 0, 0, 1, 1, 2, 3], 3),
    "late": ([-1, 0, 0, 2, 2, 2], 3),  # the first child is a leaf, the second has three
}
LAWS = (WITH_REPLACEMENT, WITHOUT_REPLACEMENT)
# Tokens that p and q may give (0: all): truncated laws, one point each, and q running out.
SUPPORTS = [(0, 0), (2, 2), (0, 1), (1, 0), (0, 2)]


def shape(name: str) -> tuple[Topology, int]:
    parents, vocab = SHAPES[name]
    return Topology.from_parents(parents, CPU), vocab


def cases() -> list[tuple[Rule, str, str]]:
    return [
        (rule, name, law)
        for rule in (leviathan, block, recursive, traversal)
        for name in SHAPES
        for law in LAWS
        if rule in (recursive, traversal) or name.startswith("chain")
    ] + [(k_seq, name, WITH_REPLACEMENT) for name in SHAPES]


@pytest.mark.parametrize(("rule", "name", "law"), cases())
def test_rule_is_exact(rule: Rule, name: str, law: str) -> None:
    topology, vocab = shape(name)
    levels = topology.levels + 1
    for seed, (top_p, top_q) in enumerate(SUPPORTS):
        p, q = toy(seed, vocab, levels, 1.5, top_p), toy(seed + 50, vocab, levels, 1.0, top_q)
        assert error(rule, topology, law, p, q) < 1e-12


@pytest.mark.parametrize(("rule", "name", "law"), cases())
def test_what_is_drawn_from_no_law_was_never_drawn(rule: Rule, name: str, law: str) -> None:
    """NaN in a draft's logits: its nodes hold some token, whatever the drafter made of it."""
    topology, vocab = shape(name)
    levels = topology.levels + 1
    p = toy(1, vocab, levels, 1.5)
    for depth in range(topology.levels):
        drawn, q = toy(51, vocab, levels), toy(51, vocab, levels)
        q[depth][(1,) * depth] = torch.nan
        assert error(rule, topology, law, p, q, drawn=drawn) < 1e-12


def error_on(rule: Rule, name: str, law: str, **options: Any) -> float:
    """The largest error over a few laws: no broken twin may pass them all."""
    topology, vocab = shape(name)
    levels = topology.levels + 1
    laws = [(toy(seed, vocab, levels, 2.5), toy(seed + 50, vocab, levels)) for seed in range(3)]
    return max(error(rule, topology, law, p, q, **options) for p, q in laws)


def from_p(rule: Rule) -> Rule:
    """The twin that draws the last token from p instead of what is left of it."""

    def broken(tree: TokenTree, p_logits: Tensor, noise: Noise, extra: Tensor | None) -> Verdict:
        verdict = rule(tree, p_logits, noise, extra)
        leaf_B1 = verdict.path_BL.gather(1, verdict.n_accepted_B[:, None])
        law_BV = p_logits[torch.arange(len(p_logits)), leaf_B1[:, 0]]
        return verdict._replace(next_B=(law_BV - noise.log_residual_BV).argmax(-1))

    return broken


def reordered(rule: Rule) -> Rule:
    """The twin that visits the children of a star by what q says of them, not as drawn."""

    def broken(tree: TokenTree, p_logits: Tensor, noise: Noise, extra: Tensor | None) -> Verdict:
        assert tree.q_logits_BIV is not None
        worth_BC = tree.q_logits_BIV[:, 0].gather(1, tree.tokens_BN[:, 1:])
        order_BN = torch.nn.functional.pad(1 + worth_BC.argsort(1), (1, 0))
        order_BN1 = order_BN[..., None].expand_as(p_logits)
        tree = replace(tree, tokens_BN=tree.tokens_BN.gather(1, order_BN))
        return rule(tree, p_logits.gather(1, order_BN1), noise, extra)

    return broken


@pytest.mark.parametrize(("rule", "name", "law"), cases())
def test_residual_from_p_fails(rule: Rule, name: str, law: str) -> None:
    assert error_on(from_p(rule), name, law) > 1e-3


@pytest.mark.parametrize("rule", [recursive, traversal])
@pytest.mark.parametrize("name", ["star-3", "bush", "late"])
@pytest.mark.parametrize(
    "without",
    [lambda q, drawn: q.scatter(2, drawn, 0.0), lambda q, drawn: q],
    ids=["not renormalised", "not dropped"],
)
def test_q_left_as_it_was_fails(
    rule: Rule, name: str, without: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_without", without)
    assert error_on(rule, name, WITHOUT_REPLACEMENT) > 1e-3


@pytest.mark.parametrize("rule", [recursive, traversal])
@pytest.mark.parametrize("name", ["star-2", "star-3"])
def test_siblings_in_another_order_fail(rule: Rule, name: str) -> None:
    assert error_on(reordered(rule), name, WITHOUT_REPLACEMENT) > 1e-3


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ["chain-2", "fork", "bush"])
def test_traversal_without_the_weight_update_fails(
    name: str, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = rules._left
    monkeypatch.setattr(rules, "_left", lambda p, q, w: (left(p, q, w)[0], w))
    assert error_on(traversal, name, law) > 1e-3


@pytest.mark.parametrize(("rule", "name", "law"), cases())
def test_argmax_drafts_with_the_q_of_draws_fail(rule: Rule, name: str, law: str) -> None:
    topology, vocab = shape(name)
    levels = topology.levels + 1
    p, q, best = toy(1, vocab, levels, 1.5), toy(2, vocab, levels), toy(2, vocab, levels, top=1)
    assert error(rule, topology, law, p, q, drawn=best) > 1e-3


STOPS = [
    (rule, small, big, law)
    for rule, small, big in (
        (leviathan, [-1, 0], [-1, 0, 1]),
        (block, [-1, 0], [-1, 0, 1]),
        (recursive, [-1, 0, 0], [-1, 0, 0, 1, 2]),
        (traversal, [-1, 0, 0], [-1, 0, 0, 1, 2]),
    )
    for law in LAWS
]


@pytest.mark.parametrize(("rule", "small", "big", "law"), STOPS)
def test_a_policy_may_stop_by_what_was_drawn(
    rule: Rule, small: list[int], big: list[int], law: str
) -> None:
    """Drafting deeper may depend on the tokens so far; dropping a token for what it is may not."""
    p, q = toy(0, 3, 3, 2.5), toy(50, 3, 3)

    def both(stop: Callable[[Tensor], Tensor], go_on: Callable[[Tensor], Tensor]) -> float:
        short, long = (Topology.from_parents(parents, CPU) for parents in (small, big))
        joint = enumerate_rule(rule, short, law, p, q, share=stop).joint[..., None] * p[2]
        joint = joint + enumerate_rule(rule, long, law, p, q, share=go_on).joint
        return float((joint - joint_of(p, 3)).abs().max())

    last = len(small) - 1  # of the first level
    assert both(lambda t: t[:, last] == 0, lambda t: t[:, last] != 0) < 1e-12
    peek = both(lambda t: q[1][t[:, 1], 0], lambda t: t[:, last + 1] != 0)
    assert peek > 1e-3


def random_case(law: str, dtype: torch.dtype) -> tuple[TokenTree, Tensor, Noise]:
    """256 rows of a bush over 40 tokens; p and q are cut to some of them."""
    g = torch.Generator().manual_seed(0)
    p_logits = 3 * torch.randn(256, 7, 40, generator=g, dtype=dtype)
    q_logits = p_logits[:, :3] + torch.randn(256, 3, 40, generator=g, dtype=dtype)
    p_logits[p_logits < 0] = -torch.inf
    q_logits[q_logits < -1] = -torch.inf
    draws = q_logits.softmax(-1).flatten(0, 1).multinomial(2, law == WITH_REPLACEMENT, generator=g)
    tokens = torch.nn.functional.pad(draws.view(256, 6), (1, 0))
    noise = Noise(
        accept_BN=torch.rand(256, 7, generator=g, dtype=dtype),
        log_residual_BV=torch.rand(256, 40, generator=g, dtype=dtype).log().neg().log(),
    )
    topology = Topology.from_parents([-1, 0, 0, 1, 1, 2, 2], CPU)
    return TokenTree(tokens, topology, law, q_logits), p_logits, noise


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rule", [recursive, traversal])
def test_nothing_is_emitted_that_the_target_excludes(rule: Rule, law: str) -> None:
    tree, p_logits, noise = random_case(law, torch.float32)
    verdict = rule(tree, p_logits, noise, None)
    rows = torch.arange(256)
    for level in range(2):
        at = verdict.n_accepted_B > level
        parent, node = verdict.path_BL[:, level], verdict.path_BL[:, level + 1]
        assert (p_logits[rows, parent, tree.tokens_BN[rows, node]] > -torch.inf)[at].all()
    leaf = verdict.path_BL.gather(1, verdict.n_accepted_B[:, None])[:, 0]
    assert (p_logits[rows, leaf, verdict.next_B] > -torch.inf).all()
    assert verdict.n_accepted_B.unique().tolist() == [0, 1, 2]


def chain_case(levels: int) -> tuple[TokenTree, Tensor, Noise]:
    g = torch.Generator().manual_seed(levels)
    q_logits = torch.randn(256, levels, 40, generator=g, dtype=torch.float64)
    p_logits = torch.randn(256, levels + 1, 40, generator=g, dtype=torch.float64)
    p_logits[:, :-1] += q_logits
    tokens = q_logits.softmax(-1).flatten(0, 1).multinomial(1, generator=g).view(256, levels)
    noise = Noise(
        accept_BN=torch.rand(256, levels + 1, generator=g, dtype=torch.float64),
        log_residual_BV=torch.rand(256, 40, generator=g, dtype=torch.float64).log(),
    )
    tokens = torch.nn.functional.pad(tokens, (1, 0))
    return TokenTree(tokens, chain(levels, CPU), WITH_REPLACEMENT, q_logits), p_logits, noise


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_traversal_of_a_chain_is_block(levels: int) -> None:
    one, other = (rule(*chain_case(levels), None) for rule in (block, traversal))
    assert torch.equal(one.n_accepted_B, other.n_accepted_B)
    assert torch.equal(one.next_B, other.next_B)
    assert one.n_accepted_B.unique().tolist() == list(range(levels + 1))


def test_block_accepts_more_than_leviathan() -> None:
    for seed in range(10):
        p, q = toy(seed, 3, 4, 1.5), toy(seed + 50, 3, 4)
        taus = [
            enumerate_rule(rule, chain(3, CPU), WITH_REPLACEMENT, p, q).tau
            for rule in (leviathan, block)
        ]
        assert taus[0] < taus[1]


@pytest.mark.parametrize("rule", [leviathan, block, recursive, traversal])
def test_the_smallest_uniform_accepts_nothing_without_probability(rule: Rule) -> None:
    p_logits = torch.tensor([[[0.0, -torch.inf], [0.0, 0.0]]])
    tree = TokenTree(torch.tensor([[0, 1]]), chain(1, CPU), WITH_REPLACEMENT, torch.zeros(1, 1, 2))
    verdict = rule(tree, p_logits, Noise(None, torch.zeros(1, 2), torch.zeros(1, 2)), None)
    assert (int(verdict.n_accepted_B), int(verdict.next_B)) == (0, 0)


@pytest.mark.parametrize("rule", [leviathan, block, recursive, traversal])
def test_nothing_left_over_falls_back_to_p(rule: Rule) -> None:
    """p = q and a uniform of 1, which rounding alone can bring about."""
    logits = torch.tensor([[[0.3, 1.1, -torch.inf], [0.0, 0.0, 0.0]]])
    tree = TokenTree(torch.tensor([[0, 0]]), chain(1, CPU), WITH_REPLACEMENT, logits[:, :1])
    noise = Noise(None, torch.ones(1, 2), torch.tensor([[0.0, 0.5, -90.0]]))
    verdict = rule(tree, logits, noise, None)
    assert (int(verdict.n_accepted_B), int(verdict.next_B)) == (0, 1)


def test_marked_nodes_pass_in_their_turn() -> None:
    """u = 1 rejects all others; an earlier sibling that passes wins over a marked later one."""
    topology = Topology.from_parents([-1, 0, 0, 2], CPU)
    p_logits, q_logits = torch.zeros(2, 4, 5), torch.randn(2, 2, 5)
    tree = TokenTree(torch.tensor([[0, 1, 2, 3]] * 2), topology, WITHOUT_REPLACEMENT, q_logits)
    accept = torch.ones(2, 4)
    accept[1, 1] = 1e-6
    mask = torch.tensor([[False, False, True, True]] * 2)
    verdict = recursive(tree, p_logits, Noise(None, accept, torch.zeros(2, 5)), mask)
    assert verdict.n_accepted_B.tolist() == [2, 1]
    assert verdict.path_BL[0].tolist() == [0, 2, 3] and verdict.path_BL[1, 1] == 1
    for rule in (block, traversal):
        with pytest.raises(ValueError, match="mask of extra acceptances"):
            rule(tree, p_logits, Noise(), mask)


@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_says_it_handles(name: str) -> None:
    info = RULES[name]
    every = (COUPLED, DETERMINISTIC, *LAWS, LAST_DRAWN)
    handled: dict[str, tuple[str, ...]] = {"coupled": every, "point_mass": (DETERMINISTIC,)}
    handled |= {"k-seq": (WITH_REPLACEMENT,), "traversal": (*LAWS, LAST_DRAWN)}
    handled["multi-draft"] = handled["traversal"]  # the same function
    laws = handled.get(name, LAWS)
    noise = Noise(torch.zeros(1, 3, 5), torch.full((1, 3), 0.5), torch.zeros(1, 5))
    uneven_rows = replace(chain(2, CPU), parents=None)
    called = {"multi-draft": "traversal"}.get(name, name)
    for law, parents in itertools.product(every, ([-1, 0, 1], [-1, 0, 0])):
        topology = Topology.from_parents(parents, CPU)
        q_logits = torch.zeros(1, len(topology.inner), 5)
        tree = TokenTree(torch.tensor([[0, 1, 2]]), topology, law, q_logits)
        if law in laws and (info.trees or topology.is_chain):
            info.verify(tree, torch.zeros(1, 3, 5), noise, None)
        else:
            with pytest.raises(ValueError, match=f"rule {called}: got .* use rule=coupled"):
                info.verify(tree, torch.zeros(1, 3, 5), noise, None)
    assert info.law in laws
    if not info.identical:
        with pytest.raises(ValueError, match=r"static tree|chain"):
            info.verify(replace(tree, topology=uneven_rows), torch.zeros(1, 3, 5), noise, None)


@pytest.mark.parametrize("name", RULES)
def test_no_rule_reads_a_tensor(name: str) -> None:
    """Fake tensors hold no numbers: reading one on the host raises."""
    info = RULES[name]
    parents = [-1, 0, 0, 1, 2, 2] if info.trees else [-1, 0, 1, 2, 3, 4]
    with FakeTensorMode():
        topology = Topology.from_parents(parents, CPU)
        q_logits = torch.zeros(2, len(topology.inner), 9)
        tree = TokenTree(torch.zeros(2, 6, dtype=torch.long), topology, info.law, q_logits)
        noise = Noise(
            torch.zeros(2, topology.levels + 1, 9) if info.identical else None,
            torch.zeros(2, 6),
            torch.zeros(2, 9),
        )
        verdict = info.verify(tree, torch.zeros(2, 6, 9), noise, None)
        assert verdict.path_BL.shape == (2, topology.levels + 1)
        assert verdict.n_accepted_B.shape == verdict.next_B.shape == (2,)


def test_k_seq_keeps_more_than_rounds_and_less_than_nothing_lost() -> None:
    """Of draws with replacement; of one draw it is Leviathan's rule."""
    topology, vocab = shape("star-3")
    for seed in range(6):
        p, q = toy(seed, vocab, 2, 1.5), toy(seed + 50, vocab, 2)
        kept = {
            rule: enumerate_rule(rule, topology, WITH_REPLACEMENT, p, q).tau
            for rule in (k_seq, recursive)
        }
        assert kept[recursive] <= kept[k_seq] + 1e-12
        one, _ = shape("chain-1")
        taus = [enumerate_rule(r, one, WITH_REPLACEMENT, p, q).tau for r in (k_seq, leviathan)]
        assert taus[0] == pytest.approx(taus[1], abs=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_given_nodes_beside_a_drawn_one_are_exact(name: str) -> None:
    topology, vocab = shape(name)
    levels = topology.levels + 1
    for seed, (top_p, top_q) in enumerate(SUPPORTS):
        p, q = toy(seed, vocab, levels, 1.5, top_p), toy(seed + 50, vocab, levels, 1.0, top_q)
        assert error(traversal, topology, LAST_DRAWN, p, q) < 1e-12


def test_given_nodes_taken_for_draws_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged by the q that the last one was drawn from, in which they have no chance; by q itself;
    and offered before the drawn one they keep less.
    """
    law, offered = LAST_DRAWN, rules._offered
    assert error_on(from_p(traversal), "star-3", law) > 1e-3
    for name in ("star-3", "bush"):
        topology, vocab = shape(name)
        p, q = toy(2, vocab, topology.levels + 1, 1.5), toy(52, vocab, topology.levels + 1)
        best = enumerate_rule(traversal, topology, law, p, q).tau
        monkeypatch.setattr(rules, "_offered", lambda tree: tree.topology.children)
        # The first child is then taken for the drawn one.
        assert error_on(traversal, name, law) > 1e-3
        monkeypatch.setattr(rules, "_offered", offered)
        as_draws = lambda t, p, n, e: traversal(replace(t, law=WITHOUT_REPLACEMENT), p, n, e)  # noqa: E731
        outcome = enumerate_rule(as_draws, topology, law, p, q)
        assert outcome.tau < best


def test_k_seq_without_its_price_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """rho = 1: each of the siblings at min(1, p / q), as if it were alone."""
    monkeypatch.setattr(rules, "_rho", lambda p_BV, q_BV, k: torch.ones_like(p_BV[:, :1]))
    assert error_on(k_seq, "star-2", WITH_REPLACEMENT) > 1e-3
