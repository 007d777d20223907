"""Hydra heads (Ankner et al., arXiv 2402.05109): Medusa heads that know what was drafted before.

    head i at position t: [b_t; e(x_{t+1}); ...; e(x_{t+1+i})] -> R z + silu(A z + c), then
                          `layers` - 1 blocks x + silu(A x + c) -> its own LM head -> x_{t+2+i}

b_t is the target's state after its final norm or, in Hydra++, what one decoder layer and a norm of
its own make of the states up to t. e is the target's embedding table.

Where we differ from the official code (zankner/Hydra): the c of a block begin at zero as its A
does; each block has weights of its own (theirs repeats one module); the LM heads have a bias only
where the config says so.

Shapes: B rows, T positions (X any leading axes), P tokens of a path, H hidden, V rows of the
target's LM head.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.models.heads.head import ANY_DEPTH, Head, Kind, entry
from draftsmith.models.heads.medusa import ResidualBlock, check_sizes, copy_head
from draftsmith.models.layers.layer import (
    LAYER_CONFIGS,
    Attention,
    EagleLayer,
    OutputHead,
    Rotary,
    layer_json,
    read_layer,
)
from draftsmith.models.taps import NORM

SIZES = ("hidden_size", "vocab_size", "hydra_num_heads", "hydra_num_layers")


@dataclass(frozen=True)
class HydraConfig:
    """hidden, rows: of the target's LM head; heads: tokens ahead; layers: residual blocks a head;
    prefix: sizes of Hydra++'s decoder layer; dropout: in front of each block and LM head, while
    training; head_bias: of the LM heads (the official ones have it).
    """

    hidden: int
    rows: int
    heads: int = 4
    layers: int = 1
    prefix: PretrainedConfig | None = None
    dropout: float = 0.0
    head_bias: bool = False

    def __post_init__(self) -> None:
        check_sizes("hydra", self.hidden, self.rows, self.heads, self.layers)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"hydra: got dropout={self.dropout}, expected 0 to below 1")
        if self.prefix is None:
            return
        got = (self.prefix.model_type, self.prefix.hidden_size, self.prefix.num_hidden_layers)
        if got[0] not in LAYER_CONFIGS or got[1:] != (self.hidden, 1):
            raise ValueError(
                f"hydra: got a prefix of kind {got[0]}, hidden size {got[1]}, {got[2]} layers, "
                f"expected one layer of {' or '.join(LAYER_CONFIGS)}, hidden size {self.hidden}"
            )


class Hydra(Head):
    """Hydra heads, or with a prefix layer Hydra++."""

    kind = "hydra"
    kinds: ClassVar = {kind: Kind("Hydra heads")}
    taps = (NORM,)

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden, self.rows, self.levels = config.hidden, config.rows, config.heads
        self.context = ANY_DEPTH
        self.hydra_mlp: Any = nn.ModuleList()
        for depth in range(config.heads):
            first = ResidualBlock(config.hidden, depth + 2)
            more = [ResidualBlock(config.hidden) for _ in range(config.layers - 1)]
            self.hydra_mlp.append(nn.Sequential(first, *more))
        self.hydra_lm_head: Any = nn.ModuleList(
            OutputHead(config.hidden, config.rows, bias=config.head_bias)
            for _ in range(config.heads)
        )
        layer = config.prefix
        if layer is not None:
            self.context = layer.max_position_embeddings
            self.prefix_layer = EagleLayer(layer, 0)
            self.prefix_norm = LlamaRMSNorm(config.hidden, eps=layer.rms_norm_eps)
            self.rotary = Rotary(layer)
            self.prefix_parts = layer, [self.prefix_layer], self.prefix_norm

    def init_from(self, target: PreTrainedModel) -> Self:
        """Bind the target, and copy its LM head into those of the heads, without a bias."""
        self.bind(target)
        copy_head(target, list(self.hydra_lm_head))
        return self

    def blocks(self, depth: int) -> list[ResidualBlock]:
        return list(self.hydra_mlp[depth])

    def output(self, depth: int) -> OutputHead:
        return self.hydra_lm_head[depth]

    def prefix(self, norm_BTH: Tensor, positions_BT: Tensor, attention: Attention) -> Tensor:
        """The base states [B, T, H] from the target's: themselves, or through Hydra++'s layer.
        attention: how positions see each other; the layer is its layer 0.
        """
        if self.config.prefix is None:
            return norm_BTH
        rotary = self.rotary(norm_BTH, positions_BT)
        return self.prefix_norm(self.prefix_layer.run(norm_BTH, rotary, attention, 0))

    def state(self, depth: int, base_XH: Tensor, path_XPH: Tensor) -> Tensor:
        """What the LM head of head `depth` multiplies, [..., H].

        base_XH: of `prefix`. path_XPH: the embeddings (`embed`) of the depth + 1 tokens after it,
        oldest first.
        """
        assert path_XPH.shape[-2] == depth + 1, (path_XPH.shape, depth)
        x_XI = torch.cat([base_XH, path_XPH.flatten(-2)], -1)
        for block in self.blocks(depth):
            x_XI = block(self._dropped(x_XI))
        return self._dropped(x_XI)

    def head_VH(self, depth: int) -> Tensor:
        """The weight [V, H] of one LM head; its bias, where it has one, is apart (`output`)."""
        return self.output(depth).weight

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training)

    def to_json(self) -> dict[str, Any]:
        config, prefix = self.config, self.config.prefix
        sizes = (config.hidden, config.rows, config.heads, config.layers)
        made: dict[str, Any] = {
            "architectures": ["HydraModel"],
            "model_type": "hydra",
            **dict(zip(SIZES, sizes, strict=True)),
            "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
            "grounded_heads": True,
            "dropout_rate": config.dropout,
            "lm_head_bias": config.head_bias,
        }
        if prefix is not None:
            made["prefix"] = layer_json(prefix)
        return made

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "Hydra":
        prefix = None
        if entry(config, "hydra_head_arch", str, "mlp") == "prefix-mlp":
            prefix = read_layer(entry(config, "prefix", dict))
        hidden, rows, heads, layers = (entry(config, name, int) for name in SIZES)
        dropout, bias = config.get("dropout_rate", 0.0), entry(config, "lm_head_bias", bool, False)
        return cls(HydraConfig(hidden, rows, heads, layers, prefix, float(dropout), bias))
