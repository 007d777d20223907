"""Clover-2 (Xiao et al., arXiv 2408.00264; Clover: 2405.00263): a light recurrent step a token.

    entry           h_t + A(h_t, e(x_{t+1})), A(s, e) = V e * cos(Q norm s, K e), head by head
    augmenting      decoder layers over the entries of the text, and a norm: s_0, once a token
    drafted tokens  s_d = s_{d-1} + A'(s_{d-1}, e(x_{t+1+d}))
    logits of depth d, of x_{t+2+d}: the target's LM head on norm(P s_0), or norm(R [s_d; e])

h_t is the target's last state before its final norm; e a token's row of the target's LM head. So a
node's law knows its whole path, and a drafted token costs four small products, no layer.

Where we differ from the official code (XiaoBin1992/clover): all maps begin as the identity or zero
without noise, so that fresh heads draft what the layers' states say; its beam search runs the
augmenting layers without the tokens, ours with them.

Shapes: B rows, T positions, X any leading axes, H hidden, V rows of the target's LM head, A heads.
"""

from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.models.fingerprint import final_norm
from draftsmith.models.heads.head import Kind, LayerHead
from draftsmith.models.heads.medusa import check_sizes
from draftsmith.models.layers.layer import Attention, begin_as, stack
from draftsmith.models.taps import decoder_layers


class TokenAttention(nn.Module):
    """s + V e * cos(Q norm s, K e): how much of a token a state takes in, by its direction."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, self.heads = config.hidden_size, config.num_attention_heads
        self.norm = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        for part in (self.query, self.key, self.value):
            nn.init.zeros_(part.bias)
            nn.init.eye_(part.weight)
        nn.init.zeros_(self.value.weight)

    def forward(self, state_XH: Tensor, token_XH: Tensor) -> Tensor:
        query, key, value = (
            x_XH.unflatten(-1, (self.heads, -1))
            for x_XH in (self.query(self.norm(state_XH)), self.key(token_XH), self.value(token_XH))
        )
        alike_XA1 = F.cosine_similarity(query, key, -1, eps=1e-6).unsqueeze(-1)
        return state_XH + (value * alike_XA1).flatten(-2)


class Clover(LayerHead):
    """See `LayerHead`; its layers augment; levels: tokens ahead."""

    kind = "clover2"
    kinds: ClassVar = {kind: Kind("Clover-2 heads")}
    own: ClassVar = {"tap": int, "levels": int}
    architecture = "Clover2"

    def __init__(self, layer: PretrainedConfig, tap: int, levels: int) -> None:
        super().__init__(layer)
        check_sizes(self.kind, self.hidden, self.rows, levels, layer.num_hidden_layers)
        self.levels, self.tap, self.taps = levels, tap, (tap,)
        self.enter, self.step = TokenAttention(layer), TokenAttention(layer)
        self.layers = stack(layer)
        self.norm, self.head_norm = (
            LlamaRMSNorm(self.hidden, eps=layer.rms_norm_eps) for _ in range(2)
        )
        self.prefix_parts = layer, list(self.layers), self.norm
        self.first, self.later = (nn.Linear(n * self.hidden, self.hidden) for n in (1, 2))
        for part in (self.first, self.later):
            nn.init.zeros_(part.bias)
            nn.init.eye_(part.weight)

    def init_from(self, target: PreTrainedModel) -> Self:
        """Bind the target; layers and norms begin as its last ones where their parts are alike."""
        for layer in self.layers:
            begin_as(layer, decoder_layers(target)[-1])
        for last in final_norm(target):
            for norm in (self.norm, self.head_norm):
                begin_as(norm, last)
        return self.bind(target)

    def embed(self, tokens_X: Tensor) -> Tensor:
        """The tokens' rows [..., H] of the target's LM head."""
        return F.embedding(tokens_X, self.target_head_VH).to(self.first.weight.dtype)

    def augmented(
        self, taps_BTH: Tensor, next_BT: Tensor, positions_BT: Tensor, attention: Attention
    ) -> Tensor:
        """s_0 [B, T, H] of the target's states and the tokens after them."""
        return self.prefix(self.enter(taps_BTH, self.embed(next_BT)), positions_BT, attention)

    def prefix(self, hidden_BTH: Tensor, positions_BT: Tensor, attention: Attention) -> Tensor:
        """The layers, and the norm after them."""
        rotary = self.rotary(hidden_BTH, positions_BT)
        for index, layer in enumerate(self.layers):
            hidden_BTH = layer.run(hidden_BTH, rotary, attention, index)
        return self.norm(hidden_BTH)

    def state(self, state_XH: Tensor, token_XH: Tensor | None) -> Tensor:
        """What the LM head multiplies, of s_d and the token that made it; None: of s_0."""
        if token_XH is None:
            x_XH = self.first(state_XH)
        else:
            x_XH = self.later(torch.cat([state_XH, token_XH], -1))
        return self.head_norm(x_XH)
