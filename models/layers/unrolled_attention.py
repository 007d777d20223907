"""Attention of the training-time test: a head runs several steps at every position at once.

In step s, position t attends as it will in decoding, when the head runs on alone from t: to the
keys of step 0 at its own and all earlier positions (there it reads the target's states), and to its
own keys of steps 1 .. s. One softmax goes over both parts:

    scores(t, s) = [ q.k_0(t') for t' <= t  |  q.k_1(t), ..., q.k_s(t) ] / sqrt(E)

Steps s >= 1 may be of M <= T positions only. `merged` runs the first part as flash attention, which
also gives the log of its softmax's denominator; adding the other columns to the denominator is then
arithmetic on single numbers. Backward, a flash kernel that is handed the *merged* output and
denominator gives exactly the first part's share of the gradient (Ring Attention, arXiv 2310.01889,
splits its keys alike). Nothing of size [B, A, T, T] is kept.

Shapes: B rows, T positions, M of them, A query heads, K key-value heads, G = A / K, E head width.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.models.layers.flash import gather, in_autocast, kernels, spread


class Unrolled:
    """An `Attention` for successive steps of a head with any number of layers.

    mask: [B, 1, T, T] bool, who may attend whom in step 0; None: causal. Calls for a layer come in
    the order of the steps.
    """

    def __init__(self, mask: Tensor | None = None) -> None:
        self._mask = mask
        self._kept: dict[int, list[tuple[Tensor, ...]]] = {}

    def go_on(self, at_BM: Tensor) -> None:
        """After step 0: later queries are at these positions, of each step the first of those."""
        at_B1M1 = at_BM[:, None, :, None]
        causal = at_B1M1 >= torch.arange(self._kept[0][0][0].shape[2], device=at_BM.device)
        self._mask = causal if self._mask is None else self._mask.take_along_dim(at_B1M1, 2)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        count, query = query.shape[1], in_autocast(query)[0]
        self.keep(layer, key, value)
        if self._mask is not None and self._mask.dtype != query.dtype:
            # What the kernels add to scores; made once for all steps.
            allowed, self._mask = self._mask, torch.zeros_like(self._mask, dtype=query.dtype)
            self._mask.masked_fill_(~allowed, -torch.inf)
        first, *later = self._kept[layer]
        sides = [first, *((key[:, :, :count], value[:, :, :count]) for key, value in later)]
        bias = None if self._mask is None else self._mask[:, :, :count]
        mixed_BATE = merged(query.transpose(1, 2), sides, bias)
        return mixed_BATE.transpose(1, 2).flatten(2)

    def keep(self, layer: int, key: Tensor, value: Tensor, *, instead: bool = False) -> None:
        """Take in keys and values that nothing is asked with; instead: of the last ones."""
        kept, sides = self._kept.setdefault(layer, []), in_autocast(key, value)
        kept[len(kept) - instead :] = [tuple(side.transpose(1, 2) for side in sides)]


Kept = Sequence[tuple[Tensor, ...]]  # (keys, values) of each step, [B, K, T, E] each


def merged(query_BATE: Tensor, kept: Kept, bias_B1TT: Tensor | None = None) -> Tensor:
    """The formula by flash attention on step 0's keys, with bounded memory: [B, A, T, E]. bias:
    added to step 0's scores; None: causal.
    """
    return _Merged.apply(query_BATE, bias_B1TT, *itertools.chain(*kept))


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, bias: Tensor | None, *sides: Tensor) -> Tensor:
        groups = query.shape[1] // sides[0].shape[1]
        run = kernels(query, bias)[0]
        first_BATE, lse_BAT = run(query, spread(sides[0], groups), spread(sides[1], groups), bias)
        if len(sides) > 2:  # the columns of the later steps, their keys and values in turns
            heads, width = sides[0].shape[1], query.shape[3]
            split = (query.shape[0], heads, -1, *query.shape[2:])
            grouped, first, lse = query.reshape(split), first_BATE.reshape(split), lse_BAT
            keys = (key.unsqueeze(2) for key in sides[2::2])
            scores = [(grouped * key).sum(-1, dtype=lse.dtype).mul_(width**-0.5) for key in keys]
            whole = torch.stack([lse.reshape(scores[0].shape), *scores]).logsumexp(0)
            out = first * (lse.reshape(whole.shape) - whole).exp_().unsqueeze(-1)
            for score, value in zip(scores, sides[3::2], strict=True):
                out += (score - whole).exp_().unsqueeze(-1) * value.unsqueeze(2)
            first_BATE, lse_BAT = out.to(query.dtype).flatten(1, 2), whole.flatten(1, 2)
        ctx.save_for_backward(query, bias, first_BATE, lse_BAT, *sides)
        return first_BATE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, bias, out, lse_BAT, *sides = ctx.saved_tensors
        groups, heads = query.shape[1] // sides[0].shape[1], sides[0].shape[1]
        run = kernels(query, bias)[1]
        whole = (spread(sides[0], groups), spread(sides[1], groups))
        d_query, d_key, d_value = run(d_out, query, *whole, out, lse_BAT, bias)
        del whole
        gradients = [gather(d_key, groups), gather(d_value, groups)]
        if len(sides) == 2:
            return d_query, None, *gradients
        split = (query.shape[0], heads, groups, *query.shape[2:])
        query, out, d_out = (x.reshape(split) for x in (query, out, d_out))
        scale, lse = query.shape[-1] ** -0.5, lse_BAT.view(split[:-1]).unsqueeze(-1)
        d_query = d_query.reshape(split)
        delta = (d_out * out).sum(-1, keepdim=True, dtype=lse.dtype)
        for key, value in zip(sides[2::2], sides[3::2], strict=True):
            key, value = key.unsqueeze(2), value.unsqueeze(2)
            score = (query * key).sum(-1, keepdim=True, dtype=lse.dtype) * scale
            weight = (score - lse).exp_()
            slope = (d_out * value).sum(-1, keepdim=True, dtype=lse.dtype).sub_(delta)
            slope = slope.mul_(weight).mul_(scale).to(query.dtype)
            d_query = d_query.addcmul_(slope, key.expand_as(query))
            gradients += [(slope * query).sum(2), (weight.to(d_out.dtype) * d_out).sum(2)]
        return d_query.flatten(1, 2), None, *gradients
