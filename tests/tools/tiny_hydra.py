"""Layers for Hydra heads, and heads that look at one place."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig

from draftsmith.models.heads.hydra import Hydra


def layer(kind: type[PretrainedConfig] = LlamaConfig, **changes: Any) -> PretrainedConfig:
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return kind(**(sizes | changes))


@torch.no_grad()
def looks_at(head: Hydra, depth: int, place: int) -> None:
    """Have one head pass on that part of its input, and nothing else."""
    skip = head.blocks(depth)[0].res_connection
    assert isinstance(skip, nn.Linear)
    skip.weight.zero_()
    skip.bias.zero_()
    skip.weight[:, place * head.hidden : (place + 1) * head.hidden] = torch.eye(head.hidden)
