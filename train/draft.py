"""The draft that a run starts from: a fresh one of given sizes, or an earlier result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.draft_lm import draft_from_config, load_draft, recast
from draftsmith.models.drafter_folder import open_drafter
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.target import check_same_tokenizer
from draftsmith.models.tokenizer import load_tokenizer


@dataclass(kw_only=True)
class Sizes:
    """The part of a recipe that sizes a fresh model."""

    layers: int = 1
    hidden: int = 96
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    context: int = 2048  # positions it is configured for


@dataclass(kw_only=True)
class DraftSource(Sizes):
    """The part of a recipe that says which draft to start from."""

    draft: str = ""  # a drafter folder, a model folder or a hub name; empty: a fresh draft
    allow_target_mismatch: bool = False  # go on from a draft that was made for another target


def fresh_model(
    sizes: Sizes,
    family: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int,
    seed: int,
) -> PreTrainedModel:
    """A random model in fp32 of a config's family, its embedding and output head one table.

    rows: of that table. A draft has as many as its target, padding included: vLLM wants it so.
    """
    return draft_from_config(
        family,
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        intermediate=sizes.intermediate,
        seed=seed,
        vocab_size=rows,
        tie_word_embeddings=True,
        max_position_embeddings=sizes.context,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def open_draft(
    source: DraftSource, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """The draft of `source` for `target`, in fp32 and where that is.

    Raises:
        ValueError: a folder that isn't whole, is made for another target, or has other tokens.
    """
    if not source.draft:
        rows = target.get_output_embeddings().weight.shape[0]
        draft = fresh_model(source, target.config, tokenizer, rows=rows, seed=seed)
    else:
        mismatch = source.allow_target_mismatch
        draft = given_draft(source.draft, target, tokenizer, allow_target_mismatch=mismatch)
    return place(draft, target.device)


def given_draft(
    path: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    allow_target_mismatch: bool = False,
) -> PreTrainedModel:
    """The draft LM in a drafter folder or at a hub name, in fp32, checked against its target.

    Raises:
        ValueError: a folder that isn't whole, is made for another target, or has other tokens.
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


def place(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The model, moved to a device."""
    moved: Any = model
    moved.to(device)
    return model


# What target.shrink=true makes of any recipe's sizes.
TINY: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 64}
