"""Reading a causal LM from a folder or the hub, and refusing what `from_pretrained` lets through.

transformers fills a tensor that the file lacks with random numbers, and only logs it: a draft with
one random layer still decodes losslessly, just slowly, so nobody would notice. Here every
difference between the file and the model is an error.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

LARGE = 1 << 30  # bytes of a checkpoint that is worth a progress bar

Shapes = dict[str, tuple[int, ...]]


def load_config(path: str | Path, *, local_files_only: bool = False) -> PretrainedConfig:
    """The configuration of the model at `path`, a folder or a hub name.

    Raises ValueError when there is none; never runs code that comes with a checkpoint.
    """
    try:
        return AutoConfig.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=local_files_only
        )
    except OSError as error:
        raise ValueError(_unreadable(path, error)) from error


def load_lm(path: str | Path, *, dtype: str, allow_unknown: bool) -> PreTrainedModel:
    """A causal LM with sdpa attention, every tensor of it read from the checkpoint.

    Args:
        path: a folder in transformers' layout, or a hub name.
        dtype: "auto" (as saved), "float32" or "bfloat16".
        allow_unknown: accept tensors in the file that the model has no place for (some published
            targets carry extra layers that only their own servers use).

    Raises:
        ValueError: unknown dtype, nothing at `path`, a truncated file, or tensors that are missing,
            of another shape, or (unless allowed) unknown.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f"got dtype {dtype!r}; expected one of {', '.join(DTYPES)}; correct the dtype"
        )
    load_config(path)
    try:
        # Any: with output_loading_info the call returns a pair, which its annotation doesn't say.
        with _bar_if_large(Path(path)):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(path),
                dtype=DTYPES[dtype],
                attn_implementation="sdpa",
                trust_remote_code=False,
                # A wrong shape is then listed in `info` with the rest, and refused below.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, SafetensorError) as error:
        raise ValueError(_unreadable(path, error)) from error
    model, info = loaded
    faults = {"missing": info["missing_keys"], "of another shape": info["mismatched_keys"]}
    if not allow_unknown:
        faults["unknown"] = info["unexpected_keys"]
    refuse_faults(path, {fault: sorted(map(str, keys)) for fault, keys in faults.items()})
    return model


@contextlib.contextmanager
def _bar_if_large(folder: Path) -> Iterator[None]:
    """transformers' progress bar only for what takes seconds to load."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    quiet = folder.is_dir() and size < LARGE and logging.is_progress_bar_enabled()
    if quiet:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if quiet:
            logging.enable_progress_bar()


def check_tensors(folder: Path, config: PretrainedConfig) -> None:
    """Compare the header of `folder/model.safetensors` with the model that `config` describes.

    Reads no weights: the model is built without storage. A tied output head may be in the file or
    not.

    Raises:
        ValueError: an unreadable or truncated file, or tensors that are missing, unknown or of
            another shape, named (the first few of each).
    """
    expected, tied = _tensors_of(config)
    found = read_header(folder / "model.safetensors")
    refuse_faults(folder, tensor_faults(found, expected, "model", tied))


def tensor_faults(
    found: Shapes, expected: Shapes, by: str, optional: set[str] | frozenset[str] = frozenset()
) -> dict[str, list[str]]:
    """How the tensors of a file differ from those expected; by: what says so, in words."""
    return {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(found.keys() - expected.keys() - optional),
        "of another shape": [
            f"{name} (file {list(found[name])}, {by} {list(expected[name])})"
            for name in sorted(expected.keys() & found.keys())
            if found[name] != expected[name]
        ],
    }


def read_header(file: Path) -> Shapes:
    """Name and shape of each tensor in a safetensors file; ValueError when it is cut or damaged."""
    try:
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"got {file}, which cannot be read ({error}); expected a whole safetensors file; it "
            "was probably cut while it was copied or saved: copy it again, or train again"
        ) from error


def refuse_faults(path: str | Path, faults: dict[str, list[str]]) -> None:
    """ValueError naming the first few tensors of each fault; nothing when there are none."""
    parts = [
        f"{len(names)} {fault}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        for fault, names in faults.items()
        if names
    ]
    if parts:
        raise ValueError(
            f"got weights in {path} with tensors "
            + "; ".join(parts)
            + "; expected exactly those of "
            "the model in its config.json; the two files come from different models or one was "
            "edited: restore the folder as it was saved"
        )


def read_json(file: Path) -> dict:
    """The object in a JSON file; ValueError when the file is cut or holds something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"got {file}, which cannot be read ({error}); expected a JSON object; it was "
            "probably cut or edited: restore the folder as it was saved"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"got {file} holding a {type(content).__name__}; expected a JSON object; restore the "
            "folder as it was saved"
        )
    return content


def write_json(file: Path, content: dict) -> None:
    """As configs are written."""
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _tensors_of(config: PretrainedConfig) -> tuple[Shapes, set[str]]:
    """Names on disk and shapes of a saved model of this config, and the tied names it may omit."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state = model.state_dict()
    # named_parameters lists a shared tensor once, under its first name: the one that is saved.
    tied = state.keys() - dict(model.named_parameters()).keys() - dict(model.named_buffers()).keys()
    saved = revert_weight_conversion(model, {k: v for k, v in state.items() if k not in tied})
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}, set(tied)


def _unreadable(path: str | Path, error: BaseException) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if Path(path).exists():
        return (
            f"got {path}, which cannot be read as a causal LM ({reason}); expected a folder with "
            "config.json and whole safetensors weights; check the path, or copy the folder again"
        )
    return (
        f"got {path!s}, which is neither a folder here nor a model that the hub gave ({reason}); "
        "expected a folder in transformers' layout or a hub name; correct the path, or, if it is "
        "a hub name and this machine is offline (HF_HUB_OFFLINE), fetch it first where there is "
        "a network"
    )


DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16}
