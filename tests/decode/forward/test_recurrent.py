"""The tree forms of recurrent layers against the recurrence itself, path by path.

Shapes: as in the module tested.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.decode.forward.recurrent import Fresh, Tokens, Tree, folded, tree_scan, windows
from draftsmith.decode.token_tree import Topology

HEADS, KEYS, VALUES, CHANNELS, WIDTH, ROWS, NODES = 3, 5, 4, 6, 4, 2, 13


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def random_tokens(delta: bool) -> Tokens:
    """Of ROWS rows of NODES; decays between nothing and nearly all."""
    key = torch.nn.functional.normalize(noise(ROWS, NODES, HEADS, KEYS), dim=-1)
    return Tokens(
        noise(ROWS, NODES, HEADS, KEYS),
        key,
        noise(ROWS, NODES, HEADS, VALUES),
        -2 * torch.rand(ROWS, NODES, HEADS, dtype=torch.float64),
        torch.rand(ROWS, NODES, HEADS, dtype=torch.float64) if delta else None,
    )


def random_topologies() -> list[Topology]:
    """One a row, deep and wide by chance."""
    made = []
    for seed in range(ROWS):
        rng = random.Random(seed)
        parents = [-1, *(rng.randrange(max(0, n - 3), n) for n in range(1, NODES))]
        made.append(Topology.from_parents(parents, torch.device("cpu")))
    return made


def path_to(topology: Topology, node: int) -> list[int]:
    assert topology.parents is not None
    path = []
    while node >= 0:
        path.append(node)
        node = topology.parents[node]
    return path[::-1]


def step_by_step(tokens: Tokens, row: int, path: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
    """What the last token of a path reads [J, E], and the state after it: slow and obvious."""
    query, key, value, decay = (x[row] for x in tokens[:4])
    read = state[:, 0]
    for n in path:
        state = decay[n].exp()[:, None, None] * state
        written = value[n]
        if tokens.beta_BNJ is not None:
            known = torch.einsum("jk,jke->je", key[n], state)
            written = tokens.beta_BNJ[row, n][:, None] * (value[n] - known)
        state = state + torch.einsum("jk,je->jke", key[n], written)
        read = torch.einsum("jk,jke->je", query[n], state)
    return read, state


def scan_error(delta: bool, seen: Callable[[Tensor], Tensor] = torch.clone) -> float:
    """How far the tree's form is from the recurrence at any node; seen: changes the mask."""
    torch.manual_seed(3)
    tokens, state = random_tokens(delta), noise(ROWS, HEADS, KEYS, VALUES)
    topologies = random_topologies()
    ancestors = torch.stack([topology.ancestors for topology in topologies])
    read, _ = tree_scan(tokens, seen(ancestors), state)
    worst = 0.0
    for row, topology in enumerate(topologies):
        for node in range(NODES):
            own, _ = step_by_step(tokens, row, path_to(topology, node), state[row])
            worst = max(worst, float((read[row, node] - own).abs().max()))
    return worst


@pytest.mark.parametrize("delta", [False, True], ids=["mamba2", "delta"])
def test_a_tree_is_its_paths(delta: bool) -> None:
    """Rows of different trees; under a causal mask, a tree taken for a chain, it isn't."""
    assert scan_error(delta) < 1e-12
    assert scan_error(delta, lambda seen: torch.ones_like(seen).tril()) > 1e-2
    assert scan_error(delta, lambda seen: seen & ~torch.eye(NODES, dtype=torch.bool)) > 1e-2


@pytest.mark.parametrize("delta", [False, True], ids=["mamba2", "delta"])
def test_a_commit_is_the_state_of_its_path(delta: bool) -> None:
    """Of every leaf, of a part of its path, and of none of it."""
    torch.manual_seed(4)
    tokens, state = random_tokens(delta), noise(ROWS, HEADS, KEYS, VALUES)
    before, inputs = noise(ROWS, WIDTH - 1, CHANNELS), noise(ROWS, NODES, CHANNELS)
    topologies = random_topologies()
    ancestors = torch.stack([topology.ancestors for topology in topologies])
    _, written = tree_scan(tokens, ancestors, state)
    fresh = Fresh(inputs, tokens.key_BNJK, written, tokens.decay_BNJ)
    for leaf in range(NODES):
        paths = [path_to(topology, leaf) for topology in topologies]
        longest = max(map(len, paths))
        path_BL = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
        row_B1 = torch.arange(ROWS)[:, None]
        kept = Fresh(*(x[row_B1, path_BL] for x in fresh))
        for cut in (0, 1, 2):
            n_B = torch.tensor([max(0, len(path) - cut) for path in paths])
            n_B[cut % ROWS] = 0  # a row that rests
            conv, got = folded(before, state, kept, n_B)
            for row, n in enumerate(n_B.tolist()):
                _, own = step_by_step(tokens, row, paths[row][:n], state[row])
                assert (got[row] - own).abs().max() < 1e-12
                text = torch.cat([before[row], inputs[row, paths[row][:n]]])
                assert torch.equal(conv[row], text[-(WIDTH - 1) :])


def test_a_convolution_reads_the_path() -> None:
    torch.manual_seed(5)
    before, inputs = noise(ROWS, WIDTH - 1, CHANNELS), noise(ROWS, NODES, CHANNELS)
    topologies = random_topologies()
    stacked = torch.stack([topology.ancestors for topology in topologies])
    for shared in (False, True):  # rows differ, or one tree for all
        tree = Tree.of(topologies[0].ancestors if shared else stacked, WIDTH)
        found = windows(before, inputs, tree)
        wrong = windows(before, inputs, Tree.chain(NODES, WIDTH, torch.device("cpu")))
        for row in range(ROWS):
            topology = topologies[0 if shared else row]
            for node in range(NODES):
                text = torch.cat([before[row], inputs[row, path_to(topology, node)]])
                assert torch.equal(found[row, node], text[-WIDTH:])
        assert not torch.equal(found, wrong)
