"""The keys and values of all rows and layers in one tensor, and the adapter that transformers sees.

Each row owns a run of slots and its own committed length. What lies beyond is garbage that no query
attends to: rolling back a rejected draft is free, rows of different lengths need no padding, and a
finished row's slots can be given to the next prompt. And what a config says of contexts.

Shapes: L layers, B rows, S slots a row, H key-value heads, E head width, N new tokens a row.
"""

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from draftsmith.decode.forward.attention import Attend
from draftsmith.decode.forward.compiled import in_large_pages
from draftsmith.decode.forward.states import StatePool
from draftsmith.models.rollback import LINEAR


class KVPool:
    """kv_2LBSHE: keys, then values. Token-major: one token's keys in a layer are one run. place: of
    each layer that has them among those. states: of the layers that have none, if there are any.
    mirror: tells other processes, with parts of the same target, what is done to it.
    """

    states: StatePool | None = None
    mirror: Any = None

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        rows: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = kv_shape(config, rows, slots)
        # Zeros: a masked slot still enters the product with weight 0, and 0 * NaN would be NaN.
        self.kv_2LBSHE = in_large_pages(torch.empty(shape, dtype=dtype, device=device)).zero_()
        self.keys_LBSHE, self.values_LBSHE = self.kv_2LBSHE
        self.rows, self.slots = rows, slots
        self.first_B1 = torch.arange(rows, device=device)[:, None] * slots
        self.place = {layer: i for i, layer in enumerate(kv_layers(config))}

    def part(self, first: int, last: int) -> Self:
        """The same memory, rows first..last-1 of it."""
        part = copy.copy(self)
        part.kv_2LBSHE = self.kv_2LBSHE[:, :, first:last]
        part.keys_LBSHE, part.values_LBSHE = part.kv_2LBSHE
        part.rows = last - first
        if self.states is not None:
            part.states = self.states.part(first, last)
        return part

    def flat(self, slots_BN: Tensor) -> Tensor:
        """Where slots [B, N] of rows 0..B-1 lie when rows and slots are one axis; [B * N]."""
        return (self.first_B1[: len(slots_BN)] + slots_BN).flatten()

    def clear(self, rows_R: Tensor) -> None:
        """Forget rows: what a request left behind, NaN perhaps, can't reach the next one."""
        if self.mirror is not None:
            self.mirror.clear(self, rows_R)
        if rows_R.device.type == "cpu":  # in half of the time
            for row in rows_R.tolist():
                self.kv_2LBSHE[:, :, row].zero_()
        else:
            self.kv_2LBSHE.index_fill_(2, rows_R, 0)
        if self.states is not None:
            self.states.clear(rows_R)

    def settle(self, path_BL: Tensor, n_new_B: Tensor) -> None:
        """Let layers that keep a state take in the first n_new_B tokens of the kept paths."""
        if self.states is not None:
            self.states.commit(path_BL, n_new_B)

    def commit(self, source_BP: Tensor, target_BP: Tensor, into: "KVPool | None" = None) -> None:
        """Move the entries of accepted paths into place, slots source -> target of rows 0..B-1: one
        gather and one scatter for all layers. A chain's path is in place already. into: another
        pool of as many rows, whose slots the targets then are.
        """
        if self.mirror is not None:
            assert into is None, "a split target's pools stay apart"
            self.mirror.commit(self, source_BP, target_BP)
        into = self if into is None else into
        moved = self.kv_2LBSHE.flatten(2, 3).index_select(2, self.flat(source_BP))
        into.kv_2LBSHE.flatten(2, 3).index_copy_(2, into.flat(target_BP), moved)

    def take(self, source: "KVPool", rows_R: Tensor, slots_LRCH: Tensor) -> None:
        """Fill slots 0..C-1 of rows R from another pool's, chosen for each layer and head."""
        layers, _, chosen, heads = slots_LRCH.shape
        layer_L, head_H = (torch.arange(n, device=rows_R.device) for n in (layers, heads))
        at = (layer_L[:, None, None, None], rows_R[:, None, None], slots_LRCH, head_H)
        self.kv_2LBSHE[:, :, rows_R, :chosen] = source.kv_2LBSHE[(slice(None), *at)]


