"""Trees whose shape follows what was drawn before (DySpec: Xiong et al., arXiv 2410.11744).

They are exact under rules by rejection as long as no node is there for its own token. What they are
worth beside trees that the decoder has is enumerated; docs/use/exact.md tells the figures.

Shapes: R rows of drafts, N nodes, V vocabulary.
"""

import heapq
import itertools
from collections.abc import Callable

import pytest
import torch
from enumeration import CPU, Tables, at_nodes, drafts, enumerate_rule, joint_of, toy
from torch import Tensor

from draftsmith.decode.token_tree import WITHOUT_REPLACEMENT, Topology
from draftsmith.decode.tree_shapes import StaticTree
from draftsmith.decode.verify.rules import Rule, recursive, traversal

VOCAB, DEPTH, NODES = 3, 3, 4
Path = tuple[int, ...]


def shapes() -> list[tuple[Path, ...]]:
    """All sets of NODES rank paths that hold every path's beginning and its elder siblings."""
    every = [p for d in range(1, DEPTH + 1) for p in itertools.product(range(VOCAB), repeat=d)]

    def closed(paths: tuple[Path, ...]) -> bool:
        elder = {(*p[:-1], p[-1] - 1) for p in paths if p[-1]} | {p[:-1] for p in paths if p[:-1]}
        return elder <= set(paths)

    return [paths for paths in itertools.combinations(every, NODES) if closed(paths)]


def grown(tokens: dict[Path, int], q: Tables, *, peek: bool) -> set[Path]:
    """The nodes that DySpec's heap draws where the draws are these: a slot is worth the chance that
    a draft from q comes there. peek: a slot is worth what its own token makes of it, too.
    """
    found: set[Path] = set()

    def slot(value: float, path: Path, left: Tensor) -> None:
        if path in tokens and float(left.sum()) > 0:
            own = float(left[tokens[path]] / left.sum()) if peek else 1.0
            heapq.heappush(heap, (-value * own, path, value, left / left.sum()))
        elif float(left.sum()) > 0:
            heapq.heappush(heap, (-value, path, value, left / left.sum()))

    heap: list[tuple[float, Path, float, Tensor]] = []
    slot(1.0, (0,), q[0])
    while heap and len(found) < NODES:
        _, path, value, left = heapq.heappop(heap)
        found.add(path)
        if path not in tokens:
            return found  # of another shape
        token = tokens[path]
        chance = float(left[token])
        if len(path) < DEPTH:
            above = tuple(tokens[path[:d]] for d in range(1, len(path) + 1))
            slot(value * chance, (*path, 0), q[len(path)][above])
        rest = left.clone()
        rest[token] = 0.0
        slot(value * (1 - chance), (*path[:-1], path[-1] + 1), rest)
    return found


def share_of(paths: tuple[Path, ...], q: Tables, *, peek: bool = False) -> Callable[..., Tensor]:
    """Which drafts DySpec draws into this shape."""

    def share(tokens_RN: Tensor) -> Tensor:
        rows = tokens_RN[:, 1:].tolist()
        named = [dict(zip(paths, row, strict=True)) for row in rows]
        hit = [grown(tokens, q, peek=peek) == set(paths) for tokens in named]
        return torch.tensor(hit, dtype=torch.float64)

    return share


def topology(paths: tuple[Path, ...]) -> Topology:
    tree = StaticTree.from_paths(paths)
    assert tree.paths == paths
    return Topology.from_parents(tree.parents, CPU)


def all_shapes(rule: Rule, p: Tables, q: Tables, *, peek: bool = False) -> tuple[Tensor, float]:
    """The joint law of DEPTH + 1 tokens and tau, over all that DySpec may draw."""
    joint, tau = torch.zeros((VOCAB,) * (DEPTH + 1), dtype=torch.float64), 0.0
    for paths in shapes():
        hanging, share = topology(paths), share_of(paths, q, peek=peek)
        if not bool(share(drafts(hanging, q, WITHOUT_REPLACEMENT)[0]).any()):
            continue
        made = enumerate_rule(rule, hanging, WITHOUT_REPLACEMENT, p, q, share=share)
        whole = made.joint
        for depth in range(hanging.levels + 1, DEPTH + 1):
            whole = whole[..., None] * p[depth]
        joint, tau = joint + whole, tau + made.tau * float(made.joint.sum())
    return joint, tau


@pytest.mark.parametrize("rule", [recursive, traversal])
def test_shapes_that_follow_earlier_draws_are_exact(rule: Rule) -> None:
    """And those that follow a node's own token are not."""
    p, q = toy(1, VOCAB, DEPTH + 1, 1.5), toy(51, VOCAB, DEPTH + 1)
    law = joint_of(p, DEPTH + 1)
    assert float((all_shapes(rule, p, q)[0] - law).abs().max()) < 1e-12
    assert float((all_shapes(rule, p, q, peek=True)[0] - law).abs().max()) > 1e-3


def kept_of_draws(paths: tuple[Path, ...], q: Tables, share: Callable[..., Tensor]) -> float:
    """How many nodes of such drafts a greedy target keeps whose path is distributed as q."""
    hanging = topology(paths)
    tokens_RN, weight_R, _ = drafts(hanging, q, WITHOUT_REPLACEMENT)
    q_RNV, kept = at_nodes(hanging, tokens_RN, q), 0.0
    for node in range(1, hanging.nodes):
        chance_R = weight_R * share(tokens_RN)
        while node:
            parent = int(hanging.parent[node])
            chance_R = chance_R * q_RNV[:, parent].gather(1, tokens_RN[:, node : node + 1])[:, 0]
            node = parent
        kept += float(chance_R.sum())
    return kept


@pytest.mark.slow
def test_a_greedy_target_keeps_more_of_the_best_paths() -> None:
    """So a dynamic tree of as many nodes is ahead of DySpec there, and DySpec of static trees."""
    taus = []
    for seed in range(20):
        q = toy(seed, VOCAB, DEPTH + 1, 1.5)
        best = torch.cat([joint_of(q, d).flatten() for d in range(1, DEPTH + 1)]).topk(NODES)
        drawn = sum(kept_of_draws(paths, q, share_of(paths, q)) for paths in shapes())
        static = max(
            kept_of_draws(paths, q, lambda t: torch.ones(len(t), dtype=torch.float64))
            for paths in shapes()
        )
        taus.append((1 + float(best.values.sum()), 1 + drawn, 1 + static))
    assert all(best > drawn for best, drawn, _ in taus)
    print("best paths, DySpec, best static:", torch.tensor(taus).mean(0))


def test_at_temperature_one_a_static_tree_may_keep_more() -> None:
    """Its worth of a slot takes acceptance for q's chance, which is a greedy target's."""
    taus = []
    for seed in range(3):
        logits = toy(seed, VOCAB, DEPTH + 1, 1.0), toy(seed + 50, VOCAB, DEPTH + 1, 0.3)
        q = logits[0]
        p = [((a.log() + b.log()).softmax(-1)) for a, b in zip(*logits, strict=True)]
        static = max(
            enumerate_rule(recursive, topology(paths), WITHOUT_REPLACEMENT, p, q).tau
            for paths in shapes()
        )
        taus.append((all_shapes(recursive, p, q)[1], static))
    print("DySpec, best static:", torch.tensor(taus).mean(0))
    assert all(drawn < static for drawn, static in taus)
