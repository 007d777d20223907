"""Mixture of Attentions (Zimmer et al., arXiv 2410.03804): a draft that asks the target's memory.

    memory_i = norm(fc [mean over l of layer attention([tap_1(i); ..; tap_m(i)])])
    f'_t = cross(self(e(x_{t+1}) after e(x_1) .. e(x_t)); memory_0 .. memory_a)     -> x_{t+2}

Layer attention is a decoder layer over the target's layers at one token, each in the place of a
position. Self-attention reads the draft's tokens, cross-attention the memory alone, up to the last
token a that the target has read: a drafted token adds nothing to it, so nothing rolls back. f' is
to be the target's state after its final norm, which its LM head multiplies.

A pair (memory_i, x_{i+1}) sits at rotary position i, in training and in decoding; so the first
token of all is read by the memory alone.

Where we differ from the public code (huawei-noah/HEBO): layer attention reads the states after
layers, not the keys and values in them, through a map to the width that these have there; no
target layers behind (its "target layer inference" of 0); the memory has a norm.

Shapes: B rows, T positions, H hidden, m taps, U = m * H, W width of layer attention, N = B * T.
"""

import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.models.heads.head import ANY_DEPTH, Head, Kind, entry
from draftsmith.models.heads.layer import (
    Attention,
    EagleLayer,
    Rotary,
    causal,
    layer_json,
    read_layer,
)
from draftsmith.models.taps import Tap
from draftsmith.models.vocab import DraftVocab

OWN, ASKS = 0, 1  # its layers: over the draft's own tokens, and over the memory


class Mixture(Head):
    """layer: sizes of its two layers, hidden_size and vocab_size the target's."""

    kind = "mixture"
    kinds: ClassVar = {kind: Kind("Mixture of Attentions")}

    def __init__(self, layer: PretrainedConfig, taps: tuple[Tap, ...]) -> None:
        super().__init__()
        if not taps or layer.num_hidden_layers != 2:
            raise ValueError(
                f"mixture: got {len(taps)} taps, {layer.num_hidden_layers} layers, expected at "
                "least one, and two: one over the draft's tokens, one over the memory"
            )
        self.config, self.taps, self.levels = layer, taps, ANY_DEPTH
        self.hidden, self.rows = layer.hidden_size, layer.vocab_size
        self.context, eps = layer.max_position_embeddings, layer.rms_norm_eps
        narrow = copy.copy(layer)
        narrow.hidden_size = 2 * layer.num_key_value_heads * layer.head_dim  # W
        narrow.intermediate_size = layer.intermediate_size * narrow.hidden_size // self.hidden
        self.tap_norm = LlamaRMSNorm(self.hidden, eps=eps)
        self.narrow = nn.Linear(self.hidden, narrow.hidden_size, bias=False)
        self.among = EagleLayer(narrow, 0, wide=False, bare=False)
        self.fc = nn.Linear(narrow.hidden_size, self.hidden)
        self.memory_norm, self.rotary = LlamaRMSNorm(self.hidden, eps=eps), Rotary(layer)
        self.layers: Any = nn.ModuleList(
            EagleLayer(layer, index, wide=False, bare=False) for index in (OWN, ASKS)
        )

    @property
    def vocab(self) -> DraftVocab:
        return DraftVocab(torch.arange(self.rows, device=self.fc.weight.device), self.rows)

    @property
    def head_DH(self) -> Tensor:
        """The LM head: the target's."""
        return self.target_head_VH

    def fuse(self, taps_BTU: Tensor) -> Tensor:
        """The memory [B, T, H] of the target's taps side by side."""
        states_BTmH = self.tap_norm(taps_BTU.unflatten(-1, (len(self.taps), -1)))
        states_NmW = self.narrow(states_BTmH).flatten(0, 1)
        at_1m = torch.arange(len(self.taps), device=taps_BTU.device)[None]
        entry_NmW, _ = self.among.enter(states_NmW, states_NmW, normed_residual=False)
        queries_and = self.among.project(entry_NmW, self.rotary(entry_NmW, at_1m))
        all_mm = torch.ones(1, 1, len(self.taps), len(self.taps), device=at_1m.device) > 0
        mixed_NmO = causal(all_mm)(0, *queries_and)
        mean_NW = self.among.leave(states_NmW, mixed_NmO).mean(1)
        memory_BTH: Tensor = self.memory_norm(self.fc(mean_NW)).unflatten(0, taps_BTU.shape[:2])
        return memory_BTH

    def step(
        self,
        memory_BTH: Tensor | None,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        attention: Attention,
    ) -> Tensor:
        """f' [B, T, H] of tokens; memory: of the tokens before them; None: of drafted ones, whose
        cross-attention is handed no keys.
        """
        hidden_BTH = self.embed(tokens_BT)
        rotary = self.rotary(hidden_BTH, positions_BT)
        for index, layer in enumerate(self.layers):
            entry_BTH, _ = layer.enter(hidden_BTH, hidden_BTH, normed_residual=False)
            query, key, value = layer.project(entry_BTH, rotary)
            if index == ASKS:
                none = key[:, :0], value[:, :0]
                key, value = none if memory_BTH is None else layer.remember(memory_BTH, rotary)
            hidden_BTH = layer.leave(hidden_BTH, attention(index, query, key, value))
        return hidden_BTH

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
        1, T, T] bool, who may attend whom; None: causal. stale: of one step, how many tokens the
        memory ends before t.
        """
        at_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        tokens_BT = F.pad(tokens_BT[:, 1:], (0, 1))
        seen_B1TT = (at_T <= at_T[:, None])[None, None] if mask is None else mask
        states = []
        for step in range(steps):
            last_BT = at_T[None] - (step if stale_BT is None else stale_BT)
            asked_B1TT = seen_B1TT & (at_T <= last_BT[..., None])[:, None]
            # Rows before a document's first of this step count for nothing: they see anything.
            asked_B1TT = asked_B1TT | ~asked_B1TT.any(-1, keepdim=True)
            attention = apart(causal(mask), causal(asked_B1TT))
            output_BTH = self.step(memory_BTH, tokens_BT, positions_BT, attention)
            states.append(output_BTH.roll(-step, 1))
        return states

    def to_json(self) -> dict[str, Any]:
        made = {"architectures": ["MixtureOfAttentions"], "taps": self.taps}
        return layer_json(self.config) | made

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "Mixture":
        return cls(read_layer(config), tuple(entry(config, "taps", list)))


def apart(own: Attention, asks: Attention) -> Attention:
    """Its self-attention by one, its cross-attention by the other."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (own if layer == OWN else asks)(layer, query, key, value)

    return attend
