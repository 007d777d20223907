"""Block drafters: the trunk runs once a round, then each node costs a light product.

A row of n committed tokens keeps the trunk's keys and values of their context states, position i in
slot i, made once. The block's own lie beyond, from slot n on: they are of this round alone,
whatever of it is kept. At depth k the nodes fed are the tokens before the drafted ones; they share
the trunk's row k, and the light head tells them apart.

Shapes: B rows, N tokens, F nodes fed, M anchors, b rows of a block, n depths, R rows or ranks, H
hidden, S numbers carried along a path, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafters.base import Admitted, Fed, Feed, Frontier, Kept, Round, picked
from draftsmith.decode.drafters.head_drafter import HeadDrafter, HeadKV
from draftsmith.decode.drafters.medusa import output_product
from draftsmith.decode.forward.attention import Seen
from draftsmith.decode.forward.product import VocabHead, head_logits
from draftsmith.decode.forward.size import ModelSize
from draftsmith.models.heads.block import Block, Guess


class BlockDrafter(HeadDrafter):
    """One pass for all depths, and a light product a node."""

    head: Block
    held = ("pool",)

    def __init__(self, head: Block, target: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(head, target, head.config.layer)
        self.lm_head = VocabHead(head.target_head_VH.detach(), None, vocab_size)
        self.after = None
        if head.light.rank:
            self.after = output_product(head.light.after.weight, None, vocab_size)

    @property
    def size(self) -> ModelSize:
        return ModelSize(self.head.config.layer, self.dtype, scratch=self.head.block)

    def reset(self, rows: int, slots: int) -> None:
        layer, slots = self.head.config.layer, slots + self.head.block
        self.pool = HeadKV(layer, rows, slots, self.context, self.head.fc.weight.detach())

    def prefill(self, admitted: Admitted) -> None:
        assert admitted.taps_RNU is not None, "the engine gives what `taps` asks for"
        at_RN, keep = self.pool.taken(admitted.rows_R, admitted.tokens_RN.shape[1])
        self.head.keep(self.head.fuse(admitted.taps_RNU.to(self.dtype)), at_RN, keep)

    def extend(self, kept: Kept) -> None:
        """What is made beyond the kept tokens is overwritten before anything sees it."""
        assert kept.taps_BLU is not None, "the engine gives what `taps` asks for"
        length = kept.tokens_BL.shape[1]
        at_BL = kept.lens_B[:, None] + torch.arange(length, device=self.device)
        context_BLH = self.head.fuse(kept.taps_BLU.to(self.dtype))
        self.head.keep(context_BLH, *self.pool.added(at_BL))

    def feed(self, request: Round) -> Feed:
        light = self.head.light
        output_BnH = state_BnH = logits_BnV = carried_BFS = self.head.fc.weight

        def feed(frontier: Frontier) -> Fed:
            nonlocal output_BnH, state_BnH, logits_BnV, carried_BFS
            depth, tokens_BF = frontier.depth, frontier.tokens_BF
            if depth == 0:
                output_BnH = self._trunk(request)
                carried_BFS = output_BnH.new_zeros(*tokens_BF.shape, light.width)
                if not light.deep:  # the LM head is read once for all depths
                    state_BnH = self.head.norm(output_BnH)
                    logits_BnV = self.lm_head.logits(state_BnH)
            elif frontier.of_BF is not None and light.width:
                carried_BFS = picked(carried_BFS, frontier.of_BF)
            embedded_BFH = self.head.embed(tokens_BF)
            output_BFH = output_BnH[:, depth, None].expand(-1, tokens_BF.shape[1], -1)
            if light.deep:
                state_BFH = self.head.norm(light.changed(output_BFH, embedded_BFH))
                return Fed(self.lm_head.logits(state_BFH), state_BFH)
            state_BFH = state_BnH[:, depth, None].expand_as(output_BFH)
            logits_BFV = logits_BnV[:, depth, None].expand(-1, tokens_BF.shape[1], -1)
            if self.after is not None:
                low_BFR, carried_BFS = light.low(state_BFH, tokens_BF, embedded_BFH, carried_BFS)
                logits_BFV = logits_BFV + head_logits(self.after, low_BFR)
            return Fed(logits_BFV, state_BFH)

        return feed

    def _trunk(self, request: Round) -> Tensor:
        """The trunk's rows of all depths, [B, n, H]; a causal block only as deep as the plan."""
        row_b = torch.arange(self.head.block, device=self.device)
        at_Bb = request.lens_B[:, None] + row_b
        block_bb = torch.ones(len(row_b), len(row_b), dtype=torch.bool, device=self.device)
        block_bb = block_bb.tril() if self.head.config.mask == "causal" else block_bb
        width = self.pool.width(request.top + len(row_b))
        seen = Seen(request.lens_B, width, block_bb, row_b)
        where = self.pool.fed(at_Bb, at_Bb, seen)
        guess = self._guess(request) if self.head.config.noise else None
        return self.head.trunk(request.pending_B[:, None], *where, guess)[:, 0]

    def _guess(self, request: Round) -> Guess:
        """The tokens that rows win by the round's own noise, where it has any."""

        def guess(states_BbH: Tensor) -> Tensor:
            scores_BbV = request.params.transform(self.lm_head.logits(states_BbH))
            if request.race_BDV is not None:
                known_BbV = request.race_BDV[:, : self.head.block]
                beyond = self.head.block - known_BbV.shape[1]
                scores_BbV = scores_BbV - F.pad(known_BbV, (0, 0, 0, beyond))
            return scores_BbV.argmax(-1)

        return guess

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor:
        """After the first token, before which there is no state, 0. A drafter that reads the noise
        is shown none.
        """
        anchors_BM = torch.arange(1, ids_BT.shape[1], device=self.device).expand(len(ids_BT), -1)
        at_BT = torch.arange(ids_BT.shape[1], device=self.device).expand(len(ids_BT), -1)

        def guess(states_BRH: Tensor) -> Tensor:
            return self.lm_head.logits(states_BRH).argmax(-1)

        text = (taps_BTU.to(self.dtype), ids_BT, at_BT, anchors_BM, guess)
        state_BMI = self.head.drafted(*text)[1][:, :, 0]
        logits_BMV = self.lm_head.logits(state_BMI[..., : self.head.hidden].contiguous())
        if self.after is not None:
            logits_BMV = logits_BMV + head_logits(self.after, state_BMI[..., self.head.hidden :])
        return F.pad(logits_BMV, (0, 0, 1, 0))

    @property
    def parameter_bytes(self) -> int:
        return super().parameter_bytes + self.head.target_head_VH.nbytes // self.levels
