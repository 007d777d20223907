"""What heads with layers of their own remember of each row: keys, values and a last state.

Shapes: B rows, R of them just admitted, N tokens, L tokens of a kept path, H hidden.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from transformers import PretrainedConfig

from draftsmith.decode.forward.attention import Attend, Seen
from draftsmith.decode.forward.kv import KVPool, SlotCache
from draftsmith.decode.forward.lean import attend
from draftsmith.decode.forward.runner import round_up
from draftsmith.models.heads.layer import Attention

Where = tuple[Tensor, Attention]  # positions [B, N], and how they attend


class HeadKV(KVPool):
    """Keys and values of a head's layers. `context`: positions that they know."""

    def __init__(
        self, layer: PretrainedConfig, *, rows: int, slots: int, context: int, like: Tensor
    ) -> None:
        super().__init__(
            layer, rows=rows, slots=round_up(slots), dtype=like.dtype, device=like.device
        )
        self.groups = layer.num_attention_heads // layer.num_key_value_heads
        self.context = context

    def prefill(self, rows_R: Tensor, length: int) -> Where:
        """The positions [R, N] of prompts that begin in rows R, and how they attend to each other:
        position i is kept in slot i.
        """
        self.clear(rows_R)
        at_RN = torch.arange(length, device=rows_R.device).expand(len(rows_R), -1)
        flat = (rows_R[:, None] * self.slots + at_RN).flatten()
        return at_RN, partial(attend, SlotCache(self, flat, prefix=0), None)

    def fed(self, at_BN: Tensor, slots_BN: Tensor, seen: Seen) -> Where:
        """The positions that new tokens of rows 0..B-1 are given, and how they attend to what is
        kept; they are kept in slots.
        """
        # What lies past the context's end is never kept; it only must not overrun the tables.
        at_BN = at_BN.clamp(max=self.context - 1)
        dtype = self.kv_2LBSHE.dtype
        attended = Attend(seen, at_BN, groups=self.groups, dtype=dtype, backend="masked")
        cache = SlotCache(self, self.flat(slots_BN), seen.width, attended)
        return at_BN, partial(attend, cache, None)

    def width(self, slots: int) -> int:
        """Slots to attend over where `slots` are in use."""
        return min(round_up(slots), self.slots)


def picked(states_BNX: Tensor, of_BF: Tensor) -> Tensor:
    """The states [B, F, X] at places `of_BF` of each row."""
    return states_BNX.gather(1, of_BF[..., None].expand(-1, -1, states_BNX.shape[2]))


def state_at(states_BNH: Tensor, place_B: Tensor) -> Tensor:
    """The state [B, H] at one place of each row."""
    return picked(states_BNH, place_B[:, None])[:, 0]


def from_second(logits_BTV: Tensor) -> Tensor:
    """Logits of a text from its second token on, with 0 for the first, where no head has any."""
    return torch.cat([torch.zeros_like(logits_BTV[:, :1]), logits_BTV], 1)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that tensors hold."""
    return sum(t.numel() * t.element_size() for t in tensors)


def keep_last(old_BH: Tensor, states_BLH: Tensor, n_new_B: Tensor) -> None:
    """Put the state before the new pending token in the old one's place, where anything is new."""
    last_BH = state_at(states_BLH, (n_new_B - 1).clamp(min=0)).to(old_BH.dtype)
    old_BH.copy_(torch.where(n_new_B[:, None] > 0, last_BH, old_BH))
