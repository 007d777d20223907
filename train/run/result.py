"""What a training entry leaves behind: a model folder, or the drafter folder of a target."""

import json
import shlex
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
    config: Any,
    made: dict[str, Any],
) -> None:
    """A drafter folder for a recipe's target; prints the line that evaluates it on the held-out
    rows to report on, then those that serve it.
    """
    path, kind = config.target.path, draft.kind if isinstance(draft, Head) else "lm"
    save_drafter(
        folder,
        kind=kind,
        model=draft,
        tokenizer=tokenizer,
        target_fingerprint=fingerprint(target, tokenizer, path),
        provenance=made,
        defaults={"K": config.K},
    )
    changed = {"adapter": config.target.adapter, "quantise": config.target.quantise}
    changed = {key: value for key, value in changed.items() if value}
    print(evaluate_line(config, target=path, drafter=str(folder), **changed))
    print(serve_line(folder, path))


def evaluate_line(config: Any, **asked: str) -> str:
    """What evaluates a result as its recipe has it, on the held-out rows to report on."""
    asked |= {"prompts": config.heldout.prompts or config.data}
    asked |= {"temperature": f"{config.temperature:g}"} if config.temperature else {}
    keys = (shlex.quote(f"{key}={value}") for key, value in asked.items())
    return f"python -m draftsmith evaluate {' '.join(keys)}"
