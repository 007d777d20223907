"""Which trained tokens of a micro-batch count in a draft's loss, and how much.

AdaSPEC (Hu et al., arXiv 2510.19779) trains a draft on the tokens where it lags most behind a
reference draft, which was distilled before from the same beginning: the share `keep` of the
micro-batch with the largest gaps KL(p_t || q_t) - KL(p_t || reference_t), whatever their sign.
Controls keep as many tokens by another order. Where the official code differs: it divides the loss
by all trained tokens (here: by those kept, so that `lr` and clipping mean the same at any `keep`),
and takes all tokens at or above a quantile (here: exactly as many as `keep` says, so that the
divisor is known before the step; of equal gaps the earlier token is taken).

Weighting by depth follows a draft of K tokens along the text instead: a token that drafting seldom
comes to, since one before it is mostly rejected, counts little.

Legend: B rows, T positions, N = B * T, K drafted tokens a round.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Weighting:
    """The group `tokens` of a recipe: which of them count."""

    select: str = ""  # adaspec | bottom | easy | random; empty: all
    keep: float = 0.4  # the share of a micro-batch's trained tokens that `select` leaves
    reference: str = ""  # of adaspec, bottom, easy: the drafter folder of the reference draft
    by_depth: int = 0  # K: weigh tokens by what accepting them gives a draft of K; 0: all alike


def check(weighting: Weighting) -> None:
    """Raises ValueError for values out of range, and for options that don't go together."""
    if weighting.select and weighting.select not in ORDERS:
        raise ValueError(
            f"tokens.select: got {weighting.select!r}, expected one of {', '.join(ORDERS)}, or "
            "nothing to train on all tokens"
        )
    if not 0 < weighting.keep <= 1:
        raise ValueError(
            f"tokens.keep: got {weighting.keep}, expected the share of tokens to train on, in "
            "(0, 1]"
        )
    if (weighting.select not in ("", "random")) != bool(weighting.reference):
        raise ValueError(
            f"tokens.reference: got {weighting.reference!r} with select={weighting.select!r}; "
            "adaspec, bottom and easy need one, a drafter folder; the rest has no use for one"
        )
    if weighting.by_depth < 0 or (weighting.by_depth and weighting.select):
        raise ValueError(
            f"tokens.by_depth: got {weighting.by_depth} with select={weighting.select!r}, expected "
            "the number of drafted tokens a round (0: off), and not both"
        )


def selected(order: str, count: int, mask_N: Tensor, loss_N: Tensor, reference_N: Tensor) -> Tensor:
    """1.0 for the first `count` trained tokens in an order of `ORDERS`, else 0.0: [N]. loss_N,
    reference_N: KL(p || q) of the draft and of the reference draft, where the order reads them.
    """
    score_N = ORDERS[order](loss_N, reference_N).masked_fill(~mask_N, -torch.inf)
    first_C = score_N.sort(descending=True, stable=True).indices[:count]
    return torch.zeros_like(loss_N).index_fill_(0, first_C, 1.0)


def depth_weights(alpha_BT: Tensor, mask_BT: Tensor, K: int) -> Tensor:
    """What accepting each trained token is worth to rounds of K drafted tokens, in tokens; 0
    elsewhere: [B, T].

    With a_t the acceptance of the token drafted for t, rounds that begin at s with chance S_s keep
    sum_s S_s sum_(i<K) a_s ... a_(s+i) drafted tokens. The weight is the derivative of this in a_t,
    the places where rounds begin held fixed: the chance that t is drafted, i tokens into a round,
    times the tokens that its acceptance is expected to bring. A new stretch of trained tokens
    begins a new round; after a rejection, or K accepted tokens and the target's own, the next does.
    """
    rows, length = alpha_BT.shape
    alpha_BT = alpha_BT * mask_BT
    # worth_KBT[i]: of accepting t as the i-th token of a round; one more if the next is kept too.
    worth_BKT = torch.ones(rows, K, length + 1, device=alpha_BT.device, dtype=alpha_BT.dtype)
    for t in range(length - 2, -1, -1):
        worth_BKT[:, :-1, t] += alpha_BT[:, t + 1, None] * worth_BKT[:, 1:, t + 1]
    fresh_K = torch.eye(K + 1, device=alpha_BT.device, dtype=alpha_BT.dtype)[0]
    reach_BK = alpha_BT.new_zeros(rows, K + 1)  # chance that t is i tokens into a round
    weights = []
    before_B = torch.zeros_like(mask_BT[:, 0])
    for t in range(length):
        reach_BK = torch.where((mask_BT[:, t] & ~before_B)[:, None], fresh_K, reach_BK)
        weights.append((reach_BK[:, :K] * worth_BKT[:, :, t]).sum(1))
        alpha_B1 = alpha_BT[:, t, None]
        ended_B1 = (reach_BK[:, :K] * (1 - alpha_B1)).sum(1, keepdim=True) + reach_BK[:, K:]
        reach_BK = torch.cat([ended_B1, reach_BK[:, :K] * alpha_B1], 1)
        before_B = mask_BT[:, t]
    return torch.stack(weights, 1) * mask_BT


# What each order ranks tokens by, the largest first, from the losses of draft and reference. The
# draw of `random` comes from torch's generator, which the loop seeds for each step and process.
ORDERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "adaspec": lambda loss_N, reference_N: loss_N - reference_N,
    "bottom": lambda loss_N, reference_N: reference_N - loss_N,
    "easy": lambda loss_N, reference_N: -reference_N,
    "random": lambda loss_N, reference_N: torch.rand_like(loss_N),
}
