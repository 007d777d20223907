"""The most that any lossless rule can accept at one position of k drafts: optimal transport.

The rate is a maximal flow from drafts to tokens, and by its minimal cut (Sun et al., arXiv
2310.15141; Hu et al., arXiv 2502.18779)

    alpha* = 1 + min over sets H of tokens of p(H) - Pr[all k drafts lie in H]

The minimum lies at a beginning of the tokens sorted by p / q. Of draws with replacement: p(H) -
q(H)^k is concave in (p(H), q(H)), so a vertex of their zonotope attains it, and these are the
beginnings. Of draws without: Hu et al. prove it from the convexity of Pr in q(H); were it wrong,
the result would still be an upper bound. Tests compare both with all subsets and with the flow.

Shapes: V vocabulary, T tuples of k drafts.
"""

import torch
from torch import Tensor

from draftsmith.decode.token_tree import DETERMINISTIC, LAST_DRAWN, WITH_REPLACEMENT

MAX_TUPLES = 1 << 24


def optimal_acceptance(p_V: Tensor, q_V: Tensor, k: int, law: str) -> float:
    """alpha* in [0, 1]: the greatest chance that a token with law p is among k drafts from q.

    p_V, q_V: probabilities. law as in `token_tree`; coupled drafts are, for themselves, draws
    without replacement, deterministic ones the k best of q, and of those whose last is drawn k - 1
    are given. Raises ValueError where draws without replacement have more than 2^24 tuples.
    """
    k = min(k, int((q_V > 0).sum()))
    if law == DETERMINISTIC:
        return float(p_V[q_V.topk(k).indices].sum())
    if law == LAST_DRAWN:
        given_K = q_V.topk(k).indices[:-1]
        rest_V = q_V.scatter(0, given_K, 0.0)
        beside_V = p_V.scatter(0, given_K, 0.0)
        return float(p_V[given_K].sum() + torch.minimum(beside_V, rest_V / rest_V.sum()).sum())
    order_V = torch.where(q_V > 0, p_V / q_V, torch.inf).argsort()
    p_V, q_V = p_V[order_V], q_V[order_V]
    if law == WITH_REPLACEMENT:
        inside_V = q_V.cumsum(0).pow(k)
    else:
        tuples_TK, chance_T = ordered_draws(q_V, k)
        inside_V = torch.zeros_like(q_V).index_add(0, tuples_TK.amax(1), chance_T).cumsum(0)
    return 1 + min(0.0, float((p_V.cumsum(0) - inside_V).min()))


def ordered_draws(q_V: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """All tuples of k draws without replacement [T, k], and the chance [T] of each."""
    if len(q_V) ** k > MAX_TUPLES:
        raise ValueError(
            f"optimal acceptance: got {k} draws without replacement from {len(q_V)} tokens, "
            f"expected at most {MAX_TUPLES} tuples; cut q to its best tokens"
        )
    tokens_V = torch.arange(len(q_V), device=q_V.device)
    tuples_TK = torch.cartesian_prod(*[tokens_V] * k).view(-1, k)
    ordered_TK = tuples_TK.sort(1).values
    tuples_TK = tuples_TK[(ordered_TK[:, 1:] != ordered_TK[:, :-1]).all(1)]
    q_TK = q_V[tuples_TK]
    left_TK = (1 - (q_TK.cumsum(1) - q_TK)).maximum(q_TK)  # rounding must not take what is left
    return tuples_TK, torch.where(q_TK > 0, q_TK / left_TK, 0.0).prod(1)
