"""The divergences of `pure.py` with their gradients in closed form, on buffers used again.

Autograd on a tile of logits spends most of its time on fresh memory and on masks. Every loss here
is a sum over the vocabulary of some f(p, q), so its gradient in the draft's logits needs no graph:
with the slope h = df/dq it is q (h - sum_v q h), the softmax's own backward. `chunked.py` runs
these forms; they are tested against the pure losses and autograd, each in value and gradient.

Ties p = q (a kink of min and of |.|) take the mean of both sides' slopes; autograd does the same.

Shapes: N rows, R of them in a tile, S steps of a draft against one target, V vocabulary; 1 marks a
kept dimension.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from draftsmith.train.losses import pure as losses
from draftsmith.train.losses.pure import LOG_ZERO, Loss, acceptance, centred

BUFFERS = 5

Transform = Callable[[Tensor], Tensor]


class Workspace:
    """The buffers of a tile, made for the first and used again for every tile that fits: a new set
    for the last one, which has fewer rows, would stand beside the old.
    """

    _buffers: Tensor | None = None

    def take(self, like_RV: Tensor, count: int = BUFFERS) -> Tensor:
        """[count, R, V] of undefined content, in fp32 (float64 for float64)."""
        rows, width = like_RV.shape
        made = (0, 0, 0) if self._buffers is None else self._buffers.shape
        if self._buffers is None or made[::2] != (count, width) or made[1] < rows:
            wide = torch.promote_types(like_RV.dtype, torch.float32)
            self._buffers = like_RV.new_empty(count, rows, width, dtype=wide)
        return self._buffers[:, :rows]


class Pair:
    """Both distributions of a tile. The closed forms overwrite any of its tensors but p and q.

    buffers: of `Workspace.take`; one more than BUFFERS keeps p's logs from draft to draft. finite:
    no logit is -inf, which else counts as in `pure.py`.
    """

    def __init__(self, p_logits_RV: Tensor, buffers: Tensor, *, finite: bool) -> None:
        self.p_RV, self.q_RV, self.log_p_RV, self.log_q_RV, self.spare_RV, *kept = buffers
        self._kept, self._finite = kept, finite
        normalise(p_logits_RV, self.p_RV, kept[0] if kept else self.log_p_RV)

    def beside(self, q_logits_RV: Tensor) -> None:
        """Put a draft's distribution in the place of the draft before."""
        if self._kept:
            self.log_p_RV.copy_(self._kept[0])
        normalise(q_logits_RV, self.q_RV, self.log_q_RV)
        # p where q's logit is not -inf, where there is such a logit.
        self.reachable_RV: Tensor | None = None
        logs = (self.log_p_RV, self.log_q_RV)
        # Masks cost a CPU as much as exponentials do, so they are made only where one is needed.
        if not self._finite and any(log_RV.amin() == -math.inf for log_RV in logs):
            self.reachable_RV = torch.where(self.log_q_RV == -math.inf, 0.0, self.p_RV)
            for log_RV in logs:
                log_RV.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=LOG_ZERO)
        self.alpha_R = torch.minimum(self.p_RV, self.q_RV, out=self.spare_RV).sum(-1)


Closed = Callable[[Pair], tuple[Tensor, Tensor]]
# Numbers of each row [R], the loss first, and its gradient in the logits [R, V] if it is wanted.
Scored = tuple[list[Tensor], Tensor | None]
# (what to compare with [R, ...], logits [S, R, V], is a gradient wanted?, workspace) -> of each
# step, whose gradient the next one may overwrite.
Score = Callable[[Tensor, Tensor, bool, Workspace], Iterator[Scored]]


def normalise(logits_RV: Tensor, probs_RV: Tensor, log_RV: Tensor) -> None:
    """Probabilities and their logs. The row's largest logit is subtracted by itself: added to the
    log of the normaliser, a large one would take that number's digits.
    """
    top_R1 = logits_RV.amax(-1, keepdim=True).to(log_RV.dtype)
    torch.softmax(torch.sub(logits_RV, top_R1, out=log_RV), dim=-1, out=probs_RV)
    # The likeliest token's probability is 1 / sum exp(z - max z): a cheap reduction gives the
    # normaliser, where log_softmax would take every exponential again.
    log_RV.add_(probs_RV.amax(-1, keepdim=True).log())


