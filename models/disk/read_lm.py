"""Reading a causal LM from a folder or the hub, and refusing what `from_pretrained` lets through.

transformers fills a tensor that the file lacks with random numbers, and only logs it: a draft with
one random layer still decodes losslessly, just slowly, so nobody would notice. Here every
difference between the file and the model is an error.
"""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

LARGE = 1 << 30  # bytes of a checkpoint that is worth a progress bar

Tensors = Mapping[str, torch.Tensor]


def load_config(path: str | Path, *, local_files_only: bool = False) -> PretrainedConfig:
    """The configuration of a causal LM, a folder or a hub name; ValueError when there is none, or
    it is of a family without one.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=local_files_only
        )
        kinds = type(config), type(config.get_text_config())
        if not any(kind in MODEL_FOR_CAUSAL_LM_MAPPING for kind in kinds):
            raise ValueError(f"transformers has none of type {config.model_type}")
        return config
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ValueError(_unreadable(path, error)) from error


def load_lm(path: str | Path, *, dtype: str, allow_unknown: bool) -> PreTrainedModel:
    """A causal LM with sdpa attention (if any), every tensor of it read from the folder or hub name
    `path`.

    dtype: of `DTYPES`; allow_unknown: accept tensors without a place in it (some published targets
    carry layers that only their own servers use). ValueError for an unknown dtype, nothing at
    `path`, a cut file, or tensors that are missing, of another shape, or (unless allowed) unknown.
    """
    check_dtype(dtype)
    kinds = getattr(load_config(path).get_text_config(), "layer_types", None) or ("full",)
    try:
        # Any: with output_loading_info the call returns a pair, which its annotation doesn't say.
        with _bar_if_large(Path(path)):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(path),
                dtype=DTYPES[dtype],
                # Refused by models without any attention.
                attn_implementation=None if set(kinds) == {"linear_attention"} else "sdpa",
                trust_remote_code=False,
                # A wrong shape is then listed in `info` with the rest, and refused below.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, SafetensorError) as error:
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
    """Compare the header of `folder/model.safetensors` with the model that `config` describes; its
    tied output head may be in the file or not, no weights are read. ValueError for an unreadable
    file, or tensors that are missing, unknown or of another shape, the first few of each named.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state = model.state_dict()
    # named_parameters lists a shared tensor once, under its first name: the one that is saved.
    tied = state.keys() - dict(model.named_parameters()).keys() - dict(model.named_buffers()).keys()
    saved = revert_weight_conversion(model, {k: v for k, v in state.items() if k not in tied})
    check_header(folder, saved, "model", tied)


def check_header(folder: Path, expected: Tensors, by: str, optional: Collection[str] = ()) -> None:
    """ValueError where `folder/model.safetensors` is cut, or its tensors aren't those expected."""
    file = folder / "model.safetensors"
    try:
        with safe_open(file, framework="pt") as opened:
            shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"got {file}, which cannot be read ({error}); expected a whole safetensors file; it "
            "was probably cut while it was copied or saved: copy it again, or train again"
        ) from error
    found = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    refuse_faults(folder, tensor_faults(found, expected, by, optional))


def tensor_faults(
    found: Tensors, expected: Tensors, by: str, optional: Collection[str] = ()
) -> dict[str, list[str]]:
    """How the tensors of a file differ from those expected; by: what says so, in words."""
    return {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(found.keys() - expected.keys() - set(optional)),
        "of another shape": [
            f"{name} (file {list(found[name].shape)}, {by} {list(expected[name].shape)})"
            for name in sorted(expected.keys() & found.keys())
            if found[name].shape != expected[name].shape
        ],
    }


def refuse_faults(path: str | Path, faults: dict[str, list[str]]) -> None:
    """ValueError naming the first few tensors of each fault; nothing when there are none."""
    parts = [
        f"{len(names)} {fault}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        for fault, names in faults.items()
        if names
    ]
    if parts:
        raise ValueError(
            f"got weights in {path} with tensors {'; '.join(parts)}; expected exactly those of the "
            "model in its config.json; the two files come from different models or one was edited: "
            "restore the folder as it was saved"
        )


def check_dtype(dtype: str) -> None:
    """ValueError for the name of another type than a model can be loaded in."""
    if dtype not in DTYPES:
        raise ValueError(f"got dtype {dtype!r}; expected one of {', '.join(DTYPES)}; correct it")


def read_json(file: Path) -> dict:
    """The object in a JSON file; ValueError when the file is cut or holds something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"got {file}, which cannot be read ({error}); expected a JSON object; it was probably "
            "cut or edited: restore the folder as it was saved"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"got {file} holding a {type(content).__name__}; expected a JSON object; restore it"
        )
    return content


def write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def save_tensors(file: Path, tensors: Tensors) -> None:
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, file, metadata={"format": "pt"})


def first_line(error: BaseException) -> str:
    """What an error says, for a message: its first line, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _unreadable(path: str | Path, error: BaseException) -> str:
    if Path(path).exists():
        return (
            f"got {path}, which cannot be read as a causal LM ({first_line(error)}); expected a "
            "folder with config.json and whole safetensors weights; check it, or copy it again"
        )
    return (
        f"got {path}, which is neither a folder here nor a model that the hub gave "
        f"({first_line(error)}); expected a folder in transformers' layout or a hub name; correct "
        "the path, or, where this machine is offline (HF_HUB_OFFLINE), fetch the model first"
    )


DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16}
