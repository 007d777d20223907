"""Mixture of Attentions as the drafter.

A row of n committed tokens keeps, in slot i, keys and values of x_{i+1} in one layer and of
memory_i in the other; the pair of the pending token, read as it was committed, gives the root's
children without another pass. Drafted tokens lie in slots beyond, of this round alone: they ask the
memory's n slots, and add none.

Shapes: B rows, F nodes fed, T tokens of a text, U width of the taps side by side, H hidden.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Fed, Feed, Frontier, Round
from draftsmith.decode.drafting.head_drafter import HeadDrafter, Where
from draftsmith.decode.forward.attention import Seen
from draftsmith.decode.forward.size import ModelSize
from draftsmith.models.heads.mixture import Mixture


class MixtureDrafter(HeadDrafter):
    """A pass of two layers a level."""

    head: Mixture
    each = True

    def __init__(self, head: Mixture, target: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(head, target, head.config)
        self.lm_head = self.vocab_head(head.head_DH, vocab_size)

    @property
    def size(self) -> ModelSize:
        # A row for each tap: a layer's input, output and feed-forward.
        beside = len(self.taps) * (3 * self.head.hidden + 4 * self.head.config.intermediate_size)
        return ModelSize(self.head.config, self.dtype, beside)

    def read(self, taps_BNU: Tensor, next_BN: Tensor, where: Where | None) -> Tensor:
        assert where is not None, "it keeps keys and values"
        return self.head.step(self.head.fuse(taps_BNU), next_BN, *where)

    def feed(self, request: Round) -> Feed:
        width = self.pool.width(request.top + request.plan.slots)
        lens_B = request.lens_B.clamp(min=1)  # a row that nothing is in reads zeros

        def feed(frontier: Frontier) -> Fed:
            if frontier.depth == 0:
                return self.first(self.state_BH[:, None])
            at_BF, slots_BF, seen = frontier.placed(request.lens_B[:, None] - 1, width)
            none_F1 = torch.zeros_like(at_BF[0, :, None], dtype=torch.bool)
            asks = self.pool.fed(at_BF, slots_BF[:, :0], Seen(lens_B, width, none_F1))[1]
            own = self.pool.fed(at_BF, slots_BF, seen)
            return self.first(self.head.step(None, frontier.tokens_BF, *own, asks))

        return feed

    def first(self, states_BTH: Tensor, next_BT: Tensor | None = None) -> Fed:
        state_BTH = states_BTH.to(self.lm_head.weight.dtype)
        return Fed(self.lm_head.logits(state_BTH), state_BTH)

    @property
    def parameter_bytes(self) -> int:
        """What the memory is made of is read once a round, beside the target's pass."""
        own = sum(tensor.nbytes for tensor in self.head.layers.parameters())
        return own + self.lm_head.bytes_read
