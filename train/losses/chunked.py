"""The losses over a large vocabulary in bounded memory: values and gradients in one sweep.

At a vocabulary of 128k the naive form (logits of both models, loss, backward) holds half a dozen
[N, V] tensors, gigabytes for a thousand tokens. Here the rows go through in chunks. Each chunk's
logits are made, scored and turned into their gradient *inside the forward*, so no logits outlive
their chunk, and the backward scales finished gradients by one number: it recomputes nothing.

Several drafts may share the target's rows: step s of EAGLE-3's training-time test at position t is
compared with the target's distribution at t + 1 + s, whose logits are made once for all steps.

Two sizes: a chunk of C rows is one matrix product a model, large enough to be efficient; inside it
the loss runs on tiles of R rows (`closed_form.py`), small enough that their buffers stay in cache.
`bench/speed/losses.py` measures what this buys.

Shapes: S steps, N rows (tokens), K rows with a weight, C rows of a chunk, M = S * C, R rows of a
tile, V vocabulary (D: the draft's own, where it drafts some tokens only), U a block of it, H / G
hidden size of the draft / the target, X numbers of a row (the loss first).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.train.losses.closed_form import (
    Score,
    Scored,
    Transform,
    Workspace,
    cross_entropy_score,
    divergence_score,
)
from draftsmith.train.losses.pure import Loss, full_precision

# How many logits a chunk and a tile hold, by device type. CPU (two cores, fp32, V = 128k): chunks
# of half the size take 12% more time and of twice the size 10% less, for 64 MiB less and 128 MiB
# more; a tile's five buffers of 1 MiB stay in cache. CUDA: for products of 1024 rows; not measured.
CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}
TILE_LOGITS = {"cpu": 1 << 18, "cuda": 1 << 24}
# Rows of the head whose gradient is formed at once where it can't be added up in place.
HEAD_BLOCK = 1 << 13

Heads = Tensor | tuple[Tensor, ...]  # [V, H]; several: H is the sum of their widths
Side = tuple[Tensor, Tensor]  # hidden [N, H], head [V, H]


class Divergence(NamedTuple):
    """total: scalar, sum of weight * loss, carries the gradient. loss_N, alpha_N: detached."""

    total: Tensor
    loss_N: Tensor
    alpha_N: Tensor


def chunked_divergence(
    loss: Loss,
    q_hidden_NH: Tensor,
    q_head_VH: Heads,
    p_hidden_NG: Tensor,
    p_head_VG: Tensor,
    weight_N: Tensor,
    *,
    transform: Transform | None = None,
) -> Divergence:
    """sum_n weight_n * loss(p_n, q_n), p and q being logits = hidden @ head.T, in bounded memory.

    Args:
        loss: (p_logits [R, V], q_logits [R, V]) -> [R], as in `pure.py`; rows are independent.
        q_hidden_NH, q_head_VH: the draft's states after its last norm, and its head (no bias).
            Several heads stand for one as wide as all of them side by side, which is never made:
            a frozen one and a small one that learns cost what the small one's gradient costs.
        p_hidden_NG, p_head_VG: the target's, without gradient. The heads may differ in V if
            `transform` cuts both sides to one size.
        weight_N: constants. Rows of weight 0 are never computed.
        transform: logits [R, V] in fp32 -> logits [R, V'], applied to both sides. A number added to
            all logits of a row must make no difference to what it gives: it gets them with one.

    Matrix products run in the autocast type where autocast is on, else in the tensors' own type;
    logits are fp32 (float64 for float64 input) before transform and loss, and the head's gradient
    is added up in fp32. Nothing is spent on a gradient that isn't needed (no_grad, a frozen head,
    constant states). A retained graph may be run backward again, at the price of a second pass.

    Both per-row results are 0 where the weight is 0; alpha is sum_v min(p, q) after the transform.
    Raises ValueError for shapes or types that don't fit, and for float16, whose range the gradients
    of 128k probabilities leave.
    """
    score, p = divergence_score([loss], transform), (p_hidden_NG, p_head_VG)
    total, scores_21N = bounded(score, 2, [q_hidden_NH], q_head_VH, p, weight_N[None])
    return Divergence(total, *scores_21N[:, 0])


def chunked_steps(
    losses: Sequence[Loss],
    q_hidden_SNH: Sequence[Tensor],
    q_head_DH: Heads,
    p_hidden_NG: Tensor,
    p_head_DG: Tensor,
    weight_SN: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """sum_s sum_n weight_sn * losses_s(p_n, q_s of state n - 1 - s), logits = hidden @ head.T:
    (total, loss_SN, alpha_SN) as in `Divergence`.

    Rows are named by the target's position. Near a document's start a draft's state n - 1 - s is
    one of another document, or wraps round; such rows have the weight 0.

    losses: one a step; p_head_DG: the rows of the target's head in the draft's order. Target rows
    without any weight are never computed. The rest as in `chunked_divergence`.
    """
    score, p = divergence_score(losses), (p_hidden_NG, p_head_DG)
    total, scores_2SN = bounded(score, 2, q_hidden_SNH, q_head_DH, p, weight_SN, lag=1)
    return total, *scores_2SN


@torch.no_grad()
def measure_steps(
    losses: Sequence[Loss],
    q_hidden_SNH: Sequence[Tensor],
    q_head_DH: Tensor,
    p_hidden_NG: Tensor,
    p_head_VG: Tensor,
    ids_D: Tensor,
    weight_SN: Tensor,
) -> tuple[Tensor, ...]:
    """What acceptance the drafts get from the target's whole vocabulary: (loss_SN on the draft
    vocabulary, alpha_SN and top1_SN, both argmaxes agree, on the whole one). ids_D: the draft's
    tokens, rows of p_head_VG. Else as `chunked_steps`.
    """

    def score(p_logits_RV: Tensor, logits_SRD: Tensor, _: bool, __: Workspace) -> Iterator[Scored]:
        p_logits_RV = full_precision(p_logits_RV)
        p_RD, best_R = p_logits_RV.softmax(-1)[:, ids_D], p_logits_RV.argmax(-1)
        p_logits_RD = p_logits_RV[:, ids_D]
        for loss, q_logits_RD in zip(losses, map(full_precision, logits_SRD), strict=True):
            alpha_R = torch.minimum(p_RD, q_logits_RD.softmax(-1)).sum(-1)
            top1_R = (ids_D[q_logits_RD.argmax(-1)] == best_R).to(alpha_R.dtype)
            yield [loss(p_logits_RD, q_logits_RD), alpha_R, top1_R], None

    p = (p_hidden_NG, p_head_VG)
    return bounded(score, 3, q_hidden_SNH, q_head_DH, p, weight_SN, lag=1)[1].unbind()


def chunked_cross_entropy(
    q_hidden_NH: Tensor, q_head_VH: Heads, tokens_N: Tensor, weight_N: Tensor
) -> tuple[Tensor, Tensor]:
    """sum_n -weight_n * log q_n(tokens_n) in bounded memory, and the loss of each row, detached.

    Arguments, types and errors as in `chunked_divergence`; tokens_N is int64, and what it holds in
    rows of weight 0 is never read.
    """
    if tokens_N.shape != q_hidden_NH.shape[:1]:
        raise ValueError(
            f"tokens: got shape {tuple(tokens_N.shape)}, expected one for each of the "
            f"{len(q_hidden_NH)} rows of q_hidden"
        )
    score = cross_entropy_score(tokens_N)
    total, loss_11N = bounded(score, 1, [q_hidden_NH], q_head_VH, None, weight_N[None])
    return total, loss_11N[0, 0]


def bounded(
    score: Score,
    numbers: int,
    q_hidden_SNH: Sequence[Tensor],
    q_head_VH: Heads,
    p: Side | None,
    weight_SN: Tensor,
    *,
    lag: int = 0,
) -> tuple[Tensor, Tensor]:
    """The one sweep: (sum of weight * loss, the numbers of all rows [X, S, N], detached).

    score: gives each row X = `numbers` from tiles of the drafts' logits and of the target's, or,
    without p, the rows' numbers [R]; p: the target's states and head; lag: row n of step s is the
    draft's state n - lag - s. The rest, types and errors as in `chunked_divergence`.
    """
    rows = [len(hidden_NH) for hidden_NH in q_hidden_SNH]
    if p is not None and len(p[0]) != rows[0]:
        raise ValueError(
            f"p_hidden: got {len(p[0])} rows, expected the {rows[0]} of q_hidden; score both "
            "models on the same positions"
        )
    if len(set(rows)) > 1 or weight_SN.shape != (len(rows), rows[0]):
        raise ValueError(
            f"weight: got shape {tuple(weight_SN.shape)} with q_hidden of {rows} rows, expected a "
            "weight for each row of each step"
        )
    heads = q_head_VH if isinstance(q_head_VH, tuple) else (q_head_VH,)
    whole_VH = torch.empty(len(heads[0]), sum(head.shape[-1] for head in heads), device="meta")
    if len({len(head) for head in heads}) > 1:
        raise ValueError(
            f"q_head: got heads of shapes {[tuple(head.shape) for head in heads]}, expected as "
            "many rows in each"
        )
    types = [matmul_type("q", q_hidden_SNH[0], whole_VH.to(heads[0].dtype))]
    width = len(rows) * len(heads[0])  # logits that a row makes
    if p is not None:
        types.append(matmul_type("p", *p))
        p, width = (p[0].detach(), p[1].detach()), max(width, len(p[1]))
    learning, device = torch.is_grad_enabled(), heads[0].device
    chunk, tile = rows_of(CHUNK_LOGITS, device, width), rows_of(TILE_LOGITS, device, len(heads[0]))
    hidden_grad = learning and any(hidden.requires_grad for hidden in q_hidden_SNH)
    wanted = hidden_grad, *(learning and head_VH.requires_grad for head_VH in heads)
    sweep = partial(_sweep, score, numbers, p, types, lag, (chunk, tile), wanted)
    return _Swept.apply(sweep, weight_SN.detach(), *heads, *q_hidden_SNH)


def rows_of(logits: dict[str, int], device: torch.device, width: int) -> int:
    """How many rows of this width hold so many logits (by device type); at least 1."""
    return max(1, logits.get(device.type, logits["cuda"]) // width)


def matmul_type(side: str, hidden_NH: Tensor, head_VH: Tensor) -> torch.dtype:
    """The type that a plain `hidden @ head.T` would run in; ValueError if it couldn't run."""
    if hidden_NH.ndim != 2 or head_VH.ndim != 2 or hidden_NH.shape[1] != head_VH.shape[1]:
        raise ValueError(
            f"{side}_hidden and {side}_head: got shapes {tuple(hidden_NH.shape)} and "
            f"{tuple(head_VH.shape)}, expected [rows, width] and [vocabulary, width]; flatten "
            "batch and position, and pass the head's weight as the module stores it"
        )
    device, found = hidden_NH.device.type, hidden_NH.dtype
    if torch.is_autocast_enabled(device) and found != torch.float64:
        found = torch.get_autocast_dtype(device)
    elif found != head_VH.dtype:
        raise ValueError(
            f"{side}_hidden and {side}_head: got {found} and {head_VH.dtype}, expected one type; "
            "cast one of them or run under autocast"
        )
    if found == torch.float16:
        raise ValueError(
            f"{side} side: got float16, expected bfloat16 or wider; 1/128k times a row's weight is "
            "below what float16 can hold"
        )
    return found


