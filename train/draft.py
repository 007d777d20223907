"""The draft that a run starts from: a fresh one of given sizes, or an earlier result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.draft_lm import draft_from_config, load_draft
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
    """The draft of `source` for `target`, in fp32.

    Raises:
        ValueError: a folder that isn't whole, is made for another target, or has other tokens.
    """
    if not source.draft:
        rows = target.get_output_embeddings().weight.shape[0]
        return fresh_model(source, target.config, tokenizer, rows=rows, seed=seed)
    if not Path(source.draft).is_dir():
        check_same_tokenizer(tokenizer, load_tokenizer(source.draft))
        return load_draft(source.draft)
    folder = open_drafter(
        source.draft,
        fingerprint(target, tokenizer),
        allow_target_mismatch=source.allow_target_mismatch,
        target_tokenizer=tokenizer,
    )
    return folder.model("float32")


# What target.shrink=true makes of any recipe's sizes.
TINY: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 64}
