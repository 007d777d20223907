"""Targets of many families, tiny and random: windows, sinks, experts, biases."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB, WINDOW = 320, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SLIDING: dict[str, Any] = {"layer_types": KINDS, "sliding_window": WINDOW}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **SLIDING, head_dim=8)),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, **SLIDING, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, head_dim=8, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
        )
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES | {"num_key_value_heads": 4})),
    "phi": lambda: PhiForCausalLM(PhiConfig(**SIZES)),  # its LM head has a bias
}


def made(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            parameter.data += 1
        if name == "lm_head.bias":
            parameter.data.normal_(std=2)
    return model.requires_grad_(False)
