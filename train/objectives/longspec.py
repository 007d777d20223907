"""What LongSpec's layer is trained for: the tokens ahead, each at the lag it will have in decoding.

    loss = sum_d decay^d sum_t D(p_{t+1+d}, q_{t,d}),  q_{t,d}: the layer at t+1+d, which sees the
           text's own tokens up to there and the target's keys up to t: a lag of d + 1

The paper draws one lag a step; here all of them are trained in every step (the layer's own
attention is run once for all). Positions of short texts are moved, as the paper's anchor-offset
does, so that they look like long ones: those after the first 0 to 4 tokens by the same random
number, for the target and the layer alike.

Legend: B rows, T positions, F tap width, H hidden.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.heads.longspec import LongSpec, last_keys
from draftsmith.models.layers.layer import layer_like
from draftsmith.train.objectives.heads import HeadObjective
from draftsmith.train.run.loop import StepOutput
from draftsmith.train.text.batches import Batch

ANCHORS = 4  # the most first tokens that stay where they are


class LongSpecObjective(HeadObjective):
    """offset: positions of a training text are moved by up to so many, as far as the target's
    context goes; 0: none. ValueError for fewer, or for states that can't be made at them.
    """

    head: LongSpec
    options = ("head.window", "offset")

    def __init__(self, *given: Any, offset: int = 0, **how: Any) -> None:
        super().__init__(*given, **how)
        if offset < 0:
            raise ValueError(f"offset: got {offset}, expected 0 or more positions")
        self.offset = offset

    @staticmethod
    def fresh(recipe: Any, target: PreTrainedModel) -> LongSpec:
        if recipe.shard_target or (recipe.offset and recipe.cache.path):
            raise ValueError(
                f"got head.kind=longspec with shard_target={recipe.shard_target}, offset="
                f"{recipe.offset}, cache={recipe.cache.path!r}: its last layer's keys are made "
                "anew at each step, and moved positions are in no cache; leave one of them out"
            )
        tap = target.config.get_text_config().num_hidden_layers - 1
        return LongSpec(layer_like(target), tap, recipe.head.heads, recipe.head.window)

    def forward(self, batch: Batch) -> StepOutput:
        return super().forward(self.moved(batch) if self.offset else batch)

    def moved(self, batch: Batch) -> Batch:
        """The batch at other positions, by torch's generator, which the loop seeds at every step. A
        pair that the move falls between isn't trained.
        """
        at_BT = batch.position_ids
        rows, length = at_BT.shape
        most = max(0, min(self.offset, self.head.context - length))
        anchors_B1 = torch.randint(ANCHORS + 1, (rows, 1), device=at_BT.device)
        offset_B1 = torch.randint(most + 1, (rows, 1), device=at_BT.device)
        at_BT = at_BT + offset_B1 * (at_BT >= anchors_B1)
        mask = batch.attention_mask
        if mask is None:  # else transformers takes a gap in positions for another document
            mask = torch.ones(length, length, dtype=torch.bool, device=at_BT.device).tril()
            mask = mask.expand(rows, 1, -1, -1)
        return replace(batch, position_ids=at_BT, attention_mask=mask)

    def drafted(self, batch: Batch, taps_BTF: Tensor) -> list[Tensor]:
        target, own = self.target, taps_BTF.dtype
        key, value = last_keys(target, taps_BTF.to(target.dtype), batch.position_ids)
        lags = range(1, min(self.head.levels, batch.input_ids.shape[1] - 1) + 1)
        text = (batch.input_ids, batch.position_ids, (key.to(own), value.to(own)))
        states = self.head.lagging(*text, batch.attention_mask, lags)
        # The pair (t, d) is at t + 1 + d.
        return [state_BTH[:, lag:] for lag, state_BTH in zip(lags, states, strict=True)]
