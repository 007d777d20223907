"""MTP modules as models are published with them, beside their obvious forward pass.

Shapes: B rows, T positions, H hidden.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from head_folders import written
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

LAYERS = {"llama": LlamaDecoderLayer, "mimo": Qwen2DecoderLayer, "qwen3": Qwen3DecoderLayer}
CONFIGS = {"llama": LlamaConfig, "mimo": Qwen2Config, "qwen3": Qwen3Config}
# model_type, what names begin with, and what is called enorm, hnorm, eh_proj, norm, the layer.
OF_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "")
OF_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "")
OF_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")
FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "deepseek": ("llama", "model.layers.3.", OF_DEEPSEEK),
    "nextn": ("llama", "model.layers.0.", OF_DEEPSEEK),
    "qwen3-next": ("qwen3", "mtp.", OF_QWEN),
    "mimo": ("mimo", "model.mtp_layers.0.", OF_MIMO),
    "speculators": ("qwen3", "mtp_layers.0.", OF_MIMO),
}


class Module(nn.Module):
    """Of transformers' own decoder layer. state_first: MiMo's order before the projection."""

    def __init__(self, config: Any, model_type: str, *, state_first: bool) -> None:
        super().__init__()
        width, norm = config.hidden_size, {"eps": config.rms_norm_eps}
        self.enorm, self.hnorm, self.norm = (nn.RMSNorm(width, **norm) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = LAYERS[model_type](config, 0)
        self.rotary, self.state_first = LlamaRotaryEmbedding(config), state_first

    def forward(self, embedded_BTH: Tensor, state_BTH: Tensor) -> Tensor:
        """What the LM head multiplies, and the next depth reads."""
        parts = [self.enorm(embedded_BTH), self.hnorm(state_BTH)]
        hidden_BTH = self.eh_proj(torch.cat(parts[::-1] if self.state_first else parts, -1))
        at_BT = torch.arange(hidden_BTH.shape[1]).expand(len(hidden_BTH), -1)
        turned = self.rotary(hidden_BTH, at_BT)
        out = self.block(hidden_BTH, position_embeddings=turned, attention_mask=None)
        return self.norm(out if isinstance(out, Tensor) else out[0])


def module(family: str, target: PreTrainedModel) -> tuple[Module, Any]:
    """A random one in which no tensor is what it was born as, and its layer's config."""
    kind = FAMILIES[family][0]
    config = CONFIGS[kind](
        vocab_size=target.config.vocab_size,
        hidden_size=target.config.hidden_size,
        intermediate_size=target.config.intermediate_size,
        num_hidden_layers=target.config.num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=target.config.max_position_embeddings,
        rope_parameters=target.config.rope_parameters,
        **({} if kind == "mimo" else {"head_dim": 8}),
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(6)
    made = Module(config, kind, state_first=family == "mimo").eval().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.ndim == 1:
            parameter.copy_(1 + torch.randn_like(parameter) / 3)
        else:
            nn.init.normal_(parameter, std=0.2)
    return made, config


def official(family: str, folder: Path, target: LlamaForCausalLM, **config: Any) -> Module:
    """Write its folder: the target's own with the module in it, or (nextn, speculators) apart."""
    made, layer = module(family, target)
    kind, prefix, (enorm, hnorm, proj, norm, block) = FAMILIES[family]
    called = {"enorm": enorm, "hnorm": hnorm, "eh_proj": proj, "norm": norm}
    tensors = {}
    for name, value in made.state_dict().items():
        part, _, rest = name.partition(".")
        tensors[prefix + (block + rest if part == "block" else f"{called[part]}.{rest}")] = value
    about = layer.to_dict() | {"model_type": kind, "num_nextn_predict_layers": 1} | config
    about |= {"architectures": target.config.architectures}
    if family == "speculators":  # which writes down only what isn't as it is by default
        about = layer.to_diff_dict() | {"model_type": kind}
        about = {"speculators_model_type": "mtp", "transformer_layer_config": about} | config
    if family == "deepseek":  # with copies of what it shares
        tensors[f"{prefix}embed_tokens.weight"] = target.get_input_embeddings().weight.clone()
        tensors[f"{prefix}shared_head.head.weight"] = target.lm_head.weight.clone()
    if family in ("nextn", "speculators"):
        written(folder, about, tensors, "model.safetensors")
        return made
    target.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    own = dict.fromkeys(target.state_dict(), "model-1.safetensors")
    index = {"metadata": {}, "weight_map": own | dict.fromkeys(tensors, "model-2.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model-2.safetensors")
    return made


def rename(folder: Path, change: dict[str, str]) -> None:
    """Rename tensors of the second file; a name that becomes nothing is dropped."""
    tensors, index = {}, json.loads((folder / "model.safetensors.index.json").read_text())
    for name, value in load_file(folder / "model-2.safetensors").items():
        new = name
        for old, by in change.items():
            new = re.sub(old, by, new)
        del index["weight_map"][name]
        if new:
            tensors[new], index["weight_map"][new] = value, "model-2.safetensors"
    save_file(tensors, folder / "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
