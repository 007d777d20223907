"""What Chimera is trained for: the tokens ahead, and states like those that the target will have.

    loss = sum_d sum_t decay^d l(d, t) + feature * sum_t |f_{t+1} - h_{t+1}|^2 / H

l: see `HeadObjective`; each f reads the text's own tokens, and the f before it.

Legend: B rows, T positions, S = T - 1, H hidden size.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.heads.chimera import Chimera
from draftsmith.train.drafts.start import layer_like
from draftsmith.train.objectives.heads import HeadObjective, trained_pairs
from draftsmith.train.run.loop import StepOutput
from draftsmith.train.text.batches import Batch


class ChimeraObjective(HeadObjective):
    """feature, beyond the arguments of `HeadObjective`: the weight of the states' distance."""

    head: Chimera
    options = ("feature",)

    def __init__(self, *given: Any, feature: float = 0.0, **about: Any) -> None:
        super().__init__(*given, **about)
        self.feature = feature

    @staticmethod
    def fresh(recipe: Any, target: PreTrainedModel) -> Chimera:
        return Chimera(layer_like(target), recipe.head.heads)

    def drafted(self, batch: Batch, norm_BTH: Tensor) -> list[Tensor]:
        text = (batch.input_ids, batch.position_ids, batch.attention_mask)
        states = self.head.unroll(norm_BTH, *text, steps=self.head.levels)
        f_BSH, h_BSH = states[0][:, :-1, self.head.hidden :], norm_BTH[:, 1:]
        self._apart_BS = (f_BSH.float() - h_BSH.float()).square().mean(-1)
        return states

    def score(self, batch: Batch, norm_BTH: Tensor, *, fully: bool = False) -> StepOutput:
        made = super().score(batch, norm_BTH, fully=fully)
        apart = self._apart_BS[trained_pairs(batch, 0)].sum()
        return made._replace(loss=made.loss + self.feature * apart)
