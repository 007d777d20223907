"""One of several parts of a target's layers (tensor parallelism, Megatron-LM, arXiv 1909.08053).

A part has some of the heads and some of the feed-forward's inner units: their rows of the maps that
read the residual stream, and their columns of those that write to it,

    y = sum over parts of W[:, part] x[part]

so a layer needs two sums over all processes, and every process holds the same states. Embeddings,
norms and LM head are whole in each.
"""

import copy
import re
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

ROWS, COLUMNS = "colwise", "rowwise"  # transformers' words for maps that read, and that write
WHOLE = "replicated_with_grad_allreduce"  # and for what isn't split


class Summed(nn.Linear):
    """A part of a map, whose outputs are summed over all processes. group: by which; None: torch's
    own.
    """

    group: ClassVar[dist.ProcessGroup | None] = None

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(F.linear(x, self.weight, self.bias))

    @classmethod
    def joined(cls, part: Tensor) -> Tensor:
        dist.all_reduce(part, group=cls.group)
        return part


def check_split_over(model: PreTrainedModel, parts: int) -> dict[str, str]:
    """How each linear map of the layers is split, by its name in the body. ValueError for a family
    whose config has no plan of that, or another kind of it, and for heads that `parts` doesn't
    divide.
    """
    config = model.config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None) or {}
    maps = {n: part for n, part in model.base_model.named_modules() if type(part) is nn.Linear}
    found = {name: plan.get(re.sub(r"\d+", "*", name), "") for name in maps}
    other = {*plan.values()} - {ROWS, COLUMNS, WHOLE} or {*found.values()} - {ROWS, COLUMNS}
    if not found or other:
        raise ValueError(
            f"parallel: got a target of type {config.model_type}, whose layers transformers splits "
            f"by {sorted(other)}, expected maps split by rows and columns alone (Llama, Mistral, "
            "Qwen2, Qwen3); use parallel=1"
        )
    sizes = {"key-value heads": getattr(config, "num_key_value_heads", 0)}
    sizes |= {"query heads": config.num_attention_heads}
    wrong = [f"{size} {name}" for name, size in sizes.items() if size % parts]
    if wrong:
        raise ValueError(
            f"parallel: got {parts} for a target with {', '.join(wrong)}, expected a number that "
            "divides them"
        )
    return found


@torch.no_grad()
def split_over(model: PreTrainedModel, part: int, parts: int) -> None:
    """Keep one part of the layers, in place; `model.part_config` has that part's heads, its config
    all. Errors of `check_split_over`.
    """
    for name, how in check_split_over(model, parts).items():
        whole: Any = model.base_model.get_submodule(name)
        own = whole.weight.tensor_split(parts, 0 if how == ROWS else 1)[part].clone()
        whole.weight = nn.Parameter(own, requires_grad=False)
        whole.out_features, whole.in_features = own.shape
        if how == COLUMNS:
            whole.__class__ = Summed
            if whole.bias is not None and part:  # is added once
                whole.bias.zero_()
        elif whole.bias is not None:
            own = whole.bias.tensor_split(parts)[part].clone()
            whole.bias = nn.Parameter(own, requires_grad=False)
    config = copy.copy(model.config.get_text_config())
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.head_dim = width
    for field in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config, field, None):
            setattr(config, field, getattr(config, field) // parts)
    model.part_config = config  # type: ignore[assignment]
