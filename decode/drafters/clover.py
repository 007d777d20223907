"""Clover-2 heads as the drafter: the augmenting layers run once a committed token, a node costs one
light step from its parent's state.

Shapes: B rows, N tokens, T tokens of a text, F nodes fed, H hidden.
"""

from functools import cached_property

from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Fed, Feed, Frontier, Round, picked
from draftsmith.decode.drafting.head_drafter import HeadDrafter, Where
from draftsmith.decode.drafting.in_rounds import Draws, InRounds, clover_rounds
from draftsmith.decode.forward.compressed import STEP
from draftsmith.decode.forward.lean_heads import lean_prefix
from draftsmith.decode.forward.product import Product
from draftsmith.models.heads.clover import Clover


class CloverDrafter(HeadDrafter):
    """A row's state is s_0; nodes know their whole path."""

    head: Clover
    each = True

    def __init__(self, head: Clover, target: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(head, target, head.config)
        self.lm_head = self.vocab_head(head.target_head_VH, vocab_size)
        self.prefix = lean_prefix(head) or head.prefix

    def read(self, taps_BNU: Tensor, next_BN: Tensor, where: Where | None) -> Tensor:
        assert where is not None
        return self.prefix(self.head.enter(taps_BNU, self.head.embed(next_BN)), *where)

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        native, head = getattr(self.prefix, "native", None), self.head
        even = head.hidden % (STEP * head.step.heads) == 0
        if native is None or not (even and native.steps(len(self.state_BH) * nodes)):
            return None
        drawn = Draws(self.lm_head, temperature, self.pool, self.context)
        return clover_rounds(native, drawn, self.state_BH, head.target_head_VH, *self.parts)

    @cached_property
    def parts(self) -> tuple[list[Tensor], list[Product]]:
        """Norms and products, as C++ is given them."""
        head, norms, maps = self.head, list[Tensor](), list[list[nn.Linear]]()
        for part in (head.enter, head.step):
            norms.append(part.norm.weight)
            maps += [part.query], [part.key, part.value]
        maps += [head.first], [head.later]
        return [*norms, head.head_norm.weight], [Product.of(linears) for linears in maps]

    def feed(self, request: Round) -> Feed:
        state_BFH = self.state_BH[:, None]

        def feed(frontier: Frontier) -> Fed:
            nonlocal state_BFH
            if frontier.depth == 0:  # the pending token is in the row's state
                return self._fed(self.head.state(state_BFH, None))
            if frontier.of_BF is not None:
                state_BFH = picked(state_BFH, frontier.of_BF)
            token_BFH = self.head.embed(frontier.tokens_BF)
            state_BFH = self.head.step(state_BFH, token_BFH)
            return self._fed(self.head.state(state_BFH, token_BFH))

        return feed

    def first(self, states_BTH: Tensor, next_BT: Tensor) -> Fed:
        return self._fed(self.head.state(states_BTH, None))

    def _fed(self, state_BFH: Tensor) -> Fed:
        return Fed(self.lm_head.logits(state_BFH), state_BFH)

    @property
    def parameter_bytes(self) -> int:
        return super().parameter_bytes + self.lm_head.bytes_read
