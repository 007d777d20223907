"""Heads with layers of their own in as few calls as possible, on their own weights (`lean.py`).

Shapes: B rows, T pairs or context states, R rows of blocks, H hidden, K key-value heads, E head
width, U width of the taps side by side; X any leading axes.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decode.forward.attention import Attend, Seen
from draftsmith.decode.forward.kv import KVPool, SlotCache
from draftsmith.decode.forward.lean import (
    POSITION_ONLY,
    Attending,
    LeanLayer,
    agree,
    enter,
    leave,
    norm_of,
    normed,
    rotary_tables,
)
from draftsmith.decode.forward.native import Front, NativeBody, weight_of
from draftsmith.decode.forward.product import Product
from draftsmith.models.heads.block import Block, Layer
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.layers.block_attention import Blocks
from draftsmith.models.layers.block_lights import SwigluLight
from draftsmith.models.layers.layer import Attention, Keep, causal


class LeanEagle:
    """The lean form of a head that is frozen and whose rotary embeddings depend on nothing but the
    position: the same `fuse`, `step`, `before_head` and `fed_back`.
    """

    def __init__(self, head: Eagle) -> None:
        self.head, self.config = head, head.config
        self.fc = Product.of([head.fc])
        self.layers = [LeanLayer(layer, i) for i, layer in enumerate(head.layers)]
        self.wide = head.config.version == 3
        self.norm = norm_of(getattr(head, "norm", None))
        self.of_token = norm_of(getattr(head, "pre_fc_norm_embedding", None))
        self.of_state = norm_of(getattr(head, "pre_fc_norm_hidden", None))
        if self.wide:
            first = head.layers[0]
            self.of_token = norm_of(first.input_layernorm)
            self.of_state = norm_of(first.hidden_norm)
            self.layers[0].entry = (None, *self.layers[0].entry[1:])
            self.of_taps = [norm_of(norm) for norm in getattr(head, "fc_norm", ())]
            self.of_all = norm_of(head.input_norm if head.config.norm_before_fc else None)
        self.cos_SE, self.sin_SE = rotary_tables(head.rotary, head.context, head.fc.weight)
        self.embedding_VH = head.target_embedding_VH
        self.native: NativeBody | None = None

    @property
    def front(self) -> Front:
        """What comes before its layers, for `native.cpp`."""
        norms = weight_of(self.of_token), weight_of(self.of_state)
        maps = (None, None) if self.wide else (self.head.fc.weight, self.head.fc.bias)
        fed_normed = self.config.norm_output or self.config.mtp
        return Front(*norms, maps, self.config.norm_before_residual, fed_normed)

    def fuse(self, taps_XU: Tensor) -> Tensor:
        if not self.wide:
            return taps_XU
        if self.of_taps:
            parts = zip(self.of_taps, taps_XU.split(self.head.hidden, -1), strict=True)
            taps_XU = torch.cat([normed(norm, part) for norm, part in parts], -1)
        return self.fc(normed(self.of_all, taps_XU))

    def step(
        self, hidden_BTH: Tensor, tokens_BT: Tensor, positions_BT: Tensor, attention: Attention
    ) -> Tensor:
        if (
            self.native is not None
            and isinstance(attention, Attending)
            and attention.window is None
            and self.native.takes(tokens_BT, attention.cache)
        ):
            return self.native.last(tokens_BT, positions_BT, attention.cache, hidden_BTH)
        embedded_BTH = self.head.embed(tokens_BT)
        rotary = self.cos_SE[positions_BT].unsqueeze(2), self.sin_SE[positions_BT].unsqueeze(2)
        if self.wide:
            normed_BTH = normed(self.of_state, hidden_BTH)
            entry_BTI = torch.cat([normed(self.of_token, embedded_BTH), normed_BTH], -1)
            if self.config.norm_before_residual:
                hidden_BTH = normed_BTH
            del normed_BTH
        else:
            parts = normed(self.of_token, embedded_BTH), normed(self.of_state, hidden_BTH)
            entry_BTI = hidden_BTH = self.fc(torch.cat(parts, -1))
            del parts
        del embedded_BTH  # a prompt's is large
        for layer in self.layers:
            # No names for what lies between: it is free as soon as it has been used.
            entry_BTI = hidden_BTH = leave(
                hidden_BTH,
                attention(layer.index, *enter(entry_BTI, rotary, layer.entry, layer.sizes)),
                layer.exit,
                layer.activation,
            )
        return hidden_BTH

    def before_head(self, output_XH: Tensor) -> Tensor:
        return normed(self.norm, output_XH)

    def fed_back(self, output_XH: Tensor) -> Tensor:
        fed = self.config.norm_output or self.config.mtp
        return normed(self.norm, output_XH) if fed else output_XH


class LeanBlock:
    """The lean form of a frozen block drafter without convolutions: the same `fuse`, `keep`, `run`
    and `normed`.
    """

    def __init__(self, head: Block) -> None:
        self.fc, self.hidden_norm = Product.of([head.fc]), norm_of(head.hidden_norm)
        self.layers = [LeanLayer(layer, i) for i, layer in enumerate(head.layers)]
        own = [layer.self_attn for layer in head.layers]
        self.kept = [
            (Product.of([a.k_proj, a.v_proj]), norm_of(getattr(a, "k_norm", None))) for a in own
        ]
        self.norm = norm_of(head.norm)
        self.cos_SE, self.sin_SE = rotary_tables(head.rotary, head.context, head.fc.weight)

    def fuse(self, taps_XU: Tensor) -> Tensor:
        return normed(self.hidden_norm, self.fc(taps_XU))

    def normed(self, output_XH: Tensor) -> Tensor:
        return normed(self.norm, output_XH)

    def keep(self, context_BTH: Tensor, positions_BT: Tensor, keep: Keep) -> None:
        cos_BT1E, sin_BT1E = self._rotary(positions_BT)
        for layer, (product, norm) in zip(self.layers, self.kept, strict=True):
            _, heads, width = layer.sizes
            sides = product(context_BTH).view(*context_BTH.shape[:2], -1, width)
            key_BTKE = normed(norm, sides[:, :, :heads])
            turned = torch.addcmul(key_BTKE * cos_BT1E, key_BTKE.roll(width // 2, -1), sin_BT1E)
            keep(layer.index, turned, sides[:, :, heads:])

    def run(self, positions_BR: Tensor, attention: Attention, rows: int) -> Layer:
        rotary = self._rotary(positions_BR)

        def run(index: int, hidden_BRH: Tensor) -> Tensor:
            layer = self.layers[index]
            mixed_BRO = attention(index, *enter(hidden_BRH, rotary, layer.entry, layer.sizes))
            return leave(hidden_BRH, mixed_BRO, layer.exit, layer.activation)

        return run

    def _rotary(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos_SE[positions_BT].unsqueeze(2), self.sin_SE[positions_BT].unsqueeze(2)


class LeanSwiglu:
    """`SwigluLight.changed` by products in their fastest form."""

    def __init__(self, light: SwigluLight) -> None:
        self.of_token, self.of_state = norm_of(light.of_token), norm_of(light.of_state)
        self.gate_up, self.down = Product.of([light.gate_up]), Product.of([light.down])
        self.cell: list[Product] = []
        if light.width:
            cell = light.cell
            pairs = (cell.weight_ih, cell.bias_ih), (cell.weight_hh, cell.bias_hh)
            self.cell = [Product([weight], [bias]) for weight, bias in pairs]

    def changed(
        self, output_XH: Tensor, embedded_XH: Tensor, carried_XS: Tensor
    ) -> tuple[Tensor, Tensor]:
        read = [normed(self.of_token, embedded_XH), normed(self.of_state, output_XH)]
        if self.cell:
            given, kept = (of(x) for of, x in zip(self.cell, (read[0], carried_XS), strict=True))
            (reset, keep, new), (resets, keeps, news) = given.chunk(3, -1), kept.chunk(3, -1)
            new_XS = (new + (reset + resets).sigmoid() * news).tanh()
            carried_XS = new_XS.lerp(carried_XS, (keep + keeps).sigmoid())
            read.append(carried_XS)
        gate_XH, up_XH = self.gate_up(torch.cat(read, -1)).chunk(2, -1)
        return output_XH + self.down(F.silu(gate_XH) * up_XH), carried_XS


def lean_eagle(head: Eagle) -> LeanEagle | None:
    """The head's lean form; None where it isn't known to be the same, or gives other states in two
    steps of two rows, the second from the first's states.
    """
    taps_BTU, tokens_BT, at_BT = _tried(head)

    def states(body: Eagle | LeanEagle) -> list[Tensor]:
        first_BTH = body.step(body.fuse(taps_BTU), tokens_BT, at_BT, causal())
        second_BTH = body.step(body.fed_back(first_BTH), tokens_BT, at_BT, causal())
        return [first_BTH, second_BTH, body.before_head(second_BTH)]

    made: LeanEagle | None = _lean(head, LeanEagle, states)
    if made is not None and type(head) is Eagle:  # P-EAGLE's tokens may be none of the target's
        native = NativeBody.of(made, made.front)
        if native is not None and agree(*_pooled(made, native), head.fc.weight.dtype):
            made.native = native
    return made


@torch.inference_mode()
def _pooled(lean: LeanEagle, made: NativeBody) -> tuple[list[Tensor], list[Tensor]]:
    """States of the same two steps in slots of a pool, and what is kept there: in torch, in C++."""
    taps_BTU, tokens_BT, at_BT = _tried(lean.head)
    layer, like, found = lean.config.layer, taps_BTU, []
    groups = layer.num_attention_heads // layer.num_key_value_heads
    for native in (None, made.unbound()):
        body = copy.copy(lean)
        body.native = native
        pool = KVPool(layer, rows=2, slots=16, dtype=like.dtype, device=like.device)
        seen = Seen(torch.zeros(2, dtype=torch.int64, device=like.device), pool.slots)
        attend = Attend(seen, at_BT, groups=groups, dtype=like.dtype, backend="masked")
        attention = Attending(SlotCache(pool, pool.flat(at_BT), pool.slots, attend))
        first_BTH = body.step(body.fuse(taps_BTU), tokens_BT, at_BT, attention)
        second_BTH = body.step(body.fed_back(first_BTH), tokens_BT, at_BT, attention)
        found.append([state.float() for state in (first_BTH, second_BTH, pool.kv_2LBSHE)])
    return found[0], found[1]


def lean_block(head: Block) -> LeanBlock | None:
    """The drafter's lean form; None where it isn't known to be the same, or gives other states in
    two blocks of two rows of text.
    """
    taps_BTU, tokens_BT, at_BT = _tried(head)
    anchors_BM, rows = at_BT[:, -2:], head.block
    at_BR = (anchors_BM[..., None] + torch.arange(rows, device=at_BT.device)).flatten(1)
    allowed_BMT = at_BT[:, None] < anchors_BM[..., None]
    tokens_BM = tokens_BT[:, -2:]

    def states(body: Block | LeanBlock) -> list[Tensor]:
        context_BTH = body.fuse(taps_BTU)
        attention = Blocks(allowed_BMT, rows, causal=head.config.mask == "causal")
        body.keep(context_BTH, at_BT, attention.keep)
        run = body.run(at_BR % head.context, attention, rows)
        given = tokens_BM, context_BTH[:, -2:], rows, run
        output_BMnH = head.trunk(*given, lambda states_BRH: states_BRH.argmax(-1) % head.rows)
        return [context_BTH, output_BMnH, body.normed(output_BMnH)]

    return None if len(head.convs) else _lean(head, LeanBlock, states)


def _tried(head: Eagle | Block) -> tuple[Tensor, Tensor, Tensor]:
    """Taps, tokens and positions of two rows."""
    noise = torch.Generator().manual_seed(0)
    device, dtype = head.fc.weight.device, head.fc.weight.dtype
    taps_BTU = torch.randn(2, 7, len(head.taps) * head.hidden, generator=noise).to(device, dtype)
    tokens_BT = torch.arange(14, device=device).view(2, 7) % head.rows
    return taps_BTU, tokens_BT, (torch.arange(7, device=device) % head.context).expand(2, -1)


def _lean(head: Any, lean: Any, states: Callable[[Any], Sequence[Tensor]]) -> Any:
    """The lean form of a frozen head whose rotary embeddings depend on nothing but the position, if
    its states are the head's own.
    """
    rope = head.config.layer.rope_parameters or {}
    if any(p.requires_grad for p in head.parameters()) or rope["rope_type"] not in POSITION_ONLY:
        return None
    made = lean(head)
    with torch.inference_mode():
        own, theirs = ([state.float() for state in states(body)] for body in (head, made))
        return made if agree(own, theirs, head.fc.weight.dtype) else None
