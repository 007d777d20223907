"""EAGLE heads as servers read them; every tensor that is written is the head's, bit for bit.

Each is a function of our own config.json, tensors by their names on disk, target, and tokens to
draft a round. By the loaders' source, see `models.server_facts`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.layers.layer import LAYER_FIELDS
from draftsmith.models.layouts.exported import Exported
from draftsmith.models.server_facts import EAGLE1_OF_SGLANG, SPECULATORS_VERSION

Config = dict[str, Any]
Tensors = dict[str, Tensor]
FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_KEYS = (*LAYER_FIELDS, "model_type", "rope_parameters", "tie_word_embeddings", "use_cache")


def eagle3_sglang(config: Config, tensors: Tensors, target: PreTrainedModel, K: int) -> Exported:
    layers = target.config.get_text_config().num_hidden_layers
    reason = unread_by_sglang(config | {"num_hidden_layers": 1}, layers)
    if reason:
        raise ValueError(
            "to=sglang: got a head with which SGLang would draft wrongly, without a word: "
            f"{reason}; vLLM reads it: to=vllm, or train one without"
        )
    # The norm before a further layer's attention has the first layer's name there.
    for index in range(1, config["num_hidden_layers"]):
        norm = tensors.pop(f"layers.{index}.input_layernorm.weight")
        tensors[f"layers.{index}.hidden_norm.weight"] = norm
    return Exported(config, tensors)


def eagle1_sglang(config: Config, tensors: Tensors, *unused: Any) -> Exported:
    """With fc's bias, zero where the head has none: SGLang's would be random."""
    fc = tensors["fc.weight"]
    tensors.setdefault("fc.bias", torch.zeros(fc.shape[0], dtype=fc.dtype))
    # `bias` would be read as biases of the attention, and leave them unset.
    return Exported(config | {"architectures": [EAGLE1_OF_SGLANG], "bias": False}, tensors)


def eagle1_vllm(config: Config, tensors: Tensors, *unused: Any) -> Exported:
    if tensors.pop("fc.bias", torch.zeros(1)).any():
        raise ValueError(
            "to=vllm: got an EAGLE-1 head whose fc has a bias, which vLLM doesn't add: it would "
            "draft with other numbers; expected a head trained without (fc_bias: false); SGLang "
            "has the bias: to=sglang"
        )
    return Exported(config | {"bias": False}, tensors)


def eagle3_speculators(flat: Config, tensors: Tensors, target: PreTrainedModel, K: int) -> Exported:
    """The unified format, which vLLM reads too."""
    kept = {name: value for name, value in flat.items() if name in LAYER_KEYS}
    # The target's embeddings are always in the file there.
    tensors = {n.replace("midlayer.", "layers.0.", 1): t for n, t in tensors.items()}
    table = target.get_input_embeddings().weight
    assert isinstance(table, Tensor)
    tensors["embed_tokens.weight"] = table.to(tensors["fc.weight"].dtype)
    config = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": flat["draft_vocab_size"],
        "dtype": flat["torch_dtype"],
        IDS: flat[IDS],
        "embed_requires_grad": False,
        # Each flag is written: readers differ in what they take for a missing one.
        **{name: flat[name] for name in FLAGS},
        **speculators_fields("eagle3", target, K),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": kept,
    }
    return Exported(config, tensors)


def speculators_fields(algorithm: str, target: PreTrainedModel, K: int) -> Config:
    """What every folder of that format says of its kind and its target."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": K}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    named = target.config.architectures or [type(target).__name__]
    about = {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"architectures": named, "name_or_path": target.name_or_path},
    }
    return {
        "speculators_config": about,
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
    }


def unread_by_sglang(config: dict[str, Any], layers: int | None = None) -> str | None:
    """Why SGLang, which reads any EAGLE-3 folder without a word, would draft wrongly with the head
    of this config.json; None where it would not. layers: of the target, where known.
    """
    ids = config.get(IDS) or []
    reasons = (
        ("its residual is never normed (norm_before_residual)", config.get("norm_before_residual")),
        ("it skips the norms on queries and keys (qwen3)", config.get("model_type") == "qwen3"),
        ("it skips the biases of the attention", config.get("attention_bias")),
        ("it takes a single tap for what fc made of it", len(ids) == 1),
        ("it can't tap the embeddings (0)", 0 in ids),
        (f"it can't tap the last layer ({layers})", layers is not None and layers in ids),
        ("it names further layers' norms otherwise", config.get("num_hidden_layers", 1) > 1),
    )
    return next((reason for reason, holds in reasons if holds), None)


def unread_by_llama_cpp(config: dict[str, Any]) -> str | None:
    """Why llama.cpp would draft wrongly with the EAGLE-3 head of this config.json (norm_output), or
    its converter or loader refuse it; None where neither.
    """
    ids, qwen = config.get(IDS) or [0, 0, 0], config.get("model_type") == "qwen3"
    reasons = (
        ("it feeds back a state that isn't normed (norm_output)", config.get("norm_output")),
        ("it has no norm for each tap (fc_norm)", config.get("fc_norm")),
        ("its layers have no norms on queries and keys (qwen3)", qwen),
        ("it has no biases of the attention", config.get("attention_bias")),
        ("it has one layer", config.get("num_hidden_layers", 1) > 1),
        (f"it taps three layers, and these are {len(ids)}", len(ids) != 3),
    )
    return next((reason for reason, holds in reasons if holds), None)


def unread_by_tensorrt(config: dict[str, Any]) -> str | None:
    """What of this EAGLE-3 head's config.json TensorRT-LLM's documentation doesn't speak of."""
    own = [name for name in FLAGS if config.get(name)]
    return f"its documentation doesn't speak of {' and '.join(own)}" if own else None


LAYOUTS: dict[tuple[str, str], Callable[[Config, Tensors, PreTrainedModel, int], Exported]] = {
    ("eagle1", "sglang"): eagle1_sglang,
    ("eagle1", "vllm"): eagle1_vllm,
    ("eagle3", "sglang"): eagle3_sglang,
    ("eagle3", "vllm"): lambda config, tensors, *unused: Exported(config, tensors),
    ("eagle3", "speculators"): eagle3_speculators,
}
