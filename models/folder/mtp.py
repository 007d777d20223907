"""Modules for multi-token prediction, in the checkpoint of the model that they were trained with or
apart from it, read as ours (`heads.eagle`, kind mtp).

    DeepSeek-V3's names: model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm} beside the layer's
        own, N the number of the model's layers, and upwards
    Qwen3-Next's: mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, mtp.layers.0.*; ours
    MiMo's: model.mtp_layers.0.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}
    speculators': mtp_layers.0.*, MiMo's names

Each reads the model's state after its final norm. input_proj of MiMo multiplies [state; token], all
the others [token; state], speculators' too. By the loaders of vLLM, SGLang, transformers (MtpModel)
and speculators' converter. Of several modules the first is read: it goes on from its own outputs.

Shapes: H hidden.
"""

import re
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from draftsmith.models.folder.foreign import (
    Changes,
    Foreign,
    layer_config,
    our_names,
    rows_of,
    unfit,
)
from draftsmith.models.folder.tensors import Checkpoint
from draftsmith.models.heads.eagle import MTP_NAME

# Models whose layers are of Llama's or Qwen3's kind.
DENSE = ("llama", "mimo", "qwen2", "qwen3")
FC = re.compile(r"((?:.*\.)?(?:mtp_)?layers\.(\d+)\.)(?:eh_proj|input_proj)\.weight")
MTP: Changes = (
    (r"^mtp\.layers\.0\.(enorm|token_layernorm)\.", "mtp.pre_fc_norm_embedding."),
    (r"^mtp\.layers\.0\.(hnorm|hidden_layernorm)\.", "mtp.pre_fc_norm_hidden."),
    (r"^mtp\.layers\.0\.(eh_proj|input_proj)\.", "mtp.fc."),
    (r"^mtp\.layers\.0\.(shared_head\.norm|final_layernorm)\.", "mtp.norm."),
)


def mtp_at(names: set[str]) -> list[str]:
    """The beginnings of the names of a checkpoint's modules, first to last; [] for none."""
    found = {int(at[2]): at[1] for name in names if (at := FC.fullmatch(name))}
    return [found[i] for i in sorted(found)] or ["mtp."] * ("mtp.fc.weight" in names)


def holds_mtp(config: dict[str, Any], names: set[str], target: PretrainedConfig | None) -> bool:
    """Whether a folder is to be read as an MTP module: it holds one and no model, or the model that
    it holds is the target itself, by its sizes; any other drafts as a whole.
    """
    modules = tuple(mtp_at(names))
    layers = [name for name in names if re.search(r"(^|\.)layers\.\d+\.", name)]
    if not modules or all(name.startswith(modules) for name in layers):
        return bool(modules)
    sizes = ("hidden_size", "num_hidden_layers", "vocab_size")
    config = config.get("text_config", config)
    return target is not None and all(config.get(n) == getattr(target, n, None) for n in sizes)


def read_mtp(
    config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None
) -> Foreign:
    """The module of a folder. ValueError for a layer that isn't known here."""
    speculators = "speculators_model_type" in config
    config = config.get("transformer_layer_config") or config.get("text_config") or config
    if config.get("model_type") not in DENSE:
        got = f"has an MTP layer of model_type {config.get('model_type')!r}"
        wanted = f"one of {', '.join(DENSE)}: no experts, no latent or gated attention"
        raise unfit(checkpoint, got, f"{wanted}, rotary embeddings of whole heads")
    if speculators:  # which leaves out what is as it is by default
        config = AutoConfig.for_model(**config).to_dict()
    modules = mtp_at(set(checkpoint.file_of))
    place = "mtp." if modules[0] == "mtp." else "mtp.layers.0."
    found = our_names(checkpoint, ((f"^{re.escape(modules[0])}", place), *MTP))
    found.pop("mtp.layers.0.shared_head.head.weight", None)  # the target's
    names = {n: old for n, old in found.items() if re.match(r"mtp\.(?!layers\.[1-9])", n)}
    attention, made = "mtp.layers.0.self_attn.", dict[str, Tensor]()
    kind = "qwen3" if f"{attention}q_norm.weight" in names else "llama"
    layer = layer_config(config, kind, vocab=rows_of(config, checkpoint, target))
    layer |= {"architectures": [MTP_NAME], "num_hidden_layers": 1}
    if f"{attention}q_proj.bias" in names:
        layer["attention_bias"] = True
        if f"{attention}o_proj.bias" not in names:  # Qwen2's has none
            kept = checkpoint.meta[names[f"{attention}q_proj.bias"]]
            made[f"{attention}o_proj.bias"] = torch.zeros(layer["hidden_size"], dtype=kept.dtype)
    if "mtp_layers" in modules[0] and not speculators:
        stored = names.pop("mtp.fc.weight")
        state_HH, token_HH = checkpoint.read([stored])[stored].chunk(2, 1)
        made["mtp.fc.weight"] = torch.cat([token_HH, state_HH], 1)
    notes = (f"of its {len(modules)} modules the first is read",) * (len(modules) > 1)
    return Foreign("an MTP module", "mtp", layer, names, made, notes)
