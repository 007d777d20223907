"""Small random targets whose layers keep a state, alone or beside attention."""

from collections.abc import Callable
from typing import Any

import torch
from families import SIZES, VOCAB
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": KINDS,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
RECURRENT: dict[str, Callable[[], PreTrainedModel]] = {
    "mamba2": lambda: Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=3,
            num_heads=8,
            head_dim=8,
            state_size=8,
            n_groups=2,
            chunk_size=16,
            initializer_range=0.2,
            eos_token_id=0,
            bos_token_id=2,
            pad_token_id=1,
        )
    ),
    "qwen3-next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES | DELTA,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    ),
    "qwen3.5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES | DELTA)),
    "bamba": lambda: BambaForCausalLM(
        BambaConfig(**SIZES | {"num_hidden_layers": 4}, **MAMBA, attn_layer_indices=[2])
    ),
    "granite": lambda: GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **SIZES | {"num_hidden_layers": 4},
            **MAMBA,
            layer_types=KINDS,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=16,
        )
    ),
}


def recurrent(family: str, seed: int = 0) -> PreTrainedModel:
    """Convolutions and decays that matter: a state forgets within a dozen tokens, not in one."""
    torch.manual_seed(seed)
    model = RECURRENT[family]().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("conv1d.weight"):
            parameter.data.normal_(std=0.5)
        if name.endswith("A_log"):
            parameter.data.uniform_(-2, 0)
        if name.endswith("dt_bias"):
            parameter.data.uniform_(-2, 1)
        if name.endswith("D"):
            parameter.data.normal_()
    return model.requires_grad_(False)
