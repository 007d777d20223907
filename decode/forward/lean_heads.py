"""Heads with layers of their own in as few calls as possible, on their own weights (`lean.py`).

Shapes: B rows, T pairs or context states, R rows of blocks, H hidden, K key-value heads, E head
width, U width of the taps side by side; X any leading axes.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.decode.forward.attention import Attend, Seen
from draftsmith.decode.forward.kv import KVPool, SlotCache
from draftsmith.decode.forward.lean import (
    POSITION_ONLY,
    Attending,
    LeanLayer,
    agree,
    enter,
    lean_copy,
    leave,
    norm_of,
    normed,
    rotary_tables,
)
from draftsmith.decode.forward.native import Front, NativeBody, weight_of
from draftsmith.decode.forward.product import HALF, Product, sides
from draftsmith.models.heads.block import Block, Stack
from draftsmith.models.heads.clover import Clover
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.heads.falcon import Falcon
from draftsmith.models.heads.head import Head
from draftsmith.models.heads.hydra import Hydra
from draftsmith.models.layers.block_attention import Blocks
from draftsmith.models.layers.layer import Attention, Keep, causal

Given = tuple[Tensor, Tensor, Tensor]  # taps, tokens and positions of a trial
ROUNDED = 2  # times as far from fp32 as the head itself a lean form may be


class LeanEagle:
    """The lean form of a head that is frozen and whose rotary embeddings depend on nothing but the
    position: the same `fuse`, `step`, `before_head` and `fed_back`.
    """

    def __init__(self, head: Eagle) -> None:
        self.head, self.config = head, head.config
        self.gated = head.config.fusion == "gated"
        self.fc: Any = lean_copy(head.fc) if self.gated else Product.of([head.fc])
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

    @property
    def fusing(self) -> tuple[Tensor | None, Sequence[Tensor | None], Tensor | None, Tensor | None]:
        """What `fuse` does, for `native.cpp`: the norm of all taps, those of each, and the map."""
        if not self.wide:
            return None, (), None, None
        weight, bias = sides(self.fc)
        return weight_of(self.of_all), [*map(weight_of, self.of_taps)], weight, bias

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
        if (there := in_native(self.native, tokens_BT, attention)) is not None:
            return there[0].states(tokens_BT, positions_BT, there[1], hidden_BTH)[0][-1]
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


class LeanStack:
    """Ordinary layers of a frozen head, which read states alone, and the norm after them."""

    embedding_VH: Tensor | None = None
    native: NativeBody | None = None
    front: Front | None = None

    def __init__(self, head: Any, layers: Sequence[Any], norm: Any) -> None:
        self.layers = [LeanLayer(layer, i) for i, layer in enumerate(layers)]
        self.norm, like = norm_of(norm), layers[0].post_attention_layernorm.weight
        self.cos_SE, self.sin_SE = rotary_tables(head.rotary, head.context, like)

    def __call__(self, states_BTH: Tensor, positions_BT: Tensor, attention: Attention) -> Tensor:
        run = self.run(positions_BT, attention, positions_BT.shape[1])
        return self.normed(run(states_BTH, range(len(self.layers))))

    def normed(self, output_XH: Tensor) -> Tensor:
        return normed(self.norm, output_XH)

    def run(self, positions_BR: Tensor, attention: Attention, rows: int) -> Stack:
        if (there := in_native(self.native, positions_BR, attention)) is not None:
            native, where = there[0], (positions_BR, positions_BR, there[1])
            return lambda states_BRH, layers: native.states(*where, states_BRH, layers)[0][-1]
        rotary = self._rotary(positions_BR)

        def run(hidden_BRH: Tensor, layers: range) -> Tensor:
            for layer in self.layers[layers.start : layers.stop]:
                hidden_BRH = leave(  # what attention reads and mixes has no name: it goes early
                    hidden_BRH,
                    attention(layer.index, *enter(hidden_BRH, rotary, layer.entry, layer.sizes)),
                    layer.exit,
                    layer.activation,
                )
            return hidden_BRH

        return run

    def _rotary(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos_SE[positions_BT].unsqueeze(2), self.sin_SE[positions_BT].unsqueeze(2)


class LeanTrunk(LeanStack):
    """The layers of a frozen block drafter: the same `keep` and `run`. With convolutions, which go
    over whole blocks, these are the head's own where C++ doesn't run them.
    """

    def __init__(self, head: Block) -> None:
        super().__init__(head, head.every, head.norm)
        for layer, convs in zip(self.layers, head.convs, strict=False):
            layer.taps = [x for c in convs for x in (c.base.flatten(), c.delta.weight)]
        self.plain = head.run if len(head.convs) else super().run
        own = [layer.self_attn for layer in head.every]
        self.kept = [
            (Product.of([a.k_proj, a.v_proj]), norm_of(getattr(a, "k_norm", None))) for a in own
        ]

    def run(self, positions_BR: Tensor, attention: Attention, rows: int) -> Stack:
        whole = in_native(self.native, positions_BR, attention) and rows == positions_BR.shape[1]
        return (super().run if whole else self.plain)(positions_BR, attention, rows)

    def keep(self, context_BTH: Tensor, positions_BT: Tensor, keep: Keep) -> None:
        if self.native is not None and self.native.keep(context_BTH, positions_BT, keep):
            return
        cos_BT1E, sin_BT1E = self._rotary(positions_BT)
        for layer, (product, norm) in zip(self.layers, self.kept, strict=True):
            _, heads, width = layer.sizes
            sides = product(context_BTH).view(*context_BTH.shape[:2], -1, width)
            key_BTKE = normed(norm, sides[:, :, :heads])
            turned = torch.addcmul(key_BTKE * cos_BT1E, key_BTKE.roll(width // 2, -1), sin_BT1E)
            keep(layer.index, turned, sides[:, :, heads:])


class LeanNodes(LeanStack):
    """A light head's layers and what comes before them, of a frozen block drafter; its pool has
    these layers alone.
    """

    def __init__(self, head: Block) -> None:
        light: Any = head.light
        super().__init__(head, light.layers, head.norm)
        self.light, self.embed = lean_copy(light), head.embed
        self.embedding_VH = head.target_embedding_VH
        token, state = (weight_of(norm_of(norm)) for norm in (light.of_token, light.of_state))
        self.front = Front(token, state, (light.entry.weight, None), beside=True)

    def step(
        self, rows_BFH: Tensor, tokens_BF: Tensor, positions_BF: Tensor, attention: Attention
    ) -> Tensor:
        """What the norm reads [B, F, H] of nodes of these tokens at their rows of the block."""
        if (there := in_native(self.native, tokens_BF, attention)) is not None:
            return there[0].states(tokens_BF, positions_BF, there[1], rows_BFH)[0][-1]
        entry_BFH, _ = self.light.changed(rows_BFH, self.embed(tokens_BF), rows_BFH)
        run = self.run(positions_BF, attention, tokens_BF.shape[1])
        return run(entry_BFH, range(len(self.layers)))


def in_native(
    native: NativeBody | None, tokens_BN: Tensor, attention: Attention
) -> tuple[NativeBody, SlotCache] | None:
    """What runs layers on so many tokens in C++, and over which slots; None: torch does."""
    if native is None or not isinstance(attention, Attending) or attention.window is not None:
        return None
    return (native, attention.cache) if native.takes(tokens_BN, attention.cache) else None


def lean_eagle(head: Eagle) -> LeanEagle | None:
    """The head's lean form; None where it isn't known to be the same, or gives other states in two
    steps of two rows, the second from the first's states.
    """

    def states(given: Given, body: Eagle | LeanEagle, attention: Attention) -> list[Tensor]:
        taps_BTU, tokens_BT, at_BT = given
        first_BTH = body.step(body.fuse(taps_BTU), tokens_BT, at_BT, attention)
        second_BTH = body.step(body.fed_back(first_BTH), tokens_BT, at_BT, attention)
        return [first_BTH, second_BTH, body.before_head(second_BTH)]

    layer = head.config.layer
    # P-EAGLE's tokens may be none of the target's, and native.cpp knows no gate.
    native = type(head) is Eagle and head.config.fusion != "gated"
    made = _lean_layers(head, layer, LeanEagle, states, native=native)
    return cast("LeanEagle | None", made)


def lean_block(head: Block) -> Block:
    """The drafter by lean parts; as it is where it isn't known to be the same, or gives other
    states in two blocks of two rows of text.
    """
    rows = head.block

    def states(given: Given, body: Block) -> list[Tensor]:
        taps_BTU, tokens_BT, at_BT = given
        anchors_BM, tokens_BM = at_BT[:, -2:], tokens_BT[:, -2:]
        at_BR = (anchors_BM[..., None] + torch.arange(rows, device=at_BT.device)).flatten(1)
        allowed_BMT = at_BT[:, None] < anchors_BM[..., None]
        context_BTH = body.fuse(taps_BTU)
        attention = Blocks(allowed_BMT, rows, causal=head.config.mask == "causal")
        body.keep(context_BTH, at_BT, attention.keep)
        run = body.run(at_BR % head.context, attention, rows)
        of = tokens_BM, context_BTH[:, -2:], rows, run
        output_BMnH = body.trunk(*of, lambda states_BRH: states_BRH.argmax(-1) % head.rows)
        lit_BRH = run(context_BTH[:, -2:].repeat_interleave(rows, 1), head.lit)
        return [context_BTH, output_BMnH, body.normed(output_BMnH), lit_BRH]

    def lean(head: Block) -> Any:
        made, stack = lean_copy(head), LeanTrunk(head)
        vars(made).update(stack=stack, keep=stack.keep, run=stack.run)
        return made

    made = _lean(head, head.config.layer, lean, states)
    if made is None:
        return head
    taps_BTU, _, at_BT = _tried(head)
    given = taps_BTU[..., : head.hidden], at_BT

    def run(over: Any) -> list[Tensor]:
        made.stack.keep(*given, over.cache)
        return [over.cache.pool.kv_2LBSHE.clone(), made.stack(*given, over)]

    _go_native(made.stack, head.stacked, at_BT, run)
    return cast("Block", made)


def lean_nodes(head: Block) -> LeanNodes | None:
    """A light head's layers, and what comes before them; None where there are none, or as above."""

    def states(given: Given, body: Block | LeanNodes, attention: Attention) -> list[Tensor]:
        taps_BTU, tokens_BT, at_BT = given
        rows_BTH = taps_BTU[..., : head.hidden]
        if isinstance(body, LeanNodes):
            return [body.step(rows_BTH, tokens_BT, at_BT, attention)]
        entry_BTH, _ = body.light.changed(rows_BTH, body.embed(tokens_BT), rows_BTH)
        return [body.run(at_BT, attention, at_BT.shape[1])(entry_BTH, body.lit)]

    if not len(head.light.layers):
        return None
    return cast("LeanNodes | None", _lean_layers(head, head.config.layer, LeanNodes, states))


