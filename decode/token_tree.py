"""What a draft proposes: tokens hung together in a tree. A chain is a tree of width 1.

Shapes: B rows, N nodes (node 0 is the root: the pending token), D levels below it, I inner nodes
(those with children), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

# The law by which a group of siblings was drawn. A rule refuses a law that it can't handle.
COUPLED = "coupled"  # the best of log q minus the shared log E: fixed once the noise is
DETERMINISTIC = "deterministic"  # fixed by the context alone
WITH_REPLACEMENT = "with replacement"  # independent draws from q
WITHOUT_REPLACEMENT = "without replacement"  # draws from q, each sibling excluding the earlier ones
LAST_DRAWN = "best, the last drawn"  # the last sibling from q without the others, q's best


@dataclass(frozen=True)
class Topology:
    """How nodes hang together. parent: [N] or, where rows differ, [B, N]; -1 for the root, parents
    before children, siblings in the order in which they were drawn. depth: the same shape, 0 for
    the root. ancestors: [N, N] or [B, N, N]; [n, m] True where m lies on the path from the root to
    n, n included. levels: the largest depth a row may have. parents: the same as `parent` on the
    host, None where rows differ.
    """

    parent: Tensor
    depth: Tensor
    ancestors: Tensor
    levels: int
    parents: tuple[int, ...] | None = None

    @classmethod
    def from_parents(cls, parents: Sequence[int], device: torch.device) -> "Topology":
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
            tuple(parents),
        )

    @property
    def nodes(self) -> int:
        return self.parent.shape[-1]

    @property
    def is_chain(self) -> bool:
        return self.parents is not None and self.levels == len(self.parents) - 1

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The nodes that have children, ascending; of a topology that all rows share."""
        assert self.parents is not None, "rows differ in their topology: no common inner nodes"
        return tuple(sorted(set(self.parents[1:])))

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """Inner node -> its children in the order in which they were drawn."""
        assert self.parents is not None, "rows differ in their topology: no common children"
        found: dict[int, tuple[int, ...]] = {}
        for node, parent in enumerate(self.parents[1:], 1):
            found[parent] = (*found.get(parent, ()), node)
        return found


@cache  # recordings of rounds read these tensors: none may go
def chain(levels: int, device: torch.device) -> Topology:
    """The root and `levels` drafted tokens in a row; made once for each length."""
    return Topology.from_parents(range(-1, levels), device)


@dataclass(frozen=True)
class TokenTree:
    """What a drafter proposes: tokens_BN (column 0 the pending token), their topology, the law the
    drafted tokens were drawn by and, where a rule needs it, q_logits_BIV: for each inner node in
    ascending order the transformed draft logits that its children were drawn from (of a chain:
    nodes 0 to D - 1), -inf at tokens that were given. rank_BN: of a tree ordered by worth, each
    node's place in that order. sure_BN: of a chain, where a round asks for it, log of the share
    that each token's best score had of all (the root's 0). verified_B: how many nodes of each row
    the target judges, the first ones; the others are as if not drafted. None: all.
    """

    tokens_BN: Tensor
    topology: Topology
    law: str
    q_logits_BIV: Tensor | None = None
    rank_BN: Tensor | None = None
    sure_BN: Tensor | None = None
    verified_B: Tensor | None = None

    @property
    def verified_BN(self) -> Tensor:
        """Whether the target judges a node."""
        assert self.verified_B is not None
        node_N = torch.arange(self.tokens_BN.shape[1], device=self.tokens_BN.device)
        return node_N < self.verified_B[:, None]

    @property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """On the host: how sure the draft is of its tokens [B, N - 1] (where it doesn't say, even
        odds), and how many nodes are verified [B], all where nobody chose.
        """
        B, N = self.tokens_BN.shape
        sure_BN = np.full((B, N), np.log(0.5))
        if self.sure_BN is not None:
            sure_BN = self.sure_BN.double().nan_to_num(nan=-40).cpu().numpy()
        part_B = self.verified_B
        return sure_BN[:, 1:], np.full(B, N) if part_B is None else part_B.cpu().numpy()

    def ranks(self, nodes_BL: Tensor) -> Tensor:
        """Of some nodes, that place; where there is no order, their numbers."""
        return nodes_BL if self.rank_BN is None else self.rank_BN.gather(1, nodes_BL)
