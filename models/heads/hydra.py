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

from draftsmith.models.heads.head import ANY_DEPTH, Head, Kind, OutputHead, entry
from draftsmith.models.heads.layer import LAYER_CONFIGS, LAYER_FIELDS, Attention, EagleLayer, Rotary
from draftsmith.models.heads.medusa import ResidualBlock, check_sizes, copy_head, parts_of
from draftsmith.models.taps import NORM


@dataclass(frozen=True)
class HydraConfig:
    """hidden, rows: of the target's LM head; heads: tokens ahead; layers: residual blocks a head;
    prefix: sizes of Hydra++'s decoder layer, of Llama's or Qwen3's kind; dropout: in front of each
    block and LM head, while training; head_bias: of the LM heads (the official ones have it).
    """

    hidden: int
    rows: int
    heads: int = 4
    layers: int = 1
    prefix: PretrainedConfig | None = None
    dropout: float = 0.0
    head_bias: bool = False

    def __post_init__(self) -> None:
        check_sizes("hydra", self.hidden, self.rows, heads=self.heads, layers=self.layers)
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
        more = range(config.layers - 1)
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                ResidualBlock(config.hidden, depth + 2),
                *(ResidualBlock(config.hidden) for _ in more),
            )
            for depth in range(config.heads)
        )
        self.hydra_lm_head = nn.ModuleList(
            OutputHead(config.hidden, config.rows, bias=config.head_bias)
            for _ in range(config.heads)
        )
        layer = config.prefix
        if layer is not None:
            self.context = layer.max_position_embeddings
            self.prefix_layer = EagleLayer(layer, 0, wide=False, bare=False)
            self.prefix_norm = LlamaRMSNorm(config.hidden, eps=layer.rms_norm_eps)
            self.rotary = Rotary(layer)

    def init_from(self, target: PreTrainedModel) -> Self:
        """Bind the target, and copy its LM head into those of the heads, without a bias."""
        self.bind(target)
        outputs = [self.output(depth) for depth in range(self.levels)]
        copy_head(target, outputs)
        for output in outputs:
            if output.bias is not None:
                nn.init.zeros_(output.bias)
        return self

    def blocks(self, depth: int) -> list[ResidualBlock]:
        """The residual blocks of one head, typed."""
        return [part for part in parts_of(self.hydra_mlp, depth) if isinstance(part, ResidualBlock)]

    def output(self, depth: int) -> OutputHead:
        """The LM head of one head, typed."""
        output = self.hydra_lm_head[depth]
        assert isinstance(output, OutputHead)
        return output

    def embed(self, tokens_X: Tensor) -> Tensor:
        """The target's embeddings [..., H] of tokens, in the head's own type."""
        dtype = self.output(0).weight.dtype
        return F.embedding(tokens_X, self.embedding_VH).to(dtype)

    def prefix(self, norm_BTH: Tensor, positions_BT: Tensor, attention: Attention) -> Tensor:
        """The base states [B, T, H] from the target's: themselves, or through Hydra++'s layer.

        attention: how positions see each other, as in `eagle`; its layer is 0.
        """
        if self.config.prefix is None:
            return norm_BTH
        layer = self.prefix_layer
        entry_BTH, residual_BTH = layer.enter(norm_BTH, norm_BTH, normed_residual=False)
        rotary = self.rotary(norm_BTH, positions_BT)
        mixed_BTO = attention(0, *layer.project(entry_BTH, rotary))
        normed_BTH: Tensor = self.prefix_norm(layer.leave(residual_BTH, mixed_BTO))
        return normed_BTH

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
        config = self.config
        plain = {
            "architectures": ["HydraModel"],
            "model_type": "hydra",
            "hidden_size": config.hidden,
            "vocab_size": config.rows,
            "hydra_num_heads": config.heads,
            "hydra_num_layers": config.layers,
            "hydra_head_arch": "mlp" if config.prefix is None else "prefix-mlp",
            "grounded_heads": True,
            "dropout_rate": config.dropout,
            "lm_head_bias": config.head_bias,
        }
        if config.prefix is None:
            return plain
        layer = config.prefix.to_dict()
        names = (*LAYER_FIELDS, "rope_parameters", "model_type")
        return plain | {"prefix": {n: layer[n] for n in names if layer.get(n) is not None}}

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "Hydra":
        prefix = None
        if entry(config, "hydra_head_arch", str, "mlp") == "prefix-mlp":
            layer = dict(entry(config, "prefix", dict))
            kind = layer.pop("model_type", None)
            if kind not in LAYER_CONFIGS:
                raise ValueError(
                    f"config.json: got a prefix of model_type={kind!r}, expected "
                    f"{' or '.join(LAYER_CONFIGS)}; restore the file as it was saved"
                )
            prefix = LAYER_CONFIGS[kind](**layer)
        return cls(
            HydraConfig(
                hidden=entry(config, "hidden_size", int),
                rows=entry(config, "vocab_size", int),
                heads=entry(config, "hydra_num_heads", int),
                layers=entry(config, "hydra_num_layers", int),
                prefix=prefix,
                dropout=float(config.get("dropout_rate", 0.0)),
                head_bias=entry(config, "lm_head_bias", bool, False),
            )
        )
