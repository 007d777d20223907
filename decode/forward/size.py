"""What a model takes in bytes, token by token, and what a device has left."""

from dataclasses import dataclass
from math import prod

import torch
from transformers import PreTrainedConfig

from draftsmith.decode.forward.compressed import memory_free
from draftsmith.decode.forward.kv import kv_shape, query_heads, round_up, windowed
from draftsmith.decode.forward.runner import Runner
from draftsmith.models.taps import NORM


@dataclass(frozen=True)
class ModelSize:
    """config: of the text model, or of a head's layers; beside: further numbers alive for each
    token of a pass: taps inside a target, or a head's wide input; handed: numbers of a token's
    states that a drafter is given; scratch: slots that a pass needs beyond a row's own; ahead:
    logits [B, V] that are alive beside a call's own; window: slots of a row whose keys and values
    don't grow with it, beside `scratch`; 0: they do; shadow: how many sides of logits of the whole
    kept path are made beside the target's (`at_once` of them). state, fresh: bytes of each row, and
    of each node until its round's commit, of layers that keep a state; channels: of the widest. (A
    chunk of one such layer's own matrices isn't counted.)
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    beside: int = 0
    handed: int = 0
    scratch: int = 0
    ahead: int = 0
    window: int = 0
    shadow: int = 0
    state: int = 0
    fresh: int = 0
    channels: int = 0

    @classmethod
    def of(cls, runner: Runner) -> "ModelSize":
        """The size of the model that a runner runs."""
        hidden, taps = runner.config.hidden_size, runner.taps
        inside = sum(tap != NORM for tap in taps)  # the last state is the pass's own output
        mixers = runner.mixers.values()
        return cls(
            runner.config,
            runner.dtype,
            beside=inside * hidden,
            handed=len(taps) * hidden,
            state=sum(mixer.row_bytes for mixer in mixers),
            fresh=sum(mixer.node_bytes for mixer in mixers),
            channels=max((mixer.conv_shape[1] for mixer in mixers), default=0),
        )

    def kv(self, rows: int, slots: int) -> int:
        """Bytes of a pool."""
        slots = round_up((self.window or slots) + self.scratch)
        return prod(kv_shape(self.config, rows, slots)) * self.dtype.itemsize + rows * self.state

    @property
    def token(self) -> int:
        """Bytes alive for each token in a forward pass: the residual stream, a layer's input, four
        arrays of the feed-forward's width (of the experts used) or attention's, what lies beside.
        """
        config = self.config
        *_, kv_heads, width = kv_shape(config, 1, 1)
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        experts = getattr(config, "num_experts_per_tok", None)
        if experts:
            inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
        heads = (query_heads(config) + 2 * kv_heads) * width
        inner = max(inner, heads, 2 * self.channels)
        elements = 2 * config.hidden_size + 4 * inner + 2 * width + self.beside
        return int(elements) * self.dtype.itemsize

    def mask(self, rows: int, nodes: int, width: int) -> int:
        """Bytes of a round's additive masks: one for each kind of layer."""
        config = self.config
        kinds = 1 + ("full_attention" in (getattr(config, "layer_types", None) or ()))
        groups = query_heads(config) // kv_shape(config, 1, 1)[4]
        width = round_up(self.window + self.scratch) if self.window else width
        one = rows * nodes * width * groups * self.dtype.itemsize
        return one * (kinds if windowed(config) else 1)


def at_once(rows: int, nodes: int) -> int:
    """Sides of so many states that go through the LM head together: a few states cost a reading of
    it, many the arithmetic and the room.
    """
    return max(1, 64 // (rows * nodes))


def available(device: torch.device) -> int | None:
    """Bytes that new tensors may take; None where that can't be known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return memory_free() if device.type == "cpu" else None
