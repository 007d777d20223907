"""What a training entry leaves behind: a model folder, or the drafter folder of a target."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.disk.store import whole_folder
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.heads.head import Head
from draftsmith.models.servers.export import serve_line


def save_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, made: dict[str, Any]
) -> None:
    """A plain transformers folder, with its provenance beside; whole or not at all."""
    with whole_folder(folder) as half:
        model.save_pretrained(half)
        tokenizer.save_pretrained(half)
        (half / "provenance.json").write_text(json.dumps(made, indent=1))


def save_draft(
    folder: Path,
    draft: PreTrainedModel | Head,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target_path: str,
    made: dict[str, Any],
    *,
    K: int,
) -> None:
    """A drafter folder for the target at `target_path`; prints the line that serves it."""
    kind = draft.kind if isinstance(draft, Head) else "lm"
    save_drafter(
        folder,
        kind=kind,
        model=draft,
        tokenizer=tokenizer,
        target_fingerprint=fingerprint(target, tokenizer, target_path),
        provenance=made,
        defaults={"K": K},
    )
    print(serve_line(folder, target_path))