def chunk_logits(hidden_NH: Tensor, head_VH: Tensor, keep_K: Tensor, rows: int) -> Iterator[Tensor]:
    """The logits of the kept rows, chunk by chunk, in one buffer that every chunk overwrites."""
    logits_CV = head_VH.new_empty(min(rows, len(keep_K)), len(head_VH))
    for rows_C in keep_K.split(rows):
        hidden_CH = hidden_NH[rows_C].to(head_VH.dtype)
        yield torch.mm(hidden_CH, head_VH.t(), out=logits_CV[: len(rows_C)])


def _sweep(
    score: Score,
    numbers: int,
    p: Side | None,
    types: list[torch.dtype],
    lag: int,
    sizes: tuple[int, int],
    wanted: tuple[bool, ...],
    *tensors: Tensor,
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """One pass over all rows that have a weight: scores, and the wanted gradients, of the states
    and of each head. types: of q's matrix products, and p's; sizes: rows of a chunk and of a tile;
    tensors: weight_SN, the heads [V, H_i], *q_hidden_SNH. The rest as in `bounded`.
    """
    weight_SN, many, (chunk, tile) = tensors[0], len(wanted), sizes
    q_heads_VH, q_hidden_SNH = tensors[1:many], tensors[many:]
    steps, rows = weight_SN.shape
    wide = torch.promote_types(types[0], torch.float32)
    scores_XSN = weight_SN.new_zeros(numbers, steps, rows, dtype=wide)
    d_hidden_SNH = [torch.zeros_like(each_NH) for each_NH in q_hidden_SNH if wanted[0]]
    d_heads_VH = [
        torch.zeros_like(head_VH, dtype=wide) if asked else None
        for head_VH, asked in zip(q_heads_VH, wanted[1:], strict=True)
    ]
    keep_K, work = (weight_SN != 0).any(0).nonzero().squeeze(1), Workspace()
    chunks: Iterable[Tensor] = keep_K.split(chunk)
    references = chunks
    if p is not None:
        references = chunk_logits(p[0], p[1].to(types[1]), keep_K, chunk)
    heads_VH = [head_VH.to(types[0]) for head_VH in q_heads_VH]
    widths = [head_VH.shape[1] for head_VH in heads_VH]
    buffer_MV = heads_VH[0].new_empty(steps * min(chunk, len(keep_K)), len(heads_VH[0]))
    for rows_C, reference_C in zip(chunks, references, strict=True):
        # A rotation: no row of a step comes twice.
        rows_SC = [(rows_C - lag - step) % max(rows, 1) for step in range(steps)]
        of_step = zip(q_hidden_SNH, rows_SC, strict=True)
        hidden_MH = torch.cat([each_NH[at_C] for each_NH, at_C in of_step]).to(types[0])
        parts_MH = hidden_MH.split(widths, 1)
        logits_MV = torch.mm(parts_MH[0], heads_VH[0].t(), out=buffer_MV[: len(hidden_MH)])
        for part_MH, head_VH in zip(parts_MH[1:], heads_VH[1:], strict=True):
            logits_MV.addmm_(part_MH, head_VH.t())
        logits_SCV = logits_MV.unflatten(0, (steps, len(rows_C)))
        for first in range(0, len(rows_C), tile):
            at = slice(first, first + tile)
            weight_SR = weight_SN[:, rows_C[at]].to(wide)
            scored = score(reference_C[at], logits_SCV[:, at], any(wanted), work)
            found = []
            for step, (scores, gradient_RV) in enumerate(scored):
                found.append(torch.stack(scores))
                if gradient_RV is not None:  # weighted, in the place of its logits
                    torch.mul(gradient_RV, weight_SR[step, :, None], out=logits_SCV[step, at])
            scores_XSN[:, :, rows_C[at]] = torch.stack(found, 1).masked_fill_(weight_SR == 0, 0.0)
        if d_hidden_SNH:
            products = [torch.mm(logits_MV, head_VH) for head_VH in heads_VH]
            d_MH = products[0] if len(products) == 1 else torch.cat(products, 1)
            d_SCH = d_MH.unflatten(0, (steps, len(rows_C)))
            for d_NH, at_C, d_CH in zip(d_hidden_SNH, rows_SC, d_SCH, strict=True):
                d_NH[at_C] = d_CH.to(d_NH.dtype)
            del products, d_MH, d_SCH, d_CH
        for d_head_VH, part_MH in zip(d_heads_VH, parts_MH, strict=True):
            if d_head_VH is not None:
                _add_head_gradient(d_head_VH, logits_MV, part_MH)
        del hidden_MH, parts_MH  # before the next chunk's are made
    return scores_XSN, d_hidden_SNH, d_heads_VH


def _add_head_gradient(d_head_VH: Tensor, d_logits_MV: Tensor, hidden_MH: Tensor) -> None:
    if d_head_VH.dtype == hidden_MH.dtype:
        d_head_VH.addmm_(d_logits_MV.t(), hidden_MH)
        return
    # fp32 can't add a bf16 product in place: it is made by blocks, or it would be a second head.
    blocks = zip(d_head_VH.split(HEAD_BLOCK), d_logits_MV.split(HEAD_BLOCK, dim=1), strict=True)
    for d_head_block_UH, d_logits_MU in blocks:
        d_head_block_UH += torch.mm(d_logits_MU.t(), hidden_MH)


class _Swept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sweep: Callable[..., Any], weight_SN: Tensor, *q: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(weight_SN.device.type, enabled=False):
            scores_XSN, *ctx.gradients = sweep(weight_SN, *q)
        ctx.save_for_backward(weight_SN, *q)
        ctx.sweep = sweep  # but no result: it leads back here, a cycle that outlives its use
        ctx.mark_non_differentiable(scores_XSN)
        return (scores_XSN[0] * weight_SN.to(scores_XSN.dtype)).sum(), scores_XSN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place and given away without a copy, since the head's gradient is the largest
        # tensor left. Only a graph that was retained comes here twice, and pays with a new pass.
        (_, *q), gradients, ctx.gradients = ctx.saved_tensors, ctx.gradients, None
        hidden, heads = gradients or ctx.sweep(*ctx.saved_tensors)[1:]
        found = [None if d is None else d.mul_(grad_total) for d in heads]
        found += [each.mul_(grad_total) for each in hidden] or [None] * (len(q) - len(heads))
        return (
            None,
            None,
            *(None if d is None else d.to(x.dtype) for d, x in zip(found, q, strict=True)),
        )
