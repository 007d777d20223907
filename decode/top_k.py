"""A distribution as its likeliest tokens, and everything else as one bucket.

Shapes: R rows, V vocabulary, J listed tokens of a row, B = J + 1 buckets, the rest last.
"""

import math

import torch
from torch import Tensor


def bucketed(logits_RV: Tensor, ids_RJ: Tensor) -> tuple[Tensor, Tensor]:
    """(logits [R, B] of the listed tokens and of the rest as one; the rest's alone [R, V]).

    Their softmax is that of `logits_RV`, added up in the buckets. The rest is a logsumexp of its
    own: 1 minus the listed ones would be rounding where they are nearly all. Listed tokens are -inf
    in the second result. A row with fewer than J tokens repeats its first one, an empty bucket.
    """
    rest_RV = logits_RV.scatter(-1, ids_RJ, -math.inf)
    listed_RJ = logits_RV.gather(-1, ids_RJ)
    listed_RJ[:, 1:].masked_fill_(ids_RJ[:, 1:] == ids_RJ[:, :1], -math.inf)
    return torch.cat([listed_RJ, rest_RV.logsumexp(-1, keepdim=True)], -1), rest_RV


def likeliest(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row, ids [R, J] likeliest first, and log-probabilities [R, B]
    of these and of the rest; fewer than k where there are fewer tokens.
    """
    logits_RV = logits_RV - logits_RV.amax(-1, keepdim=True)  # an offset of all would take digits
    ids_RJ = logits_RV.topk(min(k, logits_RV.shape[-1])).indices
    return ids_RJ, bucketed(logits_RV, ids_RJ)[0].log_softmax(-1)
