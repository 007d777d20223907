"""LongSpec (Yang et al., arXiv 2502.17421): one layer that reads the target's own last keys.

    x = e(token);  x += self-attention over the last W tokens;  x += cross-attention;  x += MLP
    logits of the next token: the target's LM head on norm(x)

The cross-attention's keys and values are the target's last layer's, turned to their positions; only
its queries and its output map are trained. The drafter's own memory is W tokens, whatever the
context: its own keys and values depend on a token and its place alone, its first sublayer's input
being an embedding.

The official code (sail-sg/LongSpec) has no norm there; with one, which begins as the target's, a
short training comes further.

Lag: what is drafted d tokens ahead sees the target's keys up to d tokens before it.

Shapes: B rows, T positions, H hidden, A query heads, K key-value heads, E head width, O = A * E, V
rows of the target's LM head.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from draftsmith.models.fingerprint import final_norm
from draftsmith.models.heads.head import Kind, LayerHead
from draftsmith.models.layers.layer import Attention, EagleLayer, begin_as, causal, remembered
from draftsmith.models.taps import decoder_layers
from draftsmith.models.target import output_head

Cross = Callable[[Tensor], Tensor]  # queries [B, T, A, E] -> mixed [B, T, O]


class LongSpec(LayerHead):
    """See `LayerHead`, the layer's heads are the target's; tap: L - 1, where the last layer's keys
    and values are made from in training; levels: the largest lag; window: W.
    """

    kind = "longspec"
    kinds: ClassVar = {kind: Kind("LongSpec")}
    own: ClassVar = {"tap": int, "levels": int, "window": int}

    def __init__(self, layer: PretrainedConfig, tap: int, levels: int, window: int) -> None:
        super().__init__(layer)
        if levels < 1 or window <= levels:
            raise ValueError(
                f"longspec: got {levels} tokens ahead, window={window}, expected at least 1, and "
                "more of the window"
            )
        self.tap, self.levels, self.window, self.taps = tap, levels, window, (tap,)
        self.layer = EagleLayer(layer, 0)
        own = self.layer.self_attn
        self.cross_norm, self.norm = (
            LlamaRMSNorm(self.hidden, eps=layer.rms_norm_eps) for _ in range(2)
        )
        self.cross_q = nn.Linear(self.hidden, own.q_proj.out_features, layer.attention_bias)
        self.cross_o = nn.Linear(own.o_proj.in_features, self.hidden, bias=False)

    def bind(self, target: PreTrainedModel) -> Self:
        """ValueError too for a target whose last layer's keys it can't read as its own."""
        own: Any = self.layer.self_attn
        last: Any = getattr(decoder_layers(target)[-1], "self_attn", None)
        turned = getattr(output_head(target)[0], "rotary_emb", None)
        there, here = getattr(turned, "inv_freq", torch.empty(0)).cpu(), self.rotary.inv_freq.cpu()
        same = getattr(last, "head_dim", 0) == own.head_dim and there.shape == here.shape
        scaled = {getattr(rotary, "attention_scaling", 1) for rotary in (turned, self.rotary)}
        same = same and len(scaled) == 1
        for name in ("k_proj", "v_proj"):
            theirs = getattr(last, name, None)
            same = same and getattr(theirs, "out_features", 0) == getattr(own, name).out_features
        if not same or not torch.allclose(there, here):
            raise ValueError(
                f"longspec head: got {type(target).__name__} whose last layer makes its keys "
                "otherwise than the head's layer, expected heads of the same sizes, turned as "
                "Llama's or Qwen's are; use another head"
            )
        return super().bind(target)

    def init_from(self, target: PreTrainedModel) -> Self:
        """Bind the target; the layer begins as its last one, and so does the cross-attention."""
        last: Any = decoder_layers(target)[-1]
        begin_as(self.layer, last)
        begin_as(self.cross_norm, last.input_layernorm)
        for norm in final_norm(target):
            begin_as(self.norm, norm)
        begin_as(self.cross_q, last.self_attn.q_proj)
        begin_as(self.cross_o, last.self_attn.o_proj)
        return self.bind(target)

    def begin(self, tokens_BT: Tensor, positions_BT: Tensor, attention: Attention) -> Tensor:
        """States [B, T, H] after the layer's own attention."""
        hidden_BTH = self.embed(tokens_BT)
        entry_BTH = self.layer.input_layernorm(hidden_BTH)
        rotary = self.rotary(hidden_BTH, positions_BT)
        mixed_BTO = attention(0, *self.layer.project(entry_BTH, rotary))
        return hidden_BTH + self.layer.self_attn.o_proj(mixed_BTO)

    def end(self, hidden_BTH: Tensor, positions_BT: Tensor, cross: Cross) -> Tensor:
        """What the LM head multiplies, [B, T, H], from what `begin` gave."""
        query = self.cross_q(self.cross_norm(hidden_BTH))
        query = query.unflatten(-1, (-1, self.layer.self_attn.head_dim))
        rotary = self.rotary(hidden_BTH, positions_BT)
        # Its first two arguments are turned alike.
        query = apply_rotary_pos_emb(query, query, *rotary, unsqueeze_dim=2)[0]
        hidden_BTH = hidden_BTH + self.cross_o(cross(query))
        inner_BTH = self.layer.mlp(self.layer.post_attention_layernorm(hidden_BTH))
        return self.norm(hidden_BTH + inner_BTH)

    def lagging(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        kv: tuple[Tensor, Tensor],
        mask: Tensor | None,
        lags: Iterable[int],
    ) -> list[Tensor]:
        """`end` of whole texts at each lag. kv: the target's [B, T, K, E]; mask: [B, 1, T, T] bool,
        who may attend whom; None: causal.
        """
        at_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        back_TT = at_T[:, None] - at_T
        own = (back_TT >= 0) & (back_TT < self.window)
        own = own[None, None] if mask is None else own & mask
        hidden_BTH = self.begin(tokens_BT, positions_BT, causal(own))
        states = []
        for lag in lags:
            sees = back_TT >= lag if mask is None else (back_TT >= lag) & mask
            states.append(self.end(hidden_BTH, positions_BT, over(*kv, sees)))
        return states


def over(key_BSKE: Tensor, value_BSKE: Tensor, sees: Tensor) -> Cross:
    """Cross-attention to what `sees` [.., T, S] allows; 0 where that is nothing."""
    none = ~sees.any(-1, keepdim=True)
    attend, none_XT1 = causal(sees | none), none.flatten(0, -3) if none.ndim > 2 else none
    return lambda query: attend(0, query, key_BSKE, value_BSKE).masked_fill(none_XT1, 0)


@torch.no_grad()
def last_keys(
    target: PreTrainedModel, states_BTH: Tensor, positions_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, T, K, E] of the target's last layer, from the states that enter it."""
    last: Any = decoder_layers(target)[-1]
    rotary = output_head(target)[0].rotary_emb(states_BTH, positions_BT)  # type: ignore[operator]
    return remembered(last.self_attn, last.input_layernorm(states_BTH), rotary)
