"""The body of a Llama-like model in as few calls as possible, on the model's own weights.

transformers' `forward` of a body makes masks, looks settings up, wraps its output, and multiplies
by seven matrices a layer; on a small model, or any model on a fast device, that costs as much as
the arithmetic. Here q, k, v are one product, gate and up another, keys and values go to their slots
as they come, and rotary embeddings are looked up. The module tree and its weights stay as they are:
what is read here are the model's own. See `decode/forward/product.py` for the products themselves.

Only for layers whose source this follows (Llama, Qwen2, Qwen3, Mistral), and frozen (sharded
training moves weights about; a layer that torch has shared out has a class of its own). The runner
compares it with the model's own forward before it is used; everything else takes that forward.

Shapes: B rows, N tokens, S slots, H hidden, E head width, G query heads a key-value head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.decode.forward.attention import mix
from draftsmith.decode.forward.kv import SlotCache
from draftsmith.decode.forward.product import Product, linear, version

LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
# The states of the taps asked for, by their number; None until the pass has been there.
Taken = dict[int, Tensor | None]
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
    """(tokens [B, N], positions [B, N], cache) -> hidden [B, N, H] after the norm."""

    def __init__(self, body: Any, layers: list[nn.Module]) -> None:
        self.layers = [LeanLayer(layer, index) for index, layer in enumerate(layers)]
        self.embedding_VH = body.embed_tokens.weight
        self.norm = Norm(body.norm)
        self.enter: Callable[..., tuple[Tensor, Tensor, Tensor]] = enter
        self.leave: Callable[..., Tensor] = leave
        self.cos_SE, self.sin_SE = rotary_tables(
            body.rotary_emb, body.config.max_position_embeddings, self.embedding_VH
        )

    def compile(self, **options: Any) -> None:
        """Compile what lies between the attentions. Weights come in as arguments, so one graph
        serves all layers; prompts, whose lengths never repeat, are left as they are.
        """
        # Shapes of two models, both precisions, single and several rows and tokens.
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, 64)
        self.enter, self.leave = torch.compile(enter, **options), torch.compile(leave, **options)

    def __call__(
        self, tokens_BN: Tensor, positions_BN: Tensor, cache: SlotCache, taken: Taken | None = None
    ) -> Tensor:
        taken = {} if taken is None else taken
        compiled = cache.attend is not None and self.enter is not enter
        first, last = (self.enter, self.leave) if compiled else (enter, leave)
        hidden_BNH = F.embedding(tokens_BN, self.embedding_VH)
        rotary = self.cos_SE[positions_BN].unsqueeze(2), self.sin_SE[positions_BN].unsqueeze(2)
        for layer in self.layers:
            if layer.index in taken:
                taken[layer.index] = hidden_BNH
            entry = layer.entry.tensors if compiled else layer.entry
            ending = layer.exit.tensors if compiled else layer.exit
            # No names for what lies between: it is free as soon as it has been used.
            hidden_BNH = last(
                hidden_BNH,
                layer.attend(*first(hidden_BNH, rotary, entry, layer.sizes), cache),
                ending,
                layer.activation,
            )
        if len(self.layers) in taken:
            taken[len(self.layers)] = hidden_BNH
        return self.norm(hidden_BNH)


def rotary_tables(rotary: Any, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, E] of all positions, in the type of `like`, for `enter`."""
    positions_1S = torch.arange(positions, device=like.device)[None]
    cos_1SE, sin_1SE = rotary(like[:1, None], position_ids=positions_1S)
    half = cos_1SE.shape[-1] // 2
    # Rotating half of a head is a roll by half its width, with the first half's sign changed.
    return cos_1SE[0], torch.cat([-sin_1SE[0, :, :half], sin_1SE[0, :, half:]], -1)


class Entry(NamedTuple):
    """What a layer does before its attention: a norm, queries, keys and values, their norms."""

    norm: Any
    qkv: Any
    q_norm: Any
    k_norm: Any

    @property
    def tensors(self) -> "Entry":
        return Entry(*(None if part is None else part.tensors for part in self))


class Exit(NamedTuple):
    """What it does after it: the output, a norm, and the feed-forward."""

    out: Any
    norm: Any
    gate_up: Any
    down: Any

    @property
    def tensors(self) -> "Exit":
        return Exit(*(part.tensors for part in self))


