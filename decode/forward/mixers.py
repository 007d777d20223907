"""The recurrent layers of transformers' models: their own weights, norms and maps, around the tree
forms of `recurrent.py`. What a class does between its maps is told here again, so the runner
compares each model with its own forward before it is used.

Shapes: as in `recurrent.py`; H hidden, X whatever a layer's maps give beside.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from draftsmith.decode.forward.recurrent import Tokens

EPSILON = 1e-6  # of a delta net's norm of queries and keys: no config has it


class Recurrent:
    """What both kinds share: a convolution of each channel, and what a state takes. dtype: of the
    convolution's inputs; wide: of the state. conv_shape: (W - 1, C); state_shape: (J, K, E).
    row_bytes: of the pool, for each row; node_bytes: of what is kept for each node until a commit.

    A kind adds `enter`: hidden -> the convolution's inputs, what rates are made of, and the gate,
    [B, N, ..] each; `tokens`, from what was convolved and those rates; `leave`: what was read, and
    the gate -> the layer's output.
    """

    def __init__(self, module: Any, state_shape: tuple[int, int, int]) -> None:
        self.module, self.state_shape = module, state_shape
        weight_C1W = module.conv1d.weight
        self.dtype = weight_C1W.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.conv_shape = (weight_C1W.shape[2] - 1, weight_C1W.shape[0])
        narrow, wide, (heads, keys, values) = self.dtype.itemsize, self.wide.itemsize, state_shape
        self.row_bytes = prod(self.conv_shape) * narrow + prod(state_shape) * wide
        self.node_bytes = self.conv_shape[1] * narrow + heads * (keys + values + 1) * wide

    def convolved(self, window_BNWC: Tensor) -> Tensor:
        conv = self.module.conv1d
        mixed_BNC = (window_BNWC.to(self.wide) * conv.weight[:, 0].T.to(self.wide)).sum(2)
        if conv.bias is not None:
            mixed_BNC = mixed_BNC + conv.bias
        made: Tensor = ACT2FN[self.module.activation](mixed_BNC.to(self.dtype))
        return made

    def heads(self, x_BNX: Tensor, width: int) -> Tensor:
        """[B, N, J, width] of groups that serve as many heads each."""
        grouped = x_BNX.to(self.wide).unflatten(-1, (-1, width))
        return grouped.repeat_interleave(self.state_shape[0] // grouped.shape[2], 2)


class Mamba2(Recurrent):
    """q = C, k = B, u = dt x, g = dt A, and D x is added."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, (module.num_heads, module.ssm_state_size, module.head_dim))

    def enter(self, hidden_BNH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, channels = self.module.num_heads, self.conv_shape[1]
        made = self.module.in_proj(hidden_BNH)
        gate, conv, rates = made.split([made.shape[-1] - channels - heads, channels, heads], -1)
        return conv, rates, gate

    def tokens(self, conv_BNC: Tensor, rates_BNX: Tensor) -> Tokens:
        module, (_, keys, width) = self.module, self.state_shape
        inner, group = module.intermediate_size, module.n_groups * keys
        x, key, query = conv_BNC.split([inner, group, group], -1)
        rate_BNJ = F.softplus(rates_BNX + module.dt_bias).clamp(*module.time_step_limit)
        rate_BNJ, x_BNJE = rate_BNJ.to(self.wide), self.heads(x, width)
        return Tokens(
            self.heads(query, keys),
            self.heads(key, keys),
            rate_BNJ[..., None] * x_BNJE,
            -rate_BNJ * module.A_log.to(self.wide).exp(),
            skip_BNJE=module.D[:, None] * x_BNJE,
        )

    def leave(self, read_BNJE: Tensor, gate_BNX: Tensor) -> Tensor:
        normed = self.module.norm(read_BNJE.flatten(2), gate_BNX)
        made: Tensor = self.module.out_proj(normed.to(gate_BNX.dtype))
        return made


class DeltaNet(Recurrent):
    """q and k of length 1 (q / sqrt K), beta = sigmoid(b), g = -A softplus(a + bias)."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, (module.num_v_heads, module.head_k_dim, module.head_v_dim))

    def enter(self, hidden_BNH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        module = self.module
        if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next
            made = module.in_proj_qkvz(hidden_BNH), module.in_proj_ba(hidden_BNH)
            *qkv, gate, b, a = module.fix_query_key_value_ordering(*made)
            conv = torch.cat([x.flatten(2) for x in qkv], -1)
        else:  # Qwen3.5
            conv, gate = module.in_proj_qkv(hidden_BNH), module.in_proj_z(hidden_BNH)
            b, a = module.in_proj_b(hidden_BNH), module.in_proj_a(hidden_BNH)
        return conv, torch.cat([b, a], -1), gate.flatten(2)

    def tokens(self, conv_BNC: Tensor, rates_BNX: Tensor) -> Tokens:
        module, (_, keys, values) = self.module, self.state_shape
        query, key, value = conv_BNC.split([module.key_dim, module.key_dim, module.value_dim], -1)
        query, key = (self._unit(self.heads(x, keys)) for x in (query, key))
        b, a = rates_BNX.chunk(2, -1)
        rate = F.softplus(a.to(self.wide) + module.dt_bias)
        decay, beta = -module.A_log.to(self.wide).exp() * rate, b.sigmoid().to(self.wide)
        return Tokens(query * keys**-0.5, key, self.heads(value, values), decay, beta)

    def _unit(self, x: Tensor) -> Tensor:
        return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()

    def leave(self, read_BNJE: Tensor, gate_BNX: Tensor) -> Tensor:
        width = read_BNJE.shape[-1]
        read = read_BNJE.to(gate_BNX.dtype).reshape(-1, width)
        normed = self.module.norm(read, gate_BNX.reshape(-1, width))
        made: Tensor = self.module.out_proj(normed.view_as(gate_BNX))
        return made


Mixer = Mamba2 | DeltaNet
KINDS: dict[str, type[Mixer]] = {
    "Mamba2Mixer": Mamba2,
    "BambaMixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "Qwen3NextGatedDeltaNet": DeltaNet,
    "Qwen3_5GatedDeltaNet": DeltaNet,
    "Qwen3_5MoeGatedDeltaNet": DeltaNet,
}


def mixers_of(model: nn.Module) -> Mapping[int, Mixer]:
    """A model's recurrent layers by their number; none where one isn't known."""
    found: list[Any] = [part for part in model.modules() if type(part).__name__ in KINDS]
    return {part.layer_idx: KINDS[type(part).__name__](part) for part in found}
