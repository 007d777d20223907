"""The bound: against all subsets, against the flow it is the cut of, and above every rule."""

import itertools
from collections import deque
from typing import Any

import pytest
import torch
from enumeration import CPU, enumerate_rule, toy
from optimal import optimal_acceptance, ordered_draws
from torch import Tensor

from draftsmith.decode.token_tree import (
    COUPLED,
    DETERMINISTIC,
    LAST_DRAWN,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    TokenTree,
    Topology,
)
from draftsmith.decode.verify.rules import Noise, Rule, coupled, leviathan, recursive, traversal

LAWS = (WITH_REPLACEMENT, WITHOUT_REPLACEMENT)


def star(k: int) -> Topology:
    return Topology.from_parents([-1, *[0] * k], CPU)


def pairs(vocab: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Laws of all kinds: flat and peaked, near and far, full and cut."""
    cuts = [(0, 0), (0, 3), (3, 0), (2, 3)]
    found = []
    for seed in range(count):
        top_p, top_q = cuts[seed % 4]
        p, q = toy(seed, vocab, 1, 0.5 + seed % 3, top_p)[0], toy(seed + 999, vocab, 1, 1, top_q)[0]
        found.append((p, q))
    return found


Sets = dict[frozenset[int], float]  # a set of drafts -> its chance


def accepted(rule: Rule, p: Tensor, q: Tensor, k: int, law: str, **options: Any) -> float:
    """The chance that `rule` accepts one of k drafts."""
    after = toy(0, len(p), 2)[1]
    return enumerate_rule(rule, star(k), law, [p, after], [q, after], **options).tau - 1


def draft_sets(q: Tensor, k: int, law: str) -> Sets:
    """From the definition of the draws."""
    found: Sets = {}
    for drawn in itertools.product(range(len(q)), repeat=k):
        chance, left = 1.0, q.clone()
        for token in drawn:
            total = float(left.sum())
            chance *= float(left[token]) / total if total > 0 else 0.0
            if law == WITHOUT_REPLACEMENT:
                left[token] = 0.0
        found[frozenset(drawn)] = found.get(frozenset(drawn), 0.0) + chance
    return found


def by_subsets(p: Tensor, sets: Sets) -> float:
    """1 + min over every set H of p(H) - Pr[all drafts in H]."""
    best = 0.0
    for size in range(len(p) + 1):
        for inside in itertools.combinations(range(len(p)), size):
            covered = sum(chance for drawn, chance in sets.items() if drawn <= set(inside))
            best = min(best, float(p[list(inside)].sum()) - covered)
    return 1 + best


def by_flow(p: Tensor, sets: Sets) -> float:
    """The transport itself: mass sent from sets of drafts to tokens they hold, by Edmonds and
    Karp's shortest augmenting paths.
    """
    room: dict[tuple[object, object], float] = {}
    for drawn, chance in sets.items():
        room["source", drawn] = chance
        room |= {(drawn, token): 2.0 for token in drawn}
    room |= {(token, "sink"): float(mass) for token, mass in enumerate(p)}
    near: dict[object, list[object]] = {}
    for a, b in list(room):
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
        room.setdefault((b, a), 0.0)
    sent = 0.0
    while True:
        came: dict[object, object] = {"source": None}
        queue = deque(["source"])
        while queue and "sink" not in came:
            at = queue.popleft()
            for to in near[at]:
                if to not in came and room[at, to] > 1e-15:
                    came[to] = at
                    queue.append(to)
        if "sink" not in came:
            return sent
        steps, at = [], "sink"
        while at != "source":
            steps.append((came[at], at))
            at = came[at]
        least = min(room[step] for step in steps)
        for a, b in steps:
            room[a, b] -= least
            room[b, a] += least
        sent += least


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_sorted_beginnings_are_enough(law: str, k: int) -> None:
    for p, q in pairs(5, 16):
        if law == WITHOUT_REPLACEMENT and int((q > 0).sum()) < k:
            continue
        found, sets = optimal_acceptance(p, q, k, law), draft_sets(q, k, law)
        assert found == pytest.approx(by_subsets(p, sets), abs=1e-12)
        assert found == pytest.approx(by_flow(p, sets), abs=1e-12)


def test_another_order_is_not_enough() -> None:
    """Sorted by p alone, a beginning misses the minimum."""
    worst = 0.0
    for p, q in pairs(5, 16):
        order = p.argsort()
        gap = (p[order].cumsum(0) - q[order].cumsum(0).pow(2)).min().clamp(max=0)
        worst = max(worst, 1 + float(gap) - optimal_acceptance(p, q, 2, WITH_REPLACEMENT))
    assert worst > 1e-3


def test_one_draft_is_total_variation_and_leviathan_reaches_it() -> None:
    for p, q in pairs(4, 12):
        alpha = float(torch.minimum(p, q).sum())
        for law in (*LAWS, COUPLED):
            assert optimal_acceptance(p, q, 1, law) == pytest.approx(alpha, abs=1e-12)
        reached = accepted(leviathan, p, q, 1, WITH_REPLACEMENT)
        assert reached == pytest.approx(alpha, abs=1e-12)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rule", [recursive, traversal])
def test_no_rule_exceeds_the_bound(rule: Rule, law: str) -> None:
    slack = [
        optimal_acceptance(p, q, k, law) - accepted(rule, p, q, k, law)
        for k, (p, q) in itertools.product((2, 3), pairs(4, 20))
    ]
    assert min(slack) > -1e-12
    assert max(slack) > 1e-3  # none reaches it everywhere


def test_a_lossy_rule_exceeds_the_bound() -> None:
    p, q = pairs(4, 1)[0]
    law = WITHOUT_REPLACEMENT

    def everything(tree: TokenTree, p_logits: Tensor, noise: Noise) -> Tensor:
        return torch.ones_like(tree.tokens_BN, dtype=torch.bool)

    lossy = accepted(recursive, p, q, 2, law, extra=everything)
    assert lossy > optimal_acceptance(p, q, 2, law) + 1e-3


def coupled_acceptance(p: Tensor, q: Tensor, k: int) -> float:
    """The chance that the target's pick is among the best k of q under the same exponentials E.

    Given E_x = t for the pick x, every other v loses p's race: E_v > t p_v / p_x; those ahead of x
    in q's race have E_v < t q_v / q_x, the rest E_v > t q_v / q_x. Independent in v, so the
    integral over t is a sum of 1 / rates, over each set of fewer than k tokens ahead.
    """
    total = 0.0
    for x in [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]:
        a, b = (p / p[x]).tolist(), (q / q[x]).tolist()
        others = [v for v in range(len(p)) if v != x]
        for size in range(k):
            for ahead in itertools.combinations([v for v in others if b[v] > a[v]], size):
                rest = 1 + sum(max(a[v], b[v]) for v in others if v not in ahead)
                for signs in itertools.product((0, 1), repeat=size):
                    rate = rest + sum((a, b)[s][v] for s, v in zip(signs, ahead, strict=True))
                    total += (-1) ** sum(signs) / rate
    return total


@pytest.mark.parametrize("k", [1, 2, 3])
def test_coupled_acceptance_stays_below_the_bound(k: int) -> None:
    slack = [
        optimal_acceptance(p, q, k, COUPLED) - coupled_acceptance(p, q, k)
        for p, q in pairs(5, 40)
        if int((q > 0).sum()) >= k
    ]
    assert min(slack) > -1e-12
    assert max(slack) > 1e-3


def test_the_coupled_integral_is_what_the_rule_does() -> None:
    p, q = pairs(5, 1)[0]
    generator = torch.Generator().manual_seed(0)
    rows = 200_000
    race = torch.empty(rows, 2, 5, dtype=torch.float64).exponential_(generator=generator).log()
    tokens = (q.log() - race[:, 0]).topk(2).indices
    tree = TokenTree(torch.nn.functional.pad(tokens, (1, 0)), star(2), COUPLED)
    kept = coupled(tree, p.log().expand(rows, 3, 5), Noise(race), None).n_accepted_B
    # 4 standard deviations of a share are at most 4 * 0.5 / sqrt(200000).
    assert float(kept.double().mean()) == pytest.approx(coupled_acceptance(p, q, 2), abs=0.0045)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_given_drafts_and_a_drawn_one_reach_their_bound(k: int) -> None:
    """The bound is that of the sets; offered before the drawn one, the given keep less."""
    worse = 0.0
    for p, q in [pair for pair in pairs(5, 16) if int((pair[1] > 0).sum()) >= k]:
        given = q.argsort(descending=True)[: k - 1]
        rest = q.scatter(0, given, 0.0) / q.scatter(0, given, 0.0).sum()
        sets = {frozenset([*given.tolist(), x]): float(rest[x]) for x in range(5) if rest[x] > 0}
        bound = optimal_acceptance(p, q, k, LAST_DRAWN)
        assert bound == pytest.approx(by_subsets(p, sets), abs=1e-12)
        assert bound == pytest.approx(accepted(traversal, p, q, k, LAST_DRAWN), abs=1e-12)
        first = float(p[given].sum())
        left = p.scatter(0, given, 0.0)
        worse = max(worse, bound - first - float(torch.minimum(left, (1 - first) * rest).sum()))
    assert worse > 1e-3 or k == 1


def test_deterministic_drafts_reach_their_bound() -> None:
    """What the point mass accepts, the sum of p over the children, is the best there is."""
    for p, q in pairs(5, 12):
        sets = {frozenset(q.topk(2).indices.tolist()): 1.0}
        bound = optimal_acceptance(p, q, 2, DETERMINISTIC)
        assert bound == pytest.approx(float(p[list(*sets)].sum()), abs=1e-12)
        assert bound == pytest.approx(by_subsets(p, sets), abs=1e-12)


def test_large_vocabularies() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(50_000, generator=generator).double().softmax(0) for _ in range(2))
    alphas = [optimal_acceptance(p, q, k, WITH_REPLACEMENT) for k in (1, 2, 4)]
    assert alphas[0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-9)
    assert alphas == sorted(alphas) and alphas[-1] <= 1
    with pytest.raises(ValueError, match="50000 tokens, expected at most"):
        ordered_draws(q, 2)
