"""Taps: states inside a target that a head reads.

Tap i is the residual stream after i decoder layers (0: the embeddings, L: before the final norm);
`NORM` is the state after the final norm, the one the LM head multiplies. Other conventions are
translated where folders are read and written, nowhere else.

Shapes: B rows, T positions, G hidden size of the target, F = (number of taps) * G.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.target import output_head

Tap = int | str
NORM = "norm"


class TargetStates(NamedTuple):
    """norm_BTG: after the final norm; taps_BTF: the taps asked for, side by side, in order."""

    norm_BTG: Tensor
    taps_BTF: Tensor


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's three taps: 2, L // 2 and L - 3 (SafeAILab/EAGLE, modeling_llama_kv.py). Under
    eight layers, where they would meet: 1, ceil(L / 2) and L - 1, without repeats.
    """
    if layers >= 8:
        return 2, layers // 2, layers - 3
    return tuple(sorted({1, math.ceil(layers / 2), max(layers - 1, 0)}))


def block_taps(layers: int) -> tuple[Tap, ...]:
    """DFlash's five, the outputs of layers 1 to L - 3, from 0, evenly; under ten layers ours."""
    if layers < 10:
        return default_taps(layers)
    return tuple(round(1 + i * (layers - 4) / 4) + 1 for i in range(5))


def check_taps(taps: Sequence[Tap], layers: int) -> None:
    """ValueError for a tap that a target of `layers` layers doesn't have, or one named twice."""
    wrong = [t for t in taps if t != NORM and not (isinstance(t, int) and 0 <= t <= layers)]
    if wrong:
        raise ValueError(
            f"taps: got {wrong} for a target of {layers} layers, expected numbers from 0 (the "
            f"embeddings) to {layers} (before the final norm), or {NORM!r}; tap i is the state "
            "after i layers, so check the convention of the place that these numbers come from"
        )
    if len(set(taps)) < len(taps):
        raise ValueError(f"taps: got {list(taps)}, expected each one once; drop the repeats")


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a causal LM in order; ValueError where they can't be told."""
    count = model.config.get_text_config().num_hidden_layers
    for module in output_head(model)[0].modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(
        f"got {type(model).__name__}, in which no list of {count} decoder layers was found; "
        "expected a causal LM whose layers stand in one ModuleList"
    )


@contextmanager
def watching(model: PreTrainedModel, taken: dict[int, Tensor | None]) -> Iterator[None]:
    """While it lasts, a forward pass of the body puts the state of each tap i into `taken[i]`."""
    layers = decoder_layers(model)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken[0] = args[0] if args else kwargs["hidden_states"]

    def after(tap: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            taken[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [layers[tap - 1].register_forward_hook(after(tap)) for tap in taken if tap > 0]
    if 0 in taken:
        hooks.append(layers[0].register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def joined(taps: Sequence[Tap], norm: Tensor, taken: dict[int, Tensor | None]) -> Tensor:
    """The taps' states [..., F] side by side, in the order of `taps`."""
    states = [norm if tap == NORM else taken[int(tap)] for tap in taps]
    found = [state for state in states if state is not None]
    assert len(found) == len(taps), f"taps {list(taps)} asked for, {len(found)} seen"
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def parted(pieces: Sequence[Tensor], lens: Sequence[int]) -> tuple[Tensor, ...]:
    """Each prompt's states [n, F] of pieces of them all, one after another; a copy of those alone
    that begin in one piece and end in another.
    """
    left, found = deque(pieces), []
    for many in lens:
        parts = list[Tensor]()
        while many:
            piece = left.popleft()
            parts.append(piece[:many])
            many -= len(parts[-1])
            if len(piece) > len(parts[-1]):
                left.appendleft(piece[len(parts[-1]) :])
        found.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return tuple(found)


@torch.no_grad()
def target_states(model: PreTrainedModel, taps: Sequence[Tap], **inputs: Any) -> TargetStates:
    """One pass of the target's body: its final states, and those of `taps`. inputs: of the body
    (input_ids, position_ids, attention_mask). Errors of `check_taps` pass.
    """
    check_taps(taps, model.config.get_text_config().num_hidden_layers)
    taken: dict[int, Tensor | None] = {int(tap): None for tap in taps if tap != NORM}
    with watching(model, taken):
        norm_BTG = output_head(model)[0](**inputs, use_cache=False).last_hidden_state
    return TargetStates(norm_BTG, joined(taps, norm_BTG, taken) if taps else norm_BTG[..., :0])
