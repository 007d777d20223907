"""Block drafters: the trunk runs once a round, then each node costs its light head.

A row of n committed tokens keeps the trunk's keys and values of their context states, position i in
slot i, made once. The block's own lie beyond, from slot n on: they are of this round alone,
whatever of it is kept. At depth k the nodes fed are the tokens before the drafted ones; they share
the trunk's row k, and the light head tells them apart; a layer of its own keeps the nodes' keys and
values beyond slot n too.

Shapes: B rows, N tokens, F nodes fed, M anchors, b rows of a block, n depths, R rows or ranks, H
hidden, S numbers carried along a path, V vocabulary.
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Embedding
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Fed, Feed, Frontier, Round, picked
from draftsmith.decode.drafting.grow_tree import at_once, grow_at_once, grow_known
from draftsmith.decode.drafting.head_drafter import HeadDrafter
from draftsmith.decode.drafting.in_rounds import Draws, InRounds, LightParts, Trunk, one_pass_rounds
from draftsmith.decode.forward.attention import Seen
from draftsmith.decode.forward.lean import lean_copy
from draftsmith.decode.forward.lean_heads import lean_block, lean_nodes
from draftsmith.decode.forward.native import NativeBody
from draftsmith.decode.forward.product import Product
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.block import Block, Guess
from draftsmith.models.layers.block_lights import Light
from draftsmith.models.layers.layer import Keep


class BlockDrafter(HeadDrafter):
    """One pass for all depths, and a light head a node."""

    head: Block
    one_pass, attends = True, False

    def __init__(self, head: Block, target: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(head, target, head.stacked)
        self.lm_head = self.vocab_head(head.target_head_VH, vocab_size)
        self.each = head.light.deep
        self.after, self.light = None, lean_copy(head.light)
        if head.light.rank:
            self.after = self.vocab_head(head.light.after.weight, vocab_size)
            del vars(self.light)["after"]
        self.body, self.nodes = lean_block(head), lean_nodes(head)

    @property
    def size(self) -> ModelSize:
        head = self.head
        ahead = 0 if head.light.deep else head.levels + 2 * (head.light.rank > 0)
        return ModelSize(head.stacked, self.dtype, scratch=head.block, ahead=ahead)

    @property
    def native(self) -> NativeBody | None:
        return self.nodes.native if self.nodes is not None else None

    def reset(self, rows: int, slots: int) -> None:
        super().reset(rows, slots + self.head.block)

    def read(self, taps_BNU: Tensor, next_BN: Tensor, where: tuple[Tensor, Keep]) -> Tensor:
        context_BNH = self.body.fuse(taps_BNU)
        self.body.keep(context_BNH, *where)
        return context_BNH

    def at_once(self, request: Round) -> TokenTree | None:
        if self.nodes is not None:
            if (native := at_once(request, self.native, self.lm_head)) is None:
                return None
            where = self.lm_head, self.pool.above(self.head.lit.start), self.context
            return grow_at_once(request, native, *where, None, self._trunk(request), request.lens_B)
        if type(self.head.light) is not Light:
            return None

        def logits() -> Tensor:
            return self.lm_head.logits(self.body.normed(self._trunk(request)))

        return grow_known(request, logits)

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        """Not of those that read the noise."""
        head, rows, plan = self.head, len(self.state_BH), self.head.config
        stack, lit = getattr(self.body, "stack", None), self.native
        native: NativeBody | None = None if stack is None else stack.native
        if native is None or plan.noise or not native.steps(rows * max(nodes, head.block)):
            return None
        if head.light.layers and not (lit and lit.drafts(self.lm_head, rows)):
            return None
        size = 0 if plan.mask == "causal" else head.block
        last_HH = head.last.weight if plan.last else None
        made = head.hidden_norm.weight, head.mask_H, head.target_embedding_VH, last_HH
        trunk = Trunk(len(head.layers), head.first, size, made)
        drawn = Draws(self.lm_head, temperature, self.pool, self.context)
        above = None if lit is None else (lit, self.pool.above(head.lit.start))
        given = self.state_BH, head.fc.weight, trunk, above, self.light_parts
        return one_pass_rounds(native, drawn, *given)

    @cached_property
    def light_parts(self) -> LightParts | None:
        """Of a light head without layers, as C++ is given them."""
        light, lean = self.head.light, vars(self.light)
        if type(light) is Light or light.layers:
            return None
        norms = [getattr(light, name, None) for name in ("of_token", "of_state")]
        before, after = getattr(light, "before", None), self.after
        tensors = [None if p is None else p.weight for p in (before, after, *norms)]
        numbers = light.rank, light.width, norms[0].variance_epsilon if norms[0] else 0.0
        named = map(lean.get, ("gate", "gates", "inner", "gate_up", "down"))
        maps = [part for part in named if isinstance(part, Product)]
        cell = [lean["cell"].given, lean["cell"].kept] if "cell" in lean else []
        kind = self.head.config.light.replace("path", "swiglu")
        return LightParts(kind, numbers, tuple(tensors), maps, cell)

    def feed(self, request: Round) -> Feed:
        light, lens_B1, lit = self.light, request.lens_B[:, None], self.head.lit
        width = self.pool.width(request.top + request.plan.slots)
        lit_pool = self.pool.above(lit.start)
        output_BnH = state_BnH = logits_BnV = carried_BFS = self.head.fc.weight

        def feed(frontier: Frontier) -> Fed:
            nonlocal output_BnH, state_BnH, logits_BnV, carried_BFS
            depth, tokens_BF = frontier.depth, frontier.tokens_BF
            if depth == 0:
                output_BnH = self._trunk(request)
                carried_BFS = output_BnH.new_zeros(*tokens_BF.shape, light.width)
                if not light.deep:  # the LM head is read once for all depths
                    state_BnH = self.body.normed(output_BnH)
                    logits_BnV = self.lm_head.logits(state_BnH)
            elif frontier.of_BF is not None and light.width:
                carried_BFS = picked(carried_BFS, frontier.of_BF)
            output_BFH = output_BnH[:, depth, None].expand(-1, tokens_BF.shape[1], -1)
            if self.nodes is not None:
                where = lit_pool.fed(*frontier.placed(lens_B1, width))
                output_BFH = self.nodes.step(output_BFH, tokens_BF, *where)
            elif light.deep:
                given = output_BFH, self.head.embed(tokens_BF), carried_BFS
                output_BFH, carried_BFS = light.changed(*given)
                if lit:
                    where = self.pool.fed(*frontier.placed(lens_B1, width))
                    output_BFH = self.body.run(*where, tokens_BF.shape[1])(output_BFH, lit)
            if light.deep:
                state_BFH = self.body.normed(output_BFH)
                return Fed(self.lm_head.logits(state_BFH), state_BFH)
            # Others know the last token by its number.
            embedded_BFH = self.head.embed(tokens_BF) if light.width else output_BFH
            state_BFH = state_BnH[:, depth, None].expand_as(output_BFH)
            logits_BFV = logits_BnV[:, depth, None].expand(-1, tokens_BF.shape[1], -1)
            if self.after is not None:
                low_BFR, carried_BFS = light.low(state_BFH, tokens_BF, embedded_BFH, carried_BFS)
                logits_BFV = logits_BFV + self.after.logits(low_BFR)
            return Fed(logits_BFV, state_BFH)

        return feed

    def _trunk(self, request: Round) -> Tensor:
        """The trunk's rows of all depths, [B, n, H]; a causal block only as deep as the plan."""
        causal = self.head.config.mask == "causal"
        rows = self.head.first + request.plan.levels if causal else self.head.block
        row_b = torch.arange(rows, device=self.device)
        at_Bb = request.lens_B[:, None] + row_b
        block_bb = None if causal else torch.ones(rows, rows, dtype=torch.bool, device=self.device)
        width = self.pool.width(request.top + rows)
        seen = Seen(request.lens_B, width, block_bb, row_b)
        run = self.body.run(*self.pool.fed(at_Bb, at_Bb, seen), rows)
        guess = self._guess(request) if self.head.config.noise else None
        given = request.pending_B[:, None], self.state_BH[:, None]
        return self.body.trunk(*given, rows, run, guess)[:, 0, : request.plan.levels]

    def _guess(self, request: Round) -> Guess:
        """The tokens that rows win by the round's own noise, where it has any."""

        def guess(states_BbH: Tensor) -> Tensor:
            scores_BbV = request.params.transform(self.lm_head.logits(states_BbH))
            if request.race_BDV is not None:
                scores_BbV = scores_BbV - request.race_BDV[:, : scores_BbV.shape[1]]
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
            logits_BMV = logits_BMV + self.after.logits(state_BMI[..., self.head.hidden :])
        return F.pad(logits_BMV, (0, 0, 1, 0))

    @property
    def parameter_bytes(self) -> int:
        """The trunk's share and a light head's own; of a table of embeddings one row is read."""
        light, lm_head = self.head.light, self.lm_head.bytes_read
        own = sum(p.nbytes for p in light.parameters())
        whole = sum(p.nbytes for p in self.head.parameters()) - own
        own -= sum(part.weight.nbytes for part in light.children() if isinstance(part, Embedding))
        own -= self.left_out(self.after) if self.after is not None else 0
        once, each = (whole, own + lm_head) if light.deep else (whole + lm_head, own)
        return once // self.levels + each
