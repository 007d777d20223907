"""Per-token losses between a target and a draft: pure functions of logits, in fp32, unreduced.

p is the target and q is the draft, everywhere. Every divergence takes `(p_logits, q_logits)` of
shape [..., V] and returns [...]: no mask, no reduction, no model. The caller sends both sides
through the one transform (temperature, top-k, top-p, vocabulary cut) before it calls a loss; the
target never gets a gradient. The same losses with bounded memory are in `chunked.py`.

Logits of -inf are welcome on either side, because top-k and top-p write them. A token with p = 0
adds nothing to a sum that p weighs, and one with q = 0 nothing to a sum that q weighs. Where the
other side then needs the log of that 0, the loss is infinite on paper; here such a token counts as
having the log-probability LOG_ZERO: the loss stays finite and large enough to be seen, and its
gradient is finite. (An impossible token itself gets no gradient, as nothing can raise a masked
logit.) A NaN stays NaN, so that the training loop can see it.

Names end in their shape: V is the vocabulary; a leading `...` is spelled X.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]

# e^-100 is just under the smallest number that fp32 can hold (1.4e-45 = e^-103.3).
LOG_ZERO = -100.0
# The least variance TV++ divides by: under fp32's rounding of a sum of probabilities.
LEAST_VARIANCE = 1e-12
# Tokens of a row that `match` tells apart, and what it divides by at least.
MATCHED, LEAST_PROBABILITY = 128, 1e-30


def full_precision(logits_XV: Tensor) -> Tensor:
    """fp32, or float64 where the caller brought that (gradcheck does)."""
    return logits_XV if logits_XV.dtype == torch.float64 else logits_XV.float()


def centred(logits_XV: Tensor) -> Tensor:
    """Logits less the row's largest, in full precision and without gradient: the same distribution,
    and a large number that was in all of them takes no digits from what is done with them.
    """
    logits_XV = full_precision(logits_XV).detach()
    return logits_XV - logits_XV.amax(-1, keepdim=True)


def _log_probs(logits_XV: Tensor) -> Tensor:
    log_XV = full_precision(logits_XV).log_softmax(-1)
    return log_XV.masked_fill(log_XV == -math.inf, LOG_ZERO)


def _probs(logits_XV: Tensor) -> Tensor:
    return full_precision(logits_XV).softmax(-1)


def forward_kl(p_logits_XV: Tensor, q_logits_XV: Tensor) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q), in nats: [..., V] twice -> [...].

    Its gradient with respect to q's logits is q - p (Hinton et al. 2015; DistillSpec, 2310.08461).
    """
    p_logits_XV = p_logits_XV.detach()
    difference_XV = _log_probs(p_logits_XV) - _log_probs(q_logits_XV)
    return (_probs(p_logits_XV) * difference_XV).sum(-1)


def reverse_kl(p_logits_XV: Tensor, q_logits_XV: Tensor) -> Tensor:
    """KL(q || p) = sum_v q (log q - log p), in nats: [..., V] twice -> [...].

    Its gradient with respect to q's logits is q (log q - log p - KL(q || p)). A target that was cut
    by top-k costs q's mass outside it LOG_ZERO nats a unit.
    """
    difference_XV = _log_probs(q_logits_XV) - _log_probs(p_logits_XV.detach())
    return (_probs(q_logits_XV) * difference_XV).sum(-1)


