"""The losses over a large vocabulary in bounded memory: values and gradients in one pass.

At a vocabulary of 128k the naive form (logits of both models, loss, backward) holds half a dozen
[N, V] tensors, gigabytes for a thousand tokens. Here the rows go through in chunks. Each chunk's
logits are made, scored and turned into their gradient *inside the forward*, so no logits outlive
their chunk, and the backward scales finished gradients by one number: it recomputes nothing.

Two sizes: a chunk of C rows is one matrix product a model, large enough to be efficient; inside it
the loss runs on tiles of R rows (`gradients.py`), small enough that their buffers stay in cache.
`bench/speed/losses.py` measures what this buys.

Shapes: N rows (tokens), K rows with a weight, C rows of a chunk, R rows of a tile, V vocabulary,
U a block of it, H / G hidden size of the draft / the target, S scores of a row (the loss first).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.train.losses.closed_form import (
    Score,
    Transform,
    Workspace,
    cross_entropy_score,
    divergence_score,
)
from draftsmith.train.losses.pure import Loss

# How many logits a chunk and a tile hold, by device type. CPU (two cores, fp32, V = 128k): chunks
# of half the size take 12% more time and of twice the size 10% less, for 64 MiB less and 128 MiB
# more; a tile's five buffers of 1 MiB stay in cache. CUDA: for products of 1024 rows; not measured.
CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}
TILE_LOGITS = {"cpu": 1 << 18, "cuda": 1 << 24}
# Rows of the head whose gradient is formed at once where it can't be added up in place.
HEAD_BLOCK = 1 << 13

References = Callable[[Tensor, int], Iterator[Tensor]]


class Divergence(NamedTuple):
    """total: scalar, sum of weight * loss, carries the gradient. loss_N, alpha_N: detached."""

    total: Tensor
    loss_N: Tensor
    alpha_N: Tensor


def chunked_divergence(
    loss: Loss,
    q_hidden_NH: Tensor,
    q_head_VH: Tensor,
    p_hidden_NG: Tensor,
    p_head_VG: Tensor,
    weight_N: Tensor,
    *,
    transform: Transform | None = None,
    chunk: int | None = None,
) -> Divergence:
    """sum_n weight_n * loss(p_n, q_n), p and q being logits = hidden @ head.T, in bounded memory.

    Args:
        loss: (p_logits [R, V], q_logits [R, V]) -> [R], as in `losses.py`; rows are independent.
        q_hidden_NH, q_head_VH: the draft's states after its last norm, and its head (no bias).
        p_hidden_NG, p_head_VG: the same of the target. They get no gradient. The heads may differ
            in V if `transform` cuts both sides to one size.
        weight_N: weight of each row, a constant. Rows of weight 0 are never computed.
        transform: logits [R, V] in fp32 -> logits [R, V'], applied to both sides.
        chunk: rows a matrix product; default: as many as make 2^24 logits (CPU).

    Matrix products run in the autocast type where autocast is on, else in the tensors' own type;
    logits are fp32 (float64 for float64 input) before transform and loss, and the head's gradient
    is added up in fp32. Nothing is spent on a gradient that isn't needed (no_grad, a frozen head,
    constant states). A retained graph may be run backward again, at the price of a second pass.

    Returns Divergence(total, loss_N, alpha_N); both per-row results are 0 where the weight is 0,
    and alpha is sum_v min(p, q) after the transform. Raises ValueError for shapes or types that
    don't fit, and for float16, whose range the gradients of 128k probabilities leave.
    """
    p_hidden_NG, p_head_VG = p_hidden_NG.detach(), p_head_VG.detach()
    p_type = matmul_type("p", p_hidden_NG, p_head_VG)
    if len(p_hidden_NG) != len(q_hidden_NH):
        raise ValueError(
            f"p_hidden: got {len(p_hidden_NG)} rows, expected the {len(q_hidden_NH)} of q_hidden; "
            "score both models on the same positions"
        )

    def references(keep_K: Tensor, rows: int) -> Iterator[Tensor]:
        return chunk_logits(p_hidden_NG, p_head_VG.to(p_type), keep_K, rows)

    score = divergence_score(loss, transform)
    total, scores_SN = bounded(references, score, 2, weight_N, q_hidden_NH, q_head_VH, chunk)
    return Divergence(total, scores_SN[0], scores_SN[1])


def chunked_cross_entropy(
    q_hidden_NH: Tensor,
    q_head_VH: Tensor,
    tokens_N: Tensor,
    weight_N: Tensor,
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """sum_n -weight_n * log q_n(tokens_n) in bounded memory, and the loss of each row.

    Arguments, types and errors as in `chunked_divergence`; tokens_N is int64. Tokens of rows with
    weight 0 may hold anything (-100, say). Returns (total, loss_N), the latter detached.
    """
    if tokens_N.shape != q_hidden_NH.shape[:1]:
        raise ValueError(
            f"tokens: got shape {tuple(tokens_N.shape)}, expected one for each of the "
            f"{len(q_hidden_NH)} rows of q_hidden"
        )

    def references(keep_K: Tensor, rows: int) -> Iterator[Tensor]:
        return iter(tokens_N[keep_K].split(rows))

    q = (q_hidden_NH, q_head_VH)
    total, scores_SN = bounded(references, cross_entropy_score, 1, weight_N, *q, chunk)
    return total, scores_SN[0]


def bounded(
    references: References,
    score: Score,
    scores: int,
    weight_N: Tensor,
    q_hidden_NH: Tensor,
    q_head_VH: Tensor,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """(sum_n weight_n * the first of `scores` a row, all of them [S, N], detached), in one pass.

    references: (rows that have a weight [K], rows of a chunk) -> what `score` compares each chunk
        with, [C, ...]. The rest, types and errors as in `chunked_divergence`.
    """
    plan = _plan(references, score, scores, weight_N, q_hidden_NH, q_head_VH, chunk)
    return _Chunked.apply(q_hidden_NH, q_head_VH, weight_N.detach(), plan)


@dataclass(frozen=True)
class _Plan:
    """What one pass does: which rows, against what, and which gradients it has to form."""

    references: References
    score: Score
    scores: int
    chunk: int
    tile: int
    matmul_type: torch.dtype
    hidden_grad: bool
    head_grad: bool


def _plan(
    references: References,
    score: Score,
    scores: int,
    weight_N: Tensor,
    q_hidden_NH: Tensor,
    q_head_VH: Tensor,
    chunk: int | None,
) -> _Plan:
    product_type = matmul_type("q", q_hidden_NH, q_head_VH)
    if weight_N.shape != q_hidden_NH.shape[:1]:
        raise ValueError(
            f"weight: got shape {tuple(weight_N.shape)}, expected one for each of the "
            f"{len(q_hidden_NH)} rows of q_hidden"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: got {chunk}, expected at least 1 row (or None for the default)")
    device, vocabulary = q_hidden_NH.device.type, len(q_head_VH)
    rows = CHUNK_LOGITS.get(device, CHUNK_LOGITS["cuda"]) // vocabulary
    tile = TILE_LOGITS.get(device, TILE_LOGITS["cuda"]) // vocabulary
    learning = torch.is_grad_enabled()
    return _Plan(
        references=references,
        score=score,
        scores=scores,
        chunk=chunk or max(rows, 1),
        tile=max(tile, 1),
        matmul_type=product_type,
        hidden_grad=learning and q_hidden_NH.requires_grad,
        head_grad=learning and q_head_VH.requires_grad,
    )


def matmul_type(side: str, hidden_NH: Tensor, head_VH: Tensor) -> torch.dtype:
    """The type that a plain `hidden @ head.T` would run in here; ValueError if it couldn't run."""
    if hidden_NH.ndim != 2 or head_VH.ndim != 2 or hidden_NH.shape[1] != head_VH.shape[1]:
        raise ValueError(
            f"{side}_hidden and {side}_head: got shapes {tuple(hidden_NH.shape)} and "
            f"{tuple(head_VH.shape)}, expected [rows, width] and [vocabulary, width]; flatten "
            "batch and position, and pass the head's weight as the module stores it"
        )
    device = hidden_NH.device.type
    found = hidden_NH.dtype
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


