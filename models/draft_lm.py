"""Standalone draft LMs: shrunk from the target's configuration, or read from a checkpoint."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from draftsmith.models.disk.read_lm import load_lm


def draft_from_config(
    target_config: PretrainedConfig, *, seed: int, **sizes_and_fields: Any
) -> PreTrainedModel:
    """A randomly initialised causal LM of the target's family, fp32, on the CPU. seed: of the
    weights; no global random state is read or moved. The rest, and the errors: of `draft_config`.
    """
    config = draft_config(target_config, **sizes_and_fields)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # torch.manual_seed would also seed the accelerators, which fork_rng here doesn't restore.
        torch.default_generator.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )


def draft_config(
    target_config: PretrainedConfig,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab_size: int,
    **config_fields: Any,
) -> PretrainedConfig:
    """The configuration of a draft of the target's family.

    target_config: its class and all that isn't a size is kept (activation, norm, RoPE, ids, tied or
    separate output head); layers, hidden, heads, kv_heads, intermediate: the draft's sizes;
    vocab_size: rows of the embedding and the output head (vLLM and transformers expect the target's
    own number, padding included); config_fields: any other field of the family, e.g. head_dim,
    which else is hidden / heads.

    ValueError for sizes that don't divide, a field that the family lacks, special ids outside the
    vocabulary, a mixture of experts without expert counts.
    """
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab_size,
    }
    head_dim = config_fields.pop("head_dim", None)
    _check_sizes({**sizes, "intermediate_size": intermediate}, head_dim)
    config = copy.deepcopy(target_config.get_text_config())
    experts = [name for name in EXPERTS if getattr(config, name, None)]
    if experts and not config_fields.keys() & set(EXPERTS):
        raise ValueError(
            f"got a {config.model_type} target, a mixture of experts ({experts[0]}="
            f"{getattr(config, experts[0])}), and no expert count for the draft; pass the config "
            f"of the dense family, or {experts[0]}=..."
        )
    family = config.model_type
    if not hasattr(config, "num_key_value_heads") and sizes.pop("num_key_value_heads") != heads:
        raise ValueError(
            f"got kv_heads={kv_heads} with heads={heads}; expected them equal, since the {family} "
            "family has no grouped heads"
        )
    width = next((name for name in ("intermediate_size", "n_inner") if hasattr(config, name)), None)
    if width is None:
        raise ValueError(
            f"got a target of the {family} family, whose config has no intermediate_size; pass the "
            "config of a Llama-like family (LlamaConfig(), say) with the same tokenizer"
        )
    for name, value in {**sizes, width: intermediate, **config_fields}.items():
        if not hasattr(config, name):
            raise ValueError(
                f"got {name}={value!r}; expected a field of {type(config).__name__}; correct the "
                "name, or leave it out"
            )
        setattr(config, name, value)
    _check_token_ids(config)
    _set_head_dim(config, head_dim or hidden // heads)
    _fit_layer_kinds(config, layers)
    _fit_rope(config)
    config.architectures = None
    # Once more through the constructor: it validates, and derives what depends on the sizes.
    return type(config).from_dict(config.to_dict())


def load_draft(path: str | Path, dtype: str = "float32") -> PreTrainedModel:
    """A draft LM from a folder or a hub name, trainable and in eval mode; fp32 to train further.
    Raises ValueError as `read_lm.load_lm` does; tensors that the model doesn't know are refused.
    """
    return load_lm(path, dtype=dtype, allow_unknown=False)


def mask_token(config: Mapping[str, Any]) -> int | None:
    """MASK, the token that stands for one not known yet in a draft LM that drafts several in a
    pass, by a config that names it as PARD or as vLLM does; None for any other.
    """
    named = config.get("pard_token"), config.get("ptd_token_id")
    return next((int(token) for token in named if token is not None and token >= 0), None)


def set_mask(config: PretrainedConfig, mask: int, levels: int) -> None:
    """Let a draft LM's config say both, as PARD's own do."""
    config.pard_token, config.para_num, config.spd_type = mask, levels, "pard"


def recast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of a module in place, and nothing else: `module.to(dtype)` would also round
    the frequencies of rotary embeddings, by up to a radian at position 1,000 in bf16.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _check_sizes(sizes: dict[str, int], head_dim: int | None) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"got {name}={value}; expected at least 1; raise it")
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if head_dim is None and hidden % heads:
        raise ValueError(
            f"got hidden={hidden} and heads={heads}; expected hidden to be a multiple of heads; "
            f"try hidden={(hidden // heads + 1) * heads}, or set head_dim"
        )
    head_dim = head_dim or hidden // heads
    if head_dim % 2:
        raise ValueError(
            f"got a head size of {head_dim} (hidden={hidden}, heads={heads}); expected an even "
            f"one: rotary positions turn pairs; try hidden={heads * (head_dim + 1)}, or head_dim"
        )
    kv_heads = sizes["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(
            f"got heads={heads} and kv_heads={kv_heads}; expected heads to be a multiple of "
            f"kv_heads; set kv_heads to a divisor of {heads}"
        )


def _check_token_ids(config: PretrainedConfig) -> None:
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        ids = value if isinstance(value, list) else [value]
        outside = [index for index in ids if index is not None and index >= config.vocab_size]
        if outside:
            raise ValueError(
                f"got {name}={value} and vocab_size={config.vocab_size}; expected ids below the "
                f"vocabulary's size; raise vocab_size, or pass {name}= of the tokenizer in use"
            )


def _set_head_dim(config: PretrainedConfig, head_dim: int) -> None:
    derived = config.hidden_size // config.num_attention_heads
    if hasattr(config, "head_dim"):
        config.head_dim = head_dim
    elif head_dim != derived:
        raise ValueError(
            f"got head_dim={head_dim}; expected {derived} (hidden / heads), since the "
            f"{config.model_type} family has no separate head size; leave head_dim out"
        )
    if hasattr(config, "query_pre_attn_scalar"):  # Gemma's attention scale, which is its head size
        config.query_pre_attn_scalar = head_dim


def _fit_layer_kinds(config: PretrainedConfig, layers: int) -> None:
    """The family's kinds of layer in turn, ending on the last kind (full attention, mostly)."""
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        kinds = list(dict.fromkeys(getattr(config, name, None) or []))
        if kinds:
            setattr(config, name, [kinds[i % len(kinds)] for i in range(-layers, 0)])


def _fit_rope(config: PretrainedConfig) -> None:
    """Drop RoPE factors listed one a frequency: they were fitted to the target's head size."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = all(isinstance(value, dict) for value in rope.values())
    for values in rope.values() if nested else [rope]:
        if any(isinstance(value, list) for value in values.values()):
            kept = {k: v for k, v in values.items() if k in ("rope_theta", "partial_rotary_factor")}
            values.clear()
            values.update(kept, rope_type="default")


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
