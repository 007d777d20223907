"""What scorers are trained for: cross-entropy with soft labels, in which rejections may weigh more.

Shapes: X rows, H hidden, S numbers read beside a state, I = H + S.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.scorers import Scorer
from draftsmith.train.run.loop import Objective, StepOutput
from draftsmith.train.scoring.calibration import auc, brier, platt
from draftsmith.train.scoring.rows import RowBatch, ScorerRows


def weighted_entropy(logit_X: Tensor, label_X: Tensor, weight: float) -> Tensor:
    """w (1 - a) (-log P0) + a (-log P1) for each row, P1 = sigmoid(logit), a the label."""
    rejected_X, kept_X = F.logsigmoid(-logit_X), F.logsigmoid(logit_X)
    return -(weight * (1 - label_X) * rejected_X + label_X * kept_X)


class ScorerObjective(Objective):
    """The weighted cross-entropy of a scorer, divided by the mean weight of `rows`, the part it is
    fitted to. reject_weight: w; 0: such that both classes weigh the same.

    A scorer with a linear map to fold them into reads inputs of mean 0 and deviation 1 while it
    trains; `folded` then gives it back for raw ones.
    """

    mean_I: Tensor
    deviation_I: Tensor

    def __init__(self, scorer: Scorer, rows: ScorerRows, reject_weight: float) -> None:
        super().__init__()
        label, config = float(rows.label_N.double().mean()), scorer.config
        self.scorer = scorer
        self.reject_weight = reject_weight or label / (1 - label)
        self.mean_weight = self.reject_weight * (1 - label) + label
        self.folds = config.enters or not config.blocks
        mean_I, deviation_I = torch.zeros(config.inputs), torch.ones(config.inputs)
        if self.folds:
            mean_I, deviation_I = rows.moments()
        # Functions of the data, so no part of the weights.
        self.register_buffer("mean_I", mean_I, persistent=False)
        self.register_buffer("deviation_I", deviation_I, persistent=False)

    def tokens(self, batch: RowBatch) -> int:
        return len(batch.label_X)

    def forward(self, batch: RowBatch) -> StepOutput:
        loss_X = weighted_entropy(self.measure(batch).float(), batch.label_X, self.reject_weight)
        count = torch.tensor(float(len(loss_X)), device=loss_X.device)
        return StepOutput(loss_X.sum() / self.mean_weight, count, {})

    def measure(self, batch: RowBatch) -> Tensor:
        """Logits [X]."""
        return self.scorer((batch.x_XI - self.mean_I) / self.deviation_I)

    def heldout(self, rows: ScorerRows) -> dict[str, float]:
        """Of rows it isn't fitted to: `loss`; `auc`; and `brier`, after a calibration on them."""
        device = self.mean_I.device
        logits = [self.measure(batch.to(device)) for batch in rows.chunks()]
        logit_N = torch.cat(logits).float().cpu()
        loss_N = weighted_entropy(logit_N, rows.label_N, self.reject_weight) / self.mean_weight
        scale, shift = platt(logit_N, rows.kept_N)
        return {
            "loss": float(loss_N.mean()),
            "brier": brier((scale * logit_N + shift).sigmoid(), rows.kept_N),
            "auc": auc(logit_N, rows.kept_N),
        }

    @torch.no_grad()
    def folded(self, dtype: torch.dtype) -> Scorer:
        """The scorer for raw inputs, on the CPU, rounded to `dtype`; once, after training."""
        scorer = self.scorer.cpu().float().eval()
        if self.folds:
            scorer.standardise(self.mean_I.cpu(), self.deviation_I.cpu())
        return scorer.to(dtype).float()


@torch.no_grad()
def logits(scorer: Scorer, rows: ScorerRows) -> Tensor:
    """Logits [N] of a folded scorer, fp32."""
    return torch.cat([scorer(batch.x_XI) for batch in rows.chunks()])
