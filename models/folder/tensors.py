"""Checkpoints tensor by tensor: where each is, its shape and type, and its values when asked for.

Heads need a target's embeddings, its LM head and final norm, never its layers; a folder is judged
by its headers. Both are read here without the rest, whatever files they stand in.
"""

import pickle
import struct
import zipfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file

from draftsmith.models.disk.read_lm import first_line, load_config, read_json
from draftsmith.models.fingerprint import final_norm

# What a model, a Medusa head and a Hydra head are stored in, in the order they are looked for.
FILES = (
    *("model.safetensors.index.json", "model.safetensors"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin"),
    *("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt"),
)

# What unpickling a damaged file raises.
DAMAGED = (
    *(OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError),
    *(AssertionError, struct.error, pickle.UnpicklingError, zipfile.BadZipFile),
)


class Checkpoint:
    """The tensors of a folder, or of a hub name at hand; ValueError for none, or a cut file."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        found = next((name for name in FILES if self._locate(name)), None)
        if found is None:
            raise ValueError(
                f"got {path}, which has no weights; expected one of {', '.join(FILES)}; check the "
                "path, or copy the folder again"
            )
        self.file = found
        self._unpickled: dict[str, dict[str, Tensor]] = {}
        self.file_of: dict[str, str] = {}
        if found.endswith(".index.json"):
            named = read_json(self._locate(found) or Path()).get("weight_map")
            if not isinstance(named, dict) or not all(isinstance(f, str) for f in named.values()):
                raise ValueError(f"got {path} whose {found} has no weight_map; copy it again")
            self.file_of = named
        else:
            self.file_of = dict.fromkeys(self._open(found), found)

    @cached_property
    def meta(self) -> dict[str, Tensor]:
        """Every tensor, on the meta device: its shape and type. Opens every file."""
        opened = {name: self._open(name) for name in sorted(set(self.file_of.values()))}
        absent = [name for name, file in self.file_of.items() if name not in opened[file]]
        if absent:
            raise ValueError(f"got {self.path} whose index names {absent[0]}, not in its file")
        return {name: opened[file][name].to("meta") for name, file in self.file_of.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The values of these tensors, on the CPU; KeyError for a name it hasn't."""
        names = list(names)
        made: dict[str, Tensor] = {}
        for file in sorted({self.file_of[name] for name in names}):
            wanted = [name for name in names if self.file_of[name] == file]
            made |= self._open(file, wanted)
        return made

    def _open(self, file: str, wanted: list[str] | None = None) -> dict[str, Tensor]:
        """The tensors of a file: `wanted` ones with values, or all on the meta device."""
        path = self._locate(file)
        if path is None:
            raise ValueError(f"got {self.path} without {file}, which its index names; copy it too")
        if path.suffix != ".safetensors":
            tensors = self._unpickled[file] = self._unpickled.get(file) or _unpickle(path)
            return tensors if wanted is None else {name: tensors[name] for name in wanted}
        try:
            with safe_open(path, framework="pt") as opened:
                if wanted is not None:
                    return {name: opened.get_tensor(name) for name in wanted}
                return {name: _described(opened, name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: half bytes
            raise _cut(path, error) from error

    def _locate(self, file: str) -> Path | None:
        if Path(self.path).is_dir():
            return Path(self.path, file) if Path(self.path, file).is_file() else None
        found = cached_file(self.path, file, _raise_exceptions_for_missing_entries=False)
        return Path(found) if found else None


def _unpickle(file: Path) -> dict[str, Tensor]:
    """The tensors that torch.save wrote, mapped from the disk if it can be; nothing else."""
    try:
        mapped = zipfile.is_zipfile(file)
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except DAMAGED as error:
        raise _cut(file, error) from error
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f"got {file}, which holds no state dict; expected tensors by name")
    return found


def outline(path: str) -> PreTrainedModel:
    """The causal LM at `path` with its embeddings, LM head and final norm, and nothing else: its
    layers have shapes alone. `Head.bind` and `fingerprint` take it for the whole target.
    """
    config = load_config(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    checkpoint = Checkpoint(path)
    outer, head = [model.get_input_embeddings()], model.get_output_embeddings()
    tied = head is not None and head.weight is outer[0].weight
    outer += final_norm(model) + ([head] if head is not None and not tied else [])
    called = {module: name for name, module in model.named_modules()}
    for module in outer:
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{called[module]}.{name}"
            stored = _stored(full, checkpoint)
            value = checkpoint.read([stored])[stored]
            if value.shape != parameter.shape:
                raise ValueError(
                    f"got {path} with {full} of {list(value.shape)}, expected "
                    f"{list(parameter.shape)} by its config.json; restore the folder"
                )
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    if tied:
        head.weight = outer[0].weight
    return model.eval()


def _stored(name: str, checkpoint: Checkpoint) -> str:
    """What a checkpoint calls a parameter: some are saved without the body's prefix."""
    if name in checkpoint.file_of:
        return name
    ends = [n for n in checkpoint.file_of if n.endswith(f".{name}") or name.endswith(f".{n}")]
    if not ends:
        raise ValueError(
            f"got {checkpoint.path} without {name}; expected the weights of the model in its "
            "config.json; restore the folder"
        )
    return min(ends, key=len)


def _described(opened: Any, name: str) -> Tensor:
    """A tensor of a safetensors file without its values."""
    view = opened.get_slice(name)
    shape = view.get_shape()
    dtype = (view[:0] if shape else opened.get_tensor(name)).dtype
    return torch.empty(shape, dtype=dtype, device="meta")


def _cut(file: Path, error: BaseException) -> ValueError:
    return ValueError(
        f"got {file}, which cannot be read ({first_line(error)}); expected a whole file of "
        "tensors; it was probably cut while it was copied: copy it again"
    )
