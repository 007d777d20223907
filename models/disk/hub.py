"""Drafters by their hub names: the files of the repository that a drafter folder is made of."""

from functools import cache
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from draftsmith.models.disk.read_lm import first_line

# Ours and other toolkits' (`tensors.FILES`); no quantised copies, no states of their training.
FETCHED = ("*.json", "*.txt", "*.model", "*.jinja", "*.safetensors", "*.bin", "*.pt")
LEFT_OUT = ("checkpoint-*", "*/*.bin", "*/*.pt", "onnx/*")


def local_folder(name: str | Path) -> Path:
    """The folder of a drafter: `name` itself, or of a hub name its files, fetched unless they are
    here already (under HF_HUB_OFFLINE: only those). ValueError where the hub gives none.
    """
    try:
        validate_repo_id(str(name))
    except HFValidationError:
        return Path(name)
    return Path(name) if Path(name).exists() else _fetched(str(name))


@cache  # a process decodes with one revision
def _fetched(name: str) -> Path:
    try:
        folder = snapshot_download(
            name,
            allow_patterns=list(FETCHED),
            ignore_patterns=list(LEFT_OUT),
            local_files_only=constants.HF_HUB_OFFLINE,
        )
    except OSError as error:
        why = "" if constants.HF_HUB_OFFLINE else f" ({first_line(error)})"
        raise ValueError(
            f"got {name}, which is no folder here and no drafter that the hub gave{why}; expected "
            "a drafter folder or a hub name; correct it, or, where this machine is offline "
            "(HF_HUB_OFFLINE), fetch it first"
        ) from error
    return Path(folder)
