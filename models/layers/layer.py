"""The decoder layer that heads are made of, on transformers' parts: how positions attend to each
other is the caller's.

Shapes: B rows, T positions, H hidden, I what the first projections read, A query heads, K key-value
heads, E head width, O = A * E.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

from draftsmith.models.target import head_weight

# (layer, queries [B, T, A, E], keys, values [B, T, K, E]) -> mixed [B, T, A * E]
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Keep = Callable[[int, Tensor, Tensor], object]  # (layer, keys, values [B, T, K, E]): takes them in
ATTENTIONS = {"llama": LlamaAttention, "qwen3": Qwen3Attention}
MLPS = {"llama": LlamaMLP, "qwen3": Qwen3MLP}
SWIGLU = ("gate_proj", "up_proj", "down_proj")
LAYER_CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
LLAMA_ROTARY = ("llama", "mistral", "qwen2", "qwen3")  # the whole head, by one rope_parameters
LAYER_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps"),
    *("max_position_embeddings", "initializer_range", "attention_bias", "mlp_bias"),
    *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def layer_json(layer: PretrainedConfig) -> dict[str, Any]:
    """What a folder's config.json keeps of the layers' config."""
    content, names = layer.to_dict(), (*LAYER_FIELDS, "rope_parameters", "model_type")
    return {name: content[name] for name in names if content.get(name) is not None}


def rope_fields(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters as servers of today and of yesterday read them."""
    return {
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
    }


def read_layer(content: dict[str, Any]) -> PretrainedConfig:
    """The layers' config in a config.json; ValueError for layers of another kind."""
    kind = content.get("model_type")
    if kind not in LAYER_CONFIGS:
        wanted = f"expected {' or '.join(LAYER_CONFIGS)}; restore the file as it was saved"
        raise ValueError(f"config.json: got layers of model_type={kind!r}, {wanted}")
    fields = (*LAYER_FIELDS, "rope_parameters")
    return LAYER_CONFIGS[kind](**{name: content[name] for name in fields if name in content})


def layer_like(target: PreTrainedModel, layers: int = 1) -> PretrainedConfig:
    """Sizes of a head's own decoder layers: those of its target's, in Llama's form or Qwen3's.

    Positions are turned as the target's are, where its family turns them as Llama's does. Whatever
    the target's activation, theirs is silu: servers know no other in such layers.
    """
    config = target.config.get_text_config()
    names = (*LAYER_FIELDS, *(("rope_parameters",) if config.model_type in LLAMA_ROTARY else ()))
    sizes = {name: getattr(config, name, None) for name in names} | {"hidden_act": "silu"}
    sizes |= {"num_hidden_layers": layers, "vocab_size": head_weight(target).shape[0]}
    sizes["intermediate_size"] = sizes["intermediate_size"] or 4 * config.hidden_size
    kind = LAYER_CONFIGS.get(config.model_type, LlamaConfig)
    return kind(**{name: value for name, value in sizes.items() if value is not None})


@torch.no_grad()
def begin_as(own: nn.Module, theirs: nn.Module) -> None:
    """Copy what of a module has the same name and shape as in another."""
    found = dict(theirs.named_parameters())
    for name, part in own.named_parameters():
        if name in found and found[name].shape == part.shape:
            part.copy_(found[name])


def begin_as_last(own: Any, theirs: Any) -> None:
    """Of layers, the last as the last one of a target's, and so on."""
    for layer, their in zip(reversed(own), reversed(theirs), strict=False):
        begin_as(layer, their)
        begin_narrower(layer.mlp, getattr(their, "mlp", None))


@torch.no_grad()
def begin_narrower(own: Any, theirs: Any) -> None:
    """Copy of a wider SwiGLU the neurons whose three weights' norms have the largest product."""
    maps: list[Any] = [getattr(theirs, name, None) for name in SWIGLU]
    if not all(isinstance(part, nn.Linear) for part in maps):
        return
    (gate, up, down), (width, hidden) = maps, own.gate_proj.weight.shape
    if width >= len(gate.weight) or hidden != gate.in_features:
        return
    size_I = gate.weight.norm(dim=1) * up.weight.norm(dim=1) * down.weight.norm(dim=0)
    kept_J = size_I.topk(width).indices.sort().values
    own.down_proj.weight.copy_(down.weight[:, kept_J])
    for part, wide in ((own.gate_proj, gate), (own.up_proj, up)):
        part.weight.copy_(wide.weight[kept_J])
        if part.bias is not None and wide.bias is not None:
            part.bias.copy_(wide.bias[kept_J])


