"""Chimera (Zeng et al., arXiv 2402.15758): one decoder layer stands in for the target's states.

    g_i = map([e(x_{i-2}); e(x_{i-1}); e(x_i)])       a residual block; e: the target's embeddings
    f_i = norm(layer(g_i after h_0 .. h_t, f_{t+1} .. f_{i-1}))
    logits of x_{t+2+d} = W_d [h_t; f_{t+1+d}]

h is the target's state after its final norm; to the tokens after x_i, f_i stands where h_i will.
Where we differ from the public code (kafkayu/Chimera): a query sees one trigram, its own, as in
decoding (there, while training, all before it); f has a norm, as h has; W_d begins as [0, LM head]
(there the LM head twice); tokens missing before a document are its first.

Shapes: B rows, T positions, H hidden, V rows of the target's LM head.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.models.heads.head import Kind, LayerHead
from draftsmith.models.heads.medusa import ResidualBlock, check_sizes
from draftsmith.models.layers.layer import Attention, EagleLayer, Keep, OutputHead
from draftsmith.models.layers.unrolled_attention import Unrolled
from draftsmith.models.taps import NORM


class Chimera(LayerHead):
    """See `LayerHead`; levels: tokens ahead."""

    kind = "chimera"
    kinds: ClassVar = {kind: Kind("Chimera")}
    taps = (NORM,)
    own: ClassVar = {"levels": int}

    def __init__(self, layer: PretrainedConfig, levels: int) -> None:
        super().__init__(layer)
        self.levels, hidden = levels, self.hidden
        check_sizes(self.kind, hidden, self.rows, levels, layer.num_hidden_layers)
        narrow = nn.Linear(3 * hidden, hidden, bias=False)
        self.trigram = nn.Sequential(ResidualBlock(3 * hidden), narrow)
        self.layer = EagleLayer(layer, 0)
        self.norm = LlamaRMSNorm(hidden, eps=layer.rms_norm_eps)
        heads = (OutputHead(2 * hidden, self.rows, bias=False) for _ in range(levels))
        self.heads: Any = nn.ModuleList(heads)

    @torch.no_grad()
    def init_from(self, target: PreTrainedModel) -> Self:
        """Bind the target; each LM head begins as the target's of f."""
        self.bind(target)
        for head in self.heads:
            head.weight.zero_()[:, self.hidden :].copy_(self.target_head_VH)
        return self

    def head_VH(self, depth: int) -> Tensor:
        """The LM head [V, 2H] of one depth."""
        return self.heads[depth].weight

    def keep(self, states_BTH: Tensor, positions_BT: Tensor, keep: Keep) -> None:
        """Hand the keys and values of states, h or f, to `keep`."""
        entry_BTH = self.layer.input_layernorm(states_BTH)
        keep(0, *self.layer.remember(entry_BTH, self.rotary(entry_BTH, positions_BT)))

    def step(self, grams_BT3: Tensor, positions_BT: Tensor, attention: Attention) -> Tensor:
        """f [B, T, H] of tokens, the third ones here."""
        g_BTH = self.trigram(self.embed(grams_BT3).flatten(-2))
        f_BTH: Tensor = self.layer.run(g_BTH, self.rotary(g_BTH, positions_BT), attention, 0)
        return self.norm(f_BTH)

    def unroll(
        self, norm_BTH: Tensor, tokens_BT: Tensor, positions_BT: Tensor, mask: Tensor | None = None
    ) -> Iterator[Tensor]:
        """[h_t; f_{t+1+s}] of each step s, by a text's own tokens; past the row's end by token 0.
        mask: [B, 1, T, T] bool, who sees whose h; None: causal.
        """
        at_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        before = [tokens_BT.gather(1, at_T - positions_BT.clamp(max=back)) for back in (2, 1)]
        grams_BT3 = torch.stack([*before, tokens_BT], -1)
        attention = Unrolled(mask)
        self.keep(norm_BTH, positions_BT, attention.keep)
        for step in range(1, self.levels + 1):
            grams_BT3 = F.pad(grams_BT3[:, 1:], (0, 0, 0, 1))
            f_BTH = self.step(grams_BT3, positions_BT + step, attention)
            self.keep(f_BTH, positions_BT + step, partial(attention.keep, instead=True))
            yield torch.cat([norm_BTH, f_BTH], -1)
