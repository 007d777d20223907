"""Draft LMs as drafter folders."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter


def save_draft(
    folder: Path,
    draft: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    **about: Any,
) -> Path:
    """The draft, saved for this target; about: provenance, defaults, and what else it has."""
    about = {"provenance": {}, "defaults": {}} | about
    mark = fingerprint(target, tokenizer)
    how = {"model": draft, "tokenizer": tokenizer, "target_fingerprint": mark}
    save_drafter(folder, kind="lm", **how, **about)
    return folder
