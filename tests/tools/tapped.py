"""A target whose states are read."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

LAYERS = 3


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)
