"""What Chimera is trained for: the text's tokens ahead, each f reading those before it.

Its public code has a loss on the states too, never added to the others; neither is it here.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.heads.chimera import Chimera
from draftsmith.models.layers.layer import layer_like
from draftsmith.train.objectives.heads import HeadObjective
from draftsmith.train.text.batches import Batch


class ChimeraObjective(HeadObjective):
    head: Chimera

    @staticmethod
    def fresh(recipe: Any, target: PreTrainedModel) -> Chimera:
        return Chimera(layer_like(target), recipe.head.heads)

    def drafted(self, batch: Batch, norm_BTH: Tensor) -> list[Tensor]:
        text = (batch.input_ids, batch.position_ids, batch.attention_mask)
        return list(self.head.unroll(norm_BTH, *text))
