"""A draft that starts as a part of its target: some of its layers, and in each matrix the rows and
columns of the hidden dimensions, heads and neurons that are kept.

One choice of hidden dimensions holds for the whole model, since the residual stream runs through
all of it: those of most weight in the embedding and the output head. Key-value heads with their
query heads, and neurons, are chosen layer by layer, by their weight in the matrices there. Weight
is a sum of squares, as a share of the matrix's own. What is kept stays in its order, so that a
draft of full size is the target itself.

Legend: H hidden, N heads, M key-value heads, G = N / M query heads a group, I neurons.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

# What the axes of each weight are; a bias has the first of them.
PROJECTIONS = {
    "q_proj": ("heads", "hidden"),
    "k_proj": ("kv", "hidden"),
    "v_proj": ("kv", "hidden"),
    "o_proj": ("hidden", "heads"),
    "gate_proj": ("inner", "hidden"),
    "up_proj": ("inner", "hidden"),
    "down_proj": ("hidden", "inner"),
}
NORMS = ("model.norm", "input_layernorm", "post_attention_layernorm")
# By the end of a parameter's name.
AXES: dict[str, tuple[str, ...]] = {
    "embed_tokens.weight": ("vocab", "hidden"),
    "lm_head.weight": ("vocab", "hidden"),
    "q_norm.weight": ("head",),
    "k_norm.weight": ("head",),
    **{f"{name}.weight": ("hidden",) for name in NORMS},
    **{f"{name}.weight": axes for name, axes in PROJECTIONS.items()},
    **{f"{name}.bias": axes[:1] for name, axes in PROJECTIONS.items()},
}
# Families whose parameters these are, and whose forward pass knows no width but through them.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

Weights = Mapping[str, Tensor]


@torch.no_grad()
def start_from_target(
    draft: PreTrainedModel, target: PreTrainedModel, layers: Sequence[int] = ()
) -> None:
    """Overwrite all weights of a draft with parts of its target's; dtype and device stay its own.

    draft: of the target's family, at most as large in every size, with as many rows in its tables,
    made by `draft_from_config`; layers: the target's layer (from 0) for each of the draft's, by
    default `spread_layers`. ValueError for a draft that isn't such a one, or layers that don't
    exist or aren't as many.
    """
    _check(draft.config, target.config)
    many, of = draft.config.num_hidden_layers, target.config.num_hidden_layers
    chosen = list(layers) or spread_layers(of, many)
    if len(chosen) != many or not all(0 <= layer < of for layer in chosen):
        raise ValueError(
            f"got layers {chosen} of the target for a draft of {many}, expected {many} numbers "
            f"from 0 to {of - 1}; correct init_layers or layers"
        )
    weights = {
        name: weight.full_tensor() if isinstance(weight, DTensor) else weight
        for name, weight in target.named_parameters(remove_duplicate=False)
        if _place(name)[0] in (None, *chosen)  # of a sharded target no more than is used
    }
    kept = kept_indices(weights, draft.config, target.config, chosen)
    for name, parameter in draft.named_parameters():
        layer, end = _place(name)
        source = name if layer is None else name.replace(f".{layer}.", f".{chosen[layer]}.", 1)
        value: Tensor = weights[source]
        for axis, of_axis in enumerate(AXES[end]):
            value = value.index_select(axis, kept[layer][of_axis].to(value.device))
        parameter.copy_(value)


def spread_layers(of: int, many: int) -> list[int]:
    """`many` layers of `of`, evenly spaced, the first and the last among them; one: the first."""
    return [round(i * (of - 1) / max(1, many - 1)) for i in range(many)]


def kept_indices(
    weights: Weights, draft: PretrainedConfig, target: PretrainedConfig, layers: Sequence[int]
) -> dict[int | None, dict[str, Tensor]]:
    """For each layer of the draft (None: outside of them) the kept indices of each axis, in order.
    weights: of the target, by name; layers: the target's layer for each of the draft's.
    """
    by_layer: dict[int | None, dict[str, Tensor]] = {None: {}}
    for name, weight in weights.items():
        by_layer.setdefault(_place(name)[0], {})[name] = weight
    outside = {
        "hidden": _largest(_energy(by_layer[None], "hidden"), draft.hidden_size),
        "vocab": torch.arange(target.vocab_size),
    }
    kept: dict[int | None, dict[str, Tensor]] = {None: outside}
    for at, layer in enumerate(layers):
        part = by_layer[layer]
        heads = _heads(part, draft, target)
        neurons = _largest(_energy(part, "inner"), draft.intermediate_size)
        kept[at] = outside | heads | {"inner": neurons}
    return kept


def _heads(part: Weights, draft: PretrainedConfig, target: PretrainedConfig) -> dict[str, Tensor]:
    """Of a layer the rows of the kept heads: whole groups first, then the best in each of them."""
    size, groups = _head_size(target), target.num_key_value_heads
    energy_MG = _energy(part, "heads").view(groups, -1, size).sum(-1)
    energy_M = _energy(part, "kv").view(groups, size).sum(-1) + energy_MG.sum(-1)
    group_M = _largest(energy_M, draft.num_key_value_heads)
    a_group = draft.num_attention_heads // draft.num_key_value_heads
    head_N = torch.cat([m * energy_MG.shape[1] + _largest(energy_MG[m], a_group) for m in group_M])
    step = torch.arange(size)
    return {
        "kv": (group_M[:, None] * size + step).flatten(),
        "heads": (head_N[:, None] * size + step).flatten(),
        "head": step,
    }


def _energy(weights: Weights, axis: str) -> Tensor:
    """For each index of an axis its share of the sum of squares, summed over the matrices."""
    total: Any = 0.0
    for name, weight in weights.items():
        axes = AXES[_place(name)[1]]
        if axis in axes and len(axes) == 2:
            share = weight.float().square().sum(1 - axes.index(axis))
            total = total + share / share.sum().clamp_min(1e-30)
    return total.cpu()


def _largest(score_X: Tensor, many: int) -> Tensor:
    """Indices of the `many` largest, in their own order; of equals the first ones."""
    return score_X.sort(descending=True, stable=True).indices[:many].sort().values


def _place(name: str) -> tuple[int | None, str]:
    """(layer, or None outside of them; the key of AXES) of a parameter."""
    found = re.search(r"layers\.(\d+)\.", name)
    end = next((end for end in AXES if name.endswith(end)), None)
    if end is None:
        raise ValueError(
            f"got a target with {name}, expected the parameters of a plain Llama, Mistral, Qwen2 "
            "or Qwen3; say init=random"
        )
    return (int(found[1]) if found else None), end


def _head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check(draft: PretrainedConfig, target: PretrainedConfig) -> None:
    family = target.model_type
    if family not in FAMILIES or draft.model_type != family:
        raise ValueError(
            f"got a draft of the {draft.model_type} family for a target of the {family} family, "
            f"expected both of one of {', '.join(FAMILIES)}; say init=random, or draft=<a smaller "
            "model of the family>"
        )
    for name, field in SIZES.items():
        got, most = getattr(draft, field), getattr(target, field)
        if got > most:
            raise ValueError(
                f"got a draft with {name}={got}, expected at most the target's {most}, which it is "
                f"cut from; lower {name}, or say init=random"
            )
    if _head_size(draft) != _head_size(target):
        raise ValueError(
            f"got a draft with heads of {_head_size(draft)}, expected the target's size "
            f"{_head_size(target)}, since heads are kept whole; say head_dim={_head_size(target)}"
        )
    a_group = draft.num_attention_heads // draft.num_key_value_heads
    most = target.num_attention_heads // target.num_key_value_heads
    if a_group > most:
        raise ValueError(
            f"got a draft with {a_group} heads for each key-value head, expected at most the "
            f"target's {most}; say kv_heads={-(-draft.num_attention_heads // most)} or more"
        )
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"got a draft of {draft.vocab_size} rows in its tables, expected the target's "
            f"{target.vocab_size}; make it with as many"
        )
    if draft.tie_word_embeddings and not target.tie_word_embeddings:
        raise ValueError(
            "got a draft with one table for embedding and output, expected two, as its target "
            "has; make it with tie_word_embeddings=False"
        )


SIZES = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate": "intermediate_size",
}
