"""Kangaroo (Liu et al., arXiv 2404.18911): a target's first layers, and a small adapter on them.

    s_t        the target's state at t after its first E layers: our tap E
    adapter    z_t = norm'(s_t + attention(norm s)_t), over s_0 .. s_t, no feed-forward
    logits     of x_{t+1}: the target's LM head on z_t

The state at t knows x_t, so what is drafted there stands beside p_t itself: no shift. All drafted
tokens pass the target's own first layers, so each depth reads exact states, and the adapter's keys
and values of a token that is kept are exact too.

The attention begins as that of the target's layer E and norm' as its final norm, where their parts
are alike.

Shapes: B rows, T positions, H hidden, V rows of the target's LM head.
"""

from typing import ClassVar, Self

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.models.fingerprint import final_norm
from draftsmith.models.heads.head import ANY_DEPTH, Kind, LayerHead
from draftsmith.models.layers.layer import Attention, EagleLayer, begin_as
from draftsmith.models.taps import decoder_layers


class Kangaroo(LayerHead):
    """See `LayerHead`; early_layers: E. ValueError for less than a layer."""

    kind = "kangaroo"
    kinds: ClassVar = {kind: Kind("Kangaroo's adapters")}
    levels = ANY_DEPTH
    own: ClassVar = {"early_layers": int}

    def __init__(self, layer: PretrainedConfig, early_layers: int) -> None:
        super().__init__(layer)
        if early_layers < 1 or layer.num_hidden_layers != 1:
            raise ValueError(
                f"kangaroo: got the target's first {early_layers} layers with "
                f"{layer.num_hidden_layers} of its own, expected at least one of the target's and "
                "one of its own"
            )
        self.early_layers, self.taps = early_layers, (early_layers,)
        self.adapter = EagleLayer(layer, 0)
        del self.adapter.mlp  # its second norm is norm'

    def init_from(self, target: PreTrainedModel) -> Self:
        self.bind(target)
        layers = decoder_layers(target)
        begin_as(self.adapter, layers[min(self.early_layers, len(layers) - 1)])
        for last in final_norm(target):
            begin_as(self.adapter.post_attention_layernorm, last)
        return self

    def adapted(self, taps_BTH: Tensor, positions_BT: Tensor, attention: Attention) -> Tensor:
        """What the LM head multiplies, [B, T, H]; attention: how positions see each other."""
        part, turned = self.adapter, self.rotary(taps_BTH, positions_BT)
        mixed_BTO = attention(0, *part.project(part.input_layernorm(taps_BTH), turned))
        return part.post_attention_layernorm(taps_BTH + part.self_attn.o_proj(mixed_BTO))

    def keys(self, taps_BTH: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        part = self.adapter
        return part.remember(part.input_layernorm(taps_BTH), self.rotary(taps_BTH, positions_BT))
