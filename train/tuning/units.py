"""Units of text that a model is sure of, said at once (Lexical Unit Decoding, Sun et al., arXiv
2405.15208): placeholders behind a text learn the tokens that follow the next one.

    loss = sum over units x_b ... x_e of sum_k CE(x_1 ... x_{b-1} PAD_1 ... PAD_k, x_{b+k}) + ar CE

A unit is a longest run of trained tokens each of which the model, as it is, gives more than `sure`;
longer ones than `pads` + 1 are cut. PAD is the token that the config names. Text never sees one, so
the model answers as it does without. Positions are those of the tokens that PADs stand for; the
paper's share of texts with PADs, and their number, weren't to be had: here all units of a text are
trained beside it. `drafter=pads:K` verifies what they say; the paper takes it as it is.

Shapes: B rows, T positions, N = B * T.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.train.objectives.distillation import hidden_and_head
from draftsmith.train.run.loop import StepOutput
from draftsmith.train.text.batches import Batch
from draftsmith.train.tuning.windows import BesideText, inside, windows


@dataclass(kw_only=True)
class Units:
    """The group `units` of a recipe."""

    sure: float = 0.5  # alpha, of each token of a unit
    pads: int = 8  # of a unit, at most
    ar: float = 1.0  # weight of cross-entropy with the text

    def __post_init__(self) -> None:
        if not 0 <= self.sure < 1 or self.pads < 1 or self.ar < 0:
            raise ValueError(
                f"units: got sure={self.sure}, pads={self.pads}, ar={self.ar}, expected a share "
                "below 1, 1 or more, and a weight"
            )


class UnitsObjective(BesideText):
    """See above. Metrics: `units` and `ar`, the two sums; `pads`, how many are trained. ValueError:
    also for a model whose config names no PAD.
    """

    def __init__(
        self, model: PreTrainedModel, how: Units, *, drafted: int, vocab_size: int
    ) -> None:
        super().__init__(model, vocab_size)
        self.how, self.drafter = how, f"pads:{drafted}"
        self.pad = model.config.get_text_config().pad_token_id
        if self.pad is None:
            raise ValueError("units: got a config without pad_token_id, expected one; set it there")

    def forward(self, batch: Batch) -> StepOutput:
        begin_BT = windows(batch, self.how.pads + 1, self.sure(batch))
        weight_N = inside(begin_BT).flatten().float()
        text, pads = self.sides(batch, torch.full_like(batch.input_ids, self.pad), begin_BT)
        units, ar = self.ar(batch, pads, weight_N)[0], self.ar(batch, text)[0]
        metrics = {"units": units.detach(), "ar": ar.detach(), "pads": weight_N.sum()}
        return StepOutput(units + self.how.ar * ar, batch.loss_mask.sum(), metrics)

    @torch.no_grad()
    def sure(self, batch: Batch) -> Tensor:
        """[B, T] bool: tokens to which the model gives more than `sure`."""
        side = hidden_and_head(self.model, batch, self.vocab_size)
        loss_BT = self.ar(batch, side)[1].view_as(batch.input_ids)
        return loss_BT.neg().exp().roll(1, 1) > self.how.sure
