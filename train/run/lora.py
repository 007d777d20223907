"""LoRA (Hu et al., arXiv 2106.09685) through peft: small trained matrices beside frozen ones.

    y = W x + (alpha / rank) B A x,      A random, B zero at first: the model starts as it was

The wrapped model goes wherever a model does. Its state is its adapters, so checkpoints and best
weights hold nothing else. In the end they are added to the weights, which makes a plain model.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from draftsmith.models.disk.store import whole_folder


@dataclass(kw_only=True)
class Lora:
    """The group `lora` of a recipe."""

    rank: int = 0  # 0: off, all weights are trained
    alpha: int = 16
    dropout: float = 0.0
    targets: list[str] = field(default_factory=list)  # [q_proj,v_proj]; empty: all linear maps


def with_lora(model: PreTrainedModel, lora: Lora, *, given: bool, seed: int) -> PreTrainedModel:
    """The model as a PeftModel, of which only the adapters (fp32) are trained; as it is at rank 0,
    or where it is one. Its layers are wrapped in place. given: whether it comes from a checkpoint;
    seed: of A, and no global random state is moved. ValueError where peft isn't installed, for a
    rank below 0, a fresh model, or names that match nothing, or no linear map in the body.
    """
    if not lora.rank or hasattr(model, "merge_and_unload"):
        return model
    if lora.rank < 0 or not 0 <= lora.dropout < 1:
        raise ValueError(
            f"got lora.rank={lora.rank}, lora.dropout={lora.dropout}, expected a rank of 0 (off) "
            "or more, and a share below 1"
        )
    if not given:
        raise ValueError(
            f"lora.rank: got {lora.rank} for a fresh model, which has nothing to adapt; name a "
            "trained one, or say lora.rank=0 to train all weights"
        )
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("lora.rank needs peft: pip install 'draftsmith[lora]'") from error
    sizes: Any = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    config = LoraConfig(**sizes, target_modules=_targets(model, lora.targets))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # peft moves them to their layers
        torch.default_generator.manual_seed(seed)
        wrapped: Any = get_peft_model(model, config)
    wrapped.register_state_dict_post_hook(_keep_adapters)
    wrapped.register_load_state_dict_post_hook(_miss_adapters)
    return wrapped


def to_save(model: PreTrainedModel, folder: Path, dtype: str) -> PreTrainedModel:
    """A trained model as it is saved: on the CPU, in `dtype`, with adapters added to its weights
    before these are rounded. The adapters themselves go to `folder`, as peft reads them.
    """
    plain: Any = model
    if hasattr(model, "merge_and_unload"):
        with whole_folder(folder) as half:
            # Without a look at the hub for the base model's vocabulary.
            model.save_pretrained(half, save_embedding_layers=False)
        plain = plain.merge_and_unload()
    return plain.to("cpu", getattr(torch, dtype))


def _targets(model: PreTrainedModel, names: list[str]) -> str | list[str]:
    """What peft is told; ValueError unless each name is that of linear maps in the body."""
    if not names:
        return "all-linear"  # but the output head
    head = model.get_output_embeddings()
    every = dict(model.named_modules())
    linear = {path for path, m in every.items() if isinstance(m, nn.Linear) and m is not head}

    def matches(name: str, paths: set[str]) -> bool:
        return any(path == name or path.endswith(f".{name}") for path in paths)

    others = every.keys() - linear
    wrong = [name for name in names if not matches(name, linear) or matches(name, others)]
    if wrong:
        kinds = sorted({path.rpartition(".")[2] for path in linear})
        raise ValueError(
            f"lora.targets: got {names}, of which {', '.join(wrong)} names no linear map in this "
            f"model's body; expected some of {', '.join(kinds)}, or none to adapt them all"
        )
    return names


def _keep_adapters(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in [name for name in state if name.startswith(prefix) and _frozen(name)]:
        del state[name]


def _miss_adapters(module: nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if not _frozen(name)]


def _frozen(name: str) -> bool:
    """Whether a tensor's name is that of a weight inside a PeftModel, not of an adapter."""
    return "base_model.model." in name and ".lora_" not in name
