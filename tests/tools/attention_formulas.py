"""What the fast attentions of `models/layers` must equal: their formulas as they stand, one softmax
over all keys.

Shapes: see `block_attention.py` and `unrolled_attention.py` there.
"""

import torch
from torch import Tensor

from draftsmith.models.layers.flash import causal_bias, spread
from draftsmith.models.layers.unrolled_attention import Kept


def block_attention(
    query_BARE: Tensor,
    context_key_BKTE: Tensor,
    context_value_BKTE: Tensor,
    key_BKRE: Tensor,
    value_BKRE: Tensor,
    bias_B1RT: Tensor,
    own_bb: Tensor,
) -> Tensor:
    """Of blocks, each over a context of its own and over itself, [B, A, R, E]; see `beside`."""
    groups, rows = query_BARE.shape[1] // key_BKRE.shape[1], query_BARE.shape[2]
    key, value = (
        torch.cat([spread(context, groups), spread(own, groups)], 2)
        for context, own in ((context_key_BKTE, key_BKRE), (context_value_BKTE, value_BKRE))
    )
    blocks = [own_bb] * (rows // len(own_bb))
    other_RR = torch.block_diag(*[torch.ones_like(block) for block in blocks]) == 0
    own_RR = torch.block_diag(*blocks).nan_to_num(nan=-torch.inf).masked_fill(other_RR, -torch.inf)
    bias_B1RX = torch.cat([bias_B1RT, own_RR.to(bias_B1RT).expand(len(bias_B1RT), 1, -1, -1)], 3)
    scores = query_BARE @ key.mT * query_BARE.shape[-1] ** -0.5 + bias_B1RX
    return scores.softmax(-1) @ value


def unrolled_attention(query_BATE: Tensor, kept: Kept, bias_B1TT: Tensor | None = None) -> Tensor:
    """Of the training-time test, [B, A, T, E]; see `merged`."""
    groups, length = query_BATE.shape[1] // kept[0][0].shape[1], kept[0][0].shape[2]
    keys, values = (
        [x.repeat_interleave(groups, 1) for x in side] for side in zip(*kept, strict=True)
    )
    query_BATE = query_BATE * query_BATE.shape[-1] ** -0.5
    if bias_B1TT is None:
        bias_B1TT = causal_bias(query_BATE)
    scores = [query_BATE @ keys[0].mT + bias_B1TT]
    scores += [(query_BATE * key).sum(-1, keepdim=True) for key in keys[1:]]
    wide = torch.promote_types(query_BATE.dtype, torch.float32)
    weights = torch.cat(scores, -1).softmax(-1, dtype=wide).to(query_BATE.dtype)
    mixed_BATE = weights[..., :length] @ values[0]
    for step, value in enumerate(values[1:]):
        mixed_BATE = mixed_BATE + weights[..., length + step, None] * value
    return mixed_BATE
