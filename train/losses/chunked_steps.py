"""The loss of a training-time test in bounded memory: S drafts against each state of the target.

Step s at position t is compared with the target's distribution at t + 1 + s. So S rows of the draft
share one row of the target, whose logits are made once, on the draft vocabulary alone. As in
`chunked.py`, values and gradients come from one pass and nothing is computed again in backward.

Rows are named by the target's position: row n of step s is the draft's state n - 1 - s. Near a
document's start that is a state of another document, or wraps round; such rows have the weight 0.

Shapes: S steps, N rows (positions of all sequences, flat), K of them with a weight, C rows of a
chunk, R of a tile, D draft vocabulary, V the target's, H / G hidden size of the draft / the target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.train.losses.chunked import (
    CHUNK_LOGITS,
    TILE_LOGITS,
    add_head_gradient,
    chunk_logits,
    matmul_type,
)
from draftsmith.train.losses.closed_form import (
    BUFFERS,
    Closed,
    Pair,
    Workspace,
    closed_form,
    normalise,
)
from draftsmith.train.losses.pure import Loss


class StepDivergence(NamedTuple):
    """total: scalar, sum of weight * loss, carries the gradient. The rest is detached, 0 where the
    weight is 0: loss_SN, and alpha_SN, sum_v min(p, q) on the draft vocabulary.
    """

    total: Tensor
    loss_SN: Tensor
    alpha_SN: Tensor


class StepScores(NamedTuple):
    """loss_SN on the draft vocabulary; alpha_SN with p and top1_SN (both argmaxes agree) over the
    whole one. 0 where the weight is 0.
    """

    loss_SN: Tensor
    alpha_SN: Tensor
    top1_SN: Tensor


def chunked_steps(
    losses: Sequence[Loss],
    q_hidden_SNH: Sequence[Tensor],
    q_head_DH: Tensor,
    p_hidden_NG: Tensor,
    p_head_DG: Tensor,
    weight_SN: Tensor,
    *,
    chunk: int | None = None,
) -> StepDivergence:
    """sum_s sum_n weight_sn * losses_s(p_n, q_s of state n - 1 - s), logits = hidden @ head.T.

    Args:
        losses: one a step, as `losses.divergence` or `losses.mixed` returns them.
        q_hidden_SNH, q_head_DH: the draft's states of each step, and its head.
        p_hidden_NG, p_head_DG: the target's, its head's rows in the draft's order.
        weight_SN: constants. Target rows without any weight are never computed.
        chunk: target rows of a matrix product; default: as many as make 2^24 logits (CPU).

    Types, precision and errors as in `chunked.chunked_divergence`. One backward pass is possible.
    """
    rows = {len(p_hidden_NG), *map(len, q_hidden_SNH)}
    steps = len(q_hidden_SNH)
    if rows != {weight_SN.shape[1]} or {len(losses), len(weight_SN)} != {steps}:
        raise ValueError(
            f"steps: got {steps} states and {len(losses)} losses, {sorted(rows)} rows and weights "
            f"of shape {tuple(weight_SN.shape)}, expected as many of each as the weights [S, N] say"
        )
    if len(q_head_DH) != len(p_head_DG):
        raise ValueError(
            f"heads: got {len(q_head_DH)} rows of the draft and {len(p_head_DG)} of the target, "
            "expected one vocabulary; gather the target's rows by the draft's ids"
        )
    forms = [closed_form(loss) for loss in losses]
    assert None not in forms, f"a loss without a closed form: {losses}"
    device = q_head_DH.device.type
    logits = CHUNK_LOGITS.get(device, CHUNK_LOGITS["cuda"])
    learning = torch.is_grad_enabled()
    plan = _Plan(
        forms=[form for form in forms if form is not None],
        types=(
            matmul_type("q", q_hidden_SNH[0], q_head_DH),
            matmul_type("p", p_hidden_NG, p_head_DG),
        ),
        chunk=chunk or max(1, logits // (steps * len(q_head_DH))),
        tile=max(1, TILE_LOGITS.get(device, TILE_LOGITS["cuda"]) // len(q_head_DH)),
        hidden_grad=learning and any(hidden.requires_grad for hidden in q_hidden_SNH),
        head_grad=learning and q_head_DH.requires_grad,
    )
    fixed = (p_hidden_NG.detach(), p_head_DG.detach(), weight_SN.detach())
    return StepDivergence(*_Steps.apply(plan, *fixed, q_head_DH, *q_hidden_SNH))


@dataclass(frozen=True)
class _Plan:
    forms: list[Closed]
    types: tuple[torch.dtype, torch.dtype]  # of q's and p's matrix products
    chunk: int
    tile: int
    hidden_grad: bool
    head_grad: bool


class _Sweep:
    """One pass over all rows with a weight: scores, and the gradients that the plan asks for."""

    def __init__(self, plan: _Plan, q_hidden_SNH: Sequence[Tensor], q_head_DH: Tensor) -> None:
        self.plan, self.q_hidden_SNH = plan, q_hidden_SNH
        self.wide = torch.promote_types(plan.types[0], torch.float32)
        self.head_DH = q_head_DH.to(plan.types[0])
        steps, rows = len(q_hidden_SNH), len(q_hidden_SNH[0])
        self.scores_2SN = q_head_DH.new_zeros(2, steps, rows, dtype=self.wide)
        hidden = q_hidden_SNH if plan.hidden_grad else ()
        self.d_hidden_SNH = [torch.zeros_like(hidden_NH) for hidden_NH in hidden]
        self.d_head_DH = torch.zeros_like(q_head_DH, dtype=self.wide) if plan.head_grad else None
        self.work = Workspace(BUFFERS + 1)

    def run(self, p_hidden_NG: Tensor, p_head_DG: Tensor, weight_SN: Tensor) -> None:
        keep_K = (weight_SN > 0).any(0).nonzero().squeeze(1)
        if not len(keep_K):
            return
        p_head_DG = p_head_DG.to(self.plan.types[1])
        chunks = chunk_logits(p_hidden_NG, p_head_DG, keep_K, self.plan.chunk)
        shape = (len(weight_SN), min(self.plan.chunk, len(keep_K)), len(p_head_DG))
        q_logits_SCD = self.head_DH.new_empty(shape)
        for rows_C, p_logits_CD in zip(keep_K.split(self.plan.chunk), chunks, strict=True):
            self._chunk(rows_C, p_logits_CD, q_logits_SCD, weight_SN[:, rows_C].to(self.wide))

    def _chunk(
        self, rows_C: Tensor, p_logits_CD: Tensor, buffer_SCD: Tensor, weight_SC: Tensor
    ) -> None:
        steps, width = len(weight_SC), len(self.head_DH)
        # A rotation: no row of a step comes twice.
        rows_SC = [(rows_C - 1 - step) % len(self.q_hidden_SNH[0]) for step in range(steps)]
        hidden_MH = torch.cat(
            [hidden_NH[at_C] for hidden_NH, at_C in zip(self.q_hidden_SNH, rows_SC, strict=True)]
        ).to(self.head_DH.dtype)
        logits_MD = buffer_SCD.view(-1, width)[: len(hidden_MH)]
        torch.mm(hidden_MH, self.head_DH.t(), out=logits_MD)
        logits_SCD = logits_MD.view(steps, -1, width)
        for first in range(0, len(rows_C), self.plan.tile):
            at = slice(first, first + self.plan.tile)
            scores_2SR = self._tile(p_logits_CD[at], logits_SCD[:, at], weight_SC[:, at])
            self.scores_2SN[:, :, rows_C[at]] = scores_2SR
        if self.d_hidden_SNH:
            d_hidden_SCH = torch.mm(logits_MD, self.head_DH).view(steps, len(rows_C), -1)
            for d_NH, at_C, d_CH in zip(self.d_hidden_SNH, rows_SC, d_hidden_SCH, strict=True):
                d_NH[at_C] = d_CH.to(d_NH.dtype)
        if self.d_head_DH is not None:
            add_head_gradient(self.d_head_DH, logits_MD, hidden_MH)

    def _tile(self, p_logits_RD: Tensor, logits_SRD: Tensor, weight_SR: Tensor) -> Tensor:
        """The scores [2, S, R] of a tile; its gradient takes the place of the draft's logits."""
        p_RD, q_RD, log_p_RD, log_q_RD, spare_RD, kept_RD = self.work.take(p_logits_RD)
        normalise(p_logits_RD, p_RD, kept_RD)
        scores = []
        for form, logits_RD, weight_R in zip(self.plan.forms, logits_SRD, weight_SR, strict=True):
            normalise(logits_RD, q_RD, log_q_RD)
            log_p_RD.copy_(kept_RD)  # the closed forms write over it
            both = Pair(p_RD, q_RD, log_p_RD, log_q_RD, spare_RD, None, None)
            alpha_R = both.acceptance()
            loss_R, gradient_RD = form(both)
            torch.mul(gradient_RD, weight_R.unsqueeze(-1), out=logits_RD)
            scores.append(torch.stack([loss_R, alpha_R]))
        return torch.stack(scores, 1) * (weight_SR > 0)


