"""Light heads: what a one-pass drafter lets a token know of the tokens drafted before it.

The trunk has run once, for all depths, and knows nothing of what is drafted. A light head changes a
depth's logits by the tokens of the path to it, at the price of a small product a node:

    logits = LM head (state) + after (low),   low of R numbers, from the state and the path

    markov     low = W[x]                               DSpark (arXiv 2607.05147)
    gated      low = W[x] * sigmoid(G [state; W[x]])    DSpark's second form
    selector   low = W[x] * (H state)                   DFlash-2's selector, over all tokens
    rnn        low = tanh(o), z = [s; W[x]; state], s' = g s + (1 - g) tanh(c)     DSpark's third
    gru        low = silu(A [state; s]), s' = GRU(E[x], s)                 Domino (2605.29707)
    swiglu     no low: the trunk's output + SwiGLU [norm E[x]; norm output]  TreeFlash (2606.03819)
    path       no low: the same of [norm E[x]; norm output; s'], s' = GRU(E[x], s)             ours
    layer      no low: a decoder layer of the output + A [norm E[x]; norm output]              ours

x is the token just before the one that is predicted. `after` begins at zero (what swiglu, path and
layer add does), so a fresh light head changes nothing, unless its layer begins as the target's. The
layer's nodes read the context anew, and the nodes above them: no other is more than a node's own.

Shapes: X any leading axes, H hidden, R rank, V rows of the target's LM head, S numbers carried from
token to token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.models.layers.layer import EagleLayer, OutputHead


class Light(nn.Module):
    """No light head, and what the others share. rank: R, 0 where nothing is added to logits; width:
    S, 0 where only the last token counts; deep: whether it changes the trunk's output; layers: of
    its own, which go over what `changed` gives, each node seeing the context and its path.
    """

    rank = width = 0
    deep = False
    after: Any  # of a rank above 0

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList()

    def changed(
        self, output_XH: Tensor, embedded_XH: Tensor, carried_XS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The trunk's output, before its norm, for a node after the token of this embedding; and
        what the next token's nodes carry.
        """
        return output_XH, carried_XS

    def low(
        self, state_XH: Tensor, tokens_X: Tensor, embedded_XH: Tensor, carried_XS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(what `after` multiplies [..., R], what the next token's nodes carry [..., S])."""
        return state_XH[..., :0], carried_XS


class MarkovLight(Light):
    """One matrix of tokens by tokens, of low rank; gate: "", "sigmoid" or "product"."""

    def __init__(self, layer: PretrainedConfig, rank: int, gate: str = "") -> None:
        super().__init__()
        hidden, rows = layer.hidden_size, layer.vocab_size
        self.rank, self.kind = rank, gate
        self.before = nn.Embedding(rows, rank)
        inputs = {"sigmoid": hidden + rank, "product": hidden}
        self.gate = nn.Linear(inputs[gate], rank, bias=gate == "sigmoid") if gate else None
        self.after = zeroed(OutputHead(rank, rows, bias=False))

    def low(
        self, state_XH: Tensor, tokens_X: Tensor, embedded_XH: Tensor, carried_XS: Tensor
    ) -> tuple[Tensor, Tensor]:
        low_XR = self.before(tokens_X)
        if self.gate is None:
            return low_XR, carried_XS
        if self.kind == "product":
            return low_XR * self.gate(state_XH), carried_XS
        return low_XR * self.gate(torch.cat([state_XH, low_XR], -1)).sigmoid(), carried_XS


class RnnLight(Light):
    """DSpark's recurrent head."""

    def __init__(self, layer: PretrainedConfig, rank: int) -> None:
        super().__init__()
        hidden, rows = layer.hidden_size, layer.vocab_size
        self.rank = self.width = rank
        self.before = nn.Embedding(rows, rank)
        self.gates = nn.Linear(2 * rank + hidden, 3 * rank)
        self.after = zeroed(OutputHead(rank, rows, bias=False))

    def low(
        self, state_XH: Tensor, tokens_X: Tensor, embedded_XH: Tensor, carried_XS: Tensor
    ) -> tuple[Tensor, Tensor]:
        read = torch.cat([carried_XS, self.before(tokens_X), state_XH], -1)
        gate_XR, new_XR, out_XR = self.gates(read).chunk(3, -1)
        gate_XR = gate_XR.sigmoid()
        return out_XR.tanh(), gate_XR * carried_XS + (1 - gate_XR) * new_XR.tanh()


class GruLight(Light):
    """Domino's head: a GRU over the drafted tokens' embeddings, as wide as four ranks (1,024 and
    256 there).
    """

    def __init__(self, layer: PretrainedConfig, rank: int) -> None:
        super().__init__()
        hidden, rows = layer.hidden_size, layer.vocab_size
        self.rank, self.width = rank, 4 * rank
        self.cell = nn.GRUCell(hidden, self.width)
        self.inner = nn.Linear(hidden + self.width, rank, bias=False)
        self.after = zeroed(OutputHead(rank, rows, bias=False))

    def low(
        self, state_XH: Tensor, tokens_X: Tensor, embedded_XH: Tensor, carried_XS: Tensor
    ) -> tuple[Tensor, Tensor]:
        flat = embedded_XH.flatten(0, -2), carried_XS.flatten(0, -2)
        carried_XS = self.cell(*flat).view_as(carried_XS)
        return F.silu(self.inner(torch.cat([state_XH, carried_XS], -1))), carried_XS


class SwigluLight(Light):
    """TreeFlash's head, which the LM head follows; as `path` it remembers all drafted tokens."""

    deep = True

    def __init__(self, layer: PretrainedConfig, rank: int, ranks: int = 0) -> None:
        super().__init__()
        hidden, width = layer.hidden_size, ranks * rank
        self.width = width
        if width:
            self.cell = nn.GRUCell(hidden, width)
        self.of_token, self.of_state = (LlamaRMSNorm(hidden, eps=1e-6) for _ in range(2))
        self.gate_up = nn.Linear(2 * hidden + width, 2 * hidden, bias=False)
        self.down = zeroed(nn.Linear(hidden, hidden, bias=False))

    def changed(
        self, output_XH: Tensor, embedded_XH: Tensor, carried_XS: Tensor
    ) -> tuple[Tensor, Tensor]:
        both = [self.of_token(embedded_XH), self.of_state(output_XH)]
        if self.width:
            flat = both[0].flatten(0, -2), carried_XS.flatten(0, -2)
            carried_XS = self.cell(*flat).view_as(carried_XS)
            both.append(carried_XS)
        gate_XH, up_XH = self.gate_up(torch.cat(both, -1)).chunk(2, -1)
        return output_XH + self.down(F.silu(gate_XH) * up_XH), carried_XS


class LayerLight(Light):
    """A decoder layer, alike the trunk's."""

    deep = True

    def __init__(self, layer: PretrainedConfig, rank: int) -> None:
        super().__init__()
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        self.of_token, self.of_state = (LlamaRMSNorm(hidden, eps=eps) for _ in range(2))
        self.entry = zeroed(nn.Linear(2 * hidden, hidden, bias=False))
        self.layers = nn.ModuleList([own := EagleLayer(layer, 0)])
        zeroed(own.self_attn.o_proj), zeroed(own.mlp.down_proj)

    def changed(
        self, output_XH: Tensor, embedded_XH: Tensor, carried_XS: Tensor
    ) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.of_token(embedded_XH), self.of_state(output_XH)], -1)
        return output_XH + self.entry(both), carried_XS


def zeroed(layer: Any) -> Any:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


# (the trunk's layers' sizes, rank) -> a light head
LIGHTS: dict[str, Callable[[PretrainedConfig, int], Light]] = {
    "none": lambda layer, rank: Light(),
    "markov": MarkovLight,
    "gated": partial(MarkovLight, gate="sigmoid"),
    "selector": partial(MarkovLight, gate="product"),
    "rnn": RnnLight,
    "gru": GruLight,
    "swiglu": SwigluLight,
    "path": partial(SwigluLight, ranks=4),
    "layer": LayerLight,
}
