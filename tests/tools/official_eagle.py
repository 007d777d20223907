"""Folders as EAGLE's own repository writes them."""

from pathlib import Path
from typing import Any

import torch
from head_folders import sizes_of, written
from transformers import LlamaForCausalLM

from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.heads.head import Head


def official_eagle3(folder: Path, head: Head, target: LlamaForCausalLM, **config: Any) -> Path:
    """SafeAILab's: `midlayer`, pickled, no layer ids, no rope_parameters."""
    assert isinstance(head, Eagle)
    tensors = head.on_disk() | {"embed_tokens.weight": target.get_input_embeddings().weight}
    about = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 160}
    return written(folder, sizes_of(head) | about | config, tensors, "pytorch_model.bin")


def official_eagle1(folder: Path, head: Head, target: LlamaForCausalLM) -> Path:
    assert isinstance(head, Eagle)
    tensors = dict(head.on_disk()) | {
        "embed_tokens.weight": target.get_input_embeddings().weight,
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    config = sizes_of(head) | {"architectures": ["LlamaForCausalLM"], "vocab_size": 320}
    return written(folder, config, tensors, "pytorch_model.bin")
