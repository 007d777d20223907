"""The divergences of `losses.py` with their gradients in closed form, on buffers used again.

Autograd on a tile of logits spends most of its time on fresh memory and on masks. Every loss here
is a sum over the vocabulary of some f(p, q), so its gradient in the draft's logits needs no graph:
with the slope h = df/dq it is q (h - sum_v q h), the softmax's own backward. `chunked.py` runs
these forms; they are tested against the pure losses and autograd, each in value and gradient.

Ties p = q (a kink of min and of |.|) take the mean of both sides' slopes; autograd does the same.

Shapes: R rows of a tile, V vocabulary; 1 marks a kept dimension.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draftsmith.train.losses import pure as losses
from draftsmith.train.losses.pure import LOG_ZERO, Loss, acceptance, full_precision

BUFFERS = 5

Transform = Callable[[Tensor], Tensor]


class Workspace:
    """The buffers of a tile, made for the first and used again for every tile of that shape."""

    def __init__(self, count: int = BUFFERS) -> None:
        self._buffers: Tensor | None = None
        self._count = count

    def take(self, like_RV: Tensor) -> Tensor:
        """[count, R, V] of undefined content, in fp32 (float64 for float64)."""
        shape = (self._count, *like_RV.shape)
        if self._buffers is None or self._buffers.shape != shape:
            wide = torch.promote_types(like_RV.dtype, torch.float32)
            self._buffers = like_RV.new_empty(shape, dtype=wide)
        return self._buffers


@dataclass(frozen=True)
class Pair:
    """Both distributions of a tile. The closed forms overwrite any of these tensors but p and q."""

    p_RV: Tensor
    q_RV: Tensor
    log_p_RV: Tensor
    log_q_RV: Tensor
    spare_RV: Tensor
    # p where q's logit is not -inf, and its sum. None: no logit is -inf.
    reachable_RV: Tensor | None
    mass_R1: Tensor | None

    def acceptance(self) -> Tensor:
        """sum_v min(p, q): [R]."""
        return torch.minimum(self.p_RV, self.q_RV, out=self.spare_RV).sum(-1)


Closed = Callable[[Pair], tuple[Tensor, Tensor]]
# S scores [R], the loss first, and the gradient of the loss in the logits [R, V] if it is wanted.
Scored = tuple[list[Tensor], Tensor | None]
# (what to compare with [R, ...], logits [R, V], is a gradient wanted?, workspace) -> Scored
Score = Callable[[Tensor, Tensor, bool, Workspace], Scored]


def pair(p_logits_RV: Tensor, q_logits_RV: Tensor, work_5RV: Tensor) -> Pair:
    """The two distributions, written into work_5RV, whose type (fp32 or float64) is the result's.

    Logits of -inf count as in `losses.py`.
    """
    p_RV, q_RV, log_p_RV, log_q_RV, spare_RV = work_5RV
    normalise(p_logits_RV, p_RV, log_p_RV)
    normalise(q_logits_RV, q_RV, log_q_RV)
    reachable_RV, mass_R1 = None, None
    # Masks cost a CPU as much as exponentials do, so they are made only where one is needed.
    if torch.minimum(p_logits_RV.amin(), q_logits_RV.amin()) == -math.inf:
        reachable_RV = torch.where(log_q_RV == -math.inf, 0.0, p_RV)
        mass_R1 = reachable_RV.sum(-1, keepdim=True)
        for log_RV in (log_p_RV, log_q_RV):
            log_RV.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=LOG_ZERO)
    return Pair(p_RV, q_RV, log_p_RV, log_q_RV, spare_RV, reachable_RV, mass_R1)


def normalise(logits_RV: Tensor, probs_RV: Tensor, log_RV: Tensor) -> None:
    torch.softmax(logits_RV, dim=-1, dtype=probs_RV.dtype, out=probs_RV)
    # The likeliest token's probability is 1 / sum exp(z - max z): two cheap reductions give the
    # normaliser, where log_softmax would take every exponential again.
    top_R1 = logits_RV.amax(-1, keepdim=True).to(probs_RV.dtype)
    log_sum_R1 = top_R1 - probs_RV.amax(-1, keepdim=True).log()
    torch.sub(logits_RV, log_sum_R1, out=log_RV)


def closed_form(loss: Loss) -> Closed | None:
    """Pair -> (loss [R], its gradient in q's logits [R, V]) for a loss that `divergence` returned.

    The gradient may lie in one of the pair's tensors. None for a loss that has no closed form here.
    """
    base, options = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    form = CLOSED_FORMS.get(base)
    return None if form is None else partial(form, **options)


def _forward_kl(s: Pair) -> tuple[Tensor, Tensor]:
    loss_R = s.log_p_RV.sub_(s.log_q_RV).mul_(s.p_RV).sum(-1)
    if s.reachable_RV is None or s.mass_R1 is None:
        return loss_R, torch.sub(s.q_RV, s.p_RV, out=s.log_p_RV)
    return loss_R, torch.mul(s.q_RV, s.mass_R1, out=s.log_p_RV).sub_(s.reachable_RV)


def _reverse_kl(s: Pair) -> tuple[Tensor, Tensor]:
    slope_RV = s.log_q_RV.sub_(s.log_p_RV)
    loss_R1 = torch.mul(slope_RV, s.q_RV, out=s.spare_RV).sum(-1, keepdim=True)
    return loss_R1.squeeze(-1), slope_RV.sub_(loss_R1).mul_(s.q_RV)


def _jsd(s: Pair, beta: float = 0.5) -> tuple[Tensor, Tensor]:
    mixture_RV = torch.lerp(s.q_RV, s.p_RV, beta, out=s.spare_RV)
    log_m_RV = mixture_RV.clamp_(min=torch.finfo(mixture_RV.dtype).tiny).log_()
    slope_RV = s.log_q_RV.sub_(log_m_RV)
    from_p_R = s.log_p_RV.sub_(log_m_RV).mul_(s.p_RV).sum(-1)
    from_q_R1 = torch.mul(slope_RV, s.q_RV, out=s.spare_RV).sum(-1, keepdim=True)
    loss_R = beta * from_p_R + (1.0 - beta) * from_q_R1.squeeze(-1)
    return loss_R, slope_RV.sub_(from_q_R1).mul_(s.q_RV).mul_(1.0 - beta)


def _tv(s: Pair) -> tuple[Tensor, Tensor]:
    difference_RV = torch.sub(s.q_RV, s.p_RV, out=s.log_q_RV)
    loss_R = 0.5 * torch.abs(difference_RV, out=s.spare_RV).sum(-1)
    # 0 where q > p and -1 where q < p rather than +-1/2: the same up to a constant, which the
    # softmax cancels, and exact to the last digit when nearly all mass lies on one side.
    slope_RV = difference_RV.sign_().sub_(1.0).mul_(0.5)
    mean_R1 = torch.mul(slope_RV, s.q_RV, out=s.spare_RV).sum(-1, keepdim=True)
    return loss_R, slope_RV.sub_(mean_R1).mul_(s.q_RV)


def _tvpp(s: Pair) -> tuple[Tensor, Tensor]:
    reward_RV = torch.sub(s.p_RV, s.q_RV, out=s.log_p_RV).sign_().clamp_(min=0.0)
    mean_R1 = torch.mul(reward_RV, s.q_RV, out=s.spare_RV).sum(-1, keepdim=True)
    deviation_R1 = (mean_R1 * (1.0 - mean_R1)).clamp(min=losses.LEAST_VARIANCE).sqrt()
    descent_RV = reward_RV.sub_(mean_R1).mul_(s.q_RV).div_(-deviation_R1)
    return s.log_q_RV.mul_(descent_RV).sum(-1), descent_RV


def _nla(s: Pair) -> tuple[Tensor, Tensor]:
    alpha_R = s.acceptance()
    tiny = torch.finfo(alpha_R.dtype).tiny
    _, gradient_RV = _tv(s)
    factor_R = torch.where(alpha_R < tiny, 0.0, 1.0 / alpha_R.clamp(min=tiny))
    return -alpha_R.clamp(min=tiny).log(), gradient_RV.mul_(factor_R.unsqueeze(-1))


def _lk(s: Pair, kl_weight: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    kl_R, kl_gradient_RV = _forward_kl(s)  # in log_p, which _tv leaves alone
    distance_R, gradient_RV = _tv(s)
    loss_R = kl_weight * kl_R + (1.0 - kl_weight) * distance_R
    return loss_R, gradient_RV.mul_(1.0 - kl_weight).add_(kl_gradient_RV.mul_(kl_weight))


def _mixture(s: Pair, parts: tuple[tuple[Loss, float], ...]) -> tuple[Tensor, Tensor]:
    kept = s.log_p_RV.clone(), s.log_q_RV.clone()
    loss_R, gradient_RV = torch.zeros_like(s.p_RV[:, 0]), torch.zeros_like(s.p_RV)
    for loss, weight in parts:
        form = closed_form(loss)
        assert form is not None, loss
        s.log_p_RV.copy_(kept[0]), s.log_q_RV.copy_(kept[1])
        part_R, slope_RV = form(s)
        loss_R.add_(part_R, alpha=weight)
        gradient_RV.add_(slope_RV, alpha=weight)
    return loss_R, gradient_RV


def divergence_score(loss: Loss, transform: Transform | None) -> Score:
    """Scores tiles of target and draft logits: loss and alpha, and the loss's gradient.

    A loss without a closed form runs by autograd; so does the transform's own backward.
    """
    closed = closed_form(loss)

    def score(p_logits_RV: Tensor, logits_RV: Tensor, learn: bool, work: Workspace) -> Scored:
        p_logits_RV, q_logits_RV = full_precision(p_logits_RV), full_precision(logits_RV).detach()
        leaf_RV = q_logits_RV.requires_grad_(learn)
        if transform is not None:
            p_logits_RV = transform(p_logits_RV)
            with torch.set_grad_enabled(learn):
                q_logits_RV = transform(leaf_RV)
        _check_vocabulary(p_logits_RV, q_logits_RV)
        if closed is None:
            with torch.set_grad_enabled(learn):
                loss_R = loss(p_logits_RV, q_logits_RV)
            alpha_R = acceptance(p_logits_RV, q_logits_RV.detach())
            output, seed = loss_R, torch.ones_like(loss_R)
        else:
            both = pair(p_logits_RV, q_logits_RV.detach(), work.take(q_logits_RV))
            alpha_R = both.acceptance()
            loss_R, slope_RV = closed(both)
            output, seed = q_logits_RV, slope_RV
        gradient_RV = torch.autograd.grad(output, leaf_RV, seed)[0] if learn else None
        return [loss_R.detach(), alpha_R], gradient_RV

    return score


def cross_entropy_score(
    tokens_R: Tensor, logits_RV: Tensor, learn: bool, work: Workspace
) -> Scored:
    """Scores tiles of draft logits against tokens: -log q(token) and its gradient, q - one-hot."""
    log_q_RV, q_RV, *_ = work.take(logits_RV)
    token_R1 = tokens_R.unsqueeze(-1)
    normalise(logits_RV, q_RV, log_q_RV)
    loss_R = -log_q_RV.gather(-1, token_R1).squeeze(-1)
    if not learn:
        return [loss_R], None
    minus_one_R1 = torch.full_like(token_R1, -1, dtype=q_RV.dtype)
    return [loss_R], q_RV.scatter_add_(-1, token_R1, minus_one_R1)


def _check_vocabulary(p_logits_RV: Tensor, q_logits_RV: Tensor) -> None:
    if p_logits_RV.shape != q_logits_RV.shape:
        raise ValueError(
            f"logits: got {p_logits_RV.shape[-1]} of the target and {q_logits_RV.shape[-1]} of "
            "the draft, expected one vocabulary; let transform cut both to the tokenizer's size"
        )


CLOSED_FORMS: dict[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]] = {
    losses.forward_kl: _forward_kl,
    losses.reverse_kl: _reverse_kl,
    losses.jsd: _jsd,
    losses.tv: _tv,
    losses.tvpp: _tvpp,
    losses.nla: _nla,
    losses.lk: _lk,
    losses.mixture: _mixture,
}