class _Formed(NamedTuple):
    total: Tensor
    scores_SN: Tensor
    d_hidden_NH: Tensor | None
    d_head_VH: Tensor | None


def _sweep(plan: _Plan, q_hidden_NH: Tensor, q_head_VH: Tensor, weight_N: Tensor) -> _Formed:
    """One pass over all rows that have a weight: scores, and the gradients the plan asks for."""
    keep_K = weight_N.nonzero().squeeze(1)
    wide = torch.promote_types(plan.matmul_type, torch.float32)
    scores_SN = torch.zeros(plan.scores, len(weight_N), dtype=wide, device=weight_N.device)
    d_hidden_NH = torch.zeros_like(q_hidden_NH) if plan.hidden_grad else None
    d_head_VH = torch.zeros_like(q_head_VH, dtype=wide) if plan.head_grad else None
    head_VH = q_head_VH.to(plan.matmul_type)
    learn, work = plan.hidden_grad or plan.head_grad, Workspace()
    chunks = zip(
        keep_K.split(plan.chunk),
        plan.references(keep_K, plan.chunk),
        chunk_logits(q_hidden_NH, head_VH, keep_K, plan.chunk),
        strict=True,
    )
    for rows_C, reference_C, logits_CV in chunks:
        for tile in range(0, len(rows_C), plan.tile):
            at = slice(tile, tile + plan.tile)
            rows_R = rows_C[at]
            scores, gradient_RV = plan.score(reference_C[at], logits_CV[at], learn, work)
            scores_SN[:, rows_R] = torch.stack(scores)
            if gradient_RV is not None:  # takes the place of the logits
                weight_R1 = weight_N[rows_R].to(wide).unsqueeze(1)
                torch.mul(gradient_RV, weight_R1, out=logits_CV[at])
        if d_hidden_NH is not None:
            d_hidden_NH[rows_C] = torch.mm(logits_CV, head_VH).to(d_hidden_NH.dtype)
        if d_head_VH is not None:
            add_head_gradient(d_head_VH, logits_CV, q_hidden_NH[rows_C].to(plan.matmul_type))
    total = (scores_SN[0] * weight_N.to(wide)).sum()
    return _Formed(total, scores_SN, d_hidden_NH, d_head_VH)


