"""Block drafters: one pass of a few layers drafts a whole block of tokens.

A block stands at the pending token x_a, whose state the target hasn't computed. Its first row is
that token's embedding, the others one learnt MASK; they read the target's states c_i of all i < a,
and each other, and draft x_{a+1}, x_{a+2}, ... at once:

    c_i = norm(fc [taps]);  a layer's keys and values: W c of the context beside W u of the rows
    logits of depth k = LM head (state of row k) + what the light head makes of the path

c is made once, when a token is committed: layers don't change it, so its keys and values never
roll back. The light heads are in `block_lights.py`. With `noise` the drafter reads the target's own
noise of the tokens ahead: after the first layer each row guesses its token by it, and tells the
next row (see docs/methods/blocks.md); no other drafter does.

The published ones are settings of this one (`KINDS`). Labels: "shifted", row k drafts x_{a+1+k};
"same", row k drafts x_{a+k}, and the first nothing. Where we differ: MASK is a vector of the
head's own unless `mask_token` names a row of the target's table, as theirs all do; the selector
ranks all tokens, not 16 candidates.

Shapes: B rows of text, T its positions, M anchors, b rows of a block, n depths (b or b - 1),
R = M * b, H hidden, U width of the taps side by side, I = H + the light head's rank.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, Self, get_type_hints

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.models.heads.head import Kind, LayerHead, Reads, entry
from draftsmith.models.layers.block_attention import Blocks
from draftsmith.models.layers.block_lights import LIGHTS
from draftsmith.models.layers.layer import (
    LAYER_CONFIGS,
    Attention,
    Keep,
    begin_as_last,
    layer_json,
    read_layer,
    stack,
)
from draftsmith.models.layouts.block_layouts import block_exported, unread
from draftsmith.models.layouts.exported import Exported
from draftsmith.models.taps import Tap, decoder_layers

# States [B, R, H] that the LM head could multiply -> the tokens [B, R] that they win.
Guess = Callable[[Tensor], Tensor]
LABELS, MASKS = ("shifted", "same"), ("full", "causal")
Stack = Callable[[Tensor, range], Tensor]  # (states [B, R, H], their numbers) -> states
KEPT: Any = [lambda x_BRH: x_BRH] * 4  # in the place of a layer's convolutions
# What the published drafters are; "block" is any other.
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"light": "none", "labels": "same", "mask": "full", "convs": False},
    "dflash2": {"light": "selector", "labels": "same", "mask": "full", "convs": True},
    "dspark": {"light": "markov", "labels": "shifted", "mask": "full", "convs": False},
    "domino": {"light": "gru", "labels": "same", "mask": "full", "convs": False},
    "jetspec": {"light": "none", "labels": "same", "mask": "causal", "convs": False},
    "treeflash": {"light": "swiglu", "labels": "same", "mask": "full", "convs": False},
}
TITLES = {"dflash": "DFlash", "dflash2": "DFlash-2", "dspark": "DSpark", "domino": "Domino"}
TITLES |= {"jetspec": "JetSpec", "treeflash": "TreeFlash", "block": "a block drafter"}
METHODS = {"vllm": ("dflash", "dspark"), "sglang": ("DFLASH", "DSPARK"), "speculators": ("", "")}
METHODS |= {"gguf": ("draft-dflash", "draft-dspark"), "tensorrt": ("DFlash", "")}
STACKS = {
    kind: {to: Reads(METHODS[to][spark], misread=partial(unread, to)) for to in stacks}
    for kind, spark, stacks in (
        ("dflash", 0, tuple(METHODS)),
        ("dspark", 1, tuple(METHODS)[:-1]),
        ("jetspec", 0, ("vllm",)),
        ("block", 1, ("speculators",)),
    )
}


@dataclass(frozen=True)
class BlockConfig:
    """layer: sizes of the trunk's layers, hidden_size and vocab_size the target's; taps: at least
    one; levels: depths that are drafted, n; light: one of `LIGHTS`, of this rank; labels, mask (of
    a block's rows among themselves), noise: see above; convs: DFlash-2's short convolutions;
    last: whether the last context state is added to every row; mask_token: the token whose
    embedding MASK is, -1: MASK is the head's own; narrow: width of a light layer's MLP, 0: as the
    trunk's.
    """

    layer: PretrainedConfig
    taps: tuple[Tap, ...]
    levels: int = 7
    light: str = "markov"
    rank: int = 256
    labels: str = "shifted"
    mask: str = "causal"
    convs: bool = False
    noise: bool = False
    last: bool = False
    mask_token: int = -1
    narrow: int = 0

    def __post_init__(self) -> None:
        for name, got, known in (
            ("light", self.light, LIGHTS),
            ("labels", self.labels, LABELS),
            ("mask", self.mask, MASKS),
            ("layers of kind", self.layer.model_type, tuple(LAYER_CONFIGS)),
        ):
            if got not in known:
                raise ValueError(f"block: got {name}={got!r}, expected one of {', '.join(known)}")
        if self.narrow and (self.light != "layer" or self.narrow not in self.widths):
            raise ValueError(
                f"block: got narrow={self.narrow} with light={self.light}, expected 0, or the "
                f"width of the MLP of light=layer, in steps of {self.widths.step} below "
                f"{self.widths.stop}"
            )
        if min(self.levels, self.rank, len(self.taps)) < 1:
            raise ValueError(
                f"block: got {self.levels} levels, rank {self.rank}, {len(self.taps)} taps, "
                "expected at least 1 of each"
            )
        if not -1 <= self.mask_token < self.layer.vocab_size:
            raise ValueError(
                f"block: got mask_token={self.mask_token}, expected a token, 0 to "
                f"{self.layer.vocab_size - 1}, or -1: MASK is a vector of the head's own"
            )
        if self.convs and self.layer.hidden_size % TwoTap.GROUP:
            raise ValueError(
                f"block: expected a hidden size in groups of {TwoTap.GROUP}, got "
                f"{self.layer.hidden_size}; leave convs out"
            )
        if self.noise and (self.labels, self.mask) != ("shifted", "causal"):
            raise ValueError(
                f"block: got noise with labels={self.labels}, mask={self.mask}, expected shifted "
                "and causal: a row tells the next one what it guessed"
            )

    @property
    def widths(self) -> range:
        """What a narrower MLP may have, so that C++ knows it."""
        return range(16, self.layer.intermediate_size, 16)

    @property
    def kind(self) -> str:
        own = {name: getattr(self, name) for name in KINDS["dflash"]}
        found = [kind for kind, settings in KINDS.items() if settings == own]
        return found[0] if found and not (self.noise or self.last) else "block"


class TwoTap(nn.Module):
    """DFlash-2's depthwise convolution: y_t = sum_o (base_o + delta_o(x_t)) x_{t-o}, o in {0, 1},
    delta of groups of 16 numbers; x_{-1} = 0. The identity at first.
    """

    GROUP = 16

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.stack([torch.ones(hidden), torch.zeros(hidden)]))
        self.delta = nn.Linear(hidden, 2 * (hidden // self.GROUP), bias=False)
        nn.init.zeros_(self.delta.weight)

    def forward(self, x_BRH: Tensor, rows: int) -> Tensor:
        """Of blocks of so many rows."""
        x_BMbH = x_BRH.unflatten(1, (-1, rows))
        before_BMbH = shifted(x_BMbH)
        each = self.delta(x_BMbH).repeat_interleave(self.GROUP, -1).chunk(2, -1)
        now_BMbH, then_BMbH = (base + delta for base, delta in zip(self.base, each, strict=True))
        return (now_BMbH * x_BMbH + then_BMbH * before_BMbH).flatten(1, 2)


def shifted(x_BMbH: Tensor) -> Tensor:
    """Each row of a block what the row before it was, the first 0."""
    return torch.cat([torch.zeros_like(x_BMbH[:, :, :1]), x_BMbH[:, :, :-1]], 2)


class Block(LayerHead):
    """A block drafter; `kind` says whose."""

    mask: nn.Parameter  # unless it is a token's embedding

    kinds: ClassVar = {kind: Kind(title, STACKS.get(kind, {})) for kind, title in TITLES.items()}

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(layer := config.layer)
        self.config, self.kind, self.taps = config, config.kind, config.taps
        self.levels = config.levels
        self.first = int(config.labels == "same")  # row that drafts the first token
        self.block = config.levels + self.first  # b
        norm = {"eps": layer.rms_norm_eps}
        self.fc = nn.Linear(len(config.taps) * self.hidden, self.hidden, bias=False)
        self.hidden_norm = LlamaRMSNorm(self.hidden, **norm)
        self.layers = stack(layer)
        self.convs: Any = nn.ModuleList(
            nn.ModuleList(TwoTap(self.hidden) for _ in KEPT)
            for _ in range(layer.num_hidden_layers * config.convs)
        )
        self.norm = LlamaRMSNorm(self.hidden, **norm)
        if config.mask_token < 0:
            self.mask = nn.Parameter(torch.randn(self.hidden) * layer.initializer_range)
        lit = copy.copy(layer)
        lit.intermediate_size = config.narrow or layer.intermediate_size
        self.light = LIGHTS[config.light](lit, config.rank)
        if config.last:
            self.last = nn.Linear(self.hidden, self.hidden, bias=False)
        if config.noise:
            self.guess = nn.Linear(self.hidden, self.hidden, bias=False)
            nn.init.zeros_(self.guess.weight)

    @torch.no_grad()
    def init_from(self, target: PreTrainedModel) -> Self:
        """Bind the target; layers begin as its last ones where their parts are alike, and the
        context states as its deepest tap.
        """
        begin_as_last(self.every, decoder_layers(target))
        deepest_HH = torch.eye(self.hidden, device=self.fc.weight.device)
        self.fc.weight.mul_(0.1)[:, -self.hidden :] += deepest_HH
        if self.config.last:
            self.last.weight.mul_(0.1).add_(deepest_HH, alpha=0.5)
        if self.config.mask_token < 0:
            table: Any = target.get_input_embeddings().weight
            self.mask.copy_(table.float().mean(0))
        return self.bind(target)

    @property
    def every(self) -> list[Any]:
        """The layers that read the context: the trunk's, then the light head's own."""
        return [*self.layers, *self.light.layers]

    @property
    def lit(self) -> range:
        """The numbers of the light head's own."""
        return range(len(self.layers), len(self.every))

    @property
    def stacked(self) -> PretrainedConfig:
        """The config of them all."""
        layer = copy.copy(self.config.layer)
        layer.num_hidden_layers = len(self.every)
        return layer

    @property
    def heads(self) -> tuple[Tensor, ...]:
        """What multiplies the two parts of `drafted`: the target's LM head, and `after`."""
        after = (self.light.after.weight,) if self.light.rank else ()
        return (self.target_head_VH, *after)

    @property
    def mask_H(self) -> Tensor:
        if self.config.mask_token < 0:
            return self.mask
        return self._bound[0][self.config.mask_token].to(self.fc.weight.dtype)

    def fuse(self, taps_XU: Tensor) -> Tensor:
        """The context states c [..., H] of the target's taps side by side."""
        return self.hidden_norm(self.fc(taps_XU))

    def normed(self, output_XH: Tensor) -> Tensor:
        """What the LM head multiplies."""
        return self.norm(output_XH)

    def keep(self, context_BTH: Tensor, positions_BT: Tensor, keep: Keep) -> None:
        """Hand each layer's keys and values of the context to `keep`."""
        rotary = self.rotary(context_BTH, positions_BT)
        for index, layer in enumerate(self.every):
            keep(index, *layer.remember(context_BTH, rotary))

    def run(self, positions_BR: Tensor, attention: Attention, rows: int) -> Stack:
        """The layers on blocks of so many rows at these positions: the trunk's, and then the light
        head's, of which a row is a node.
        """
        rotary = self.rotary(self.fc.weight[None], positions_BR)

        def run(hidden_BRH: Tensor, layers: range) -> Tensor:
            for index in layers:
                layer, convs = self.every[index], KEPT
                if index < len(self.convs):  # nodes have none: nothing is beside them
                    convs = [partial(conv, rows=rows) for conv in self.convs[index]]
                before, after, into, out = convs
                entry_BRH = before(layer.input_layernorm(hidden_BRH))
                mixed_BRO = attention(index, *layer.project(entry_BRH, rotary))
                hidden_BRH = hidden_BRH + after(layer.self_attn.o_proj(mixed_BRO))
                inner_BRH = into(layer.post_attention_layernorm(hidden_BRH))
                hidden_BRH = hidden_BRH + out(layer.mlp(inner_BRH))
            return hidden_BRH

        return run

    def trunk(
        self, tokens_BM: Tensor, last_BMH: Tensor, rows: int, run: Stack, guess: Guess | None = None
    ) -> Tensor:
        """Before the final norm, [B, M, n, H], of blocks at these pending tokens, after contexts
        whose last states these are, of so many rows (a causal block may be cut short); run: see
        above; guess: by the noise, of a head that reads it.
        """
        first_BM1H = self.embed(tokens_BM).unsqueeze(2)
        masks_BMrH = self.mask_H.to(first_BM1H).expand(*tokens_BM.shape, rows - 1, -1)
        hidden_BMbH = torch.cat([first_BM1H, masks_BMrH], 2)
        if self.config.last:
            hidden_BMbH = hidden_BMbH + self.last(last_BMH).unsqueeze(2)
        hidden_BRH, layers = hidden_BMbH.flatten(1, 2), range(len(self.layers))
        if self.config.noise:
            assert guess is not None, "a drafter that reads the noise is given it"
            hidden_BRH, layers = run(hidden_BRH, layers[:1]), layers[1:]
            told_BRH = self.guess(self.embed(guess(self.norm(hidden_BRH))))
            told_BMbH = shifted(told_BRH.unflatten(1, (-1, rows)))
            hidden_BRH = hidden_BRH + told_BMbH.flatten(1, 2)
        hidden_BRH = run(hidden_BRH, layers)
        return hidden_BRH.unflatten(1, (-1, rows))[:, :, self.first :]

    def drafted(
        self,
        taps_BTU: Tensor,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        anchors_BM: Tensor,
        guess: Guess | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What blocks at these anchors of a text draft, its own tokens taken for the drafted ones:
        states [B, M, n, H] without the light head, and with it [B, M, n, I], I in the parts that
        `heads` multiply. positions: from 0 in each document; an anchor reads its document alone.
        """
        at_BM = positions_BT.gather(1, anchors_BM)
        column_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        first_BM1, anchors_BM1 = (anchors_BM - at_BM)[..., None], anchors_BM[..., None]
        allowed_BMT = (column_T >= first_BM1) & (column_T < anchors_BM1)
        # An anchor that begins a document has no context, and isn't trained: any will do.
        allowed_BMT = allowed_BMT | ((at_BM == 0)[..., None] & (column_T == anchors_BM1))
        attention = Blocks(allowed_BMT, self.block, causal=self.config.mask == "causal")
        nodes, alike = attention, self.config.mask == "causal" and not self.first
        if self.lit and not alike:
            nodes = Blocks(allowed_BMT, self.levels, causal=True)

        def keep(layer: int, *sides: Tensor) -> None:
            (nodes if layer in self.lit else attention).keep(layer, *sides)

        context_BTH = self.fuse(taps_BTU)
        self.keep(context_BTH, positions_BT, keep)
        row_b = torch.arange(self.block, device=anchors_BM.device)
        positions_BR = (at_BM[..., None] + row_b).flatten(1).clamp(max=self.context - 1)
        tokens_BM = tokens_BT.gather(1, anchors_BM)
        before_BM1 = (anchors_BM - 1).clamp(min=0)[..., None]
        last_BMH = context_BTH.gather(1, before_BM1.expand(-1, -1, self.hidden))
        run = self.run(positions_BR, attention, self.block)
        output_BMnH = self.trunk(tokens_BM, last_BMH, self.block, run, guess)
        at_BMn = positions_BR.unflatten(1, (-1, self.block))[..., : self.levels]
        run = self.run(at_BMn.flatten(1), nodes, self.levels)
        return self.norm(output_BMnH), self._lit(output_BMnH, tokens_BT, anchors_BM, run)

    def _lit(
        self, output_BMnH: Tensor, tokens_BT: Tensor, anchors_BM: Tensor, run: Stack
    ) -> Tensor:
        """The states of all depths with the light head, after the text's own tokens."""
        step_n = torch.arange(self.levels, device=anchors_BM.device)
        at_BMn = (anchors_BM[..., None] + step_n).clamp(max=tokens_BT.shape[1] - 1)
        path_BMn = tokens_BT.gather(1, at_BMn.flatten(1)).view_as(at_BMn)
        embedded_BMnH = self.embed(path_BMn)

        def each(light: Callable[..., tuple[Tensor, Tensor]], *given: Tensor) -> Tensor:
            carried_BMS = output_BMnH.new_zeros(*anchors_BM.shape, self.light.width)
            found = []
            for of_depth in zip(*(x.unbind(2) for x in (*given, embedded_BMnH)), strict=True):
                made_BMX, carried_BMS = light(*of_depth, carried_BMS)
                found.append(made_BMX)
            return torch.stack(found, 2)

        if self.light.deep:
            output_BMnH = each(self.light.changed, output_BMnH)
            output_BMnH = run(output_BMnH.flatten(1, 2), self.lit).view_as(output_BMnH)
        state_BMnH = self.norm(output_BMnH)
        low_BMnR = each(self.light.low, state_BMnH, path_BMn)
        return torch.cat([state_BMnH, low_BMnR.to(state_BMnH)], -1)

    def to_json(self) -> dict[str, Any]:
        about = asdict(self.config)
        del about["layer"]
        return layer_json(self.config.layer) | about | {"architectures": ["BlockDrafter"]}

    def exported(self, to: str, target: PreTrainedModel, K: int) -> Exported:
        return block_exported(to, self.to_json(), self.on_disk(), target, self.vocab)

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "Block":
        # Which no other layout has.
        usual = {"last": False, "mask_token": -1, "narrow": 0}
        taps, own = tuple(entry(config, "taps", list)), get_type_hints(BlockConfig)
        plain = {name: kind for name, kind in own.items() if kind in (int, str, bool)}
        said = {name: entry(config, name, kind, usual.get(name)) for name, kind in plain.items()}
        return cls(BlockConfig(read_layer(config), taps, **said))