class Rotary(LlamaRotaryEmbedding):  # the same for Qwen3
    """transformers' rotary embeddings, whose frequencies stay as they are when a head is cast:
    rounded to bfloat16 they turn up to a radian too far at position 1,000.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self


class OutputHead(nn.Linear):
    """A linear map onto a vocabulary. Optimizers tell it from hidden matrices by its class."""


class EagleLayer(nn.Module):
    """One decoder layer, apart from how positions attend to each other. wide: EAGLE-3's first,
    which reads a normed embedding beside the normed state; bare: EAGLE-1's first, without a norm
    before its attention; else an ordinary one.
    """

    def __init__(
        self, config: PretrainedConfig, index: int, *, wide: bool = False, bare: bool = False
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn: Any = ATTENTIONS[config.model_type](config, index)
        if wide:
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(self.self_attn, name)
                new = nn.Linear(2 * hidden, old.out_features, bias=old.bias is not None)
                setattr(self.self_attn, name, new)
            self.hidden_norm = LlamaRMSNorm(hidden, eps=eps)
        if not bare:
            self.input_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.mlp: Any = MLPS[config.model_type](config)
        self.wide, self.bare = wide, bare

    def enter(
        self, hidden_BTH: Tensor, embedded_BTH: Tensor, *, normed_residual: bool
    ) -> tuple[Tensor, Tensor]:
        """(what the attention's projections read, the residual)."""
        if self.bare:
            return hidden_BTH, hidden_BTH
        if not self.wide:
            return self.input_layernorm(hidden_BTH), hidden_BTH
        normed_BTH = self.hidden_norm(hidden_BTH)
        entry_BTI = torch.cat([self.input_layernorm(embedded_BTH), normed_BTH], -1)
        return entry_BTI, normed_BTH if normed_residual else hidden_BTH

    def project(
        self, entry_BTI: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, T, heads, E], turned to their positions."""
        part = self.self_attn
        shape = (*entry_BTI.shape[:-1], -1, part.head_dim)
        query, key, value = (
            project(entry_BTI).view(shape) for project in (part.q_proj, part.k_proj, part.v_proj)
        )
        if hasattr(part, "q_norm"):
            query, key = part.q_norm(query), part.k_norm(key)
        query, key = apply_rotary_pos_emb(query, key, *rotary, unsqueeze_dim=2)
        return query, key, value

    def remember(self, entry_BTH: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values alone [B, T, K, E], of states that nothing is asked about."""
        return remembered(self.self_attn, entry_BTH, rotary)

    def run(
        self, hidden_BTH: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention, index: int
    ) -> Tensor:
        """Output of an ordinary layer, the attention's number `index`."""
        entry_BTH, _ = self.enter(hidden_BTH, hidden_BTH, normed_residual=False)
        return self.leave(hidden_BTH, attention(index, *self.project(entry_BTH, rotary)))

    def leave(self, residual_BTH: Tensor, mixed_BTO: Tensor) -> Tensor:
        """The layer's output from the residual and what attention mixed."""
        hidden_BTH = residual_BTH + self.self_attn.o_proj(mixed_BTO)
        return hidden_BTH + self.mlp(self.post_attention_layernorm(hidden_BTH))


def stack(config: PretrainedConfig) -> Any:
    """As many ordinary layers as a config says."""
    return nn.ModuleList(EagleLayer(config, i) for i in range(config.num_hidden_layers))


def remembered(
    part: Any, entry_BTH: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, T, K, E] of an attention of Llama's or Qwen3's kind."""
    shape = (*entry_BTH.shape[:-1], -1, part.head_dim)
    key, value = (project(entry_BTH).view(shape) for project in (part.k_proj, part.v_proj))
    if hasattr(part, "k_norm"):
        key = part.k_norm(key)
    # Its first two arguments are turned alike.
    return apply_rotary_pos_emb(key, key, *rotary, unsqueeze_dim=2)[0], value


def causal(mask: Tensor | None = None) -> Attention:
    """Positions see themselves and what came before; mask: [B, 1, T, T] bool in its place."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return mixed.transpose(1, 2).flatten(2)

    return attend
