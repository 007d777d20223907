"""Flash attention as the parts that its users need: the output with the log of the softmax's
denominator, and the backward of both, by the kernels of the device or plain products.

Handed the output and denominator of a softmax that went over more than these keys, the backward
gives exactly these keys' share of the gradient (Ring Attention, arXiv 2310.01889).

Shapes: B rows, T queries, A query heads, K key-value heads, G = A / K, E head width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# (query, key, value, bias) -> (output, log-denominator [B, A, T]); bias: added to the scores, None:
# causal.
Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
# (gradient of the output, query, key, value, output, log-denominator, bias) -> their gradients.
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernels(query: Tensor, bias: Tensor | None) -> tuple[Forward, Backward]:
    """What runs such queries: flash attention of the device, or plain products."""
    if query.device.type == "cpu" and HAS_CPU:
        return _cpu, _cpu_backward
    half = query.dtype in (torch.float16, torch.bfloat16)
    fits = half and bias is None and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    if query.device.type == "cuda" and HAS_CUDA and fits:
        return _cuda, _cuda_backward
    return _plain, _plain_backward


def in_autocast(*sides: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the type that autocast gives torch's own attention: rotary angles
    have made them fp32.
    """
    device = sides[0].device.type
    if torch.is_autocast_enabled(device) and sides[0].dtype != torch.float64:
        return tuple(side.to(torch.get_autocast_dtype(device)) for side in sides)
    return sides


def spread(x_BKTE: Tensor, groups: int) -> Tensor:
    """Each key-value head for all of its query heads: not every version's kernels share them."""
    return x_BKTE if groups == 1 else x_BKTE.repeat_interleave(groups, 1)


def gather(d_BATE: Tensor, groups: int) -> Tensor:
    return d_BATE if groups == 1 else d_BATE.unflatten(1, (-1, groups)).sum(2)


def causal_bias(query_BATE: Tensor) -> Tensor:
    length = query_BATE.shape[2]
    return query_BATE.new_full((length, length), -torch.inf).triu(1)


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
    return scores_ATT.add_(causal_bias(q) if bias is None else bias[row])


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
