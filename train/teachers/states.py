"""The target's states of a training batch: computed as they are needed, or read from a cache, for
which the target runs once over the whole text, not once an epoch.

A shard (`store.py`) holds states [N, S, G]; of int8 also scales [N, S], fp32. Each state is
stored once: the final one, then the taps.

int8 is symmetric with one scale a token and state, max |x| / 127. On the taps of a small model, a
15M Llama, its error is 1.1 to 1.3% of the states' root mean square
(tests/train/teachers/test_tap_cache.py).

Shapes: B rows, T positions, N tokens, G hidden size of the target, S states a token in the cache,
F = (number of taps) * G.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.taps import NORM, Tap, TargetStates, check_taps, target_states
from draftsmith.models.target import output_head
from draftsmith.train.teachers.store import TokenShards
from draftsmith.train.text.batches import Batch, Batches

States = Callable[[Batch], TargetStates]
STORED = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


@dataclass(kw_only=True)
class Cache:
    """The group `cache` of a recipe: where the target's states are kept."""

    path: str = ""  # a folder; empty: they are made anew at each step
    int8: bool = False  # at half the size
    top_k: int = 0  # instead of states, so many of the likeliest tokens; 0: states, exact
    # The target's layers wait in the host's memory while steps read the cache.
    offload_target: bool = False


class OnlineTaps:
    """States of a batch by a pass of the target. ValueError for taps that it hasn't."""

    def __init__(self, target: PreTrainedModel, taps: Sequence[Tap]) -> None:
        check_taps(taps, target.config.get_text_config().num_hidden_layers)
        self.target, self.taps = target, tuple(taps)

    def __call__(self, batch: Batch) -> TargetStates:
        return target_states(self.target, self.taps, **batch.inputs)


@dataclass(eq=False)
class TapCache(TokenShards):
    """The same states from those of `batches`' pieces in `folder`, once it is written: in the
    target's type, zeros at padding. A folder serves any order of the taps.

    asked: the taps; stored: a key of `STORED`. ValueError for taps that the target hasn't.
    """

    stem, what, remedy = "states", "the target's states", "set cache.int8=true"

    asked: Sequence[Tap]
    stored: str = "bfloat16"

    def __post_init__(self) -> None:
        check_taps(self.asked, self.target.config.get_text_config().num_hidden_layers)
        self.taps = tuple(tap for tap in self.asked if tap != NORM)
        self.states: tuple[Tap, ...] = (NORM, *self.taps)
        self.columns = [self.states.index(tap) for tap in self.asked]
        self.hidden = output_head(self.target)[1].shape[1]
        each = self.hidden * STORED[self.stored].itemsize + 4 * (self.stored == "int8")
        self.describe(
            holds={"states": list(self.states), "stored": self.stored},
            token_bytes=len(self.states) * each,
            about=f"{len(self.states)} states of {self.hidden} in {self.stored}",
        )

    def __call__(self, batch: Batch) -> TargetStates:
        assert batch.places is not None, "the states of text written on the fly are in no cache"
        given = (batch.places.flatten(), batch.input_ids.device, self.target.dtype)
        states_BTSG = self.rows(*given).unflatten(0, batch.places.shape)
        return TargetStates(states_BTSG[:, :, 0], states_BTSG[:, :, self.columns].flatten(2))

    def rows(self, places_N: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """States [N, S, G] of tokens by their places in the text; zeros where they are below 0."""
        shape = (len(places_N), len(self.states), self.hidden)
        states_NSG = torch.zeros(shape, dtype=dtype, device=device)
        for at_N, tensors, local_N in self.found(places_N):
            found = tensors["states"][local_N].to(device)
            if self.stored == "int8":
                found = found * tensors["scales"][local_N].to(device)[..., None]
            states_NSG[at_N.to(device)] = found.to(dtype)
        return states_NSG

    def made(self, norm_TG: Tensor, taps_TF: Tensor) -> dict[str, Tensor]:
        states_TSG = torch.cat([norm_TG, taps_TF], -1).unflatten(-1, (-1, self.hidden))
        if self.stored == "int8":
            return dict(zip(("states", "scales"), quantised(states_TSG.float()), strict=True))
        return {"states": states_TSG.to(STORED[self.stored])}


def quantised(states_NSG: Tensor) -> tuple[Tensor, Tensor]:
    """(states as whole numbers from -127 to 127, scales [N, S]): states = numbers * scales."""
    scales_NS = states_NSG.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (states_NSG / scales_NS[..., None]).round().to(torch.int8), scales_NS


def open_states(
    keep: Cache,
    accelerator: Accelerator,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    taps: Sequence[Tap],
    batches: Batches,
) -> States:
    """The states that training reads: computed, or from the folder `keep.path`, which all processes
    first fill together. Runs on the same text, target and taps can share one. Errors as above.
    """
    if keep.top_k:
        raise ValueError(
            f"cache.top_k: got {keep.top_k}, expected 0: a head reads the target's states, of "
            "which the likeliest tokens tell nothing; cache them as they are, or with cache.int8"
        )
    if not keep.path:
        if keep.int8:
            raise ValueError("got cache.int8=true without a cache, expected cache=<a folder> too")
        return OnlineTaps(target, taps)
    stored = "int8" if keep.int8 else "bfloat16"
    with accelerator.autocast():
        cache = TapCache(Path(keep.path), target, tokenizer, batches, taps, stored)
        cache.fill(accelerator)
    return cache
