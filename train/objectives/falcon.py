"""What Falcon is trained for: the k tokens after each pair of a text, by the block that ends there.

    loss = sum_{d<k} decay^d sum_t [ D(p_{t+1+d}, q_{t,d}) + state * smooth-L1(f', f)_{t+1+d} ]

Glancing: pairs drawn in each step show the answer of their own row, pair i + k in pair i's place;
rows learn to go by each other before they must do without. The share of pairs that show it is

    glance * (E - e) / E * (1 - alpha)

e of E steps are done; alpha is the mean acceptance of the step before. Where this differs from the
paper's code: every pair ends a block, in each step; how much is wrong is known from the step
before, without a first pass; pairs are shown whatever their row; D is one divergence, theirs mixes
one at temperature .95 with a drawn token's cross-entropy; the target's states get no noise. As
theirs, depths from k on, which are drafted from f' of its own, are never trained.

Legend: B rows, T positions, S = T - k, F tap width, H hidden, D depths.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.heads.falcon import Falcon
from draftsmith.models.layers.layer import layer_like
from draftsmith.train.objectives.heads import HeadObjective, trained_pairs
from draftsmith.train.run.loop import Counting
from draftsmith.train.text.batches import Batch


class FalconObjective(HeadObjective, Counting):
    """glance, steps, beyond the arguments of `HeadObjective`: the share at first, and E. A loss
    that knows no alpha (ce) counts as always wrong. Draws are from torch's generator, which the
    loop seeds at every step. ValueError for a share out of range.
    """

    head: Falcon
    options = ("head.block", "glance", "state", "steps")

    def __init__(self, *given: Any, glance: float = 0.4, steps: int = 1, **about: Any) -> None:
        super().__init__(*given, **about)
        if not 0 <= glance <= 1:
            raise ValueError(f"glance: got {glance}, expected a share, 0 to 1")
        self.glance, self.steps = glance, steps

    @staticmethod
    def fresh(recipe: Any, target: PreTrainedModel) -> Falcon:
        return Falcon(layer_like(target), recipe.head.heads, recipe.head.block)

    def drafted(self, batch: Batch, taps_BTF: Tensor) -> list[Tensor]:
        next_BT = batch.input_ids.roll(-1, 1)
        if self.glance and self.training:
            taps_BTF, next_BT = self._glanced(batch, taps_BTF, next_BT)
        text = (taps_BTF, next_BT, batch.position_ids, batch.attention_mask)
        return list(self.head.drafted(*text).unbind(2))

    def _glanced(self, batch: Batch, states_BTH: Tensor, next_BT: Tensor) -> tuple[Tensor, Tensor]:
        """States and tokens of the pairs, the drawn ones' those of k later."""
        k, left = self.head.block, (1 - self.steps_done / self.steps).clamp(min=0)
        share = self.glance * left * (1 - self.mean_alpha_D[:k].mean())
        can_BS = trained_pairs(batch, k - 1)
        shown_BS = can_BS & (torch.rand(can_BS.shape, device=can_BS.device) < share)
        shown_BT = F.pad(shown_BS, (0, next_BT.shape[1] - shown_BS.shape[1]))
        states_BTH = torch.where(shown_BT.unsqueeze(2), states_BTH.roll(-k, 1), states_BTH)
        return states_BTH, torch.where(shown_BT, next_BT.roll(-k, 1), next_BT)
