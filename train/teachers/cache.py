"""The target's states of a whole training text on disk: it runs once, not once an epoch.

A shard (`token_shards.py`) holds states [N, S, G]; of int8 also scales [N, S], fp32. Each state is
stored once: the final one, then the taps.

int8 is symmetric with one scale a token and state, max |x| / 127. On the taps of a small model, a
15M Llama, its error is 1.1 to 1.3% of the states' root mean square (tests/train/teachers/test_tap_cache.py).

Shapes: N tokens, S states a token, G hidden size of the target.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.taps import NORM, Tap, check_taps, target_states
from draftsmith.models.target import output_head
from draftsmith.train.teachers.store import SHARD_BYTES, TokenShards
from draftsmith.train.text.batches import Batches

STORED = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


class TapCache(TokenShards):
    """The states of `batches`' pieces in `folder`.

    Args:
        taps: besides the final state, which is always there.
        stored: a key of `STORED`.
        shard_bytes: as in `TokenShards`.

    Raises ValueError for taps that the target hasn't, or an unknown `stored`.
    """

    stem, what, remedy = "states", "the target's states", "set cache_int8=true"

    def __init__(
        self,
        folder: Path,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        taps: Sequence[Tap],
        batches: Batches,
        *,
        stored: str = "bfloat16",
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if stored not in STORED:
            raise ValueError(f"got stored={stored!r}, expected one of {', '.join(STORED)}")
        config = target.config.get_text_config()
        check_taps(taps, config.num_hidden_layers)
        self.states: tuple[Tap, ...] = (NORM, *(tap for tap in taps if tap != NORM))
        self.stored, self.hidden = stored, output_head(target)[1].shape[1]
        scale = 4 if stored == "int8" else 0
        super().__init__(
            folder,
            target,
            tokenizer,
            batches,
            holds={"states": list(self.states), "stored": stored},
            token_bytes=len(self.states) * (self.hidden * STORED[stored].itemsize + scale),
            shard_bytes=shard_bytes,
        )

    def about(self) -> str:
        return f"{len(self.states)} states of {self.hidden} in {self.stored}"

    def rows(self, places_N: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """States [N, S, G] of tokens by their places in the text, all of them in some piece."""
        shape = (len(places_N), len(self.states), self.hidden)
        states_NSG = torch.empty(shape, dtype=dtype, device=device)
        for at_N, tensors, local_N in self.found(places_N):
            found = tensors["states"][local_N].to(device)
            if self.stored == "int8":
                found = found * tensors["scales"][local_N].to(device)[..., None]
            states_NSG[at_N.to(device)] = found.to(dtype)
        return states_NSG

    def compute(self, shard: int) -> dict[str, Tensor]:
        shape = (self.tokens(shard), len(self.states), self.hidden)
        states_NSG = torch.empty(shape, dtype=STORED[self.stored])
        scales_NS = torch.empty(shape[:2])
        for inputs, rows in self.passes(shard):
            norm_BTG, taps_BTF = target_states(self.target, self.states[1:], **inputs)
            all_BTSG = torch.cat([norm_BTG, taps_BTF], -1).unflatten(-1, (-1, self.hidden))
            for at, found in zip(rows, all_BTSG, strict=True):
                kept = found[: at.stop - at.start]
                if self.stored == "int8":
                    kept, scale = quantised(kept.float())
                    scales_NS[at] = scale.cpu()
                states_NSG[at] = kept.to(states_NSG.dtype).cpu()
        return {"states": states_NSG} | ({"scales": scales_NS} if self.stored == "int8" else {})


def quantised(states_NSG: Tensor) -> tuple[Tensor, Tensor]:
    """(states as whole numbers from -127 to 127, scales [N, S]): states = numbers * scales."""
    scales_NS = states_NSG.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (states_NSG / scales_NS[..., None]).round().to(torch.int8), scales_NS
