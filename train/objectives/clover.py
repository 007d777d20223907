"""What Clover-2 heads are trained for: the tokens ahead, each a light step after the text's own.

    loss = sum_d decay^d sum_t [ D(p_{t+1+d}, q_{t,d}) + state * smooth-L1(what the LM head
           multiplies, the target's state at t+1+d) ]

The paper's: decay .7, state 10, D the soft cross-entropy (here the divergence, of the same
gradient). Its option that masks tokens which an earlier head has missed isn't here.

Legend: B rows, T positions, S = T - 1 - d positions with a token at depth d, F tap width, H hidden.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.heads.clover import Clover
from draftsmith.models.layers.layer import causal, layer_like
from draftsmith.train.objectives.heads import HeadObjective
from draftsmith.train.text.batches import Batch


class CloverObjective(HeadObjective):
    head: Clover
    options = ("state",)

    @staticmethod
    def fresh(recipe: Any, target: PreTrainedModel) -> Clover:
        tap = target.config.get_text_config().num_hidden_layers
        return Clover(layer_like(target, recipe.head.layers), tap, recipe.head.heads)

    def drafted(self, batch: Batch, taps_BTF: Tensor) -> list[Tensor]:
        next_BT, positions_BT = batch.input_ids.roll(-1, 1), batch.position_ids
        attention = causal(batch.attention_mask)
        state_BSH = self.head.augmented(taps_BTF, next_BT, positions_BT, attention)
        states = [self.head.state(state_BSH, None)]
        embedded_BTH = self.head.embed(batch.input_ids)
        for depth in range(1, min(self.head.levels, batch.input_ids.shape[1] - 1)):
            token_BSH = embedded_BTH[:, 1 + depth :]
            state_BSH = self.head.step(state_BSH[:, : token_BSH.shape[1]], token_BSH)
            states.append(self.head.state(state_BSH, token_BSH))
        return states
