"""EAGLE heads (Li et al., arXiv 2401.15077, 2406.16858, 2503.01840) and MTP modules as the drafter.

A row of n committed tokens has been fed the pairs (f_i, x_{i+1}) for i = 0..n-1, the last one with
the pending token: pair i lies in slot i and at rotary position i. Its output there, kept as state,
gives the law of the root's children without another pass; a node at depth k is fed with its
parent's output in the target's place, at position n - 1 + k. After the verdict the kept tokens are
fed again, with the target's own states, over what was drafted there.

Shapes: B rows, N nodes or tokens, F nodes fed, H hidden, U width of the taps side by side, D draft
vocabulary, V the tokenizer's.
"""

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Fed, Feed, Frontier, Round, picked
from draftsmith.decode.drafting.grow_tree import at_once, grow_at_once
from draftsmith.decode.drafting.head_drafter import HeadDrafter, Where
from draftsmith.decode.drafting.in_rounds import Draws, InRounds, head_rounds
from draftsmith.decode.forward.lean_heads import LeanEagle, lean_eagle
from draftsmith.decode.forward.native import NativeBody
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.eagle import Eagle


class EagleDrafter(HeadDrafter):
    """An EAGLE head or an MTP module; each draft call runs its layers over the nodes fed."""

    head: Eagle
    each = True

    def __init__(self, head: Eagle, target: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(head, target, head.config.layer)
        self.lm_head = self.vocab_head(head.head_DH, vocab_size)
        self.body: Eagle | LeanEagle = lean_eagle(head) or head

    @property
    def size(self) -> ModelSize:
        # EAGLE-3's first layer reads two states side by side.
        wide = 0 if self.head.config.version == 1 else 2 * self.head.hidden
        return ModelSize(self.head.config.layer, self.dtype, beside=wide)

    def read(self, taps_BNU: Tensor, next_BN: Tensor, where: Where | None) -> Tensor:
        assert where is not None
        return self.body.step(self.body.fuse(taps_BNU), next_BN, *where)

    @property
    def native(self) -> NativeBody | None:
        return self.body.native if isinstance(self.body, LeanEagle) else None

    def at_once(self, request: Round) -> TokenTree | None:
        if (native := at_once(request, self.native, self.lm_head)) is None:
            return None
        states = self.body.before_head(self.state_BH), self.body.fed_back(self.state_BH)
        where = self.lm_head, self.pool, self.pool.context
        return grow_at_once(request, native, *where, *states, request.lens_B)

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        native, body, rows = self.native, self.body, len(self.state_BH)
        drafts = native and native.drafts(self.lm_head, rows) and native.steps(rows * nodes)
        if native is None or not drafts or not isinstance(body, LeanEagle):
            return None
        drawn = Draws(self.lm_head, temperature, self.pool, self.pool.context)
        return head_rounds(native, drawn, self.state_BH, body.fusing)

    def feed(self, request: Round) -> Feed:
        width = self.pool.width(request.top + request.plan.slots)
        last_B1 = request.lens_B[:, None] - 1
        outputs_BFH = self.state_BH[:, None]

        def feed(frontier: Frontier) -> Fed:
            nonlocal outputs_BFH
            if frontier.depth == 0:
                return self.first(outputs_BFH)
            if frontier.of_BF is not None:
                outputs_BFH = picked(outputs_BFH, frontier.of_BF)
            where = self.pool.fed(*frontier.placed(last_B1, width))
            hidden_BFH = self.body.fed_back(outputs_BFH)
            outputs_BFH = self.body.step(hidden_BFH, frontier.tokens_BF, *where)
            return self.first(outputs_BFH)

        return feed

    def first(self, states_BTH: Tensor, next_BT: Tensor | None = None) -> Fed:
        """Raw logits, -inf for tokens that aren't drafted, and what they are made of."""
        state_BTH = self.body.before_head(states_BTH).to(self.lm_head.weight.dtype)
        return Fed(self.lm_head.logits(state_BTH), state_BTH)

    @property
    def parameter_bytes(self) -> int:
        """EAGLE-3 needs its fc for the target's states alone."""
        read = [*self.head.layers.parameters()]
        read += self.head.fc.parameters() if self.head.config.version == 1 else []
        return sum(tensor.nbytes for tensor in read) + self.lm_head.bytes_read
