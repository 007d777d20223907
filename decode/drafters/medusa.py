"""Medusa heads as the drafter.

Shapes: B rows, T tokens of a text, K heads, H hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Fed, Feed, Frontier, Round
from draftsmith.decode.drafting.grow_tree import grow_known
from draftsmith.decode.drafting.head_drafter import HeadDrafter
from draftsmith.decode.drafting.in_rounds import InRounds, heads_rounds
from draftsmith.decode.forward.product import Product, sides
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.medusa import Medusa


class MedusaDrafter(HeadDrafter):
    """Heads that know how far ahead they guess, but not what was drafted before: all nodes of one
    depth share one law.
    """

    head: Medusa

    def __init__(self, head: Medusa, target: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(head, target)
        blocks = [head.blocks(depth) for depth in range(head.levels)]
        self.blocks = Product.of([first.linear for first, *_ in blocks])
        self.more = [[Product.of([block.linear]) for block in more] for _, *more in blocks]
        own = range(head.levels if head.config.own_heads else 1)
        self.outputs = tuple(self.vocab_head(head.head_VH(k), vocab_size) for k in own)

    def feed(self, request: Round) -> Feed:
        states_BKH = shared_BKV = self.state_BH

        def feed(frontier: Frontier) -> Fed:
            nonlocal states_BKH, shared_BKV
            depth, nodes = frontier.depth, frontier.tokens_BF.shape[1]
            if depth == 0:
                states_BKH = self._states(self.state_BH, request.plan.levels)
                if not self.head.config.own_heads:
                    shared_BKV = self._logits(states_BKH)
            state_B1H = states_BKH[:, depth, None]
            if self.head.config.own_heads:
                logits_B1V = self.outputs[depth].logits(state_B1H)
            else:
                logits_B1V = shared_BKV[:, depth, None]
            return Fed(logits_B1V.expand(-1, nodes, -1), state_B1H.expand(-1, nodes, -1))

        return feed

    def at_once(self, request: Round) -> TokenTree | None:
        def logits() -> Tensor:
            return self._logits(self._states(self.state_BH, request.plan.levels))

        return grow_known(request, logits)

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        outputs = self.outputs if self.head.config.own_heads else self.outputs * self.levels
        first = sides(self.blocks)
        blocks = [[first[2 * k : 2 * k + 2], *map(sides, self.more[k])] for k in range(nodes - 1)]
        return heads_rounds(blocks, outputs[: nodes - 1], temperature, self.state_BH)

    def first(self, states_BTH: Tensor, next_BT: Tensor) -> Fed:
        state_BTH = self._states(states_BTH.flatten(0, 1), 1).view_as(states_BTH)
        return Fed(self.outputs[0].logits(state_BTH), state_BTH)

    @property
    def parameter_bytes(self) -> int:
        if self.head.config.own_heads:
            return super().parameter_bytes
        read = [*self.head.parameters(), self.head.target_head_VH]
        left_out = self.left_out(self.outputs[0])
        return (sum(tensor.nbytes for tensor in read) - left_out) // self.levels

    def _logits(self, states_BKH: Tensor) -> Tensor:
        """Of the first heads; one matrix of all is read once."""
        if not self.head.config.own_heads:
            return self.outputs[0].logits(states_BKH)
        shape = *states_BKH.shape[:2], self.outputs[0].size
        logits_BKV = states_BKH.new_empty(shape, dtype=torch.float32)
        for depth, state_BH in enumerate(states_BKH.unbind(1)):
            logits_BKV[:, depth] = self.outputs[depth].logits(state_BH)
        return logits_BKV

    def _states(self, hidden_BH: Tensor, levels: int) -> Tensor:
        """What the LM heads of the first `levels` heads multiply, [B, K, H]."""
        inner_BKH = self.blocks(hidden_BH).unflatten(-1, (self.levels, -1))
        state_BKH = (hidden_BH[:, None] + F.silu(inner_BKH))[:, :levels]
        each = zip(self.more[:levels], state_BKH.unbind(1), strict=True)
        return torch.stack([through(products, state_BH) for products, state_BH in each], 1)


def through(blocks: list[Product], state_XH: Tensor) -> Tensor:
    """A state after residual blocks without a projection."""
    for linear in blocks:
        state_XH = state_XH + F.silu(linear(state_XH))
    return state_XH
