"""What Hydra heads are trained for: each head also reads the tokens up to the one that it
continues, which in training are the text's own.

Legend: B rows, T positions, S = T - 1 - d positions with a token at depth d, H hidden size, P
tokens of a path.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.heads.hydra import Hydra, HydraConfig
from draftsmith.models.layers.layer import causal, layer_like
from draftsmith.models.target import head_weight
from draftsmith.train.objectives.heads import HeadObjective
from draftsmith.train.text.batches import Batch


class HydraObjective(HeadObjective):
    """noise, beyond the arguments of `HeadObjective`: alpha of NEFTune's noise on the states read,
    alpha * U(-1, 1) / sqrt(L H) in a document of L tokens.
    """

    head: Hydra
    options = ("head.prefix", "head.dropout", "noise")

    def __init__(self, *given: Any, noise: float = 0.0, **about: Any) -> None:
        super().__init__(*given, **about)
        assert not self.head.config.head_bias, "the loss multiplies by weights alone"
        self.noise = noise

    @staticmethod
    def fresh(recipe: Any, target: PreTrainedModel) -> Hydra:
        (rows, hidden), asked = head_weight(target).shape, recipe.head
        prefix = layer_like(target) if asked.prefix else None
        sizes = (hidden, rows, asked.heads, asked.layers)
        return Hydra(HydraConfig(*sizes, prefix, asked.dropout))

    def drafted(self, batch: Batch, norm_BTH: Tensor) -> list[Tensor]:
        if self.noise and self.training:
            reach_BT1 = self.noise / (batch.lengths * norm_BTH.shape[2]).unsqueeze(2).sqrt()
            norm_BTH = norm_BTH + reach_BT1 * (2 * torch.rand_like(norm_BTH) - 1)
        base_BTH = self.head.prefix(norm_BTH, batch.position_ids, causal(batch.attention_mask))
        embedded_BTH = self.head.embed(batch.input_ids)
        states = []
        for depth in range(self.head.levels):
            many = max(0, norm_BTH.shape[1] - 1 - depth)
            path = [embedded_BTH[:, 1 + i : 1 + i + many] for i in range(1 + depth)]
            path_BSPH = torch.stack(path, 2)
            states.append(self.head.state(depth, base_BTH[:, :many], path_BSPH))
        return states
