"""The losses against a target of which only the likeliest tokens are known, in bounded memory.

A row knows the log-probabilities of J tokens and, as one bucket, of all the rest. The draft is put
into the same J + 1 buckets, and any loss of `pure.py` compares the two small distributions; one
whose slopes in the buckets are g has in the draft's logits the gradient

    dz_v = g_j                    where v is the listed token j
           g_rest q_v / q_rest    elsewhere

So within the rest nothing says which token is better: the draft's own ratios stay. Every
f-divergence of buckets is a lower bound of the one of tokens, and alpha = sum min(p, q) an upper
bound; both are exact where p has nothing outside the list (it is cut to its top k, say), except
for the reverse KL, which is infinite there on paper.

Shapes: N rows, R rows of a tile, V vocabulary, J listed tokens of a row, B = J + 1 buckets, the
rest last, H hidden size of the draft.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.top_k import bucketed
from draftsmith.train.losses.chunked import Divergence, Side, bounded
from draftsmith.train.losses.closed_form import Scored, Transform, Workspace, divergence_score
from draftsmith.train.losses.pure import Loss, centred


class TopKRows(NamedTuple):
    """The target's distributions at N positions as its likeliest tokens.

    Args:
        ids_NJ: int64, the listed tokens. A row with fewer than J repeats its first one: from the
            second place on, that one is an empty bucket.
        log_p_NB: log-probabilities of the listed tokens, then of the rest; -inf for none.
    """

    ids_NJ: Tensor
    log_p_NB: Tensor

    def divergence(
        self, loss: Loss, q: Side, weight_N: Tensor, transform: Transform | None
    ) -> Divergence:
        """sum_n weight_n * loss(p_n, q_n) over the buckets, q being the draft's states and head.

        transform: logits [R, V] in fp32 -> logits [R, V'], of the draft's; the target's have had
            theirs. The rest, types, memory, result and errors as in `chunked_divergence`.
        """
        ids_NJ, log_p_NB, rows = self.ids_NJ, self.log_p_NB.detach(), len(q[0])
        if len(ids_NJ) != rows or log_p_NB.shape != (rows, ids_NJ.shape[1] + 1):
            raise ValueError(
                f"listed tokens: got ids of shape {tuple(ids_NJ.shape)} and log-probabilities of "
                f"{tuple(log_p_NB.shape)}, expected [{rows}, J] and [{rows}, J + 1]; the last "
                "column is the rest's"
            )
        compare = divergence_score([loss], finite=False)

        def score(
            rows_R: Tensor, logits_1RV: Tensor, learn: bool, work: Workspace
        ) -> Iterator[Scored]:
            ids_RJ, log_p_RB = ids_NJ[rows_R], log_p_NB[rows_R]
            leaf_RV = centred(logits_1RV[0]).requires_grad_(learn)
            with torch.set_grad_enabled(learn):
                q_logits_RV = leaf_RV if transform is None else transform(leaf_RV)
            q_RB, rest_RV = bucketed(q_logits_RV.detach(), ids_RJ)
            ((scores, slope_RB),) = compare(log_p_RB.to(q_RB.dtype), q_RB[None], learn, work)
            slope_RV = None
            if slope_RB is not None:
                q_rest_R1 = q_RB[:, -1:]
                rest_RV.sub_(q_rest_R1.masked_fill(q_rest_R1 == -math.inf, 0.0)).exp_()
                slope_RV = rest_RV.mul_(slope_RB[:, -1:])
                slope_RV.scatter_add_(-1, ids_RJ, slope_RB[:, :-1])
                if q_logits_RV is not leaf_RV:
                    (slope_RV,) = torch.autograd.grad(q_logits_RV, leaf_RV, slope_RV)
            yield scores, slope_RV

        total, scores_21N = bounded(score, 2, [q[0]], q[1], None, weight_N[None])
        return Divergence(total, *scores_21N[:, 0])

    def first(self, k: int) -> "TopKRows":
        """The same with the first k tokens listed alone."""
        rest_N1 = self.log_p_NB[:, k:].logsumexp(-1, keepdim=True)
        return TopKRows(self.ids_NJ[:, :k], torch.cat([self.log_p_NB[:, :k], rest_N1], -1))
