"""Chimera (Zeng et al., arXiv 2402.15758): one decoder layer stands in for the target's states.

A token that the target hasn't read yet stands as a trigram, read among the states that it has:

    g_i = map([e(x_{i-2}); e(x_{i-1}); e(x_i)])      of a residual block; e: the target's embeddings
    f_i = norm(layer(g_i after h_0 .. h_t, f_{t+1} .. f_{i-1}))
    logits of x_{t+2+d} = W_d [h_t; f_{t+1+d}]

h is the target's state after its final norm. To the tokens after it, f_i stands where h_i will.

Where we differ from the public code (kafkayu/Chimera): a query sees one trigram, its own, as it
does in decoding (theirs sees all before it in training alone); f has a norm, as h has; W_d begins
as [0, LM head] for a law of f alone (theirs repeats the LM head, which says h_t's token again); a
document's first tokens repeat the very first one for those missing before it.

Shapes: B rows, T positions, H hidden, V rows of the target's LM head, D depths.
"""

from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.models.heads.head import Head, Kind, OutputHead, entry
from draftsmith.models.heads.layer import (
    Attention,
    EagleLayer,
    Keep,
    Rotary,
    layer_json,
    read_layer,
)
from draftsmith.models.heads.medusa import ResidualBlock, check_sizes
from draftsmith.models.heads.unrolled_attention import Unrolled
from draftsmith.models.taps import NORM


class Chimera(Head):
    """layer: sizes of the decoder layer, hidden_size and vocab_size the target's; levels: D."""

    kind = "chimera"
    kinds: ClassVar = {kind: Kind("Chimera")}
    taps = (NORM,)

    def __init__(self, layer: PretrainedConfig, levels: int) -> None:
        super().__init__()
        self.config, self.levels = layer, levels
        self.hidden, self.rows = layer.hidden_size, layer.vocab_size
        check_sizes(self.kind, self.hidden, self.rows, levels, layer.num_hidden_layers)
        self.context, wide = layer.max_position_embeddings, 3 * layer.hidden_size
        narrowed = nn.Linear(wide, self.hidden, bias=False)
        self.trigram = nn.Sequential(ResidualBlock(wide), narrowed)
        self.layer = EagleLayer(layer, 0, wide=False, bare=False)
        self.norm, self.rotary = LlamaRMSNorm(self.hidden, eps=layer.rms_norm_eps), Rotary(layer)
        self.heads: Any = nn.ModuleList(
            OutputHead(2 * self.hidden, self.rows, bias=False) for _ in range(levels)
        )

    @torch.no_grad()
    def init_from(self, target: PreTrainedModel) -> Self:
        """Bind the target; each LM head begins as the target's of f."""
        self.bind(target)
        for head in self.heads:
            head.weight.zero_()[:, self.hidden :].copy_(self.target_head_VH)
        return self

    def head_VH(self, depth: int) -> Tensor:
        """The LM head [V, 2H] of one depth."""
        weight: Tensor = self.heads[depth].weight
        return weight

    def keep(self, states_BTH: Tensor, positions_BT: Tensor, keep: Keep) -> None:
        """Hand the keys and values of states, h or f, to `keep`."""
        entry_BTH, _ = self.layer.enter(states_BTH, states_BTH, normed_residual=False)
        keep(0, *self.layer.remember(entry_BTH, self.rotary(entry_BTH, positions_BT)))

    def step(self, tokens_BT3: Tensor, positions_BT: Tensor, attention: Attention) -> Tensor:
        """f [B, T, H] of tokens, each after the two before it."""
        g_BTH = self.trigram(self.embed(tokens_BT3).flatten(-2))
        entry_BTH, _ = self.layer.enter(g_BTH, g_BTH, normed_residual=False)
        rotary = self.rotary(entry_BTH, positions_BT)
        f_BTH: Tensor = self.layer.leave(
            g_BTH, attention(0, *self.layer.project(entry_BTH, rotary))
        )
        return self.norm(f_BTH)

    def unroll(
        self,
        norm_BTH: Tensor,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        mask: Tensor | None = None,
        *,
        steps: int,
    ) -> list[Tensor]:
        """From each h_t of a text on, by the text's own tokens: [h_t; f_{t+1+s}], [B, T, 2H], of
        each step s. mask: [B, 1, T, T] bool, who sees whose h; None: causal. Past the row's end it
        reads token 0.
        """
        at_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        before = [tokens_BT.gather(1, at_T - positions_BT.clamp(max=back)) for back in (2, 1)]
        grams_BT3 = torch.stack([*before, tokens_BT], -1)
        attention, states = Unrolled(mask), []
        self.keep(norm_BTH, positions_BT, attention.keep)
        for step in range(1, steps + 1):
            grams_BT3 = F.pad(grams_BT3[:, 1:], (0, 0, 0, 1))
            f_BTH = self.step(grams_BT3, positions_BT + step, attention)
            attention.forget(0)
            self.keep(f_BTH, positions_BT + step, attention.keep)
            states.append(torch.cat([norm_BTH, f_BTH], -1))
        return states

    def to_json(self) -> dict[str, Any]:
        return layer_json(self.config) | {"architectures": ["Chimera"], "levels": self.levels}

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "Chimera":
        return cls(read_layer(config), entry(config, "levels", int))
