"""The topology of what a draft proposes. A chain is a tree of width 1.

Shapes: B rows, N nodes (node 0 is the root: the pending token), D levels below it, V vocabulary.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# The law by which a group of siblings was drawn. A rule refuses a law that it can't handle.
COUPLED = "coupled"  # the argmax of log q plus the shared noise: fixed once the noise is
DETERMINISTIC = "deterministic"  # fixed by the context alone
WITH_REPLACEMENT = "with replacement"  # independent draws from q


@dataclass(frozen=True)
class Topology:
    """How nodes hang together: parent_N (-1 for the root, parents before children), depth_N (0 for
    the root), ancestors_NN ([n, m] True where m lies on the path from the root to n, n included),
    levels (the largest depth, a plain int: no tensor is read to know a shape).
    """

    parent_N: Tensor
    depth_N: Tensor
    ancestors_NN: Tensor
    levels: int

    @classmethod
    def from_parents(cls, parents: list[int], device: torch.device) -> "Topology":
        """The topology of a list of parents; ValueError unless each comes before its children."""
        depth: list[int] = []
        paths: list[set[int]] = []
        for node, parent in enumerate(parents):
            if parent >= node or (parent < 0) != (node == 0):
                raise ValueError(
                    f"tree: node {node} has parent {parent}; expected -1 for node 0 and an earlier "
                    "node for every other: order the nodes by depth"
                )
            depth.append(depth[parent] + 1 if node else 0)
            paths.append((paths[parent] if node else set()) | {node})
        ancestors = [[m in path for m in range(len(parents))] for path in paths]
        return cls(
            torch.tensor(parents, device=device),
            torch.tensor(depth, device=device),
            torch.tensor(ancestors, dtype=torch.bool, device=device),
            max(depth),
        )

    @property
    def is_chain(self) -> bool:
        return self.levels == self.parent_N.shape[0] - 1


@lru_cache(maxsize=64)
def chain(levels: int, device: torch.device) -> Topology:
    """The root and `levels` drafted tokens in a row; made once for each length."""
    return Topology.from_parents(list(range(-1, levels)), device)


@dataclass(frozen=True)
class TokenTree:
    """What a drafter proposes: tokens_BN (column 0 the pending token), their topology, the law the
    drafted tokens were drawn by and, where a rule needs it, q_logits_BDV: the transformed draft
    logits that the token at depth d + 1 of a chain was drawn from.
    """

    tokens_BN: Tensor
    topology: Topology
    law: str
    q_logits_BDV: Tensor | None = None