def closed_form(loss: Loss) -> Closed | None:
    """Pair -> (loss [R], its gradient in q's logits [R, V], maybe in one of the pair's tensors) for
    a loss that `divergence` returned; None for one that has no closed form here.
    """
    base, options = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    form = CLOSED_FORMS.get(base)
    return None if form is None else partial(form, **options)


def _forward_kl(s: Pair) -> tuple[Tensor, Tensor]:
    loss_R = s.log_p_RV.sub_(s.log_q_RV).mul_(s.p_RV).sum(-1)
    if s.reachable_RV is None:
        return loss_R, torch.sub(s.q_RV, s.p_RV, out=s.log_p_RV)
    mass_R1 = s.reachable_RV.sum(-1, keepdim=True)
    return loss_R, torch.mul(s.q_RV, mass_R1, out=s.log_p_RV).sub_(s.reachable_RV)


def _softmax_backward(s: Pair, slope_RV: Tensor) -> tuple[Tensor, Tensor]:
    """(sum_v q h [R], the gradient q (h - sum_v q h) in the place of the slope h)."""
    mean_R1 = torch.mul(slope_RV, s.q_RV, out=s.spare_RV).sum(-1, keepdim=True)
    return mean_R1.squeeze(-1), slope_RV.sub_(mean_R1).mul_(s.q_RV)


def _reverse_kl(s: Pair) -> tuple[Tensor, Tensor]:
    return _softmax_backward(s, s.log_q_RV.sub_(s.log_p_RV))


def _jsd(s: Pair, beta: float = 0.5) -> tuple[Tensor, Tensor]:
    mixture_RV = torch.lerp(s.q_RV, s.p_RV, beta, out=s.spare_RV)
    log_m_RV = mixture_RV.clamp_(min=torch.finfo(mixture_RV.dtype).tiny).log_()
    s.log_q_RV.sub_(log_m_RV)
    from_p_R = s.log_p_RV.sub_(log_m_RV).mul_(s.p_RV).sum(-1)
    from_q_R, gradient_RV = _softmax_backward(s, s.log_q_RV)
    return beta * from_p_R + (1.0 - beta) * from_q_R, gradient_RV.mul_(1.0 - beta)


def _tv(s: Pair) -> tuple[Tensor, Tensor]:
    difference_RV = torch.sub(s.q_RV, s.p_RV, out=s.log_q_RV)
    loss_R = 0.5 * torch.abs(difference_RV, out=s.spare_RV).sum(-1)
    # 0 where q > p and -1 where q < p rather than +-1/2: the same up to a constant, which the
    # softmax cancels, and exact to the last digit when nearly all mass lies on one side.
    return loss_R, _softmax_backward(s, difference_RV.sign_().sub_(1.0).mul_(0.5))[1]


def _tvpp(s: Pair) -> tuple[Tensor, Tensor]:
    reward_RV = torch.sub(s.p_RV, s.q_RV, out=s.log_p_RV).sign_().clamp_(min=0.0)
    mean_R1 = torch.mul(reward_RV, s.q_RV, out=s.spare_RV).sum(-1, keepdim=True)
    deviation_R1 = (mean_R1 * (1.0 - mean_R1)).clamp(min=losses.LEAST_VARIANCE).sqrt()
    descent_RV = reward_RV.sub_(mean_R1).mul_(s.q_RV).div_(-deviation_R1)
    return s.log_q_RV.mul_(descent_RV).sum(-1), descent_RV


def _nla(s: Pair) -> tuple[Tensor, Tensor]:
    tiny = torch.finfo(s.alpha_R.dtype).tiny
    alpha_R, (_, gradient_RV) = s.alpha_R.clamp(min=tiny), _tv(s)
    factor_R = torch.where(s.alpha_R < tiny, 0.0, 1.0 / alpha_R)
    return -alpha_R.log(), gradient_RV.mul_(factor_R.unsqueeze(-1))


