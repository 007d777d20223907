"""The target's states of a training batch: computed as they are needed, or read from a cache.

Shapes: B rows, T positions, N = B * T, G hidden size of the target, S states a token in the cache,
F = (number of taps) * G.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.taps import Tap, TargetStates, check_taps, target_states
from draftsmith.train.teachers.cache import TapCache
from draftsmith.train.text.batches import Batch, Batches

States = Callable[[Batch], TargetStates]


@dataclass(kw_only=True)
class Cache:
    """The group `cache` of a recipe: where the target's states are kept."""

    path: str = ""  # a folder; empty: they are made anew at each step
    int8: bool = False  # at half the size
    top_k: int = 0  # instead of states, so many of the likeliest tokens; 0: states, exact


class OnlineTaps:
    """States of a batch by a pass of the target.

    Raises ValueError for taps that the target hasn't.
    """

    def __init__(self, target: PreTrainedModel, taps: Sequence[Tap]) -> None:
        check_taps(taps, target.config.get_text_config().num_hidden_layers)
        self.target = target
        self.taps = tuple(taps)

    def __call__(self, batch: Batch) -> TargetStates:
        return target_states(
            self.target,
            self.taps,
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
        )


class CachedTaps:
    """The same states from a cache that is written, in the target's type; zeros at padding.

    Args:
        taps: of those in the cache.
    """

    def __init__(self, cache: TapCache, taps: Sequence[Tap]) -> None:
        self.cache = cache
        self.columns = [cache.states.index(tap) for tap in taps]

    def __call__(self, batch: Batch) -> TargetStates:
        cache, device = self.cache, batch.input_ids.device
        assert batch.places is not None, "the states of text written on the fly are in no cache"
        places_N = batch.places.flatten().cpu()
        shape = (len(places_N), len(cache.states), cache.hidden)
        states_NSG = torch.zeros(shape, dtype=cache.target.dtype, device=device)
        at_N = (places_N >= 0).nonzero().flatten()
        states_NSG[at_N.to(device)] = cache.rows(places_N[at_N], device, states_NSG.dtype)
        states_BTSG = states_NSG.unflatten(0, batch.places.shape)
        return TargetStates(states_BTSG[:, :, 0], states_BTSG[:, :, self.columns].flatten(2))


def open_states(
    keep: Cache,
    accelerator: Accelerator,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    taps: Sequence[Tap],
    batches: Batches,
) -> States:
    """The states that training reads: computed, or from the folder `keep.path`, which all processes
    first fill together. Runs on the same text, target and taps can share one.

    Raises ValueError for wrong taps, or what `TapCache` refuses.
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
        cache = TapCache(Path(keep.path), target, tokenizer, taps, batches, stored=stored)
        cache.fill(accelerator)
    return CachedTaps(cache, taps)
