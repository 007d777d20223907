"""What a draft that is trusted makes of the target's law: pi from p and q, before a rule compares.

    rapid:eta         the target learns from the draft: log pi = log p + eta (q - p), where q is at
                      least a tenth of its largest, renormalised (RAPID, Chen et al., arXiv
                      2502.20330)
    cascade:RULE,a    speculative cascades (Narasimhan et al., arXiv 2405.19261). pi is q where the
                      draft is sure enough, else p:
        chow  max q >= 1 - a       diff  max q >= max p - a       opt  max q >= max p - a TV(p, q)
                      or, token by token, pi = q 1_A + (1 - q(A)) p, with A the tokens of
        v1    q(v) >= max p - a    v2    p(v) >= max p - a        v3   p(v) >= (1 - a) max p

Any rule then verifies against pi, so what is decoded has the law pi, wherever a node was drafted
from: after the last drafted token no q is known, and p stands. The answer depends on the tree.
At a = -1 diff, v1 and v2 are p, and so is rapid at 0; chow and v3 at a = 1 are q.

How sure a model is: its law as sampled, at temperature 0 the softmax of its raw logits; what is
sampled from (opt's TV, the mixtures) is then its best token alone. The papers take the laws at
temperature 1 for the former, whatever the latter. RAPID's code accepts by pi but draws what follows
a rejection from a mixture of neither p nor pi; a rule draws from what is left of pi.

Shapes: B rows, I nodes whose children were drawn, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decode.sampling import BatchParams, RowParams

RULES = ("chow", "diff", "opt", "v1", "v2", "v3")
PLAUSIBLE = 0.1  # of the draft's largest: what the target learns of


def rapid(p_logits_BIV: Tensor, q_logits_BIV: Tensor, params: BatchParams, eta: float) -> Tensor:
    """Logits [B, I, V] of the enriched law."""
    p_BIV, q_BIV = p_logits_BIV.softmax(-1), q_logits_BIV.softmax(-1)
    plausible_BIV = q_BIV >= PLAUSIBLE * q_BIV.amax(-1, keepdim=True)
    return p_logits_BIV + eta * plausible_BIV * (q_BIV - p_BIV)


def cascade(
    p_logits_BIV: Tensor, q_logits_BIV: Tensor, params: BatchParams, a: float, rule: str
) -> Tensor:
    """Logits [B, I, V] of the law that a rule of deferral gives."""
    p_BIV, q_BIV = p_logits_BIV.softmax(-1), q_logits_BIV.softmax(-1)
    sure_BI1 = p_BIV.amax(-1, keepdim=True)
    if rule in ("v1", "v2", "v3"):
        least_BI1 = (1 - a) * sure_BI1 if rule == "v3" else sure_BI1 - a
        inside_BIV = (q_BIV if rule == "v1" else p_BIV) >= least_BI1
        kept_BIV = sampled(q_logits_BIV, q_BIV, params) * inside_BIV
        rest_BI1 = (1 - kept_BIV.sum(-1, keepdim=True)).clamp(min=0)
        pi_BIV = kept_BIV + rest_BI1 * sampled(p_logits_BIV, p_BIV, params)
        return torch.where(inside_BIV.any(-1, keepdim=True), pi_BIV.log(), p_logits_BIV)
    least_BI1 = torch.full_like(sure_BI1, 1 - a) if rule == "chow" else sure_BI1 - a
    if rule == "opt":
        laws = sampled(p_logits_BIV, p_BIV, params), sampled(q_logits_BIV, q_BIV, params)
        least_BI1 = sure_BI1 - a * (laws[1] - laws[0]).clamp(min=0).sum(-1, keepdim=True)
    return torch.where(q_BIV.amax(-1, keepdim=True) >= least_BI1, q_logits_BIV, p_logits_BIV)


def sampled(logits_BIV: Tensor, law_BIV: Tensor, params: BatchParams) -> Tensor:
    """The law that tokens are drawn from: of greedy rows all on the best one."""
    if not (isinstance(params, RowParams) or params.greedy):
        return law_BIV
    best_BIV = F.one_hot(logits_BIV.argmax(-1), logits_BIV.shape[-1]).to(law_BIV.dtype)
    if isinstance(params, RowParams):
        return torch.where(params.greedy_B[:, None, None], best_BIV, law_BIV)
    return best_BIV