def lean_prefix(head: Clover | Falcon | Hydra) -> LeanStack | None:
    """A head's `prefix`, of its `prefix_parts`: sizes, layers and a norm. None as above."""

    def states(given: Given, body: Any, attention: Attention) -> list[Tensor]:
        states_BTH, _, at_BT = given
        prefix = body if isinstance(body, LeanStack) else body.prefix
        return [prefix(states_BTH, at_BT, attention)]

    def lean(head: Clover | Falcon | Hydra) -> LeanStack:
        return LeanStack(head, *head.prefix_parts[1:])

    return cast("LeanStack | None", _lean_layers(head, head.prefix_parts[0], lean, states))


def _tried(head: Head) -> Given:
    """Taps, tokens and positions of two rows."""
    noise, weight = torch.Generator().manual_seed(0), next(head.parameters())
    taps_BTU = torch.randn(2, 7, len(head.taps) * head.hidden, generator=noise).to(weight)
    tokens_BT = torch.arange(14, device=weight.device).view(2, 7) % head.rows
    at_BT = (torch.arange(7, device=weight.device) % head.context).expand(2, -1)
    return taps_BTU, tokens_BT, at_BT


def _lean_layers(head: Any, layer: Any, lean: Any, states: Any, *, native: bool = True) -> Any:
    """`_lean`, and in C++ where that is the same. states: (given, body, attention) -> states."""
    made = _lean(head, layer, lean, lambda given, body: states(given, body, causal()))
    if made is not None and native:
        given = _tried(head)
        _go_native(made, layer, given[2], partial(states, given, made))
    return made


