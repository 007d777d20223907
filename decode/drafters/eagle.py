"""EAGLE heads as the drafter (Li et al., arXiv 2401.15077, 2406.16858 and 2503.01840).

A row of n committed tokens has been fed the pairs (f_i, x_{i+1}) for i = 0..n-1, the last one with
the pending token: pair i lies in slot i and at rotary position i. Its output there, kept as state,
gives the law of the root's children without another pass; a node at depth k is fed with its
parent's output in the target's place, at position n - 1 + k. After the verdict the kept tokens are
fed again, with the target's own states, over what was drafted there.

Shapes: B rows, N nodes or prompt tokens, L tokens of a kept path, F nodes fed, H hidden, U width of
the taps side by side, D draft vocabulary, V the tokenizer's.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafters.base import ANY_DEPTH, Admitted, Fed, Feed, Frontier, Kept, Round
from draftsmith.decode.drafters.grow_tree import grow
from draftsmith.decode.drafters.head_kv import (
    HeadKV,
    bytes_of,
    from_second,
    keep_last,
    picked,
    state_at,
)
from draftsmith.decode.forward.attention import Seen
from draftsmith.decode.forward.lean_eagle import LeanEagle, lean_eagle
from draftsmith.decode.forward.product import VocabHead
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.eagle import Eagle, causal
from draftsmith.models.scorers import Scored


class EagleDrafter:
    """Trees and chains from an EAGLE-1 or EAGLE-3 head with a KV pool of its own.

    Raises ValueError for a head made for another target (see `Head.bind`).
    """

    trees = samples = True
    levels = ANY_DEPTH
    acceptance: Scored | None = None
    held: tuple[str, ...] = ("pool", "state_BH")

    def __init__(self, head: Eagle, target: PreTrainedModel, vocab_size: int) -> None:
        self.head = head.bind(target)
        self.kind, self.taps, self.context = head.kind, head.taps, head.context
        self.layer = head.config.layer
        weight = head.fc.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.vocab = head.vocab
        ids_D = None if self.vocab.is_full else self.vocab.ids_D
        self.lm_head = VocabHead(head.head_DH.detach(), ids_D, vocab_size)
        self.body: Eagle | LeanEagle = lean_eagle(head) or head

    @property
    def size(self) -> ModelSize:
        # EAGLE-3's first layer reads two states side by side.
        wide = 0 if self.kind == "eagle1" else 2 * self.head.hidden
        return ModelSize(self.layer, self.dtype, beside=wide)

    def reset(self, rows: int, slots: int) -> None:
        self.state_BH = torch.zeros(rows, self.head.hidden, dtype=self.dtype, device=self.device)
        self.pool = HeadKV(
            self.layer, rows=rows, slots=slots, context=self.context, like=self.state_BH
        )

    def release(self) -> None:
        self.__dict__.pop("pool", None)
        self.__dict__.pop("state_BH", None)

    def prefill(self, admitted: Admitted) -> None:
        assert admitted.taps_RNU is not None, "the engine gives what `taps` asks for"
        rows_R, tokens_RN = admitted.rows_R, admitted.tokens_RN
        last_R1 = admitted.lens_R[:, None] - 1
        next_RN = tokens_RN.roll(-1, 1).scatter(1, last_R1, admitted.pending_R[:, None])
        where = self.pool.prefill(rows_R, tokens_RN.shape[1])
        output_RNH = self.body.step(self._fused(admitted.taps_RNU), next_RN, *where)
        self.state_BH[rows_R] = state_at(output_RNH, admitted.lens_R - 1)

    def propose(self, request: Round) -> TokenTree:
        return grow(request, self.feed(request))[0]

    def feed(self, request: Round) -> Feed:
        width = self.pool.width(request.top + request.plan.slots)
        last_B1 = request.lens_B[:, None] - 1
        outputs_BFH = self.state_BH[:, None]

        def feed(frontier: Frontier) -> Fed:
            nonlocal outputs_BFH
            if frontier.depth == 0:
                return self._fed(outputs_BFH)
            hidden_BFH = outputs_BFH
            if frontier.of_BF is not None:
                hidden_BFH = picked(hidden_BFH, frontier.of_BF)
            slots_BF = last_B1 + frontier.slot_F
            at_BF = (last_B1 + frontier.depth).expand_as(slots_BF)
            if frontier.block is None:
                seen = Seen(slots_BF[:, 0], width)
            else:
                seen = Seen(last_B1[:, 0], width, frontier.block, frontier.depth_M)
            hidden_BFH = self.body.fed_back(hidden_BFH)
            where = self.pool.fed(at_BF, slots_BF, seen)
            outputs_BFH = self.body.step(hidden_BFH, frontier.tokens_BF, *where)
            return self._fed(outputs_BFH)

        return feed

    def extend(self, kept: Kept) -> None:
        assert kept.taps_BLU is not None, "the engine gives what `taps` asks for"
        length = kept.tokens_BL.shape[1]
        at_BL = kept.lens_B[:, None] + torch.arange(length, device=self.device)
        seen = Seen(kept.lens_B, self.pool.width(kept.top + length))
        where = self.pool.fed(at_BL, at_BL, seen)
        output_BLH = self.body.step(self._fused(kept.taps_BLU), kept.tokens_BL, *where)
        keep_last(self.state_BH, output_BLH, kept.n_new_B)

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor:
        """Step 0 on the target's own states; after the first token, where no pair is whole, 0."""
        at_BT = torch.arange(ids_BT.shape[1] - 1, device=self.device).expand(len(ids_BT), -1)
        fused_BTH = self._fused(taps_BTU[:, :-1])
        output_BTH = self.body.step(fused_BTH, ids_BT[:, 1:], at_BT, causal())
        return from_second(self._fed(output_BTH).logits_BFV)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights one draft call reads: the layers, the LM head's rows, and of EAGLE-1
        the fc, which EAGLE-3 needs for the target's states alone.
        """
        read = [*self.head.layers.parameters(), self.lm_head.weight]
        read += self.head.fc.parameters() if self.kind == "eagle1" else []
        return bytes_of(read)

    def _fused(self, taps_BNU: Tensor) -> Tensor:
        return self.body.fuse(taps_BNU.to(self.dtype))

    def _fed(self, output_BNH: Tensor) -> Fed:
        """Raw logits, -inf for tokens that aren't drafted, and what they are made of."""
        state_BNH = self.body.before_head(output_BNH).to(self.lm_head.weight.dtype)
        return Fed(self.lm_head.logits(state_BNH), state_BNH)
