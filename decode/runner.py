"""The only code that calls a model while decoding: prefill and verify over per-row KV slots.

Works on unmodified transformers classes whose layers keep nothing but keys and values of every
token. Attention runs on packed query groups: the queries that share a key-value head become more
rows of one product, so keys and values are never repeated.

Shapes: B rows, N tokens a row, S slots attended to, G query heads a key-value head, V vocabulary.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.decode.kv import KVPool, SlotCache
from draftsmith.decode.lean import lean_body
from draftsmith.models.target import split_head

ATTENTION = "draftsmith_slots"
SLOT_BUCKET = 64  # attended slots are rounded up to this, so that shapes repeat


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa, but where the mask is laid out for packed groups ([B, 1, G * N, S]) the
    query heads of a group [B, H * G, N, E] are packed to [B, H, G * N, E]: exact, and no repeats.
    """
    batch, q_heads, length, width = query.shape
    groups = q_heads // key.shape[1]
    if attention_mask is None or groups == 1 or attention_mask.shape[2] != groups * length:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    packed = query.reshape(batch, key.shape[1], groups * length, width)
    mixed = F.scaled_dot_product_attention(packed, key, value, attention_mask, scale=scaling)
    return mixed.view(batch, q_heads, length, -1).transpose(1, 2), None


AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@dataclass(frozen=True)
class Seen:
    """What new tokens attend to: the first lens_B slots of their row and, of the block of slots
    that begins there, what `block` marks: [N, M] or [B, N, M], True where query n sees slot
    lens + m. Without a block the queries are a chain: query n sees slots up to lens + n. width: of
    the slots looked at, a plain int that covers them all. depth: [M] or [B, M], how far beyond lens
    the position of each slot of the block is (a chain: 0, 1, ...).
    """

    lens_B: Tensor
    width: int
    block: Tensor | None = None
    depth: Tensor | None = None


