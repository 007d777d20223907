"""The rules that emit what the target samples: token by token, and the point mass's acceptance."""

import itertools

import pytest
import torch
from enumeration import CPU, Tables, at_nodes, enumerate_rule, joint_of, toy
from torch import Tensor

from draftsmith.decode.token_tree import (
    COUPLED,
    DETERMINISTIC,
    WITH_REPLACEMENT,
    TokenTree,
    Topology,
    chain,
)
from draftsmith.decode.verify import rules as verify
from draftsmith.decode.verify.rules import Noise, leviathan

V = 3
P = toy(1, V, 4, 1.5)


def following(prefix: tuple[int, ...]) -> Tensor:
    return P[len(prefix)][prefix]


def test_coupled_emits_what_plain_decoding_emits() -> None:
    """Injected noise, every draft: the emitted prefix is the target's own samples."""
    depth = 3
    for trial in range(40):
        generator = torch.Generator().manual_seed(trial)
        race = (
            torch.empty(1, depth + 1, V, dtype=torch.float64)
            .exponential_(generator=generator)
            .log()
        )
        truth: tuple[int, ...] = ()
        for level in range(depth + 1):
            truth = (*truth, int((following(truth).log() - race[0, level]).argmax()))
        longest = 0
        for drafted in itertools.product(range(V), repeat=depth):
            p_rows = torch.stack([following(drafted[:i]) for i in range(depth + 1)])
            tree = TokenTree(torch.tensor([[0, *drafted]]), chain(depth, CPU), COUPLED)
            verdict = verify.coupled(tree, p_rows.log()[None], Noise(race), None)
            kept = int(verdict.n_accepted_B)
            assert (*drafted[:kept], int(verdict.next_B)) == truth[: kept + 1]
            assert kept == depth or drafted[kept] != truth[kept]
            longest = max(longest, kept)
        assert longest == depth


def test_coupled_tree_finds_the_longest_path() -> None:
    #       0
    #     1   2        tokens 1: a, 2: b; below 1: 3 (a); below 2: 4 (b), 5 (c)
    topology = Topology.from_parents([-1, 0, 0, 1, 2, 2], CPU)
    tokens = torch.tensor([[9, 0, 1, 0, 1, 2]])
    wants = torch.tensor([[1, 0, 2, 0, 0, 1]])  # what the target samples after each node
    p_logits = torch.full((1, 6, V), -50.0).scatter(2, wants[..., None], 0.0)
    tree = TokenTree(tokens, topology, COUPLED)
    verdict = verify.coupled(tree, p_logits, Noise(), None)
    assert verdict.path_BL.tolist() == [[0, 2, 5]]
    assert (int(verdict.n_accepted_B), int(verdict.next_B)) == (2, 1)


def test_tree_code_and_chain_code_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, V, (64, 5), generator=generator)
    p_logits = torch.randn(64, 5, V, generator=generator)
    flat = chain(4, CPU)
    chained = verify.coupled(TokenTree(tokens, flat, COUPLED), p_logits, Noise(), None)
    # A useless extra child of the root forces the general code.
    bushy = Topology.from_parents([-1, 0, 1, 2, 3, 0], CPU)
    wrong = (p_logits[:, 0].argmax(-1, keepdim=True) + 1) % V
    general = verify.coupled(
        TokenTree(torch.cat([tokens, wrong], 1), bushy, COUPLED),
        torch.cat([p_logits, p_logits[:, :1]], 1),
        Noise(),
        None,
    )
    assert torch.equal(chained.n_accepted_B, general.n_accepted_B)
    assert torch.equal(chained.next_B, general.next_B)
    assert chained.n_accepted_B.max() >= 3


