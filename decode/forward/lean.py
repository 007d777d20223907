"""The body of a Llama-like model in as few calls as possible, on the model's own weights.

transformers' `forward` makes masks, looks settings up, wraps its output, and multiplies by seven
matrices a layer; on a small model, or any model on a fast device, that costs as much as the
arithmetic. Here q, k, v are one product (`decode/forward/product.py`), gate and up another, keys
and values go to their slots as they come, and rotary embeddings are looked up.

Only for frozen layers whose source this follows (Llama, Qwen2, Qwen3, Mistral; one that torch has
shared out has a class of its own). The runner compares it with the model's own forward before it is
used; everything else takes that forward. Heads have lean forms likewise (`lean_heads.py`).

Shapes: B rows, N tokens (any leading axes: X), S slots, H hidden, E head width, G query heads a
key-value head.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.decode.forward.attention import mix
from draftsmith.decode.forward.compressed import version
from draftsmith.decode.forward.kv import SlotCache
from draftsmith.decode.forward.native import HALVES, Half, NativeBody
from draftsmith.decode.forward.product import Product, QuickLinear, linear
from draftsmith.models.split import Summed

LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
# The states of the taps asked for, by their number; None until the pass has been there.
Taken = dict[int, Tensor | None]
# Norms and maps: tensors and an epsilon, so that a compiled function takes them as arguments; in
# bf16 on a CPU, where nothing is compiled, objects that keep a faster form.
Parts = tuple[Any, ...]
# Rotary embeddings that depend on nothing but the position.
POSITION_ONLY = {"default", "linear", "llama3", "yarn"}
# Largest difference of hidden states, as a share of the largest state.
AGREEMENT = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def lean_body(body: Any) -> "LeanBody | None":
    """The lean form of a transformers body, or None where it isn't known to be the same."""
    layers = list(getattr(body, "layers", nn.ModuleList()).children())
    known = all(type(layer).__name__ in LAYERS for layer in layers)
    if not layers or not known:
        return None
    rope = getattr(body.config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in POSITION_ONLY or rope.get("partial_rotary_factor", 1) != 1:
        return None
    maps = (part for layer in layers for part in projections(layer))
    if not all(type(part) in (nn.Linear, QuickLinear, Summed) for part in maps):
        return None
    if any(p.requires_grad for p in body.parameters()):
        warnings.warn(
            "decoding: got a model whose weights require gradients, which runs by transformers' "
            "own layers, several times slower; expected model.requires_grad_(False), unless it is "
            "being trained",
            stacklevel=4,
        )
        return None
    return LeanBody(body, layers)


def agree(own: list[Tensor], lean: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether a lean form's states are the model's own, but for the rounding of `dtype`."""
    return all(
        float((a - b).abs().max()) <= AGREEMENT[dtype] * float(a.abs().max())
        for a, b in zip(own, lean, strict=True)
    )


def kept_layers(last: int, without: Collection[Half]) -> list[int]:
    """Those of the first `last` layers of which a half at least stays."""
    return [i for i in range(last) if any((i, half) not in without for half in HALVES)]


def sliced(body: Any, layers: list[int], without: Collection[Half]) -> Any:
    """A transformers body of some of its layers, which know their own places in a cache. ValueError
    where half a layer is to go: only the lean body does that.
    """
    held = getattr(body, "layers", None)
    halves = sorted(half for half in without if half[0] in layers)
    if not isinstance(held, nn.ModuleList) or halves:
        raise ValueError(
            f"model {type(body).__name__}: got halves {halves} to leave out of layers that are "
            "transformers' own, expected whole layers of a body that lists them"
        )
    part = copy.copy(body)
    part._modules = dict(body._modules)
    part.layers = nn.ModuleList(held[i] for i in layers)
    part.config = copy.copy(body.config)
    part.config.num_hidden_layers = len(layers)
    if kinds := getattr(body.config, "layer_types", None):
        part.config.layer_types = [kinds[i] for i in layers]
    return part


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
        self.norm = norm_of(body.norm)
        self.enter: Callable[..., tuple[Tensor, Tensor, Tensor]] = enter
        self.leave: Callable[..., Tensor] = leave
        self.cos_SE, self.sin_SE = rotary_tables(
            body.rotary_emb, body.config.max_position_embeddings, self.embedding_VH
        )
        self.native: NativeBody | None = None
        self.leader: Any = None  # of a target that is split over processes

    def compile(self, **options: Any) -> None:
        """Compile what lies between the attentions. Weights come in as arguments, so one graph
        serves all layers; prompts, whose lengths never repeat, are left as they are.
        """
        # Shapes of two models, both precisions, single and several rows and tokens.
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, 64)
        self.enter, self.leave = torch.compile(enter, **options), torch.compile(leave, **options)

    def part(self, last: int, without: Collection[Half]) -> "LeanBody":
        """Its first `last` layers without these halves, and the norm."""
        part = copy.copy(self)
        part.layers = [copy.copy(self.layers[i]) for i in kept_layers(last, without)]
        for layer in part.layers:
            layer.halves = tuple(half for half in HALVES if (layer.index, half) not in without)
        part.native = None if self.native is None else NativeBody.of(part)
        if part.native is not None and self.native is not None:
            part.native.compressed = self.native.compressed
        return part

    def __call__(
        self, tokens_BN: Tensor, positions_BN: Tensor, cache: SlotCache, taken: Taken
    ) -> Tensor:
        if self.leader is not None:
            self.leader.passing(tokens_BN, positions_BN, cache, lean=True)
        if self.native is not None and not taken and self.native.takes(tokens_BN, cache):
            return self.native.states(tokens_BN, positions_BN, cache)[1]
        compiled = cache.attend is not None and self.enter is not enter
        first, last = (self.enter, self.leave) if compiled else (enter, leave)
        hidden_BNH = F.embedding(tokens_BN, self.embedding_VH)
        rotary = self.cos_SE[positions_BN].unsqueeze(2), self.sin_SE[positions_BN].unsqueeze(2)
        for layer in self.layers:
            if layer.index in taken:
                taken[layer.index] = hidden_BNH
            if layer.halves == HALVES[1:]:
                hidden_BNH = fed_forward(hidden_BNH, layer.exit, layer.activation)
                continue
            over = partial(attend, cache, layer.scale, layer.index)
            if layer.halves == HALVES[:1]:
                mixed_BNH = over(*enter(hidden_BNH, rotary, layer.entry, layer.sizes))
                hidden_BNH = hidden_BNH + _product(layer.exit[0], mixed_BNH)
                continue
            # No names for what lies between: it is free as soon as it has been used.
            hidden_BNH = last(
                hidden_BNH,
                over(*first(hidden_BNH, rotary, layer.entry, layer.sizes)),
                layer.exit,
                layer.activation,
            )
        if len(self.layers) in taken:
            taken[len(self.layers)] = hidden_BNH
        return normed(self.norm, hidden_BNH)


def rotary_tables(rotary: Any, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, E] of all positions, in the type of `like`, for `enter`."""
    positions_1S = torch.arange(positions, device=like.device)[None]
    cos_1SE, sin_1SE = rotary(like[:1, None], position_ids=positions_1S)
    half = cos_1SE.shape[-1] // 2
    # Rotating half of a head is a roll by half its width, with the first half's sign changed.
    return cos_1SE[0], torch.cat([-sin_1SE[0, :, :half], sin_1SE[0, :, half:]], -1)


def enter(
    hidden_BNH: Tensor, rotary: tuple[Tensor, Tensor], entry: Parts, sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, N, heads, E], turned to their positions: what a layer does
    before its attention. entry: its norm, the maps to these, and their norms. sizes: query heads,
    key heads, E.
    """
    norm, qkv, q_norm, k_norm = entry
    q_heads, kv_heads, width = sizes
    heads = _product(qkv, normed(norm, hidden_BNH)).view(*hidden_BNH.shape[:2], -1, width)
    turned = heads[:, :, : q_heads + kv_heads]
    if q_norm is not None:
        query, key = turned.split([q_heads, kv_heads], dim=2)
        turned = torch.cat([normed(q_norm, query), normed(k_norm, key)], 2)
    cos_BN1E, sin_BN1E = rotary
    turned = torch.addcmul(turned * cos_BN1E, turned.roll(width // 2, -1), sin_BN1E)
    return turned[:, :, :q_heads], turned[:, :, q_heads:], heads[:, :, q_heads + kv_heads :]


def leave(
    hidden_BNH: Tensor, mixed_BNH: Tensor, ending: Parts, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """The layer's output, from its input and what attention mixed. ending: the output's map, a
    norm, and the feed-forward's maps in and out.
    """
    hidden_BNH = hidden_BNH + _product(ending[0], mixed_BNH)
    del mixed_BNH  # a prompt's is large, and the feed-forward is what needs most
    return fed_forward(hidden_BNH, ending, activation)


def fed_forward(
    hidden_BNH: Tensor, ending: Parts, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """The second half of a layer."""
    _, norm, gate_up, down = ending
    inner = _outputs(gate_up, normed(norm, hidden_BNH))
    gate, up = inner if len(inner) == 2 else inner[0].chunk(2, -1)
    return hidden_BNH + _product(down, activation(gate) * up)


def _outputs(maps: Any, x: Tensor) -> list[Tensor]:
    """What each of them gives, or all in one tensor."""
    return linear(x, *maps) if type(maps) is tuple else maps.outputs(x)


def _product(maps: Any, x: Tensor) -> Tensor:
    made = _outputs(maps, x)
    return made[0] if len(made) == 1 else torch.cat(made, -1)


def normed(norm: Any, x: Tensor) -> Tensor:
    """By what `norm_of` gave."""
    if norm is None:
        return x
    made: Tensor = F.rms_norm(x, norm[0].shape, *norm) if type(norm) is tuple else norm(x)
    return made


def norm_of(norm: Any) -> Any:
    """Weight and epsilon of an RMS norm, or its faster form; None stays."""
    if norm is None:
        return None
    half_on_cpu = norm.weight.device.type == "cpu" and norm.weight.dtype == torch.bfloat16
    return TwiceNorm(norm) if half_on_cpu else (norm.weight, norm.variance_epsilon)


def maps_of(*linears: nn.Linear) -> Any:
    """Weights and biases of maps that read the same input, or their packed form."""
    product = Product.of(linears)
    if isinstance(linears[0], Summed):
        return SummedProduct(product)
    return product if product.packs else product.tensors


class SummedProduct:
    """A part of a product, the outputs summed over processes."""

    def __init__(self, own: Product) -> None:
        self.own = own

    def outputs(self, x: Tensor) -> list[Tensor]:
        return [Summed.joined(self.own(x))]


class LeanLayer:
    """One decoder layer's parts, as `enter` and `leave` want them."""

    def __init__(self, layer: Any, index: int) -> None:
        attention = layer.self_attn
        self.halves: tuple[str, ...] = HALVES
        self.index, self.scale, self.activation = index, attention.scaling, layer.mlp.act_fn
        q, k, v, out, gate, up, down = projections(layer)
        own = [norm_of(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
        first, after = getattr(layer, "input_layernorm", None), layer.post_attention_layernorm
        self.entry: Parts = (norm_of(first), maps_of(q, k, v), *own)
        self.exit: Parts = (maps_of(out), norm_of(after), maps_of(gate, up), maps_of(down))
        width = attention.head_dim
        self.sizes = (q.out_features // width, k.out_features // width, width)
        self.taps: Sequence[Tensor | None] = [None] * 8  # of a block's convolutions, for C++ alone


def attend(
    cache: SlotCache,
    scale: float | None,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
) -> Tensor:
    """Attention of [B, N, heads, E] as [B, N, Hq * E], a prompt's to itself alone. window: of new
    tokens.
    """
    seen = cache.write(layer, key, value)
    grouped = query.shape[2] != key.shape[2]
    query, keys, values = (x.transpose(1, 2) for x in (query, *seen))
    if cache.attend is not None:
        mixed = mix(cache.attend, query, keys, values, scale=scale, window=window)
        return mixed.flatten(2)
    mixed = F.scaled_dot_product_attention(
        query, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return mixed.transpose(1, 2).flatten(2)


@dataclass
class Attending:
    """`attend` over these slots, layer by layer, as a head's layers call it."""

    cache: SlotCache
    window: int | None = None

    def __call__(self, layer: int, *qkv: Tensor) -> Tensor:
        return attend(self.cache, None, layer, *qkv, window=self.window)


class TwiceNorm:
    """transformers' RMS norm in as few calls as a CPU has in bf16.

    torch has no kernel of its own for it there and makes it of a dozen. But the layer norm of
    [x, -x], whose mean is 0 and whose variance is the mean of x squared, is one, and its first half
    is the RMS norm of x. A step of the quickstart's target falls from 2.6 to 2.15 ms.
    """

    def __init__(self, norm: Any) -> None:
        self.weight, self.epsilon, self.version = norm.weight, norm.variance_epsilon, -1

    def __call__(self, x: Tensor) -> Tensor:
        if self.version != version(self.weight):
            self.weight_2H = torch.cat([self.weight, self.weight]).detach()
            self.version = version(self.weight)
        both, shape = torch.cat([x, -x], -1), self.weight_2H.shape
        return F.layer_norm(both, shape, self.weight_2H, None, self.epsilon)[..., : x.shape[-1]]


class LeanCell:
    """A GRU cell: (x [X, I], carried [X, S]) -> carried."""

    def __init__(self, cell: nn.GRUCell) -> None:
        pairs = (cell.weight_ih, cell.bias_ih), (cell.weight_hh, cell.bias_hh)
        self.given, self.kept = (Product([weight], [bias]) for weight, bias in pairs)

    def __call__(self, x_XI: Tensor, carried_XS: Tensor) -> Tensor:
        reset, keep, new = self.given(x_XI).chunk(3, -1)
        resets, keeps, news = self.kept(carried_XS).chunk(3, -1)
        new = (new + (reset + resets).sigmoid() * news).tanh()
        return new.lerp(carried_XS, (keep + keeps).sigmoid())


def lean_copy(module: Any) -> Any:
    """A copy on the same weights, its own maps and norms in their fastest form."""
    made = copy.copy(module)
    for name, part in module.named_children():
        if isinstance(part, nn.Linear):
            vars(made)[name] = Product.of([part])
        elif isinstance(part, nn.GRUCell):
            vars(made)[name] = LeanCell(part)
        elif isinstance(part, LlamaRMSNorm):
            vars(made)[name] = partial(normed, norm_of(part))
    return made