def _lean(
    head: Any, layer: Any, lean: Any, states: Callable[[Given, Any], Sequence[Tensor]]
) -> Any:
    """The lean form of a frozen head whose rotary embeddings depend on nothing but the position, if
    its states are the head's own. layer: the config of its layers. Where attention is sharp, one
    rounding more or less moves it from token to token, so that right forms are far apart in half
    precision: there the lean one must be the head in fp32, and mostly as near to that as the head.
    """
    rope = layer.rope_parameters or {}
    if any(p.requires_grad for p in head.parameters()) or rope["rope_type"] not in POSITION_ONLY:
        return None
    made, dtype = lean(head), next(head.parameters()).dtype
    with torch.inference_mode():
        own, theirs = _states(states, head, made)
        if agree(own, theirs, dtype):
            return made
        if dtype not in HALF:
            return None
        exact = copy.deepcopy(head, {id(head._bound): head._bound}).float()
        whole, alike = _states(states, exact, lean(exact))
        near = all(map(_near, theirs, own, whole))
        return made if near and agree(whole, alike, torch.float32) else None


def _states(
    states: Callable[[Given, Any], Sequence[Tensor]], *bodies: Any
) -> Iterator[list[Tensor]]:
    """What each gives, in fp32, of what is tried on the first."""
    given = _tried(bodies[0])
    return ([state.float() for state in states(given, body)] for body in bodies)


def _near(found: Tensor, like: Tensor, exact: Tensor) -> bool:
    """Whether it is mostly (by the median, which tokens with another attention don't move) as near
    to the exact states as others are.
    """
    return bool((found - exact).abs().median() <= ROUNDED * (like - exact).abs().median())


@torch.inference_mode()
def _go_native(
    lean: Any, layer: Any, at_BT: Tensor, states: Callable[[Attention], Sequence[Tensor]]
) -> None:
    """Let a lean form run its layers in C++, if in slots of a pool its states there, and what is
    kept, are torch's. states: of two rows at these positions.
    """
    native, like, found = NativeBody.of(lean, lean.front), lean.cos_SE, []
    if native is None:
        return
    groups = layer.num_attention_heads // layer.num_key_value_heads
    for lean.native in (None, native.unbound()):
        pool = KVPool(layer, rows=2, slots=16, dtype=like.dtype, device=like.device)
        seen = Seen(torch.zeros(2, dtype=torch.int64, device=like.device), pool.slots)
        attend = Attend(seen, at_BT, groups=groups, dtype=like.dtype, backend="masked")
        attention = Attending(SlotCache(pool, pool.flat(at_BT), pool.slots, attend))
        found.append([state.float() for state in (*states(attention), pool.kv_2LBSHE)])
    lean.native = native if agree(found[0], found[1], like.dtype) else None
