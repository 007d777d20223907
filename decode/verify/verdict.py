"""What every accept / reject rule is given beside the tree, and what it returns.

Shapes: B rows, N nodes, D levels, L = D + 1, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.token_tree import TokenTree, Topology


class Verdict(NamedTuple):
    """path_BL: the node at each depth 0..D of the kept path (beyond its end: any node);
    n_accepted_B: drafted tokens kept; next_B: the token that follows them.
    """

    path_BL: Tensor
    n_accepted_B: Tensor
    next_B: Tensor


@dataclass(frozen=True)
class Noise:
    """A round's randomness. log_race_BLV: log E at each depth, None when greedy; accept_BN: one
    uniform in (0, 1) a node (the root's is unused), and log_residual_BV: the race for the token
    after the kept path (both only for rules that aren't coupled).
    """

    log_race_BLV: Tensor | None = None
    accept_BN: Tensor | None = None
    log_residual_BV: Tensor | None = None

    def race_at_nodes(self, topology: Topology) -> Tensor | None:
        """log E [B, N, V] for the token that follows each node; None when greedy."""
        race_BLV = self.log_race_BLV
        if race_BLV is None or topology.is_chain:
            return race_BLV
        if topology.depth.ndim == 1:
            return race_BLV[:, topology.depth]
        rows_B1 = torch.arange(race_BLV.shape[0], device=race_BLV.device)[:, None]
        return race_BLV[rows_B1, topology.depth]


Rule = Callable[[TokenTree, Tensor, Noise, Tensor | None], Verdict]


def path_to(topology: Topology, leaf_B: Tensor) -> tuple[Tensor, Tensor]:
    """(path_BL, n_accepted_B) of the path from the root to a node of each row."""
    rows_B = torch.arange(leaf_B.shape[0], device=leaf_B.device)
    ancestors_BNN = topology.ancestors.expand(leaf_B.shape[0], -1, -1)
    depth_BN = topology.depth.expand(leaf_B.shape[0], -1)
    levels_L = torch.arange(topology.levels + 1, device=leaf_B.device)
    at_depth_BLN = ancestors_BNN[rows_B, leaf_B][:, None] & (depth_BN[:, None] == levels_L[:, None])
    return at_depth_BLN.long().argmax(-1), depth_BN[rows_B, leaf_B]


def deepest(topology: Topology, agree_BN: Tensor) -> Tensor:
    """The deepest node [B] that agrees with all above it but the root, which always does; of
    equally deep ones the first.
    """
    agree_BN = agree_BN | (topology.depth == 0)
    broken_BN = (topology.ancestors & ~agree_BN[:, None, :]).any(-1)
    return torch.where(broken_BN, -1, topology.depth).argmax(1)
