"""Attention of many blocks at once, each over a context of its own and over itself.

A block of b rows stands at an anchor in a text; rows of all blocks are queries side by side. A row
sees what its anchor may see of the text, and the rows of its own block: all of them, or in a causal
block those up to itself. One softmax goes over both parts:

    scores = [ q.k(i) for i in the anchor's context | q.k(j) for j in the block ] / sqrt(E)

`beside` runs the first part as flash attention (on a CPU; on CUDA flash takes no mask) and adds the
second, b columns a row, to its denominator, as `unrolled_attention.py` does. No row meets another
block.

Shapes: B rows of text, T its positions, M blocks a row, b rows of a block, R = M * b, A query
heads, K key-value heads, G = A / K, E head width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.models.layers.flash import gather, in_autocast, kernels, spread


class Blocks:
    """An `Attention` for the rows of blocks; `keep` first takes in the context of each layer.

    allowed_BMT: bool, which positions of the text each block's rows see, at least one; causal:
    whether rows of a block see only those up to themselves.
    """

    def __init__(self, allowed_BMT: Tensor, rows: int, *, causal: bool) -> None:
        bias_BMT = torch.zeros(allowed_BMT.shape, device=allowed_BMT.device)
        bias_BMT = bias_BMT.masked_fill_(~allowed_BMT, -torch.inf)
        self._bias_B1RT = bias_BMT.repeat_interleave(rows, 1)[:, None]
        self._own_bb = own_bias(rows, causal, allowed_BMT.device)
        self._context: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, layer: int, key_BTKE: Tensor, value_BTKE: Tensor) -> None:
        """The keys and values of the text's positions."""
        self._context[layer] = key_BTKE.transpose(1, 2), value_BTKE.transpose(1, 2)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sides = [side.transpose(1, 2) for side in (query, key, value)]
        sides = list(in_autocast(sides[0], *self._context[layer], *sides[1:]))
        bias_B1RT = self._bias_B1RT.to(sides[0].dtype)
        return beside(*sides, bias_B1RT, self._own_bb).transpose(1, 2).flatten(2)


def own_bias(rows: int, causal: bool, device: torch.device) -> Tensor:
    """What is added to the scores of a block's rows among themselves, [b, b]."""
    hidden_bb = torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)
    return torch.zeros(rows, rows, device=device).masked_fill(hidden_bb & causal, -torch.inf)


def beside(*given: Tensor) -> Tensor:
    """The formula, its context part by flash attention: [B, A, R, E], of queries [B, A, R, E]; keys
    and values of the context [B, K, T, E], and of the rows [B, K, R, E]; what is added to scores,
    [B, 1, R, T] of the context and `own_bias` [b, b] of a block.
    """
    return _Beside.apply(*given)


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, *given: Tensor) -> Tensor:
        context_key, context_value, key, value, bias, own_bb = given
        groups = query.shape[1] // key.shape[1]
        run = kernels(query, bias)[0]
        out, lse = run(query, spread(context_key, groups), spread(context_value, groups), bias)
        grouped, keys, values = _by_block(len(own_bb), groups, query, key, value)
        scores = (grouped @ keys.mT).to(lse.dtype).mul_(query.shape[-1] ** -0.5).add_(own_bb)
        first = lse.reshape(scores.shape[:-1])
        whole = torch.logaddexp(first, scores.logsumexp(-1))
        weights = scores.sub_(whole[..., None]).exp_()
        mixed = out.reshape(grouped.shape) * (first - whole).exp_()[..., None].to(out.dtype)
        mixed = (mixed + weights.to(values.dtype) @ values).to(query.dtype)
        mixed, whole = mixed.reshape(query.shape), whole.reshape(lse.shape)
        ctx.save_for_backward(query, *given, mixed, whole)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, context_key, context_value, key, value, bias, own_bb, out, lse = ctx.saved_tensors
        groups, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5
        context = spread(context_key, groups), spread(context_value, groups)
        d_query, *d_context = kernels(query, bias)[1](d_out, query, *context, out, lse, bias)
        grouped, keys, values = _by_block(len(own_bb), groups, query, key, value)
        d_mixed = d_out.reshape(grouped.shape)
        scores = (grouped @ keys.mT).to(lse.dtype).mul_(scale).add_(own_bb)
        weights = scores.sub_(lse.reshape(scores.shape[:-1])[..., None]).exp_()
        delta = (d_out * out).sum(-1, dtype=lse.dtype).reshape(scores.shape[:-1])[..., None]
        slope = (d_mixed @ values.mT).to(lse.dtype).sub_(delta).mul_(weights).mul_(scale)
        slope = slope.to(query.dtype)
        d_query = d_query + (slope @ keys).reshape(query.shape)
        d_key, d_value = (
            (weight.mT @ of).sum(2).reshape(key.shape)
            for weight, of in ((slope, grouped), (weights.to(d_mixed.dtype), d_mixed))
        )
        return d_query, *(gather(d, groups) for d in d_context), d_key, d_value, None, None


def _by_block(rows: int, groups: int, query: Tensor, *sides: Tensor) -> list[Tensor]:
    """[B, K, G, M, b, E] of queries; [B, K, 1, M, b, E] of keys and values."""
    heads = [query.unflatten(1, (-1, groups)), *(side.unsqueeze(2) for side in sides)]
    return [each.unflatten(3, (-1, rows)) for each in heads]
