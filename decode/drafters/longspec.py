"""LongSpec's layer as the drafter: a ring of its own keys, and the target's in the target's pool.

A row of n committed tokens holds, in a ring of W slots, its own keys and values of the last W of
them; a round's nodes lie behind the ring. They read the target's last layer in slots below n: that
a node at depth d sees nothing of the d tokens before it is how it was trained.

Shapes: B rows, R of them just admitted, N prompt tokens, L tokens of a kept path, M tokens taken
in, T tokens of a text, F nodes fed, S slots.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import (
    Admitted,
    Drafter,
    Fed,
    Feed,
    Frontier,
    Kept,
    Round,
)
from draftsmith.decode.drafting.grow_tree import grow
from draftsmith.decode.drafting.head_drafter import HeadKV
from draftsmith.decode.forward.attention import Attend, Seen, mix
from draftsmith.decode.forward.kv import ROOM, KVPool, SlotCache, ring, round_up
from draftsmith.decode.forward.native import attends, committed
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.longspec import Cross, LongSpec


class LongSpecDrafter(Drafter):
    """Trees and chains; each draft call runs the layer over the nodes fed."""

    kind = "longspec"
    shares = owes = True
    room = ROOM
    held: tuple[str, ...] = ("pool", "own")

    def __init__(self, head: LongSpec, target: PreTrainedModel, vocab_size: int) -> None:
        self.head = head.bind(target)
        self.levels, self.context = head.levels, head.context
        self.runner = Runner(target, vocab_size)
        self.weight = next(head.parameters())

    @property
    def size(self) -> ModelSize:
        window, dtype = self.head.window, self.weight.dtype
        return ModelSize(self.head.config, dtype, window=window, scratch=ROOM)

    @property
    def parameter_bytes(self) -> int:
        return sum(p.nbytes for p in self.head.parameters()) + self.runner.head.weight.nbytes

    def reset(self, rows: int, slots: int) -> None:
        self._begin(self.runner.pool(rows, slots), slots)

    def share(self, pool: KVPool) -> None:
        self._begin(pool, ROOM)

    def _begin(self, pool: KVPool, room: int) -> None:
        self.pool, slots = pool, self.head.window + room
        self.own = HeadKV(self.head.config, pool.rows, slots, self.context, self.weight)

    def prefill(self, admitted: Admitted) -> None:
        """A prompt's last tokens, and the pending one."""
        self.own.clear(admitted.rows_R)
        lens_R1 = admitted.lens_R[:, None]
        tokens_RN = F.pad(admitted.tokens_RN, (0, 1))
        tokens_RN = tokens_RN.scatter(1, lens_R1, admitted.pending_R[:, None])
        count = min(self.head.window, tokens_RN.shape[1])
        at_RM = lens_R1 - torch.arange(count, device=lens_R1.device)
        tokens_RM = tokens_RN.gather(1, at_RM.clamp(min=0))
        self._take(admitted.rows_R, tokens_RM, at_RM, at_RM >= 0)

    def extend(self, kept: Kept) -> None:
        """The tokens emitted, the new pending one too: it is seen when it is committed. Of more
        than the window holds, the last ones.
        """
        step_L = torch.arange(kept.tokens_BL.shape[1], device=kept.lens_B.device)
        at_BL = kept.lens_B[:, None] + 1 + step_L
        rows_B = torch.arange(len(kept.lens_B), device=step_L.device)
        left_BL = kept.n_new_B[:, None] - step_L  # from each one on
        self._take(rows_B, kept.tokens_BL, at_BL, (left_BL > 0) & (left_BL <= self.head.window))

    @torch.inference_mode()
    def _take(self, rows_R: Tensor, tokens_RM: Tensor, at_RM: Tensor, own_RM: Tensor) -> None:
        """Keys and values of the tokens that `own_RM` marks, at their positions."""
        part, slots = self.head.layer, self.own.slots
        # What isn't kept goes where no committed token is.
        slots_RM = torch.where(own_RM, ring(at_RM, self.head.window), slots - 1)
        hidden_RMH = self.head.embed(tokens_RM)
        rotary = self.head.rotary(hidden_RMH, at_RM.clamp(0, self.context - 1))
        keys = part.remember(part.input_layernorm(hidden_RMH), rotary)
        SlotCache(self.own, (rows_R[:, None] * slots + slots_RM).flatten(), 0).write(0, *keys)

    def propose(self, request: Round) -> TokenTree:
        return grow(request, self.feed(request))[0]

    def feed(self, request: Round) -> Feed:
        window, lens_B1 = self.head.window, request.lens_B[:, None]
        fill_B1 = lens_B1.clamp(max=window)
        width = self.own.width(min(request.top, window) + request.plan.slots)
        slot_S = torch.arange(width, device=lens_B1.device)
        # The latest committed token of each slot of the ring.
        latest_BS = lens_B1 - 1 - (lens_B1 - 1 - slot_S) % window
        at_BS = torch.where(slot_S < fill_B1, latest_BS, lens_B1)

        def feed(frontier: Frontier) -> Fed:
            at_BF, slots_BF, seen = frontier.placed(fill_B1, width)
            at_BF = at_BF + (lens_B1 - fill_B1)
            at_BF, attention = self.own.fed(at_BF, slots_BF, replace(seen, at=at_BS), window)
            hidden_BFH = self.head.begin(frontier.tokens_BF, at_BF, attention)
            states_BFH = self.head.end(hidden_BFH, at_BF, self._cross(request, at_BF))
            return Fed(self.runner.logits(states_BFH), states_BFH)

        return feed

    def _cross(self, request: Round, at_BF: Tensor) -> Cross:
        """Attention to the target's committed slots, and to no other."""
        width = min(round_up(request.top), self.pool.slots)

        def cross(query: Tensor) -> Tensor:
            if attends(query, self.pool):
                last = len(self.pool.keys_LBSHE) - 1
                return committed(query, self.pool, last, request.lens_B, width).flatten(2)
            none_F1 = torch.zeros(at_BF.shape[1], 1, dtype=torch.bool, device=at_BF.device)
            how = {"groups": self.own.groups, "dtype": self.weight.dtype}
            seen = Seen(request.lens_B, width, none_F1)
            attend = Attend(seen, at_BF, backend="masked", **how)
            keys, values = (kv[-1, :, :width].transpose(1, 2) for kv in self.pool.kv_2LBSHE)
            return mix(attend, query.transpose(1, 2), keys, values, scale=None).flatten(2)

        return cross

    @torch.inference_mode()
    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor:
        """After each token, of which the target has no keys yet."""
        rows, length = ids_BT.shape
        pool, row_B = self.runner.pool(rows, length), torch.arange(rows, device=ids_BT.device)
        self.runner.prefill(pool, row_B, ids_BT, torch.full_like(row_B, length))
        at_BT = torch.arange(length, device=ids_BT.device).expand_as(ids_BT)
        keys, values = pool.kv_2LBSHE[:, -1, :, :length]
        return self.runner.logits(self.head.lagging(ids_BT, at_BT, (keys, values), None, (1,))[0])
