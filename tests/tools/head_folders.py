"""Tiny heads of every kind for one target, in our folders and as other toolkits write them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.heads.block import KINDS, Block, BlockConfig
from draftsmith.models.heads.clover import Clover
from draftsmith.models.heads.eagle import Eagle, EagleConfig
from draftsmith.models.heads.falcon import Falcon
from draftsmith.models.heads.head import Head
from draftsmith.models.heads.hydra import Hydra, HydraConfig
from draftsmith.models.heads.kangaroo import Kangaroo
from draftsmith.models.heads.longspec import LongSpec
from draftsmith.models.heads.medusa import Medusa, MedusaConfig
from draftsmith.models.heads.peagle import PEagle, PEagleConfig
from draftsmith.models.layers.layer import layer_like
from draftsmith.models.vocab import DraftVocab

DRAFTED = 160


def layer(
    target: PreTrainedModel, kind: type = LlamaConfig, layers: int = 1, width: int = 8
) -> Any:
    config = target.config
    return kind(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )


def made(kind: str, target: PreTrainedModel, **about: Any) -> Head:
    """A random head in which no tensor is what it was born as. about: layers, qwen (its layers are
    Qwen3's), width (of their heads), shared, and fields of the kind's config.
    """
    sizes = {"hidden": target.config.hidden_size, "rows": target.config.vocab_size}
    qwen, layers = about.pop("qwen", False), about.pop("layers", 1)
    config = layer(target, Qwen3Config if qwen else LlamaConfig, layers, about.pop("width", 8))
    head: Head
    if kind == "eagle1":
        head = Eagle(EagleConfig(config, 1, **about))
    elif kind == "dovetail":
        head = Eagle(EagleConfig(config, 1, fusion="gated", **about))
    elif kind == "mtp":
        head = Eagle(EagleConfig(config, 1, mtp=True, **about))
    elif kind == "eagle3":
        about = {"taps": (1, 2), "draft_vocab": DRAFTED} | about
        head = Eagle(EagleConfig(config, 3, **about))
    elif kind in ("block", *KINDS):
        own = {"mask_token": 7, "taps": (1, 2), "levels": 4, "rank": 6} | KINDS.get(kind, {})
        head = Block(BlockConfig(config, **own | about))
    elif kind == "peagle":
        about = {"taps": (1, 2), "draft_vocab": DRAFTED, "parallel": 6} | about
        head = PEagle(PEagleConfig(config, 3, **about))
    elif kind == "clover2":
        head = Clover(config, 2, 4)
    elif kind.startswith("falcon"):
        head = Falcon(config, 6, int(kind[-1]))
    elif kind == "kangaroo":
        head = Kangaroo(layer_like(target), 1)
    elif kind == "longspec":  # of a window that fewer rounds fill than may wait
        head = LongSpec(layer_like(target), target.config.num_hidden_layers - 1, 4, window=8)
    elif kind == "medusa":
        head = Medusa(MedusaConfig(**sizes, heads=3, layers=layers, **about))
    else:
        prefix = config if about.pop("prefixed", False) else None
        if prefix is not None:
            prefix.num_hidden_layers = 1
        head = Hydra(HydraConfig(**sizes, heads=3, layers=layers, prefix=prefix, **about))
    torch.manual_seed(3)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=0.2)
    if isinstance(head, Eagle) and 0 < head.config.draft_vocab < sizes["rows"]:
        ids_D = torch.randperm(sizes["rows"])[: head.config.draft_vocab].sort().values
        head.set_vocab(DraftVocab(ids_D, sizes["rows"]))
    return head.eval().requires_grad_(False)


def ours(
    folder: Path,
    head: Head,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    vocab: DraftVocab | None = None,
) -> Path:
    """The folder that training writes; vocab: as `trim` has it."""
    save_drafter(
        folder,
        kind=head.kind,
        model=head,
        tokenizer=tokenizer,
        target_fingerprint=fingerprint(target, tokenizer),
        provenance={"recipe": "test"},
        defaults={"K": 3},
        vocab=vocab,
    )
    return folder


def on_disk(folder: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """A target's own folder."""
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> Path:
    """A folder as others write it: pickled (.bin, .pt) or safetensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def sizes_of(head: Eagle) -> dict[str, Any]:
    """The sizes that official EAGLE configs name, with the rotary fields of old."""
    config = head.config.layer
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": 50000.0,
    }


def equal_heads(got: Head, wanted: Head) -> None:
    """Every tensor by name, bit for bit, and the config."""
    one, other = got.state_dict(), wanted.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert one[name].dtype == tensor.dtype and torch.equal(one[name], tensor), name
    assert got.taps == wanted.taps and got.levels == wanted.levels
    assert got.rows == wanted.rows and got.hidden == wanted.hidden
