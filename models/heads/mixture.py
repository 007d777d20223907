"""Mixture of Attentions (Zimmer et al., arXiv 2410.03804): a draft that asks the target's memory.

    memory_i = norm(fc [mean over l of layer attention([tap_1(i); ..; tap_m(i)])])
    f'_t = asks(own(e(x_1) .. e(x_{t+1})); memory_0 .. memory_a)     -> x_{t+2}

Layer attention is a decoder layer over the target's layers at one token. `own` reads the draft's
tokens, and `asks` the memory alone, up to the last token a that the target has read: what is
drafted adds nothing to it. f' is to be the target's state after its final norm. A pair (memory_i,
x_{i+1}) sits at position i, in training and in decoding.

Where we differ from the public code (huawei-noah/HEBO): layer attention reads the states after
layers, not the keys and values in them, mapped to the width of these; no layers of the target
follow (its target_layer_inference=0); the memory has a norm; `own` doesn't read x_0.

Shapes: B rows, T positions, H hidden, m taps, U = m * H, W width of layer attention, N = B * T.
"""

import copy
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.models.heads.head import ANY_DEPTH, Kind, LayerHead
from draftsmith.models.layers.layer import Attention, EagleLayer, causal, stack
from draftsmith.models.taps import Tap


class Mixture(LayerHead):
    """See `LayerHead`, of which it has two; taps: at least one."""

    kind = "mixture"
    kinds: ClassVar = {kind: Kind("Mixture of Attentions")}
    levels = ANY_DEPTH
    own: ClassVar = {"taps": list}

    def __init__(self, layer: PretrainedConfig, taps: Sequence[Tap]) -> None:
        layer = copy.copy(layer)
        layer.num_hidden_layers = 2
        super().__init__(layer)
        self.taps = tuple(taps)
        within = copy.copy(layer)
        within.hidden_size = wide = 2 * layer.num_key_value_heads * layer.head_dim  # W
        within.intermediate_size = layer.intermediate_size * wide // self.hidden
        self.narrow = nn.Linear(self.hidden, wide, bias=False)
        self.among = EagleLayer(within, 0)
        self.fc = nn.Linear(wide, self.hidden)
        self.norm = LlamaRMSNorm(self.hidden, eps=layer.rms_norm_eps)
        self.layers = stack(layer)

    @property
    def head_DH(self) -> Tensor:
        return self.target_head_VH

    def fuse(self, taps_BTU: Tensor) -> Tensor:
        """The memory [B, T, H] of the target's taps side by side."""
        states_NmW = self.narrow(taps_BTU.unflatten(-1, (len(self.taps), -1))).flatten(0, 1)
        layer_1m = torch.arange(len(self.taps), device=taps_BTU.device)[None]
        everyone = causal(torch.ones_like(layer_1m, dtype=torch.bool)[:, None, None])
        rotary = self.rotary(states_NmW, layer_1m)
        mean_NW = self.among.run(states_NmW, rotary, everyone, 0).mean(1)
        memory_NH: Tensor = self.norm(self.fc(mean_NW))
        return memory_NH.unflatten(0, taps_BTU.shape[:2])

    def step(
        self,
        memory_BTH: Tensor | None,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        own: Attention,
        asks: Attention | None = None,
    ) -> Tensor:
        """f' [B, T, H] of tokens. memory: of the tokens before them; None: of drafted ones, whose
        `asks` is handed no keys. asks: where it isn't as `own` is.
        """
        hidden_BTH = self.embed(tokens_BT)
        rotary, (first, second) = self.rotary(hidden_BTH, positions_BT), self.layers
        hidden_BTH = first.run(hidden_BTH, rotary, own, 0)
        query, *sides = second.project(second.input_layernorm(hidden_BTH), rotary)
        sides = [side[:, :0] for side in sides]
        if memory_BTH is not None:
            sides = second.remember(memory_BTH, rotary)
        return second.leave(hidden_BTH, (asks or own)(1, query, *sides))

    def unroll(
        self,
        memory_BTH: Tensor,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        mask: Tensor | None = None,
        *,
        steps: int,
        stale_BT: Tensor | None = None,
    ) -> list[Tensor]:
        """f' of each step s, where t's has read x_{t+1+s} and the memory up to t alone. mask: [B,
        1, T, T] bool, who may attend whom; None: causal. stale: of a lone step, how far before t
        the memory ends.
        """
        at_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        seen_B1TT = (at_T <= at_T[:, None])[None, None] if mask is None else mask
        tokens_BT, states = F.pad(tokens_BT[:, 1:], (0, 1)), []
        for step in range(steps):
            last_BT = at_T[None] - (step if stale_BT is None else stale_BT)
            asked_B1TT = seen_B1TT & (at_T <= last_BT[..., None])[:, None]
            # Rows before a document's first of this step count for nothing: they see anything.
            asks = causal(asked_B1TT | ~asked_B1TT.any(-1, keepdim=True))
            output_BTH = self.step(memory_BTH, tokens_BT, positions_BT, causal(mask), asks)
            states.append(output_BTH.roll(-step, 1))
        return states