SLOT_BUCKET = 64  # attended slots are rounded up to this, so that shapes repeat
ROOM = 128  # slots beyond a ring of them, for what a round drafts


def ring(number: Tensor, size: int, sinks: int = 0) -> Tensor:
    """The slots, of `size`, of tokens by their number in order: once all are full, each new token
    takes the oldest one's, except that the first `sinks` stay.
    """
    return torch.where(number < sinks, number, sinks + (number - sinks) % (size - sinks))


def kv_shape(config: PreTrainedConfig, rows: int, slots: int) -> tuple[int, ...]:
    """The shape (2, L, B, S, H, E) of a pool."""
    heads = getattr(config, "num_key_value_heads", None) or query_heads(config)
    width = getattr(config, "head_dim", None) or config.hidden_size // query_heads(config)
    return 2, len(kv_layers(config)), rows, slots, heads, width


def query_heads(config: PreTrainedConfig) -> int:
    """Of an attention; of a model without any, one that nothing is made of."""
    return getattr(config, "num_attention_heads", 1)


def kv_layers(config: PreTrainedConfig) -> list[int]:
    """The layers that have keys and values."""
    kinds = getattr(config, "layer_types", None) or ()
    return [i for i in range(config.num_hidden_layers) if LINEAR not in kinds[i : i + 1]]


class SlotCache(Cache):
    """What one forward pass writes to and reads from: with `prefix=0` (prefill) its own keys alone,
    else the first `prefix` slots of every row, as `attend` says. flat_slots: None where the new
    tokens' keys and values are in their slots already, and are left as they are. mix: (layer, its
    input [B, N, H]) -> its output, of layers that keep a state.
    """

    mix: Callable[[int, Tensor], Tensor] | None = None

    def __init__(
        self, pool: KVPool, flat_slots: Tensor | None, prefix: int, attend: Attend | None = None
    ) -> None:
        super().__init__(layers=[])
        self.pool, self.flat_slots, self.prefix, self.attend = pool, flat_slots, prefix, attend

    def write(self, layer: int, keys_BNHE: Tensor, values_BNHE: Tensor) -> tuple[Tensor, Tensor]:
        """Put new keys and values into their slots; return what to attend to, [B, S, H, E] each."""
        keys_BSHE, values_BSHE = self.pool.keys_LBSHE[layer], self.pool.values_LBSHE[layer]
        if self.flat_slots is not None:
            keys_BSHE.flatten(0, 1).index_copy_(0, self.flat_slots, keys_BNHE.flatten(0, 1))
            values_BSHE.flatten(0, 1).index_copy_(0, self.flat_slots, values_BNHE.flatten(0, 1))
        if self.prefix == 0:
            return keys_BNHE, values_BNHE
        return keys_BSHE[:, : self.prefix], values_BSHE[:, : self.prefix]

    __call__ = write  # as what takes keys and values in where nothing attends

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """The same for transformers, whose keys and values are [B, H, N, E]."""
        new = key_states.transpose(1, 2), value_states.transpose(1, 2)
        keys, values = self.write(self.pool.place[layer_idx], *new)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Never consulted: positions and masks are given."""
        return 0


def context_of(model: PreTrainedModel) -> int:
    """Positions that a model is configured for."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 30))


def round_up(slots: int) -> int:
    """Slots in whole buckets."""
    return -(-slots // SLOT_BUCKET) * SLOT_BUCKET


def windowed(config: PreTrainedConfig) -> bool:
    """Whether any layer has a sliding window."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return "sliding_attention" in kinds
    used = getattr(config, "use_sliding_window", True)
    return bool(used and getattr(config, "sliding_window", None))


def laid(pool: KVPool) -> dict[str, int]:
    """Where a pool's keys and values lie, and how far layers and rows are apart."""
    keys, values = pool.keys_LBSHE, pool.values_LBSHE
    steps = {"layer_step": keys.stride(0), "row_step": keys.stride(1)}
    return {"keys": keys.data_ptr(), "values": values.data_ptr(), **steps}