class _Steps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        p_hidden_NG: Tensor,
        p_head_DG: Tensor,
        weight_SN: Tensor,
        q_head_DH: Tensor,
        *q_hidden_SNH: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(q_head_DH.device.type, enabled=False):
            sweep = _Sweep(plan, q_hidden_SNH, q_head_DH)
            sweep.run(p_hidden_NG, p_head_DG, weight_SN)
        ctx.gradients = (sweep.d_head_DH, sweep.d_hidden_SNH)
        ctx.form = (q_head_DH.dtype, len(q_hidden_SNH))
        loss_SN, alpha_SN = sweep.scores_2SN
        ctx.mark_non_differentiable(loss_SN, alpha_SN)
        return (loss_SN * weight_SN.to(loss_SN.dtype)).sum(), loss_SN, alpha_SN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "chunked_steps: the graph was run backward before"
        # Scaled in place and given away: a second copy would be the largest tensor of the step.
        (d_head, d_hidden), ctx.gradients = ctx.gradients, None
        dtype, steps = ctx.form
        d_head = None if d_head is None else d_head.mul_(grad_total).to(dtype)
        scaled = [d.mul_(grad_total) for d in d_hidden] or [None] * steps
        return None, None, None, None, d_head, *scaled


@torch.no_grad()
def measure_steps(
    losses: Sequence[Loss],
    q_hidden_SNH: Sequence[Tensor],
    q_head_DH: Tensor,
    p_hidden_NG: Tensor,
    p_head_VG: Tensor,
    ids_D: Tensor,
    weight_SN: Tensor,
) -> StepScores:
    """What acceptance the drafts get from the target as it is, its tokens outside the draft
    vocabulary included. ids_D: the draft's tokens, rows of p_head_VG. Else as `chunked_steps`.
    """
    scores_3SN = torch.zeros(3, *weight_SN.shape, device=weight_SN.device)
    head_DH = q_head_DH.to(matmul_type("q", q_hidden_SNH[0], q_head_DH))
    for rows_C, p_logits_CV in target_rows(p_hidden_NG, p_head_VG, weight_SN):
        p_CD, best_C = p_logits_CV.softmax(-1)[:, ids_D], p_logits_CV.argmax(-1)
        p_logits_CD = p_logits_CV[:, ids_D]
        for step, (loss, hidden_NH) in enumerate(zip(losses, q_hidden_SNH, strict=True)):
            hidden_CH = hidden_NH[(rows_C - 1 - step) % len(hidden_NH)].to(head_DH.dtype)
            q_logits_CD = (hidden_CH @ head_DH.t()).float()
            alpha_C = torch.minimum(p_CD, q_logits_CD.softmax(-1)).sum(-1)
            top1_C = ids_D[q_logits_CD.argmax(-1)] == best_C
            scores = torch.stack([loss(p_logits_CD, q_logits_CD), alpha_C, top1_C.float()])
            scores_3SN[:, step, rows_C] = scores * (weight_SN[step, rows_C] > 0)
    return StepScores(*scores_3SN)


def target_rows(
    p_hidden_NG: Tensor, p_head_VG: Tensor, weight_SN: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows, the target's logits [C, V] in fp32) of the rows with a weight, chunk by chunk."""
    keep_K = (weight_SN > 0).any(0).nonzero().squeeze(1)
    device = p_head_VG.device.type
    rows = max(1, CHUNK_LOGITS.get(device, CHUNK_LOGITS["cuda"]) // len(p_head_VG))
    head_VG = p_head_VG.to(matmul_type("p", p_hidden_NG, p_head_VG))
    for rows_C, logits_CV in zip(
        keep_K.split(rows), chunk_logits(p_hidden_NG, head_VG, keep_K, rows), strict=True
    ):
        yield rows_C, logits_CV.float()
