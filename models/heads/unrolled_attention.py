"""Attention of the training-time test: a head runs several steps at every position at once.

In step s, position t attends as it will in decoding, when the head runs on alone from t: to the
keys of step 0 at its own and all earlier positions (there it reads the target's states), and to its
own keys of steps 1 .. s. One softmax goes over both parts:

    scores(t, s) = [ q.k_0(t') for t' <= t  |  q.k_1(t), ..., q.k_s(t) ] / sqrt(E)

`concatenated` is that formula. `merged` runs the first part as flash attention, which also gives
the log of its softmax's denominator; adding the other columns to the denominator is then arithmetic
on single numbers. Backward, a flash kernel that is handed the *merged* output and denominator
gives exactly the first part's share of the gradient (Ring Attention, arXiv 2310.01889, splits
its keys alike). Nothing of size [B, A, T, T] is kept.

Shapes: B rows, T positions, A query heads, K key-value heads, G = A / K, E head width.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Unrolled:
    """An `Attention` for successive steps of a head with any number of layers.

    mask: [B, 1, T, T] bool, who may attend whom in step 0; None: causal. Calls for a layer come in
    the order of the steps.
    """

    def __init__(self, mask: Tensor | None = None) -> None:
        self._mask = mask
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept = self._kept.setdefault(layer, [])
        device = query.device.type
        if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
            # As autocast does to torch's own attention: rotary angles have made them fp32.
            low = torch.get_autocast_dtype(device)
            query, key, value = query.to(low), key.to(low), value.to(low)
        if self._mask is not None and self._mask.dtype != query.dtype:
            # What the kernels add to scores; made once for all steps.
            allowed, self._mask = self._mask, torch.zeros_like(self._mask, dtype=query.dtype)
            self._mask.masked_fill_(~allowed, -torch.inf)
        kept.append((key.transpose(1, 2), value.transpose(1, 2)))
        mixed_BATE = merged(query.transpose(1, 2), kept, self._mask)
        return mixed_BATE.transpose(1, 2).flatten(2)


Kept = Sequence[tuple[Tensor, Tensor]]  # (keys, values) of each step, [B, K, T, E] each


def concatenated(query_BATE: Tensor, kept: Kept, bias_B1TT: Tensor | None = None) -> Tensor:
    """The formula as it stands: [B, A, T, E]. bias: added to step 0's scores; None: causal."""
    groups, length = query_BATE.shape[1] // kept[0][0].shape[1], query_BATE.shape[2]
    keys, values = (
        [x.repeat_interleave(groups, 1) for x in side] for side in zip(*kept, strict=True)
    )
    query_BATE = query_BATE * query_BATE.shape[-1] ** -0.5
    if bias_B1TT is None:
        bias_B1TT = _causal_bias(query_BATE)
    scores = [query_BATE @ keys[0].mT + bias_B1TT]
    scores += [(query_BATE * key).sum(-1, keepdim=True) for key in keys[1:]]
    wide = torch.promote_types(query_BATE.dtype, torch.float32)
    weights = torch.cat(scores, -1).softmax(-1, dtype=wide).to(query_BATE.dtype)
    mixed_BATE = weights[..., :length] @ values[0]
    for step, value in enumerate(values[1:]):
        mixed_BATE = mixed_BATE + weights[..., length + step, None] * value
    return mixed_BATE


def merged(query_BATE: Tensor, kept: Kept, bias_B1TT: Tensor | None = None) -> Tensor:
    """The same by flash attention on step 0's keys, with bounded memory."""
    return _Merged.apply(query_BATE, bias_B1TT, *itertools.chain(*kept))