def enter(
    hidden_BNH: Tensor, rotary: tuple[Tensor, Tensor], part: Entry, sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, N, heads, E], turned to their positions. sizes: query heads, key
    heads, E.
    """
    q_heads, kv_heads, width = sizes
    batch, length, _ = hidden_BNH.shape
    heads = _product(part.qkv, _normed(part.norm, hidden_BNH)).view(batch, length, -1, width)
    turned = heads[:, :, : q_heads + kv_heads]
    if part.q_norm is not None:
        query, key = turned.split([q_heads, kv_heads], dim=2)
        turned = torch.cat([_normed(part.q_norm, query), _normed(part.k_norm, key)], 2)
    cos_BN1E, sin_BN1E = rotary
    turned = torch.addcmul(turned * cos_BN1E, turned.roll(width // 2, -1), sin_BN1E)
    return turned[:, :, :q_heads], turned[:, :, q_heads:], heads[:, :, q_heads + kv_heads :]


def leave(
    hidden_BNH: Tensor, mixed_BNH: Tensor, part: Exit, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """The layer's output, from its input and what attention mixed."""
    hidden_BNH = hidden_BNH + _product(part.out, mixed_BNH)
    del mixed_BNH  # a prompt's is large, and the feed-forward is what needs most
    inner = _outputs(part.gate_up, _normed(part.norm, hidden_BNH))
    gate, up = inner if len(inner) == 2 else inner[0].chunk(2, -1)
    return hidden_BNH + _product(part.down, activation(gate) * up)


def _outputs(product: Any, x: Tensor) -> list[Tensor]:
    """By a `Product`, or by its bare tensors: what each of its maps gives, or all in one tensor."""
    return linear(x, *product) if type(product) is tuple else product.outputs(x)


def _product(product: Any, x: Tensor) -> Tensor:
    made = _outputs(product, x)
    return made[0] if len(made) == 1 else torch.cat(made, -1)


def _normed(norm: Any, x: Tensor) -> Tensor:
    """By a `Norm`, or by its bare weight and epsilon; None leaves it as it is."""
    if norm is None:
        return x
    if type(norm) is not tuple:
        made: Tensor = norm(x)
        return made
    weight, epsilon = norm
    return F.rms_norm(x, weight.shape, weight, epsilon)


class LeanLayer:
    """One decoder layer's parts, and its attention."""

    def __init__(self, layer: Any, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.scale = attention.scaling
        q, k, v, out, gate, up, down = projections(layer)
        self.qkv, self.out = Product.of([q, k, v]), Product.of([out])
        self.gate_up, self.down = Product.of([gate, up]), Product.of([down])
        normed = hasattr(attention, "q_norm")
        norm = getattr(layer, "input_layernorm", None)
        self.entry = Entry(
            None if norm is None else Norm(norm),
            self.qkv,
            Norm(attention.q_norm) if normed else None,
            Norm(attention.k_norm) if normed else None,
        )
        self.exit = Exit(self.out, Norm(layer.post_attention_layernorm), self.gate_up, self.down)
        width = attention.head_dim
        self.sizes = (q.out_features // width, k.out_features // width, width)
        self.activation = mlp.act_fn

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: SlotCache) -> Tensor:
        """Attention of [B, N, heads, E], as [B, N, Hq * E]."""
        return attend(cache, self.scale, self.index, query, key, value)


def attend(
    cache: SlotCache, scale: float | None, layer: int, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attention of [B, N, heads, E] over a cache, as [B, N, Hq * E]; a prompt attends to itself
    alone.
    """
    keys, values = cache.write(layer, key, value)
    grouped = query.shape[2] != key.shape[2]
    query, keys, values = (x.transpose(1, 2) for x in (query, keys, values))
    if cache.attend is not None:
        return mix(cache.attend, query, keys, values, scale=scale).flatten(2)
    mixed = F.scaled_dot_product_attention(
        query, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return mixed.transpose(1, 2).flatten(2)


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

    @property
    def tensors(self) -> tuple[Tensor, float]:
        return self.norm.weight, self.norm.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        weight, epsilon = self.tensors
        if not self.twice:
            return F.rms_norm(x, weight.shape, weight, epsilon)
        if self.version != version(weight):
            self.weight_2H, self.version = torch.cat([weight, weight]).detach(), version(weight)
        both = F.layer_norm(
            torch.cat([x, -x], -1), self.weight_2H.shape, self.weight_2H, None, epsilon
        )
        return both[..., : x.shape[-1]]
