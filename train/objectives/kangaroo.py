"""What Kangaroo's adapter is trained for: the target's own law at the same place.

    loss = sum_t KL(p_t || q_t),    q_t from the state of t after the target's first E layers

Where this differs from the public code: theirs drops the first position of the states but not of
the mask, so that two positions of each answer aren't trained, and steps each micro-batch although
it declares eight; it clips each gradient number at .5, ours the norm of all.

Legend: B rows, T positions, F tap width, H hidden.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.heads.kangaroo import Kangaroo
from draftsmith.models.layers.layer import causal, layer_like
from draftsmith.train.objectives.heads import HeadObjective
from draftsmith.train.text.batches import Batch


class KangarooObjective(HeadObjective):
    """See `HeadObjective`; one depth, since all read exact states."""

    head: Kangaroo
    options = ("head.early",)
    begins = -1

    @staticmethod
    def fresh(recipe: Any, target: PreTrainedModel) -> Kangaroo:
        return Kangaroo(layer_like(target), recipe.head.early)

    def drafted(self, batch: Batch, taps_BTF: Tensor) -> list[Tensor]:
        attention = causal(batch.attention_mask)
        return [self.head.adapted(taps_BTF, batch.position_ids, attention)]