def test_rows_of_different_topology_are_judged_as_each_alone() -> None:
    """One batch of three trees of as many nodes, with noise and a mask; the same tree by tree."""
    generator = torch.Generator().manual_seed(0)
    trees = [
        Topology.from_parents(parents, CPU)
        for parents in ([-1, 0, 0, 1, 2], [-1, 0, 1, 1, 2], [-1, 0, 0, 0, 3])
    ]
    rows = 30 * torch.ones(3, dtype=torch.long)
    parent, depth, ancestors = (
        torch.stack([getattr(tree, field) for tree in trees]).repeat_interleave(rows, 0)
        for field in ("parent", "depth", "ancestors")
    )
    tokens = torch.randint(0, V, (90, 5), generator=generator)
    p_logits = torch.randn(90, 5, V, generator=generator)
    race = torch.rand(90, 4, V, generator=generator).log()
    mask = torch.rand(90, 5, generator=generator) < 0.2
    mixed = TokenTree(tokens, Topology(parent, depth, ancestors, 3), COUPLED)
    verdict = verify.coupled(mixed, p_logits, Noise(race), mask)
    for i, topology in enumerate(trees):
        at = slice(30 * i, 30 * i + 30)
        alone = TokenTree(tokens[at], topology, COUPLED)
        expected = verify.coupled(alone, p_logits[at], Noise(race[at]), mask[at])
        assert torch.equal(verdict.n_accepted_B[at], expected.n_accepted_B)
        assert torch.equal(verdict.next_B[at], expected.next_B)
        levels = topology.levels + 1
        for row, kept in enumerate(expected.n_accepted_B.tolist()):
            assert torch.equal(
                verdict.path_BL[at][row, : kept + 1], expected.path_BL[:, :levels][row, : kept + 1]
            )
        assert expected.n_accepted_B.max() >= 2


def best_drafts(topology: Topology, q: Tables) -> Tensor:
    """The tree [1, N] whose siblings are the best tokens of q, best first."""
    tokens = torch.zeros(1, topology.nodes, dtype=torch.long)
    for i, node in enumerate(topology.inner):
        children = topology.children[node]
        q_V = at_nodes(topology, tokens, q)[0, topology.inner[i]]
        tokens[0, list(children)] = q_V.topk(len(children)).indices
    return tokens


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2], [-1, 0, 0], [-1, 0, 0, 1, 1, 2, 2]])
def test_point_mass_accepts_iff_the_targets_sample_is_a_child(parents: list[int]) -> None:
    """Every sequence the target can sample, each with its probability: the joint law of what is
    emitted is p's, and a node is passed with the sum of p over its children.
    """
    topology = Topology.from_parents(parents, CPU)
    levels = topology.levels + 1
    q = toy(2, V, levels)
    tokens = best_drafts(topology, q)
    tree = TokenTree(tokens, topology, DETERMINISTIC)
    p_logits = at_nodes(topology, tokens, P).log()
    emitted = torch.zeros((V,) * levels, dtype=torch.float64)
    for samples in itertools.product(range(V), repeat=levels):
        # Whatever the node: at depth d the race is won by samples[d].
        race = torch.full((1, levels, V), 600.0).scatter(2, torch.tensor([samples]).mT[None], -600)
        verdict = verify.point_mass(tree, p_logits, Noise(race.double()), None)
        kept, node = int(verdict.n_accepted_B), 0
        for depth in range(levels):
            found = [c for c in topology.children.get(node, ()) if tokens[0, c] == samples[depth]]
            assert (kept > depth) == bool(found)
            if not found:
                break
            node = found[0]
        path = tokens[0, verdict.path_BL[0, 1 : kept + 1]].tolist()
        said = (*path, int(verdict.next_B), *samples[kept + 1 :])
        emitted[said] += joint_of(P, levels)[samples]
    assert float((emitted - joint_of(P, levels)).abs().max()) < 1e-12

    first = [int(tokens[0, child]) for child in topology.children[0]]
    assert float(P[0][first].sum()) == pytest.approx(float(emitted[first].sum()), abs=1e-12)


def test_a_point_mass_judged_as_a_draw_is_biased() -> None:
    """Argmax drafts are exact under their own q, a point mass, and wrong under a softmax."""
    best = toy(2, V, 3, top=1)
    for q, exact in ((best, True), (toy(2, V, 3), False)):
        outcome = enumerate_rule(leviathan, chain(2, CPU), WITH_REPLACEMENT, P, q, drawn=best)
        error = float((outcome.joint - joint_of(P, 3)).abs().max())
        assert (error < 1e-12) if exact else (error > 1e-3)


def test_topology_refuses_children_before_parents() -> None:
    with pytest.raises(ValueError, match="node 1 has parent 2"):
        Topology.from_parents([-1, 2, 0], CPU)
