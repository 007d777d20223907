"""EAGLE heads for a tiny target."""

import torch
from transformers import LlamaConfig, PreTrainedModel

from draftsmith.models.heads.eagle import Eagle, EagleConfig
from draftsmith.models.taps import NORM


def layer_config(kind: type = LlamaConfig, layers: int = 1):
    return kind(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )


def eagle(target: PreTrainedModel, layer=None, **fields) -> Eagle:
    """A random head; fields of EagleConfig. Norms that aren't 1 show where they are used."""
    torch.manual_seed(1)
    fields = {"version": 3, "taps": (1, 2), "draft_vocab": 97} | fields
    if fields["version"] == 1:
        fields |= {"taps": (NORM,), "draft_vocab": 0}
    head = Eagle(EagleConfig(layer or layer_config(), **fields)).bind(target)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return head
