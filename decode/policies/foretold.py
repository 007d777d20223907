"""What drafting gives, from how much is kept of it and what passes take: the engine of `predict`,
`size` and the advice of `evaluate`.

    tau      = 1 + sum over i of the chance that at least i drafted tokens are kept
    speed-up = tau t_plain / seconds of a round

Shapes: D depths that were seen, K depths asked for.
"""

import heapq
from collections.abc import Sequence

import numpy as np

# How much less a child of the next rank is kept, beyond that it asks for those before it to fail:
# chance of rank r = a (SIBLING (1 - a))^r, with which trees of 5 to 32 nodes on the 15M target come
# out within 4% of the measured tau in the mean (docs/results/one-pass.json and heads.json).
SIBLING = 0.55


def kept_shares(histogram: Sequence[int]) -> np.ndarray:
    """The shares of rounds that kept at least 1, 2, ... tokens, of rounds by how many they kept."""
    return np.cumsum(histogram[::-1])[-2::-1] / max(1, sum(histogram))


def extended(share_D: Sequence[float] | np.ndarray, K: int) -> np.ndarray:
    """The chances that 1, 2, ..., K tokens are kept, those beyond D by the last conditional one."""
    share_D = np.asarray(share_D, float)[:K]
    last = share_D[-1] / share_D[-2] if len(share_D) > 1 and share_D[-2] else share_D[-1]
    return np.concatenate([share_D, share_D[-1] * last ** np.arange(1, K - len(share_D) + 1)])


def taus(share_K: Sequence[float] | np.ndarray) -> np.ndarray:
    """tau of chains of 1, 2, ..., K."""
    return 1 + np.cumsum(share_K)


def tree_tau(share_D: Sequence[float] | np.ndarray, levels: int, nodes: int) -> float:
    """tau of the tree of so many drafted nodes, of the likeliest paths."""
    share_K = extended(share_D, levels)
    kept_K = share_K / np.concatenate([[1.0], share_K[:-1]]).clip(1e-9)
    found, grown = 1.0, [(-kept_K[0], 0)]  # chance of the whole path, negated, and depth
    for _ in range(nodes):
        if not grown:
            break
        minus, depth = heapq.heappop(grown)
        found -= minus
        heapq.heappush(grown, (minus * SIBLING * (1 - kept_K[depth]), depth))
        if depth + 1 < levels:
            heapq.heappush(grown, (minus * kept_K[depth + 1], depth + 1))
    return found