# (tokens [B, N], positions [B, N], mask or None, cache) -> hidden [B, N, H]
Body = Callable[[Tensor, Tensor, Tensor | None, SlotCache], Tensor]
# Bodies whose lean form has been compared with their own forward. Its weights are views of theirs,
# so the comparison holds when the weights change.
_agreed: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
# Largest difference of hidden states, as a share of the largest state.
AGREEMENT = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class Runner:
    """A model, its LM head cut to the tokenizer's size, and the calls that decoding makes.

    Raises ValueError for models that can't be rolled back by slots (recurrent state, sliding
    windows) or whose logits are more than head(hidden).
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        refuse_what_cannot_roll_back(model)
        self.model = model
        self.body, head_VH = split_head(model)
        if head_VH.shape[0] < vocab_size:
            raise ValueError(
                f"model: got {head_VH.shape[0]} logits, expected at least the tokenizer's "
                f"{vocab_size}; this model was made for another tokenizer"
            )
        self.head_VH = head_VH[:vocab_size]
        self.dtype, self.device = head_VH.dtype, head_VH.device
        config = model.config
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.groups = config.num_attention_heads // kv_heads
        model.set_attn_implementation(ATTENTION)
        self.call: Body = self._whole
        lean = lean_body(self.body)
        if lean is not None and (self.body in _agreed or self._agree(lean)):
            _agreed.add(self.body)
            self.call = lean

    def pool(self, rows: int, slots: int) -> KVPool:
        """A KV pool for this model; the slots are rounded up to whole buckets."""
        return KVPool(
            self.model.config,
            rows=rows,
            slots=round_up(slots),
            dtype=self.dtype,
            device=self.device,
        )

    def prefill(self, pool: KVPool, rows_B: Tensor, tokens_BN: Tensor, lens_B: Tensor) -> Tensor:
        """Write prompts (right-padded to N) into the slots of `rows_B`; the logits [B, V] after
        each.

        What is written beyond a prompt's length is garbage in the sense of the pool.
        """
        positions_BN = torch.arange(tokens_BN.shape[1], device=self.device).expand_as(tokens_BN)
        cache = SlotCache(pool, (rows_B[:, None] * pool.slots + positions_BN).flatten(), prefix=0)
        hidden_BNH = self.call(tokens_BN, positions_BN, None, cache)
        last_B11 = (lens_B - 1)[:, None, None].expand(-1, 1, hidden_BNH.shape[-1])
        return self.logits(hidden_BNH.gather(1, last_B11)[:, 0])

    def verify(
        self,
        pool: KVPool,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        slots_BN: Tensor,
        seen: Seen,
    ) -> Tensor:
        """Hidden states [B, N, H] of new tokens of rows 0..B-1, whose keys and values go to
        `slots_BN`; each sees what `seen` says.
        """
        cache = SlotCache(pool, pool.flat(slots_BN), seen.width)
        return self.call(tokens_BN, positions_BN, self.mask(seen, tokens_BN.shape[1]), cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] fp32 over the tokenizer's vocabulary."""
        return F.linear(hidden, self.head_VH).float()

    def mask(self, seen: Seen, length: int) -> Tensor:
        """Additive mask [B, 1, G * N, S] of `length` queries a row."""
        slot_S = torch.arange(seen.width, device=self.device)
        if seen.block is None:
            step_N = torch.arange(length, device=self.device)
            return self._additive(slot_S <= (seen.lens_B[:, None] + step_N)[..., None])
        nodes = seen.block.shape[-1]
        node_BS = slot_S - seen.lens_B[:, None]
        inside_BS = (node_BS >= 0) & (node_BS < nodes)
        node_B1S = node_BS.clamp(0, nodes - 1)[:, None].expand(-1, length, -1)
        family_BNS = seen.block.expand(node_BS.shape[0], -1, -1).gather(2, node_B1S)
        before_BS = slot_S < seen.lens_B[:, None]
        return self._additive((family_BNS & inside_BS[:, None]) | before_BS[:, None])

    def _additive(self, allowed_BNS: Tensor) -> Tensor:
        batch, length, width = allowed_BNS.shape
        mask = torch.zeros(batch, 1, 1, length, width, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill_(~allowed_BNS[:, None, None], float("-inf"))
        return mask.expand(-1, 1, self.groups, -1, -1).reshape(batch, 1, -1, width)

    def _whole(
        self, tokens_BN: Tensor, positions_BN: Tensor, mask: Tensor | None, cache: SlotCache
    ) -> Tensor:
        """transformers' own forward of the body."""
        return self.body(
            input_ids=tokens_BN,
            position_ids=positions_BN,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    @torch.inference_mode()
    def _agree(self, lean: Body) -> bool:
        """Two ragged prompts, then three tokens each: does `lean` give the model's own states?"""
        lens_B = torch.tensor([7, 4], device=self.device)
        tokens_BN = torch.arange(14, device=self.device).view(2, 7) % len(self.head_VH)
        rows_B = torch.arange(2, device=self.device)
        states = []
        for body in (self._whole, lean):
            self.call, pool = body, self.pool(2, 16)
            states.append(self.prefill(pool, rows_B, tokens_BN, lens_B))
            positions_BN = lens_B[:, None] + torch.arange(3, device=self.device)
            seen = Seen(lens_B, pool.slots)
            new_BN = tokens_BN[:, :3]
            states.append(self.verify(pool, new_BN, positions_BN, positions_BN, seen).float())
        self.call = self._whole
        limit = AGREEMENT[self.dtype]
        return all(
            float((a - b).abs().max()) <= limit * float(a.abs().max())
            for a, b in zip(states[:2], states[2:], strict=True)
        )


def round_up(slots: int) -> int:
    """Slots in whole buckets."""
    return -(-slots // SLOT_BUCKET) * SLOT_BUCKET


def refuse_what_cannot_roll_back(model: PreTrainedModel) -> None:
    """ValueError for a model with state other than the keys and values of every token."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    unknown = kinds - {"full_attention"}
    window = None
    if getattr(config, "layer_types", None) is None and getattr(config, "use_sliding_window", True):
        window = getattr(config, "sliding_window", None)
    if unknown or window or not getattr(model, "_supports_attention_backend", False):
        reason = f"layers of type {sorted(unknown)}" if unknown else "a sliding window"
        if not unknown and not window:
            reason = "attention that can't be replaced"
        raise ValueError(
            f"model {type(model).__name__}: got {reason}, expected full attention in every layer "
            "(Llama, Qwen2 and Qwen3 are tested): rejected drafts could not be rolled back"
        )
