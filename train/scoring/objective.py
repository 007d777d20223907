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


def row_weight(label_N: Tensor, weight: float) -> float:
    """Mean over rows of w (1 - a) + a, the weight that a row of label a has."""
    label = float(label_N.double().mean())
    return weight * (1 - label) + label


def balance(label_N: Tensor) -> float:
    """The weight of a rejection at which both classes weigh the same."""
    label = float(label_N.double().mean())
    return label / (1 - label)


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
        self.scorer = scorer
        self.reject_weight = reject_weight or balance(rows.label_N)
        self.mean_weight = row_weight(rows.label_N, self.reject_weight)
        config = scorer.config
        mean_I, deviation_I = torch.zeros(config.inputs), torch.ones(config.inputs)
        self.folds = config.enters or not config.blocks
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
        hidden = self.scorer.config.hidden
        state_XH = (batch.state_XH - self.mean_I[:hidden]) / self.deviation_I[:hidden]
        scalars_XS = batch.scalars_XS
        if scalars_XS is not None:
            scalars_XS = (scalars_XS - self.mean_I[hidden:]) / self.deviation_I[hidden:]
        logit_X: Tensor = self.scorer(state_XH, scalars_XS)
        return logit_X

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
        """The scorer for raw inputs, on the CPU, its weights rounded to `dtype` and back to fp32.
        Once, after training.
        """
        scorer = self.scorer.cpu().float().eval()
        if self.folds:
            scorer.standardise(self.mean_I.cpu(), self.deviation_I.cpu())
        return scorer.to(dtype).float()


@torch.no_grad()
def logits(scorer: Scorer, rows: ScorerRows) -> Tensor:
    """Logits [N] of a folded scorer, fp32."""
    return torch.cat([scorer(batch.state_XH, batch.scalars_XS) for batch in rows.chunks()])