def add_head_gradient(d_head_VH: Tensor, d_logits_CV: Tensor, hidden_CH: Tensor) -> None:
    if d_head_VH.dtype == hidden_CH.dtype:
        d_head_VH.addmm_(d_logits_CV.t(), hidden_CH)
        return
    # fp32 can't add a bf16 product in place: it is made by blocks, or it would be a second head.
    blocks = zip(d_head_VH.split(HEAD_BLOCK), d_logits_CV.split(HEAD_BLOCK, dim=1), strict=True)
    for d_head_block_UH, d_logits_CU in blocks:
        d_head_block_UH += torch.mm(d_logits_CU.t(), hidden_CH)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_hidden_NH: Tensor, q_head_VH: Tensor, weight_N: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q_hidden_NH.device.type, enabled=False):
            formed = _sweep(plan, q_hidden_NH, q_head_VH, weight_N)
        ctx.save_for_backward(q_hidden_NH, q_head_VH, weight_N)
        # Not `formed`: the total in it leads back to this context, a cycle that outlives its use.
        ctx.plan, ctx.gradients = plan, (formed.d_hidden_NH, formed.d_head_VH)
        ctx.mark_non_differentiable(formed.scores_SN)
        return formed.total, formed.scores_SN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place and given away without a copy, since the head's gradient is the largest
        # tensor left. Only a graph that was retained comes here twice, and pays with a new pass.
        inputs, gradients, ctx.gradients = ctx.saved_tensors, ctx.gradients, None
        if gradients is None:
            again = _sweep(ctx.plan, *inputs)
            gradients = (again.d_hidden_NH, again.d_head_VH)
        hidden, head = gradients
        d_hidden = None if hidden is None else hidden.mul_(grad_total)
        d_head = None if head is None else head.mul_(grad_total).to(inputs[1].dtype)
        return d_hidden, d_head, None, None
