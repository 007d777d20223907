"""The body of a Llama-like model as few calls as possible, on the model's own weights.

transformers' `forward` of a body makes masks, looks settings up, wraps its output, and multiplies
by seven matrices a layer; on a small model, or any model on a fast device, that costs as much as
the arithmetic. Here q, k, v are one product, gate and up another, keys and values go to their slots
as they come, and rotary embeddings are looked up. The module tree stays as it is: the merged
matrices are the storage, and each layer's own weights become views of it, so a weight changed in
place is changed for both. See `decode/product.py` for the products themselves.

Only for layers whose source this follows (Llama, Qwen2, Qwen3, Mistral), and frozen (sharded
training moves weights about). The runner compares it with the model's own forward before it is
used; everything else takes that forward.

Shapes: B rows, N tokens, S slots, H hidden, E head width, G query heads a key-value head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.decode.attention import mix
from draftsmith.decode.kv import SlotCache
from draftsmith.decode.product import Product, version

LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
# Rotary embeddings that depend on nothing but the position.
POSITION_ONLY = {"default", "linear", "llama3"}


def lean_body(body: Any) -> "LeanBody | None":
    """The lean form of a transformers body, or None where it isn't known to be the same."""
    layers = list(getattr(body, "layers", nn.ModuleList()).children())
    known = all(type(layer).__name__ in LAYERS for layer in layers)
    if not layers or not known or any(p.requires_grad for p in body.parameters()):
        return None
    rope = getattr(body.config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in POSITION_ONLY or rope.get("partial_rotary_factor", 1) != 1:
        return None
    plain = all(type(part) is nn.Linear for layer in layers for part in projections(layer))
    return LeanBody(body, layers) if plain else None


def projections(layer: Any) -> list[nn.Linear]:
    """The layer's seven linear maps, in the order in which they are merged."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*parts, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


class LeanBody:
    """(tokens [B, N], positions [B, N], mask or None, cache) -> hidden [B, N, H] after the norm."""

    def __init__(self, body: Any, layers: list[nn.Module]) -> None:
        self.layers = [LeanLayer(layer, index) for index, layer in enumerate(layers)]
        self.embedding_VH = body.embed_tokens.weight
        self.norm = Norm(body.norm)
        weight = self.embedding_VH
        # A draft at the end of the context reaches a little beyond it; nothing there is kept.
        positions_1S = torch.arange(body.config.max_position_embeddings + 64, device=weight.device)
        cos_1SE, sin_1SE = body.rotary_emb(weight[:1, None], position_ids=positions_1S[None])
        half = cos_1SE.shape[-1] // 2
        self.cos_SE = cos_1SE[0]
        # Rotating half of a head is a roll by half its width, with the first half's sign changed.
        self.sin_SE = torch.cat([-sin_1SE[0, :, :half], sin_1SE[0, :, half:]], -1)

    @property
    def current(self) -> bool:
        """Whether the model's weights are still those that were merged."""
        first = self.layers[0]
        return all(p.current for p in (first.qkv, first.out, first.gate_up, first.down))

    def __call__(
        self, tokens_BN: Tensor, positions_BN: Tensor, mask: Tensor | None, cache: SlotCache
    ) -> Tensor:
        hidden_BNH = F.embedding(tokens_BN, self.embedding_VH)
        cos_BN1E = self.cos_SE[positions_BN].unsqueeze(2)
        sin_BN1E = self.sin_SE[positions_BN].unsqueeze(2)
        for layer in self.layers:
            hidden_BNH = layer.attend(hidden_BNH, (cos_BN1E, sin_BN1E), mask, cache)
            hidden_BNH = layer.feed_forward(hidden_BNH)
        return self.norm(hidden_BNH)


class LeanLayer:
    """One decoder layer: attention and feed-forward, each with its norm and residual."""

    def __init__(self, layer: Any, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.width = attention.head_dim
        self.q_heads = attention.q_proj.out_features // self.width
        self.kv_heads = attention.k_proj.out_features // self.width
        self.scale = attention.scaling
        q, k, v, out, gate, up, down = projections(layer)
        self.qkv, self.out = Product.of([q, k, v]), Product.of([out])
        self.gate_up, self.down = Product.of([gate, up]), Product.of([down])
        normed = hasattr(attention, "q_norm")
        self.q_norm = Norm(attention.q_norm) if normed else None
        self.k_norm = Norm(attention.k_norm) if normed else None
        self.before_attention = Norm(layer.input_layernorm)
        self.before_mlp = Norm(layer.post_attention_layernorm)
        self.activation = mlp.act_fn

    def attend(
        self,
        hidden_BNH: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: SlotCache,
    ) -> Tensor:
        batch, length, _ = hidden_BNH.shape
        joint = self.qkv(self.before_attention(hidden_BNH))
        heads = joint.view(batch, length, -1, self.width)
        turned = heads[:, :, : self.q_heads + self.kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = turned.split([self.q_heads, self.kv_heads], dim=2)
            turned = torch.cat([self.q_norm(query), self.k_norm(key)], 2)
        cos_BN1E, sin_BN1E = rotary
        turned = torch.addcmul(turned * cos_BN1E, turned.roll(self.width // 2, -1), sin_BN1E)
        query, key = turned.split([self.q_heads, self.kv_heads], dim=2)
        value = heads[:, :, self.q_heads + self.kv_heads :]
        keys, values = cache.write(self.index, key, value)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if cache.attend is None or cache.attend.backend == "masked":
            mixed = self._mix(query, keys, values, mask)
        else:
            mixed = mix(cache.attend, query.transpose(1, 2), keys, values, scale=self.scale)
            mixed = mixed.flatten(2)
        return hidden_BNH + self.out(mixed)

    def _mix(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of query [B, N, Hq, E] over keys [B, Hkv, S, E], as [B, N, Hq * E]."""
        batch, length, q_heads, width = query.shape
        if mask is None:
            grouped = q_heads != self.kv_heads
            mixed = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                keys,
                values,
                is_causal=True,
                scale=self.scale,
                enable_gqa=grouped,
            )
            return mixed.transpose(1, 2).reshape(batch, length, -1)
        groups = q_heads // self.kv_heads
        packed = query.unflatten(2, (self.kv_heads, groups)).permute(0, 2, 3, 1, 4)
        packed = packed.reshape(batch, self.kv_heads, groups * length, width)
        mixed = F.scaled_dot_product_attention(packed, keys, values, mask, scale=self.scale)
        mixed = mixed.view(batch, self.kv_heads, groups, length, width).permute(0, 3, 1, 2, 4)
        return mixed.reshape(batch, length, -1)

    def feed_forward(self, hidden_BNH: Tensor) -> Tensor:
        gate, up = self.gate_up(self.before_mlp(hidden_BNH)).chunk(2, -1)
        return hidden_BNH + self.down(self.activation(gate) * up)


class Norm:
    """transformers' RMS norm in as few calls as the device has.

    torch has no kernel of its own for it on a CPU and makes it of a dozen. But the layer norm of
    [x, -x], whose mean is 0 and whose variance is the mean of x squared, is one, and its first half
    is the RMS norm of x. A step of the quickstart's target falls from 2.6 to 2.15 ms.
    """

    def __init__(self, norm: Any) -> None:
        self.norm, self.version = norm, -1
        self.twice = norm.weight.device.type == "cpu" and norm.weight.dtype == torch.bfloat16
        self.weight_2H: Tensor = norm.weight

    def __call__(self, x: Tensor) -> Tensor:
        weight, epsilon = self.norm.weight, self.norm.variance_epsilon
        if not self.twice:
            return F.rms_norm(x, weight.shape, weight, epsilon)
        if self.version != version(weight):
            self.weight_2H, self.version = torch.cat([weight, weight]).detach(), version(weight)
        both = F.layer_norm(
            torch.cat([x, -x], -1), self.weight_2H.shape, self.weight_2H, None, epsilon
        )
        return both[..., : x.shape[-1]]
