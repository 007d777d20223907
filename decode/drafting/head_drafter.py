"""What drafters around a trained head share: a state of each row, kept up with the target's.

A row's state is what its head has made of the target's taps at its last committed token and of the
pending one; heads with layers keep keys and values too. Each kind says how it reads (`read`) and
what it drafts from that (`feed`, `first`).

Shapes: B rows, R of them just admitted, N prompt tokens, L tokens of a kept path, T tokens of a
text, U width of the taps side by side, H hidden, V vocabulary.
"""

import copy
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Drafter, Fed, Kept, Round, picked
from draftsmith.decode.drafting.grow_tree import grow
from draftsmith.decode.forward.attention import Attend, Seen
from draftsmith.decode.forward.kv import KVPool, SlotCache, round_up
from draftsmith.decode.forward.lean import Attending
from draftsmith.decode.forward.product import VocabHead, quick
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.head import Head
from draftsmith.models.layers.layer import Attention, Keep, causal
from draftsmith.models.vocab import DraftVocab

Where = tuple[Tensor, Attention]  # positions [B, N], and how they attend


class HeadDrafter(Drafter):
    """Trees and chains from a head, in its own type and on its device. ValueError for a head made
    for another target (see `Head.bind`).

    layer: sizes of the layers whose keys and values it keeps, position i in slot i; None for none.
    They are of committed tokens and of this round's nodes: nothing is ever rolled back.
    """

    head: Head
    outputs: tuple[VocabHead, ...] = ()  # the LM heads, of those that have one a level
    owes = True
    attends = True  # whether `read` attends; else it is told where keys and values go
    trims = True  # whether it can draft some tokens alone
    lm_head: VocabHead  # of those that have one for all levels
    each = False  # whether that is read for every node
    held: tuple[str, ...] = ("pool", "state_BH")

    def __init__(
        self, head: Head, target: PreTrainedModel, layer: PretrainedConfig | None = None
    ) -> None:
        self.head = head.bind(target)
        quick(self.head)
        self.kind, self.taps = head.kind, head.taps
        self.levels, self.context = head.levels, head.context
        weight = next(head.parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self.layer = layer

    @property
    def vocab(self) -> DraftVocab:
        """The tokens that it drafts."""
        return self.head.vocab

    @property
    def per_node(self) -> VocabHead | None:
        return self.lm_head if self.each else None

    def vocab_head(self, rows_VH: Tensor, size: int, bias_V: Tensor | None = None) -> VocabHead:
        """An LM head of the tokens that it drafts, of a tokenizer's `size`, from the rows of all or
        of these; of a part of all a copy, which doesn't follow a change.
        """
        ids_D = None if self.vocab.is_full else self.vocab.ids_D.to(rows_VH.device)
        if ids_D is not None and len(rows_VH) > len(ids_D):
            rows_VH = rows_VH[ids_D]
            bias_V = None if bias_V is None else bias_V[ids_D]
        return VocabHead(rows_VH.detach(), ids_D, size, bias_V)

    def read(self, taps_BNU: Tensor, next_BN: Tensor, where: Any) -> Tensor:
        """States [B, N, H] from the target's, in the head's type, and the tokens after them."""
        return taps_BNU

    def first(self, states_BTH: Tensor, next_BT: Tensor) -> Fed:
        """What is drafted after the tokens `next`, from what `read` gave for them."""
        raise NotImplementedError

    @property
    def size(self) -> ModelSize:
        """Without a layer: no keys, no values, states of one block at a time."""
        hidden = self.head.hidden
        flat = LlamaConfig(
            hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=0, num_attention_heads=1
        )
        return ModelSize(self.layer or flat, self.dtype)

    def reset(self, rows: int, slots: int) -> None:
        self.state_BH = torch.zeros(rows, self.head.hidden, dtype=self.dtype, device=self.device)
        if self.layer is not None:
            self.pool = HeadKV(self.layer, rows, slots, self.context, self.state_BH)

    def prefill(self, admitted: Admitted) -> None:
        assert admitted.taps_RNU is not None, "the engine gives what `taps` asks for"
        rows_R, where = admitted.rows_R, None
        if self.layer is not None:
            begun = self.pool.prefill if self.attends else self.pool.taken
            where = begun(rows_R, admitted.tokens_RN.shape[1])
        states_RNH = self.read(admitted.taps_RNU.to(self.dtype), admitted.next_RN, where)
        self.state_BH[rows_R] = picked(states_RNH, admitted.lens_R[:, None] - 1)[:, 0]

    def propose(self, request: Round) -> TokenTree:
        if (tree := self.at_once(request)) is not None:
            return tree
        feed = self.feed(request)
        assert feed is not None, "a head is asked by draft calls"
        return grow(request, feed, self.per_node)[0]

    def at_once(self, request: Round) -> TokenTree | None:
        """The chain asked for, where one call drafts all of it."""
        return None

    def extend(self, kept: Kept) -> None:
        """What layers make beyond the kept tokens is overwritten before anything sees it."""
        assert kept.taps_BLU is not None, "the engine gives what `taps` asks for"
        where: Any = None
        length = kept.tokens_BL.shape[1]
        if self.layer is not None:
            at_BL = kept.lens_B[:, None] + torch.arange(length, device=self.device)
            if self.attends:
                seen = Seen(kept.lens_B, self.pool.width(kept.top + length))
                where = self.pool.fed(at_BL, at_BL, seen)
            else:
                where = self.pool.added(at_BL)
        states_BLH = self.read(kept.taps_BLU.to(self.dtype), kept.tokens_BL, where)
        keep_last(self.state_BH, states_BLH, kept.n_new_B)

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor:
        """After the first token, before which there is no state, 0."""
        assert self.attends, "what only keeps is read otherwise"
        next_BT = ids_BT[:, 1:]
        at_BT = torch.arange(next_BT.shape[1], device=self.device).expand(len(ids_BT), -1)
        states_BTH = self.read(taps_BTU[:, :-1].to(self.dtype), next_BT, (at_BT, causal()))
        return F.pad(self.first(states_BTH, next_BT).logits_BFV, (0, 0, 1, 0))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights read in a round of all levels, shared out among as many calls."""
        own = sum(p.nbytes for p in self.head.parameters())
        return (own - sum(map(self.left_out, self.outputs))) // self.levels

    def left_out(self, output: VocabHead) -> int:
        """Bytes of the rows of an LM head for tokens that it doesn't draft."""
        return output.weight.nbytes * self.head.rows // len(self.vocab.ids_D) - output.weight.nbytes


class HeadKV(KVPool):
    """Keys and values of a head's layers. `context`: positions that they know."""

    def __init__(
        self, layer: PretrainedConfig, rows: int, slots: int, context: int, like: Tensor
    ) -> None:
        super().__init__(
            layer, rows=rows, slots=round_up(slots), dtype=like.dtype, device=like.device
        )
        self.groups = layer.num_attention_heads // layer.num_key_value_heads
        self.context = context

    def prefill(self, rows_R: Tensor, length: int) -> Where:
        """Of prompts that begin in rows R; position i is kept in slot i."""
        at_RN, cache = self.taken(rows_R, length)
        return at_RN, Attending(cache)

    def taken(self, rows_R: Tensor, length: int) -> tuple[Tensor, SlotCache]:
        """The same where nothing attends: positions, and what takes keys and values in."""
        self.clear(rows_R)
        at_RN = torch.arange(length, device=rows_R.device).expand(len(rows_R), -1)
        flat_N = (rows_R[:, None] * self.slots + at_RN).flatten()
        return at_RN, SlotCache(self, flat_N, prefix=0)

    def added(self, at_BN: Tensor, slots_BN: Tensor | None = None) -> tuple[Tensor, Keep]:
        """Of the next tokens of rows 0..B-1, likewise; slots: where they go, by default `at`."""
        keep = SlotCache(self, self.flat(at_BN if slots_BN is None else slots_BN), prefix=0)
        return at_BN.clamp(max=self.context - 1), keep

    def fed(self, at_BN: Tensor, slots_BN: Tensor, seen: Seen, window: int | None = None) -> Where:
        """Of new tokens of rows 0..B-1, which are kept in these slots."""
        # What lies past the context's end is never kept; it only must not overrun the tables.
        at_BN = at_BN.clamp(max=self.context - 1)
        dtype = self.kv_2LBSHE.dtype
        attended = Attend(seen, at_BN, groups=self.groups, dtype=dtype, backend="masked")
        cache = SlotCache(self, self.flat(slots_BN), seen.width, attended)
        return at_BN, Attending(cache, window)

    def above(self, layer: int) -> Self:
        """The same memory, the layers from this one on, which counts as the first."""
        part = copy.copy(self)
        part.kv_2LBSHE = self.kv_2LBSHE[:, layer:]
        part.keys_LBSHE, part.values_LBSHE = part.kv_2LBSHE
        return part

    def width(self, slots: int) -> int:
        """Slots to attend over where `slots` are in use."""
        return min(round_up(slots), self.slots)


def keep_last(old_BH: Tensor, states_BLH: Tensor, n_new_B: Tensor) -> None:
    """Put the state before the new pending token in the old one's place, where anything is new."""
    last_BH = picked(states_BLH, (n_new_B - 1).clamp(min=0)[:, None])[:, 0].to(old_BH.dtype)
    old_BH.copy_(torch.where(n_new_B[:, None] > 0, last_BH, old_BH))
