"""What a training entry leaves behind: a model folder, or the drafter folder of a target."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.disk.provenance import provenance
from draftsmith.models.disk.store import whole_folder
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import save_drafter
from draftsmith.models.servers.export import serve_line
from draftsmith.train.run.loop import Result


def made_by(
    argv: list[str], seed: int, data_hash: str, ended: Result, acceptance: float | None = None
) -> dict[str, Any]:
    """The provenance of a run's result; data_hash: of the text that it has read; acceptance:
    held-out alpha, where it was measured.
    """
    return provenance(
        argv=argv,
        seed=seed,
        data_hash=data_hash,
        steps=ended.best_step,
        acceptance=acceptance,
    )


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
    draft: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target_path: str,
    made: dict[str, Any],
    *,
    K: int = 4,
) -> None:
    """A drafter folder for `target`; prints the line that serves it."""
    save_drafter(
        folder,
        kind="lm",
        model=draft,
        tokenizer=tokenizer,
        target_fingerprint=fingerprint(target, tokenizer, target_path),
        provenance=made,
        defaults={"K": K},
    )
    print(serve_line(folder, target_path))
