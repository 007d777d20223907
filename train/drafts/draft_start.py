"""The draft that a run starts from: a fresh one of given sizes, or an earlier result."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.draft_init import start_from_target
from draftsmith.models.draft_lm import draft_from_config, load_draft, recast
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import open_drafter
from draftsmith.models.tokenizer import check_same_tokenizer, load_tokenizer
from draftsmith.train.run.lora import Lora, with_lora

Module = TypeVar("Module", bound=nn.Module)


@dataclass(kw_only=True)
class ModelStart:
    """The group `draft` or `model` of a recipe."""

    path: str = ""  # what to go on from: a folder or a hub's name; empty: a fresh one of the sizes
    layers: int = 1
    hidden: int = 96
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    head_dim: int = 0  # 0: hidden / heads
    context: int = 2048  # positions it is configured for
    init: str = "random"  # random | target: a part of the target (models/draft_init.py)
    init_layers: list[int] = field(default_factory=list)  # which of its layers; none: spread evenly


def fresh_model(
    sizes: ModelStart,
    family: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int,
    seed: int,
    tied: bool = True,
) -> PreTrainedModel:
    """A random model in fp32 of a config's family. rows: of its tables, a draft's as many as its
    target's, padding included: vLLM wants it so; tied: embedding and output head are one table.
    """
    names = ["layers", "hidden", "heads", "kv_heads", "intermediate"]
    names += ["head_dim"] if sizes.head_dim else []
    fields: dict[str, Any] = {name: getattr(sizes, name) for name in names}
    fields |= {name: getattr(tokenizer, name) for name in SPECIAL}
    fields |= {"tie_word_embeddings": tied, "max_position_embeddings": sizes.context}
    return draft_from_config(family, seed=seed, vocab_size=rows, **fields)


def fresh_draft(
    sizes: ModelStart, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """A draft of the target's family with as many logits, in fp32 on the CPU: random, or as `init`
    says a part of the target, which then also decides whether its tables are one. ValueError:
    another `init`, and what `start_from_target` refuses.
    """
    if sizes.init not in ("random", "target"):
        raise ValueError(f"got init={sizes.init!r}, expected random or target")
    rows, copied = target.get_output_embeddings().weight.shape[0], sizes.init == "target"
    tied = not copied or target.config.tie_word_embeddings
    draft = fresh_model(sizes, target.config, tokenizer, rows=rows, seed=seed, tied=tied)
    if copied:
        start_from_target(draft, target, sizes.init_layers)
    return draft


def open_draft(
    source: ModelStart,
    lora: Lora,
    mismatch: bool,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> PreTrainedModel:
    """The draft of `source` for `target`, in fp32 and where that is, with adapters if asked for;
    mismatch: also one that was made for another target. ValueError: a folder that isn't whole, is
    made for another target, or has other tokens; what `with_lora` refuses.
    """
    if source.path and source.init == "target":
        raise ValueError(
            f"got draft.init=target and draft.path={source.path}, expected one of them"
        )
    if source.path:
        draft = given_draft(source.path, target, tokenizer, allow_target_mismatch=mismatch)
    else:
        draft = fresh_draft(source, target, tokenizer, seed)
    draft = with_lora(draft, lora, given=bool(source.path), seed=seed)
    return place(draft, target.device)


def given_draft(
    path: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    allow_target_mismatch: bool = False,
) -> PreTrainedModel:
    """The draft LM in a drafter folder or at a hub name, in fp32, checked against its target.
    ValueError as for `open_draft`, and for a folder of no LM.
    """
    if not Path(path).is_dir():
        check_same_tokenizer(tokenizer, load_tokenizer(path))
        return load_draft(path)
    folder = open_drafter(
        path,
        fingerprint(target, tokenizer),
        allow_target_mismatch=allow_target_mismatch,
        target_tokenizer=tokenizer,
    )
    if folder.kind != "lm":
        raise ValueError(
            f"got draft={path}, a head of kind {folder.kind}, expected a draft LM; train/heads.py "
            "and train/eagle.py train heads, train/scorers.py an acceptance head for one"
        )
    if folder.vocab is not None:
        warnings.warn(
            f"{path} drafts {len(folder.vocab.ids_D):,} of {folder.vocab.size:,} tokens; here it "
            "has them all again, and so has what is trained from it: `python -m draftsmith trim` "
            "needs no training and comes last",
            stacklevel=2,
        )
    return folder.model("float32")


def open_reference(
    path: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | None:
    """The frozen reference draft at `path`, if any, in the target's type and place."""
    if not path:
        return None
    reference = given_draft(path, target, tokenizer).requires_grad_(False)
    recast(reference, target.dtype)
    return place(reference, target.device)


def place(model: Module, device: torch.device) -> Module:
    """The model, moved to a device, if it isn't there."""
    if any(part.device != device for part in (*model.parameters(), *model.buffers())):
        model.to(device)
    return model


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# What target.shrink=true makes of any recipe's sizes.
TINY = ModelStart(layers=1, hidden=32, heads=2, kv_heads=1, intermediate=64)
