"""An acceptance head (SpecDec++, arXiv 2405.19715) trained together with its draft.

    loss + head.weight * mean_t [-(1 - a_t) log P0_t - a_t log P1_t]
    Y_t ~ q_t,   a_t = min(1, p_t(Y_t) / q_t(Y_t)),   P1_t = 1 - P0_t = sigmoid(head(h_t, Y_t))

At each trained position the draft draws a token from its law as it is now, and the head learns how
it would fare, from the state h that q was made of and numbers of Y. None of these carries the
head's gradient into the draft.

Where this differs from the paper:
1. The paper's head learns on a draft that stays as it is; here both learn, in one loss.
2. The head reads the state that Y was drawn from. The state after Y would take a second pass, over
   a text with Y in it: train/scorers.py has it, on a frozen draft.
3. Both classes weigh the same (w = 1), no token mixing: the text is the one that is distilled on.
4. The best weights are those at which the draft does best, whatever the head's loss was there.

Shapes: N positions, K trained ones, R rows of a tile, V vocabulary, H hidden, S numbers.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.scorers import Scorer, ScorerConfig, read_scalar
from draftsmith.train.losses.closed_form import Transform
from draftsmith.train.scoring.objective import weighted_entropy
from draftsmith.train.teachers.teachers import TargetRows, Teacher, TopKTeacher

NUMBERS = ("log_q", "entropy", "lead")  # of a drawn token


@dataclass(kw_only=True)
class JointHead:
    """The group `head` of a distillation: an acceptance head beside the draft."""

    weight: float = 0.0  # of its loss; 0: no head
    scalars: list[str] = field(default_factory=lambda: list(NUMBERS))
    blocks: int = 2
    width: int = 64
    limit: int = 100  # held-out ones, decoded at the end to calibrate and check it


class AcceptanceLoss(nn.Module):
    """The head's part of the loss."""

    def __init__(self, scorer: Scorer, *, weight: float) -> None:
        super().__init__()
        self.scorer, self.weight = scorer, weight

    def forward(
        self, rows: TargetRows, q: tuple[Tensor, Tensor], mask_N: Tensor, transform: Transform
    ) -> Tensor:
        """Mean cross-entropy over the trained positions (mask_N); 0 where there is none. q: the
        draft's states [N, H] and output head [V, H].
        """
        state_KH, scalars_KS, label_K = self.examples(rows, q, mask_N, transform)
        logit_K = self.scorer(state_KH.detach(), scalars_KS)
        return weighted_entropy(logit_K.float(), label_K, 1.0).sum() / max(1, len(label_K))

    def examples(
        self, rows: TargetRows, q: tuple[Tensor, Tensor], mask_N: Tensor, transform: Transform
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """What the head reads at each trained position (states, numbers), and the chances."""
        numbers: list[Tensor] = []

        def drawn(p_logits_RV: Tensor, q_logits_RV: Tensor) -> Tensor:
            """A `Loss` by its form: min(1, p(Y) / q(Y)) [R], Y drawn from torch's generator, which
            the loop seeds for each step and process.
            """
            score_RV = q_logits_RV - torch.empty_like(q_logits_RV).exponential_().log()
            best_R2, token_R2 = score_RV.topk(2)
            log_q_RV, log_p_RV = q_logits_RV.log_softmax(-1), p_logits_RV.log_softmax(-1)
            log_q_R, log_p_R = (one.gather(1, token_R2)[:, 0] for one in (log_q_RV, log_p_RV))
            entropy_R = torch.special.entr(log_q_RV.exp()).sum(-1)
            numbers.append(torch.stack([log_q_R, entropy_R, best_R2[:, 0] - best_R2[:, 1]], 1))
            return (log_p_R - log_q_R).clamp(max=0.0).exp()

        with torch.no_grad():
            label_N = rows.divergence(drawn, q, mask_N.float(), transform).loss_N
        # With a bias the states have a column more, which no decoder shows to a head.
        state_KH = q[0][mask_N][:, : self.scorer.config.hidden].float()
        names, scalars_KS = self.scorer.config.scalars, None
        if names:
            found_K3 = torch.cat([label_N.new_empty(0, len(NUMBERS)), *numbers])
            of = dict(zip(NUMBERS, found_K3.T, strict=True))
            scalars_KS = torch.stack([read_scalar(name, of[name]) for name in names], 1)
        return state_KH, scalars_KS, label_N[mask_N]


def open_head(
    asked: JointHead, hidden: int, teacher: Teacher, warp: SamplingParams, seed: int
) -> AcceptanceLoss | None:
    """A fresh head for a draft of this width, if any; ValueError for what doesn't go together."""
    if not asked.weight:
        return None
    scalars = tuple(asked.scalars)
    if asked.weight < 0 or warp.greedy:
        raise ValueError(
            f"head.weight: got {asked.weight} at temperature {warp.temperature}, expected above 0, "
            "both: the head learns the chance of a drawn token"
        )
    if isinstance(teacher, TopKTeacher):
        raise ValueError(
            "head.weight: got a target of which only the likeliest tokens are kept, expected its "
            "states: a drawn token may be any one; leave cache.top_k out, or train the head on the "
            "finished draft (train/scorers.py)"
        )
    if {"depth", "path", "rank"} & {*scalars}:
        raise ValueError(
            f"head.scalars: got {list(scalars)}, expected some of {', '.join(NUMBERS)}; a text has "
            "no tree: a head that reads one is trained on the finished draft (train/scorers.py)"
        )
    sizes = {"blocks": asked.blocks, "width": asked.width}
    config = ScorerConfig("acceptance", hidden, **sizes, scalars=scalars, state="parent")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        scorer = Scorer(config)
    return AcceptanceLoss(scorer, weight=asked.weight)
