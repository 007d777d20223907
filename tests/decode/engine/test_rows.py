"""How a round ends, in one call: row by row and to the bit what the rule and `advance` say."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decode.engine import rows as module
from draftsmith.decode.engine.rows import Rows, Settled
from draftsmith.decode.token_tree import COUPLED, TokenTree, Topology, chain
from draftsmith.decode.verify.rules import Noise, coupled

B, V, M = 5, 37, 2
CPU = torch.device("cpu")
STATE = ("lens_B", "pending_B", "rounds_B", "room_B", "active_B")

pytestmark = pytest.mark.skipif(
    module.library(module.SOURCE) is None, reason="no compiler on this machine"
)


def topologies() -> dict[str, Topology]:
    """Chains, a tree, and trees that differ from row to row."""
    bushy = [[-1, 0, 0, 1, 1, 2, 3], [-1, 0, 1, 2, 3, 4, 5], [-1, 0, 0, 0, 0, 0, 0]]
    several = [Topology.from_parents(bushy[b % 3], CPU) for b in range(B)]
    parts = (torch.stack([getattr(t, n) for t in several]) for n in ("parent", "depth"))
    ancestors = torch.stack([topology.ancestors for topology in several])
    return {
        "plain": chain(0, CPU),
        "chain": chain(4, CPU),
        "tree": Topology.from_parents(bushy[0], CPU),
        "rows": Topology(*parts, ancestors, 6),
    }


def case(topology: Topology, seed: int, *, noisy: bool) -> tuple[TokenTree, Tensor, Tensor | None]:
    """A tree whose tokens are often what the target chooses, its logits (of some rows broken, some
    words forbidden), and the noise.
    """
    torch.manual_seed(seed)
    p_logits_BNV = torch.randn(B, topology.nodes, V).mul(4).round()  # ties, too
    p_logits_BNV[..., 5] = -torch.inf
    # One more level than the tree has: as where a policy ended it early.
    race_BLV = torch.rand(B, topology.levels + 2, V)[:, :-1] if noisy else None
    race_BNV = Noise(race_BLV).race_at_nodes(topology)
    chosen_BN = (p_logits_BNV if race_BNV is None else p_logits_BNV - race_BNV).argmax(-1)
    parent_BN = topology.parent.clamp(min=0).expand(B, -1)
    right_BN = torch.rand(B, topology.nodes) < 0.8
    tokens_BN = torch.where(
        right_BN, chosen_BN.gather(1, parent_BN), torch.randint(V, right_BN.shape)
    )
    if seed % 4 == 0:
        p_logits_BNV[1, -1, 3] = torch.nan
    rank_BN = torch.rand(B, topology.nodes).argsort(1) if topology.parents is None else None
    return TokenTree(tokens_BN, topology, COUPLED, rank_BN=rank_BN), p_logits_BNV, race_BLV


def some_rows(seed: int, tree: TokenTree) -> Rows:
    """Some about to run out of room, some that rest, one that ends at a token it may emit."""
    draw = random.Random(seed)
    rows = Rows(B, M, CPU)
    rows.lens_B += torch.tensor([draw.randrange(50) for _ in range(B)])
    rows.pending_B.copy_(tree.tokens_BN[:, 0])
    rows.room_B.copy_(torch.tensor([draw.choice((0, 1, 2, 9)) for _ in range(B)]))
    rows.active_B.copy_(torch.tensor([draw.random() < 0.8 for _ in range(B)]))
    rows.stop_ids_BM[2:, 0] = tree.tokens_BN[2:, -1]
    return rows


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("shape", topologies())
def test_it_is_the_rule_and_the_advance(shape: str, noisy: bool) -> None:
    seen = set()
    for seed in range(40):
        tree, p_logits_BNV, race_BLV = case(topologies()[shape], seed, noisy=noisy)
        slow, fast = some_rows(seed, tree), some_rows(seed, tree)
        bad_B = p_logits_BNV.amax(-1).isnan().any(1)
        verdict = coupled(tree, p_logits_BNV, Noise(race_BLV))
        want = Settled.by(slow, tree, verdict, bad_B)
        got = Settled.at_once(fast, tree, p_logits_BNV, race_BLV)
        assert got is not None
        for name in STATE:
            assert torch.equal(getattr(slow, name), getattr(fast, name)), (seed, name)
        assert torch.equal(want.before_B, got.before_B)
        for row in (~bad_B).nonzero()[:, 0].tolist():
            accepted, length = int(verdict.n_accepted_B[row]), want.emitted_BL.shape[1]
            said: list[Any] = []
            for one in (want, got):
                emitted, path, news = one.table[row].tensor_split([length, 2 * length])
                parts = emitted[: accepted + 1], path[: accepted + 1], news
                said.append([part.tolist() for part in parts])
                assert torch.equal(emitted, one.emitted_BL[row])
                said[-1] += [one.path_BL[row, : accepted + 1].tolist(), int(one.n_new_B[row])]
            assert said[0] == said[1], (seed, row)
            seen.add(accepted)
        assert torch.equal(want.table[:, -1], got.table[:, -1])
    assert seen == set(range(topologies()[shape].levels + 1))  # every depth was kept


def test_what_it_cannot_do_is_left_to_torch() -> None:
    tree, p_logits_BNV, race_BLV = case(topologies()["chain"], 1, noisy=True)
    rows = some_rows(1, tree)
    assert Settled.at_once(rows, tree, p_logits_BNV.double(), race_BLV) is None
    assert Settled.at_once(rows, tree, p_logits_BNV.to("meta"), race_BLV) is None
