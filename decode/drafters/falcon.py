"""Falcon as the drafter: a pass every k levels, whose rows give the laws of the next k.

A row of n committed tokens has been fed the pairs 0..n-1, pair i in slot i; its state is what the
block of the last k pairs drafts, these pairs' y, and what the LSTM keeps. The nodes below one that
ended a block share its laws, row by row. Each node fed is a pair too, after its parent's: the LSTM
goes one step on, and its key and value go into its slot; every k levels the last k pairs of each
path are a block, which sees the text and that path.

Shapes: B rows, N prompt tokens, L tokens of a kept path, F nodes fed, T tokens of a text, k rows of
a block, H hidden, X = (k + 4) * H: y of the last k pairs, and the LSTM's; W = X + k * H, V
vocabulary.
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Fed, Feed, Frontier, Kept, Round, picked
from draftsmith.decode.drafting.head_drafter import HeadDrafter, HeadKV
from draftsmith.decode.drafting.in_rounds import Draws, InRounds, falcon_rounds
from draftsmith.decode.forward.attention import Seen
from draftsmith.decode.forward.lean_heads import lean_prefix
from draftsmith.decode.forward.product import Product, packs
from draftsmith.models.heads.falcon import OF_LSTM, Falcon
from draftsmith.models.layers.layer import Attention, causal

FEW = 16  # pairs whose LSTM goes by products of its own


class FalconDrafter(HeadDrafter):
    """Tokens enter between passes."""

    head: Falcon
    held = ("pool", "state_BW")

    def __init__(self, head: Falcon, target: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(head, target, head.config)
        self.lm_head = self.vocab_head(head.target_head_VH, vocab_size)
        self.stride, self.packs = head.block, packs(head.target_head_VH)
        self.block_native = getattr(self.packs and lean_prefix(head), "native", None)
        self.wide = head.block * head.hidden  # of a block's rows side by side

    def reset(self, rows: int, slots: int) -> None:
        width = 2 * self.wide + 4 * self.head.hidden
        self.state_BW = torch.zeros(rows, width, dtype=self.dtype, device=self.device)
        self.pool = HeadKV(self.head.config, rows, slots, self.context, self.state_BW)

    def prefill(self, admitted: Admitted) -> None:
        assert admitted.taps_RNU is not None, "the engine gives what `taps` asks for"
        rows_R, last_R1 = admitted.rows_R, admitted.lens_R[:, None] - 1
        at_RN, keep = self.pool.taken(rows_R, admitted.tokens_RN.shape[1])
        old_RX = self.state_BW.new_zeros(len(rows_R), self.state_BW.shape[1] - self.wide)
        sees_R1kN = (at_RN <= last_R1)[:, None, None].expand(-1, -1, self.head.block, -1)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keep(layer, key, value)
            return causal(sees_R1kN)(layer, query, key, value)

        new = (admitted.taps_RNU, admitted.next_RN, at_RN, last_R1)
        self.state_BW[rows_R] = self._ended(old_RX, *new, attend)

    def extend(self, kept: Kept) -> None:
        """What is made beyond the kept tokens is overwritten before anything sees it."""
        assert kept.taps_BLU is not None, "the engine gives what `taps` asks for"
        length, n_new_B1 = kept.tokens_BL.shape[1], kept.n_new_B[:, None]
        at_BL = kept.lens_B[:, None] + torch.arange(length, device=self.device)
        last_B1 = (n_new_B1 - 1).clamp(min=0)
        nothing_k1 = torch.zeros(self.head.block, 1, dtype=torch.bool, device=self.device)
        ended_B = at_BL.gather(1, last_B1)[:, 0] + 1
        seen = Seen(ended_B, self.pool.width(kept.top + length), nothing_k1)
        rows_Bk = at_BL[:, :1].expand(-1, self.head.block)
        attention = self.pool.fed(rows_Bk, at_BL, seen)[1]
        old_BX = self.state_BW[:, self.wide :]
        new = (kept.taps_BLU, kept.tokens_BL, at_BL, last_B1)
        state_BW = self._ended(old_BX, *new, attention)
        self.state_BW.copy_(torch.where(n_new_B1 > 0, state_BW, self.state_BW))

    def _ended(
        self,
        old_BX: Tensor,
        taps_BTH: Tensor,
        next_BT: Tensor,
        at_BT: Tensor,
        last_B1: Tensor,
        attention: Attention,
    ) -> Tensor:
        """States [B, W] after the pairs `last`, from those before."""
        head, k = self.head, self.head.block
        recent_BkH = old_BX[:, : self.wide].unflatten(1, (k, -1))
        states_BTH, memory_BS = taps_BTH.to(self.dtype), old_BX[:, self.wide :]
        y_BTH, memory_BS = self._along(states_BTH, next_BT, memory_BS, last_B1)
        rows_B1I = picked(head.blocks(y_BTH, at_BT, recent_BkH).flatten(2), last_B1)
        keyed, end_B1 = head.keys(y_BTH, at_BT), at_BT.gather(1, last_B1)
        drafted_B1kH = head.draft(
            rows_B1I.unflatten(2, (k, -1)), end_B1, lambda query: attention(0, query, *keyed)
        )
        return torch.cat([drafted_B1kH.flatten(1), rows_B1I[:, 0], memory_BS], 1)

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        rows, native = len(self.state_BW), self.block_native
        if native is None or not native.steps(rows * max(nodes, self.stride)):
            return None
        drawn = Draws(self.lm_head, temperature, self.pool, self.context)
        given = self.state_BW, self.head.target_embedding_VH
        return falcon_rounds(native, drawn, *given, self.stride, self.gates)

    @cached_property
    def gates(self) -> list[Product]:
        """What the LSTM's layers make of what they read, and of their last output."""
        of = [[getattr(self.head.lstm, f"{n}_l{i}") for n in OF_LSTM] for i in range(2)]
        return [Product([lstm[i]], [lstm[i + 2]]) for i in range(2) for lstm in of]

    def feed(self, request: Round) -> Feed:
        k, last_B1 = self.head.block, request.lens_B[:, None] - 1
        width = self.pool.width(request.top + request.plan.slots)
        deepest = (request.plan.levels - 1) // k * k  # where the last pass is
        drafted_BFI, carried_BFX = self.state_BW[:, None].tensor_split([self.wide], -1)
        drafted_BFkH = drafted_BFI.unflatten(2, (k, -1))
        logits_BFkV, of_BF = self.lm_head.logits(drafted_BFkH), torch.zeros_like(last_B1)

        def feed(frontier: Frontier) -> Fed:
            nonlocal drafted_BFkH, carried_BFX, logits_BFkV, of_BF
            depth = frontier.depth
            if frontier.of_BF is not None:
                of_BF = of_BF.gather(1, frontier.of_BF)
                carried_BFX = picked(carried_BFX, frontier.of_BF)
            if 0 < depth <= deepest:
                before_BFH = picked(drafted_BFkH[:, :, (depth - 1) % k], of_BF)
                carried_BFX = self._paired(before_BFH, frontier.tokens_BF, carried_BFX)
                rows_BFkH = carried_BFX[..., : self.wide].unflatten(2, (k, -1))
                at_BF, slots_BF, seen = frontier.placed(last_B1, width)
                keyed = self.head.keys(rows_BFkH[:, :, -1], at_BF)
                if depth % k:
                    self.pool.added(at_BF, slots_BF)[1](0, *keyed)
                else:
                    attention = self.pool.fed(*self._by_row(at_BF, slots_BF, seen))[1]
                    drafted_BFkH = self.head.draft(
                        rows_BFkH, at_BF, lambda query: attention(0, query, *keyed)
                    )
                    logits_BFkV = self.lm_head.logits(drafted_BFkH)
                    of_BF = torch.arange(at_BF.shape[1], device=self.device).expand_as(at_BF)
            made = (x[:, :, depth % k] for x in (logits_BFkV, drafted_BFkH))
            return Fed(*(picked(x_BFY, of_BF) for x_BFY in made))

        return feed

    def _paired(self, states_BFH: Tensor, tokens_BF: Tensor, carried_BFX: Tensor) -> Tensor:
        """What nodes carry on, from what their parents did."""
        memory_NS = carried_BFX[..., self.wide :].flatten(0, 1)
        pair = states_BFH.flatten(0, 1)[:, None], tokens_BF.flatten()[:, None]
        y_N1H, memory_NS = self._along(*pair, memory_NS, torch.zeros_like(pair[1]))
        recent_BFI = carried_BFX[..., self.head.hidden : self.wide]
        made_NY = torch.cat([y_N1H[:, 0], memory_NS], -1)
        return torch.cat([recent_BFI, made_NY.unflatten(0, tokens_BF.shape)], -1)

    def _along(
        self, states_BTH: Tensor, next_BT: Tensor, memory_BS: Tensor, last_B1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As the head's own; of a few pairs on a CPU by products that lay no matrix anew."""
        if next_BT.shape[1] > FEW or not self.packs:
            return self.head.along(states_BTH, next_BT, memory_BS, last_B1=last_B1)
        x_BTI, kept = torch.cat([self.head.embed(next_BT), states_BTH], -1), list[Tensor]()
        for layer in range(2):
            output_BH, cell_BH = memory_BS.chunk(4, -1)[2 * layer : 2 * layer + 2]
            made = list[Tensor](), list[Tensor]()
            for given_BG in self.gates[layer](x_BTI).unbind(1):
                gates_BG = given_BG + self.gates[2 + layer](output_BH)
                enters_BH, stays_BH, new_BH, leaves_BH = gates_BG.chunk(4, -1)
                cell_BH = stays_BH.sigmoid() * cell_BH + enters_BH.sigmoid() * new_BH.tanh()
                output_BH = leaves_BH.sigmoid() * cell_BH.tanh()
                for of, part in zip(made, (output_BH, cell_BH), strict=True):
                    of.append(part)
            x_BTI, cells_BTH = (torch.stack(part, 1) for part in made)
            kept += [picked(each, last_B1)[:, 0] for each in (x_BTI, cells_BTH)]
        return x_BTI, torch.cat(kept, -1)

    def _by_row(self, at_BF: Tensor, slots_BF: Tensor, seen: Seen) -> tuple[Tensor, Tensor, Seen]:
        """For the k queries that each of the nodes has; all see what it sees."""
        k, block = self.head.block, seen.block
        if block is None:  # a chain's one node, and all before it
            block = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        seen = Seen(seen.lens_B, seen.width, block.repeat_interleave(k, -2), seen.depth)
        return at_BF.repeat_interleave(k, 1), slots_BF, seen

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor:
        """After the first token, before which there is no state, 0."""
        next_BT, states_BTH = ids_BT[:, 1:], taps_BTU[:, :-1].to(self.dtype)
        at_BT = torch.arange(next_BT.shape[1], device=self.device).expand_as(next_BT)
        drafted_BTkH = self.head.drafted(states_BTH, next_BT, at_BT)
        return F.pad(self.lm_head.logits(drafted_BTkH[:, :, 0]), (0, 0, 1, 0))

    @property
    def parameter_bytes(self) -> int:
        """A pass for every k calls, the LSTM for each."""
        once = sum(p.nbytes for p in self.head.layer.parameters()) + self.lm_head.weight.nbytes
        return once // self.head.block + sum(p.nbytes for p in self.head.lstm.parameters())
