"""Medusa heads (Cai et al., arXiv 2401.10774): K small heads that guess K tokens ahead at once.

    head i at position t: f_t -> x + silu(A x + b), `layers` times -> its own LM head -> x_{t+2+i}

f_t is the target's state after its final norm; the target's own LM head predicts x_{t+1} from it.

Where we differ from the official code (FasterDecoding/Medusa): biases begin at zero as the weights
do, so that a new head says exactly what the target's LM head says; each block has weights of its
own (theirs repeats one module).

Shapes: X any leading axes, H hidden, V rows of the target's LM head, K heads.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.heads.head import ANY_DEPTH, Head, Kind, Reads, entry
from draftsmith.models.layers.layer import OutputHead
from draftsmith.models.layouts.exported import Exported
from draftsmith.models.taps import NORM
from draftsmith.models.target import head_weight

SIZES = ("hidden_size", "vocab_size", "medusa_num_heads", "medusa_num_layers")


@dataclass(frozen=True)
class MedusaConfig:
    """hidden, rows: of the target's LM head; heads: tokens ahead; layers: residual blocks a head;
    own_heads: whether each head has an LM head of its own, or all multiply the target's.
    """

    hidden: int
    rows: int
    heads: int = 5
    layers: int = 1
    own_heads: bool = True

    def __post_init__(self) -> None:
        check_sizes("medusa", self.hidden, self.rows, self.heads, self.layers)


class ResidualBlock(nn.Module):
    """x -> R x + silu(A x + b), A and b zero at first; R is the identity, or, where `inputs` states
    side by side come in, a learned map of them onto one.
    """

    def __init__(self, hidden: int, inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * hidden, hidden)
        self.res_connection: nn.Module = nn.Identity()
        if inputs > 1:
            self.res_connection = nn.Linear(inputs * hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x_XI: Tensor) -> Tensor:
        skipped_XH: Tensor = self.res_connection(x_XI)
        return skipped_XH + F.silu(self.linear(x_XI))


class Medusa(Head):
    """K heads on the target's last state."""

    kind = "medusa"
    kinds: ClassVar = {kind: Kind("Medusa heads", {"tgi": Reads()})}
    taps = (NORM,)
    context = ANY_DEPTH

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden, self.rows, self.levels = config.hidden, config.rows, config.heads
        self.heads: Any = nn.ModuleList()
        for _ in range(config.heads):
            blocks = [ResidualBlock(config.hidden) for _ in range(config.layers)]
            own = [OutputHead(config.hidden, config.rows, bias=False)] if config.own_heads else []
            self.heads.append(nn.Sequential(*blocks, *own))

    def init_from(self, target: PreTrainedModel) -> Self:
        """Bind the target, and copy its LM head into those of the heads."""
        self.bind(target)
        if self.config.own_heads:
            copy_head(target, [self.output(depth) for depth in range(self.levels)])
        return self

    def blocks(self, depth: int) -> list[ResidualBlock]:
        return list(self.heads[depth])[: self.config.layers]

    def output(self, depth: int) -> OutputHead:
        """The LM head of its own that one head has."""
        assert self.config.own_heads, "these heads multiply the target's LM head"
        return self.heads[depth][-1]

    def states(self, norm_XH: Tensor) -> list[Tensor]:
        """What the LM head of each head multiplies: K tensors [..., H], of the final states."""
        states = [norm_XH] * self.levels
        for depth in range(self.levels):
            for block in self.blocks(depth):
                states[depth] = block(states[depth])
        return states

    def head_VH(self, depth: int) -> Tensor:
        """The LM head [V, H] of one head: its own, or the target's."""
        return self.output(depth).weight if self.config.own_heads else self.target_head_VH

    def to_json(self) -> dict[str, Any]:
        config = self.config
        sizes = (config.hidden, config.rows, config.heads, config.layers)
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            **dict(zip(SIZES, sizes, strict=True)),
            "original_lm_head": not config.own_heads,
        }

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "Medusa":
        hidden, rows, heads, layers = (entry(config, name, int) for name in SIZES)
        own_heads = not entry(config, "original_lm_head", bool, False)
        return cls(MedusaConfig(hidden, rows, heads, layers, own_heads))

    def on_disk(self) -> dict[str, Tensor]:
        return {name.removeprefix("heads."): t for name, t in self.state_dict().items()}

    def from_disk(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"heads.{name}": t for name, t in tensors.items()}

    def exported(self, to: str, target: PreTrainedModel, K: int) -> Exported:
        """FasterDecoding's layout, which TGI reads; its second form for a shared LM head."""
        if not self.config.own_heads and self.config.layers != 1:
            raise ValueError(
                f"to=tgi: got heads of {self.config.layers} layers that share the target's LM "
                "head, expected one layer, or LM heads of their own: TGI reads no others"
            )
        ours = self.to_json()
        config = {name: ours[name] for name in SIZES}
        config |= {"base_model_name_or_path": target.name_or_path}
        config |= {} if self.config.own_heads else {"version": "2"}
        return Exported(config, self.on_disk(), "medusa_lm_head.safetensors")


def check_sizes(kind: str, hidden: int, rows: int, heads: int, layers: int) -> None:
    """ValueError for sizes below 1."""
    if min(hidden, rows, heads, layers) < 1:
        raise ValueError(
            f"{kind}: got hidden={hidden}, rows={rows}, heads={heads}, layers={layers}, expected "
            "each to be at least 1"
        )


@torch.no_grad()
def copy_head(target: PreTrainedModel, heads: list[OutputHead]) -> None:
    """Copy the target's LM head into each of `heads`, their biases zero."""
    for head in heads:
        head.weight.copy_(head_weight(target))
        if head.bias is not None:
            head.bias.zero_()
