"""What Medusa heads are trained for: Medusa-1, each head reads the target's state alone.

Shapes: B rows, T positions, H hidden size.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.heads.medusa import Medusa, MedusaConfig
from draftsmith.models.target import split_head
from draftsmith.train.objectives.heads import HeadObjective
from draftsmith.train.text.batches import Batch


class MedusaObjective(HeadObjective):
    """See `HeadObjective`."""

    head: Medusa
    options = ("head.own_heads", "joint.enabled")

    @staticmethod
    def fresh(recipe: Any, target: PreTrainedModel) -> Medusa:
        (rows, hidden), asked = split_head(target)[1].shape, recipe.head
        return Medusa(MedusaConfig(hidden, rows, asked.heads, asked.layers, asked.own_heads))

    def drafted(self, batch: Batch, norm_BTH: Tensor) -> list[Tensor]:
        return self.head.states(norm_BTH)
