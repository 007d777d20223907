"""Layers side by side: an approximation of a model for drafting (EasySpec, arXiv 2502.02493).

Between the first layer and the last, the attentions of each group of G layers read the same input,
the group's, and so could run at once on as many devices; then, in order,

    x <- x + attention_j(group's input);  x <- x + feed-forward_j(x)

On one device nothing is gained by it.

Shapes: B rows, N new tokens a row, H hidden.
"""

import copy

import torch.nn.functional as F
from torch import Tensor

from draftsmith.decode.forward.kv import SlotCache
from draftsmith.decode.forward.lean import LeanBody, Taken, attend, enter, leave, normed
from draftsmith.decode.forward.runner import Runner


def side_by_side(runner: Runner, size: int) -> Runner:
    """The same model, and its slots of a pool, in groups of so many layers; no taps. ValueError for
    a body that isn't known layer by layer.
    """
    if not isinstance(lean := runner.call, LeanBody):
        raise ValueError(
            f"layers side by side: got {type(runner.model).__name__}, expected a Llama, Qwen2, "
            "Qwen3 or Mistral without windows; use the model as an ordinary draft"
        )
    layers, last = lean.layers, len(lean.layers) - 1
    inner = [layers[i : min(i + size, last)] for i in range(1, last, size)]
    groups = [layers[:1], *inner, layers[1:][-1:]]

    def call(tokens_BN: Tensor, positions_BN: Tensor, cache: SlotCache, taken: Taken) -> Tensor:
        hidden_BNH = F.embedding(tokens_BN, lean.embedding_VH)
        rotary = lean.cos_SE[positions_BN].unsqueeze(2), lean.sin_SE[positions_BN].unsqueeze(2)
        for group in groups:
            mixed = [
                attend(cache, x.scale, x.index, *enter(hidden_BNH, rotary, x.entry, x.sizes))
                for x in group
            ]
            for x, mixed_BNH in zip(group, mixed, strict=True):
                hidden_BNH = leave(hidden_BNH, mixed_BNH, x.exit, x.activation)
        return normed(lean.norm, hidden_BNH)

    part = copy.copy(runner)
    part.taps, part.call = (), call
    return part