def jsd(p_logits_XV: Tensor, q_logits_XV: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q: [..., V] twice -> [...].

    The generalised Jensen-Shannon divergence of GKD (2306.13649), in nats and finite whatever the
    supports. beta lies strictly in (0, 1), at whose ends it is identically 0: divided by beta it
    tends to the forward KL for beta -> 0, by 1 - beta to the reverse KL for beta -> 1. So a small
    beta wants a larger learning rate.
    """
    p_logits_XV = p_logits_XV.detach()
    log_p_XV, log_q_XV = _log_probs(p_logits_XV), _log_probs(q_logits_XV)
    log_m_XV = torch.logaddexp(log_p_XV + math.log(beta), log_q_XV + math.log1p(-beta))
    from_p_XV = _probs(p_logits_XV) * (log_p_XV - log_m_XV)
    from_q_XV = _probs(q_logits_XV) * (log_q_XV - log_m_XV)
    return beta * from_p_XV.sum(-1) + (1.0 - beta) * from_q_XV.sum(-1)


def tv(p_logits_XV: Tensor, q_logits_XV: Tensor) -> Tensor:
    """Total variation, 1/2 sum_v |p - q| = 1 - alpha, in [0, 1]: [..., V] twice -> [...].

    Its gradient carries a factor q_v, so it nearly vanishes for tokens that the draft does not
    know yet: good after a KL stage, poor from a cold start.
    """
    return 0.5 * (_probs(p_logits_XV.detach()) - _probs(q_logits_XV)).abs().sum(-1)


def tvpp(p_logits_XV: Tensor, q_logits_XV: Tensor) -> Tensor:
    """TV++ (Goel et al. 2403.00858): total variation as a policy gradient: [..., V] twice -> [...].

    The reward of drafting token v is r_v = 1 where p_v > q_v, else 0. The advantage A_v is
    (r_v - mean) / deviation, both taken over the whole vocabulary under q at each position, and
    the gradient is that of -E_q[A log q] with q and A held fixed: -q_v A_v in q's logits.

    The *value* is that surrogate, -sum_v q_v A_v log q_v: neither a distance nor positive, and it
    says nothing about progress. Watch alpha instead. Where no token has a reward, or all of q's
    mass has, both value and gradient are 0.
    """
    log_q_XV = _log_probs(q_logits_XV)
    with torch.no_grad():
        q_XV = _probs(q_logits_XV)
        reward_XV = (_probs(p_logits_XV) > q_XV).to(q_XV.dtype)
        mean_X1 = (q_XV * reward_XV).sum(-1, keepdim=True)
        variance_X1 = mean_X1 * (1.0 - mean_X1)
        deviation_X1 = variance_X1.clamp(min=LEAST_VARIANCE).sqrt()
        credit_XV = q_XV * (reward_XV - mean_X1) / deviation_X1
    return -(credit_XV * log_q_XV).sum(-1)


def nla(p_logits_XV: Tensor, q_logits_XV: Tensor) -> Tensor:
    """-log alpha, in nats: [..., V] twice -> [...].

    Total variation's direction divided by alpha, so that it does not vanish where the draft is far
    off (the likelihood form in LK losses, 2602.23881). A position with alpha = 0 has no direction
    to follow: it costs -log of the smallest normal number and gives no gradient.
    """
    alpha_X = acceptance(p_logits_XV, q_logits_XV)
    return -alpha_X.clamp(min=torch.finfo(alpha_X.dtype).tiny).log()


def lk(p_logits_XV: Tensor, q_logits_XV: Tensor, kl_weight: float | Tensor = 1.0) -> Tensor:
    """w KL(p || q) + (1 - w) (1 - alpha), w = kl_weight: [..., V] twice -> [...].

    The hybrid of LK losses (2602.23881): it starts as the KL and becomes direct acceptance as w
    falls; `lk_weight` gives the schedule. A tensor w broadcasts to [...].
    """
    distance_X = tv(p_logits_XV, q_logits_XV)
    return kl_weight * forward_kl(p_logits_XV, q_logits_XV) + (1.0 - kl_weight) * distance_X


def match(p_logits_XV: Tensor, q_logits_XV: Tensor) -> Tensor:
    """1 - the chance that one race of exponentials has the same winner under p and under q, which
    is how often a token drafted with shared noise is kept: [..., V] twice -> [...].

        m = sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) = sum_x p_x q_x / (q_x P_x + p_x Q_x)

    P_x: p's mass of the tokens with p_y / q_y at least x's, x included; Q_x: q's of the others. m
    lies between alpha / (2 - alpha) and alpha. Of more tokens than MATCHED those with the largest
    max(p, q) are told apart, and all others count as one that never matches: m is off by less than
    their mass under p or q, the larger one. As `tv` it says little to a draft that knows nothing.
    """
    return 1 - matched(_probs(p_logits_XV.detach()), _probs(q_logits_XV))


def matched(p_XV: Tensor, q_XV: Tensor) -> Tensor:
    """m of `match`, of probabilities: [..., V] twice -> [...]."""
    both, told = (p_XV, q_XV), p_XV.shape[-1]
    if told > MATCHED:
        top_XK, told = torch.maximum(p_XV, q_XV.detach()).topk(MATCHED, -1).indices, MATCHED
        few = [probs_XV.gather(-1, top_XK) for probs_XV in both]
        rest = [(1 - probs_XK.sum(-1, keepdim=True)).clamp(min=0) for probs_XK in few]
        both = torch.cat([few[0], rest[0]], -1), torch.cat([few[1], rest[1]], -1)
    ratio_XK = both[0] / both[1].detach().clamp(min=LEAST_PROBABILITY)
    order_XK = ratio_XK.sort(dim=-1, descending=True, stable=True).indices
    # Equal ratios in either order: m is the same, its slope the mean of both sides of the kink.
    last = ratio_XK.shape[-1] - 1
    other_XK = last - ratio_XK.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    return (_same_winner(*both, order_XK, told) + _same_winner(*both, other_XK, told)) / 2


def _same_winner(p_XK: Tensor, q_XK: Tensor, order_XK: Tensor, told: int) -> Tensor:
    """m, of tokens in the order of falling p / q, of which the first `told` may match."""
    p_XK, q_XK = p_XK.gather(-1, order_XK), q_XK.gather(-1, order_XK)
    above_XK = p_XK.cumsum(-1)
    below_XK = (q_XK.sum(-1, keepdim=True) - q_XK.cumsum(-1)).clamp(min=0)
    taken_XK = q_XK * above_XK + p_XK * below_XK
    same_XK = p_XK * q_XK / taken_XK.clamp(min=LEAST_PROBABILITY)
    return (same_XK * (order_XK < told)).sum(-1)


def lk_weight(mean_alpha: Tensor) -> Tensor:
    """The KL weight of `lk`: exp(-3 a), a being the mean acceptance over trained tokens, without
    gradient. 3 is NeMo Automodel's; SpecForge has 1.
    """
    return torch.exp(-3.0 * mean_alpha.detach())


def mixture(
    p_logits_XV: Tensor, q_logits_XV: Tensor, parts: tuple[tuple[Loss, float], ...]
) -> Tensor:
    """sum of weight * loss over `parts`, pairs of them: [..., V] twice -> [...]."""
    terms = [weight * loss(p_logits_XV, q_logits_XV) for loss, weight in parts]
    return torch.stack(terms).sum(0)


def acceptance(p_logits_XV: Tensor, q_logits_XV: Tensor) -> Tensor:
    """alpha = sum_v min(p, q) = 1 - TV, the chance that a drafted token is kept: -> [...].

    One-hot logits (0 and -inf, what temperature 0 means) turn it into `agreement`.
    """
    return torch.minimum(_probs(p_logits_XV.detach()), _probs(q_logits_XV)).sum(-1)


def agreement(p_logits_XV: Tensor, q_logits_XV: Tensor) -> Tensor:
    """1.0 where both argmaxes are the same token, else 0.0 (alpha at temperature 0): -> [...]."""
    return (p_logits_XV.argmax(-1) == q_logits_XV.argmax(-1)).float()


def cross_entropy(q_logits_XV: Tensor, tokens_X: Tensor) -> Tensor:
    """-log q(token), in nats: logits [..., V] and int64 tokens [...] -> [...]."""
    return -_log_probs(q_logits_XV).gather(-1, tokens_X.unsqueeze(-1)).squeeze(-1)


def apart(q_XH: Tensor, p_XH: Tensor) -> Tensor:
    """How far a draft's states are from the target's: the mean of smooth L1 over H (EAGLE-1)."""
    return F.smooth_l1_loss(q_XH.float(), p_XH.float(), reduction="none").mean(-1)


def divergence(name: str, beta: float = 0.5, kl_weight: float | Tensor = 1.0) -> Loss:
    """The loss called `name` as a function of (p_logits, q_logits) alone. beta is read by `jsd`,
    kl_weight by `lk`. ValueError for an unknown name, a beta outside (0, 1) or a weight outside
    [0, 1].
    """
    if name not in DIVERGENCES:
        raise ValueError(f"divergence: got {name!r}, expected one of {', '.join(DIVERGENCES)}")
    if name == "jsd":
        if not 0.0 < beta < 1.0:
            raise ValueError(
                f"beta: got {beta}, expected a number strictly between 0 and 1; "
                "for the limits use fkl (beta -> 0) or rkl (beta -> 1)"
            )
        return partial(jsd, beta=beta)
    if name == "lk":
        if not isinstance(kl_weight, Tensor) and not 0.0 <= kl_weight <= 1.0:
            raise ValueError(
                f"kl_weight: got {kl_weight}, expected a number in [0, 1]; "
                "lk_weight(mean_alpha) gives one"
            )
        return partial(lk, kl_weight=kl_weight)
    return DIVERGENCES[name]


def parse_loss(text: str) -> dict[str, float]:
    """The weight of each part of a loss as recipes spell it: "fkl", "0.5*ce+0.5*tv", "rkl+0.2*ce".
    Parts are keys of `DIVERGENCES`, or ce, cross-entropy with the text itself; ValueError for
    anything else, and for weights that aren't above 0.
    """
    weights: dict[str, float] = {}
    for term in text.replace(" ", "").split("+"):
        weight, _, name = term.rpartition("*")
        try:
            number = float(weight or 1)
        except ValueError:
            number = 0.0
        if name not in ("ce", *DIVERGENCES) or name in weights or not 0 < number < math.inf:
            raise ValueError(
                f"loss: got {text!r}, expected one of ce, {', '.join(DIVERGENCES)}, or a sum of "
                "them with weights above 0, each once, like 0.5*ce+0.5*fkl"
            )
        weights[name] = number
    return weights


def mixed(weights: Mapping[str, float], kl_weight: float | Tensor = 1.0, beta: float = 0.5) -> Loss:
    """The weighted sum of the named losses, of (p_logits, q_logits); errors of `divergence`."""
    parts = tuple((divergence(name, beta, kl_weight), w) for name, w in weights.items())
    alone = len(parts) == 1 and parts[0][1] == 1.0
    return parts[0][0] if alone else partial(mixture, parts=parts)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "fkl": forward_kl,
    "rkl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
    "tvpp": tvpp,
    "nla": nla,
    "lk": lk,
    "match": match,
}
