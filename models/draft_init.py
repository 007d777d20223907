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

# What the axes of each module's weight are; a projection's bias has the first of them.
AXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("embed_tokens", "lm_head"), ("vocab", "hidden")),
    **dict.fromkeys(("q_norm", "k_norm"), ("head",)),
    **dict.fromkeys(("norm", "input_layernorm", "post_attention_layernorm"), ("hidden",)),
    "q_proj": ("heads", "hidden"),
    **dict.fromkeys(("k_proj", "v_proj"), ("kv", "hidden")),
    "o_proj": ("hidden", "heads"),
    **dict.fromkeys(("gate_proj", "up_proj"), ("inner", "hidden")),
    "down_proj": ("hidden", "inner"),
}
SIZES = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate": "intermediate_size",
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
    default `spread_layers`. ValueError for another draft, or layers that don't fit.
    """
    _check(draft.config, target.config)
    many, of = draft.config.num_hidden_layers, target.config.num_hidden_layers
    chosen = list(layers) or spread_layers(of, many)
    if len(chosen) != many or not all(0 <= layer < of for layer in chosen):
        raise ValueError(
            f"got layers {chosen} of the target for a draft of {many}, expected {many} numbers "
            f"from 0 to {of - 1}"
        )
    weights = {
        name: weight.full_tensor() if isinstance(weight, DTensor) else weight
        for name, weight in target.named_parameters(remove_duplicate=False)
        if _place(name)[0] in (None, *chosen)  # of a sharded target no more than is used
    }
    kept = kept_indices(weights, draft.config, target.config, chosen)
    for name, parameter in draft.named_parameters():
        layer, axes = _place(name)
        source = name if layer is None else name.replace(f".{layer}.", f".{chosen[layer]}.", 1)
        value: Tensor = weights[source]
        for axis, of_axis in enumerate(axes):
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
        neurons = _largest(_energy(by_layer[layer], "inner"), draft.intermediate_size)
        kept[at] = outside | _heads(by_layer[layer], draft, target) | {"inner": neurons}
    return kept


def _heads(part: Weights, draft: PretrainedConfig, target: PretrainedConfig) -> dict[str, Tensor]:
    """Of a layer the rows of the kept heads: whole groups first, then the best in each of them."""
    size, groups = head_size(target), target.num_key_value_heads
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
        axes = _place(name)[1]
        if axis in axes and len(axes) == 2:
            share = weight.float().square().sum(1 - axes.index(axis))
            total = total + share / share.sum().clamp_min(1e-30)
    return total.cpu()


def _largest(score_X: Tensor, many: int) -> Tensor:
    """Indices of the `many` largest, in their own order; of equals the first ones."""
    return score_X.sort(descending=True, stable=True).indices[:many].sort().values


def _place(name: str) -> tuple[int | None, tuple[str, ...]]:
    """(layer, or None outside of them; the axes) of a parameter."""
    module, part = name.split(".")[-2:]
    if module not in AXES or (part != "weight" and not module.endswith("_proj")):
        raise ValueError(
            f"got a target with {name}, expected the parameters of a plain Llama, Mistral, Qwen2 "
            "or Qwen3; say init=random"
        )
    found = re.search(r"layers\.(\d+)\.", name)
    return (int(found[1]) if found else None), AXES[module][: 1 if part == "bias" else None]


def head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check(draft: PretrainedConfig, target: PretrainedConfig) -> None:
    family = target.model_type
    if family not in FAMILIES or draft.model_type != family:
        got = f"of the {draft.model_type} family for a target of the {family} family"
        remedy = "say init=random, or draft=<a smaller model of the family>"
        raise _refusal(got, f"both of one of {', '.join(FAMILIES)}", remedy)
    for name, field in SIZES.items():
        got, most = getattr(draft, field), getattr(target, field)
        if got > most:
            wanted = f"at most the target's {most}, which it is cut from"
            raise _refusal(f"with {name}={got}", wanted, f"lower {name}, or say init=random")
    ours, theirs = head_size(draft), head_size(target)
    if ours != theirs:
        wanted = f"the target's size {theirs}, since heads are kept whole"
        raise _refusal(f"with heads of {ours}", wanted, f"say draft.head_dim={theirs}")
    ours, theirs = (c.num_attention_heads // c.num_key_value_heads for c in (draft, target))
    if ours > theirs:
        remedy = f"say draft.kv_heads={-(-draft.num_attention_heads // theirs)} or more"
        got = f"with {ours} heads for each key-value head"
        raise _refusal(got, f"at most the target's {theirs}", remedy)
    if draft.vocab_size != target.vocab_size:
        got = f"of {draft.vocab_size} rows in its tables"
        raise _refusal(got, f"the target's {target.vocab_size}", "make it with as many")
    if draft.tie_word_embeddings and not target.tie_word_embeddings:
        got, remedy = "with one table for embedding and output", "tie_word_embeddings=False"
        raise _refusal(got, "two, as its target has", f"make it with {remedy}")


def _refusal(got: str, expected: str, remedy: str) -> ValueError:
    return ValueError(f"got a draft {got}, expected {expected}; {remedy}")