def _causal_bias(query_BATE: Tensor) -> Tensor:
    length = query_BATE.shape[2]
    return query_BATE.new_full((length, length), -torch.inf).triu(1)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, bias: Tensor | None, *sides: Tensor) -> Tensor:
        groups = query.shape[1] // sides[0].shape[1]
        run = _kernels(query, bias)[0]
        first_BATE, lse_BAT = run(query, _spread(sides[0], groups), _spread(sides[1], groups), bias)
        if len(sides) > 2:  # the columns of the later steps, their keys and values in turns
            rows, heads, length, width = sides[0].shape
            split = (rows, heads, -1, length, width)
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
        run = _kernels(query, bias)[1]
        spread = (_spread(sides[0], groups), _spread(sides[1], groups))
        d_query, d_key, d_value = run(d_out, query, *spread, out, lse_BAT, bias)
        del spread
        gradients = [_gather(d_key, groups), _gather(d_value, groups)]
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


def _spread(x_BKTE: Tensor, groups: int) -> Tensor:
    """Each key-value head for all of its query heads: not every version's kernels share them."""
    return x_BKTE if groups == 1 else x_BKTE.repeat_interleave(groups, 1)


def _gather(d_BATE: Tensor, groups: int) -> Tensor:
    return d_BATE if groups == 1 else d_BATE.unflatten(1, (-1, groups)).sum(2)


# --- kernels: (query, key, value, bias) -> (output, log-denominator), and its backward ----------

Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Row by row of the batch, so that only one row's scores are there at a time."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide)
    for row in range(len(q)):
        scores_ATT = _scores(q, k, bias, row)
        lse[row] = scores_ATT.logsumexp(-1)
        out[row] = scores_ATT.sub_(lse[row].unsqueeze(-1)).exp_().to(v.dtype) @ v[row]
    return out, lse


def _plain_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for row in range(len(q)):
        weight_ATT = _scores(q, k, bias, row).sub_(lse[row].unsqueeze(-1)).exp_()
        d_v[row] = weight_ATT.to(v.dtype).mT @ d_out[row]
        delta_AT1 = (d_out[row] * out[row]).sum(-1, keepdim=True, dtype=lse.dtype)
        slope_ATT = weight_ATT.mul_((d_out[row] @ v[row].mT).sub_(delta_AT1))
        slope_ATT = slope_ATT.mul_(q.shape[-1] ** -0.5).to(q.dtype)
        d_q[row], d_k[row] = slope_ATT @ k[row], slope_ATT.mT @ q[row]
    return d_q, d_k, d_v


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, row: int) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores_ATT = (q[row] @ k[row].mT).to(wide).mul_(q.shape[-1] ** -0.5)
    return scores_ATT.add_(_causal_bias(q) if bias is None else bias[row])


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return op(q, k, v, 0.0, bias is None, attn_mask=bias)


def _cpu_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return op(d_out, q, k, v, out, lse, 0.0, bias is None, attn_mask=bias)


def _cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[:2]


def _cuda_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    length = q.shape[2]
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is 0
    return op(d_out, q, k, v, out, lse, None, None, length, length, 0.0, True, seed, seed[:1])


def _as_known(name: str, known: str) -> bool:
    """Whether this torch has the operator with the arguments that it is called with here."""
    found = getattr(torch.ops.aten, name, None)
    return found is not None and [a.name for a in found.default._schema.arguments] == known.split()


_SIDES = "query key value"
_AGAIN = f"grad_out {_SIDES} out logsumexp"
_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_CUDA = "_scaled_dot_product_flash_attention"
HAS_CPU = _as_known(_CPU, f"{_SIDES} dropout_p is_causal attn_mask scale") and _as_known(
    f"{_CPU}_backward", f"{_AGAIN} dropout_p is_causal attn_mask scale"
)
HAS_CUDA = _as_known(_CUDA, f"{_SIDES} dropout_p is_causal return_debug_mask scale") and _as_known(
    f"{_CUDA}_backward",
    f"{_AGAIN} cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed philox_offset scale",
)


def _kernels(query: Tensor, bias: Tensor | None) -> tuple[Forward, Backward]:
    """What runs step 0's part: flash attention of the device, or plain products."""
    if query.device.type == "cpu" and HAS_CPU:
        return _cpu, _cpu_backward
    half = query.dtype in (torch.float16, torch.bfloat16)
    fits = half and bias is None and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    if query.device.type == "cuda" and HAS_CUDA and fits:
        return _cuda, _cuda_backward
    return _plain, _plain_backward