def _lk(s: Pair, kl_weight: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    kl_R, kl_gradient_RV = _forward_kl(s)  # in log_p, which _tv leaves alone
    distance_R, gradient_RV = _tv(s)
    loss_R = kl_weight * kl_R + (1.0 - kl_weight) * distance_R
    return loss_R, gradient_RV.mul_(1.0 - kl_weight).add_(kl_gradient_RV.mul_(kl_weight))


def _match(s: Pair) -> tuple[Tensor, Tensor]:
    """By autograd, but for the softmax's own backward: few of the tokens have a slope."""
    with torch.enable_grad():
        loss_R = 1 - losses.matched(s.p_RV, q_RV := s.q_RV.detach().requires_grad_())
        (slope_RV,) = torch.autograd.grad(loss_R.sum(), q_RV)
    return loss_R.detach(), _softmax_backward(s, slope_RV)[1]


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


def divergence_score(
    by_step: Sequence[Loss], transform: Transform | None = None, *, finite: bool | None = None
) -> Score:
    """Scores tiles of target and draft logits: loss and alpha, and the loss's gradient. by_step:
    the loss of each step; finite: no logit is -inf, by default if there is no transform.

    A loss without a closed form runs by autograd, and so does the transform's own backward; both
    see logits whose largest is 0.
    """
    forms = [closed_form(loss) for loss in by_step]
    closed, finite = None not in forms, transform is None if finite is None else finite
    plain, many = closed and transform is None, BUFFERS + (len(forms) > 1)
    change = transform or (lambda logits_RV: logits_RV)

    def score(
        p_logits_RV: Tensor, logits_SRV: Tensor, learn: bool, work: Workspace
    ) -> Iterator[Scored]:
        if not plain:
            p_logits_RV = change(centred(p_logits_RV))
        both = Pair(p_logits_RV, work.take(p_logits_RV, many), finite=finite) if closed else None
        for loss, form, logits_RV in zip(by_step, forms, logits_SRV, strict=True):
            leaf_RV = logits_RV if plain else centred(logits_RV).requires_grad_(learn)
            with torch.set_grad_enabled(learn):
                q_logits_RV = change(leaf_RV)
                if p_logits_RV.shape != q_logits_RV.shape:
                    raise ValueError(
                        f"logits: got {p_logits_RV.shape[-1]} of the target and "
                        f"{q_logits_RV.shape[-1]} of the draft, expected one vocabulary; let "
                        "transform cut both to the tokenizer's size"
                    )
                output = q_logits_RV if closed else loss(p_logits_RV, q_logits_RV)
            if both is None or form is None:
                alpha_R = acceptance(p_logits_RV, q_logits_RV.detach())
                loss_R, gradient_RV = output.detach(), torch.ones_like(output)
            else:
                both.beside(q_logits_RV.detach())
                alpha_R, (loss_R, gradient_RV) = both.alpha_R, form(both)
            if learn and output is not leaf_RV:
                (gradient_RV,) = torch.autograd.grad(output, leaf_RV, gradient_RV)
            yield [loss_R, alpha_R], gradient_RV if learn else None

    return score


def cross_entropy_score(tokens_N: Tensor) -> Score:
    """Scores tiles of draft logits against the tokens of the rows whose numbers it is given:
    -log q(token) and its gradient, q - one-hot.
    """

    def score(rows_R: Tensor, logits_1RV: Tensor, learn: bool, work: Workspace) -> Iterator[Scored]:
        log_q_RV, q_RV, *_ = work.take(logits_1RV[0])
        token_R1 = tokens_N[rows_R].unsqueeze(-1)
        normalise(logits_1RV[0], q_RV, log_q_RV)
        loss_R = -log_q_RV.gather(-1, token_R1).squeeze(-1)
        if learn:
            minus_one_R1 = torch.full_like(token_R1, -1, dtype=q_RV.dtype)
            q_RV.scatter_add_(-1, token_R1, minus_one_R1)
        yield [loss_R], q_RV if learn else None

    return score


CLOSED_FORMS: dict[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]] = {
    losses.forward_kl: _forward_kl,
    losses.reverse_kl: _reverse_kl,
    losses.jsd: _jsd,
    losses.tv: _tv,
    losses.tvpp: _tvpp,
    losses.nla: _nla,
    losses.lk: _lk,
    losses.match: _match,
    losses.mixture: _mixture,
}
