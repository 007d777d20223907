"""Chains that are drafted in several rounds of one call (`several` in rows.cpp), by what is in C++
too (in_rounds.h, heads.h, lights.h).

Shapes: B rows, H hidden, U width of the taps side by side.
"""

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.forward.compiled import library, pointer
from draftsmith.decode.forward.compressed import STEP, follow
from draftsmith.decode.forward.kv import KVPool, laid
from draftsmith.decode.forward.native import ChainCall, NativeBody, PassCall
from draftsmith.decode.forward.product import Product, VocabHead, sides

LIT = ("markov", "selector", "gated", "rnn", "gru", "swiglu")  # in the order of lights.h
_P, _N = ctypes.c_void_p, ctypes.c_int64


class InRounds(NamedTuple):
    """What a call is given: how a chain is drafted, how what a round came to is heard, and of what;
    and what that reads, which must live as long.
    """

    call: tuple[Any, ...] = (None, None, None)
    held: tuple[Any, ...] = ()


class _Draft(ctypes.Structure):
    _fields_ = [(n, _P) for n in ("body", "pass_", "chain", "tail")]


class _Pard(ctypes.Structure):
    _fields_ = [("draft", _Draft), ("mask", _N), ("wide", _N), ("unfed", _P)]
    _fields_ += [("drafted", ctypes.c_uint8)]


class _Head(ctypes.Structure):
    _fields_ = [("draft", _Draft), *((n, _P) for n in ("of_all", "of_taps", "fuse", "bias"))]
    _fields_ += [("wide", _N), ("state", _P)]


class _Block(ctypes.Structure):
    _fields_ = [(n, _P) for n in ("weight", "bias", "skip", "skip_bias")]


class _Level(ctypes.Structure):
    _fields_ = [("block", _P), ("blocks", _N), ("head", _P), ("bias", _P)]


class _Heads(ctypes.Structure):
    _fields_ = [("hidden", _N), *((n, _P) for n in ("chain", "level", "embedding", "state"))]
    _fields_ += [("prefix", _P), ("pass_", _P)]


class _Kept(ctypes.Structure):
    _fields_ = [(n, _P) for n in ("body", "pass_", "chain", "embedding", "state")]


class _Clover(_Kept):
    _fields_ = [(f"{part}_{of}", _P) for of in range(3) for part in ("norm", "one", "other")]


class _Falcon(_Kept):
    _fields_ = [("block", _N), *((f"gates_{i}", _P) for i in range(4))]


class _OnePass(ctypes.Structure):
    _fields_ = [("head", _Head), ("trunk", _P), ("pass_", _P)]
    _fields_ += [(n, _N) for n in ("layers", "first", "rows")]
    _fields_ += [(n, _P) for n in ("norm", "mask", "embedding", "last", "light")]


class _Light(ctypes.Structure):
    _fields_ = [(n, _N) for n in ("kind", "rank", "width")]
    _fields_ += [("epsilon", ctypes.c_double)]
    _fields_ += [(n, _P) for n in ("before", "after", "of_token", "of_state")]
    _fields_ += [(n, _P) for n in ("first", "second", "given", "kept")]


class _Either(ctypes.Structure):
    _fields_ = [(f"{n}_{of}", _P) for of in (1, 2) for n in ("draft", "hear", "own")]
    _fields_ += [("levels", _N), *((n, _P) for n in ("verified", "drafted", "tree", "sees"))]
    _fields_ += [(n, _P) for n in ("hits", "seen", "place", "guess", "certain", "own")]
    _fields_ += [("places", _N)]
    _fields_ += [(n, ctypes.c_float) for n in ("sure", "most", "rests", "usual", "fades")]


class Draws(NamedTuple):
    """How tokens are drafted: by which LM head, at which temperature, and where keys and values go,
    of so many positions.
    """

    head: VocabHead
    temperature: float
    pool: KVPool
    context: int


class Trunk(NamedTuple):
    """How a block drafter makes a block's rows: by how many layers, from which row on they draft,
    how many there are (0: as few as the chain needs); tensors: the norm of what the taps are mapped
    to, MASK, the embeddings, and a map of the last state that is added to all rows, if it is.
    """

    layers: int
    first: int
    rows: int
    tensors: tuple[Tensor | None, ...]


class LightParts(NamedTuple):
    """A light head without layers. kind: one of LIT; numbers: R, how many are carried on, and the
    epsilon of its norms; tensors: each token's own numbers, what adds to the logits, and the norms
    of tokens and states; maps: at most two; cell: a GRU's two, if it has one.
    """

    kind: str
    numbers: tuple[int, int, float]
    tensors: tuple[Tensor | None, ...]
    maps: Sequence[Product]
    cell: Sequence[Product]


def lm_rounds(native: NativeBody, drawn: Draws, tail_B2: Tensor | None) -> InRounds:
    """Of a draft LM. tail_B2: each row's last two tokens, which the call keeps up; None where all
    but the last have keys and values that somebody else keeps up.
    """
    held, parts = _parts(native, drawn)
    draft, made = _Draft(*parts, pointer(tail_B2)), native.made
    return called(draft, held, made.draft_lm, None if tail_B2 is None else made.told_lm)


def pard_rounds(
    native: NativeBody, drawn: Draws, mask: int, tail_BW: Tensor, unfed_B: Tensor
) -> InRounds | None:
    """Of a draft LM with MASKs. tail_BW: each row's last tokens, and unfed_B how many of them wait,
    which the call keeps up. None where its LM head's product isn't C++'s.
    """
    if not native.reads_out(drawn.head):
        return None
    held, parts = _parts(native, drawn)
    waits, made = (mask, tail_BW.shape[1], pointer(unfed_B)), native.made
    pard = _Pard(_Draft(*parts, pointer(tail_BW)), *waits)
    return called(pard, held, made.draft_pard, made.told_pard)


def head_rounds(
    native: NativeBody, drawn: Draws, state_BH: Tensor, fuse: Sequence[Any]
) -> InRounds:
    """Of a head whose state the call keeps up. fuse: what the taps become the states beside tokens
    by: the norm of all, or those of each, then weight and bias; None for what there isn't.
    """
    held, parts = _parts(native, drawn)
    head, norms = _fusing(_Draft(*parts, None), fuse, state_BH)
    return called(head, (held, norms), native.made.draft_head, native.made.told_head)


def one_pass_rounds(
    native: NativeBody,
    drawn: Draws,
    state_BH: Tensor,
    fc_HU: Tensor,
    trunk: Trunk,
    lit: tuple[NativeBody, KVPool] | None,
    light: LightParts | None,
) -> InRounds | None:
    """Of a block drafter. native: its layers, the light head's among them; lit: these, and their
    keys and values, of a light head that has any; light: one that has none. None where products
    aren't C++'s.
    """
    own = None if light is None else _light(native, drawn.head, light)
    if not native.reads_out(drawn.head) or (light is not None and own is None):
        return None
    held, (body, pass_, chain) = _parts(native, drawn)
    each, parts = (None, (None, None, chain)) if lit is None else _parts(lit[0], drawn, lit[1])
    head, norms = _fusing(_Draft(*parts, None), (None, (), fc_HU, None), state_BH)
    rows, tensors = trunk[:3], map(pointer, trunk.tensors)
    at = None if own is None else ctypes.addressof(own)
    block, made = _OnePass(head, body, pass_, *rows, *tensors, at), native.made
    follow(trunk.tensors[3:])
    all_held = held, each, norms, trunk, own, light
    return called(block, all_held, made.draft_one_pass, made.told_one_pass)


def heads_rounds(
    blocks: Sequence[Sequence[Sequence[Tensor | None]]],
    outputs: Sequence[VocabHead],
    temperature: float,
    state_BH: Tensor,
    embedding_VH: Tensor | None = None,
    prefix: tuple[NativeBody, KVPool, int] | None = None,
) -> InRounds | None:
    """Of heads without attention: of every level residual blocks, each weight and bias of a map and
    where there is one of what that is added to, and an LM head. embedding_VH: of those that read
    their path's tokens; prefix: layers that the target's states go through first, where their keys
    and values lie, and of how many positions. None where products aren't C++'s.
    """
    ready = all(one.native is not None for one in outputs)
    if not ready or state_BH.dtype != torch.bfloat16:
        return None
    held = [(_Block * len(own))(*(_Block(*map(pointer, maps)) for maps in own)) for own in blocks]
    levels = (
        _Level(ctypes.addressof(own), len(own), *map(pointer, sides(output)))
        for own, output in zip(held, outputs, strict=True)
    )
    laid = (_Level * len(outputs))(*levels)
    how = ChainCall(size=len(outputs[0].weight), temperature=temperature)
    how.ids = pointer(outputs[0].ids_D)
    parts = ctypes.addressof(how), ctypes.addressof(laid), pointer(embedding_VH), pointer(state_BH)
    made, before, at = library(), None, None
    if prefix is not None:
        native, pool, how.context = prefix
        before, at, how.slots = native.body, _pass(native, pool), pool.slots
    first = (None if one is None else ctypes.addressof(one) for one in (before, at))
    heads = _Heads(state_BH.shape[1], *parts, *first)
    follow(part for own in blocks for maps in own for part in maps[::2])
    follow(output.weight for output in outputs)
    return called(heads, (how, laid, held, before, at), made.draft_heads, made.told_heads)


def clover_rounds(
    native: NativeBody,
    drawn: Draws,
    state_BH: Tensor,
    embedding_VH: Tensor,
    norms: Sequence[Tensor],
    products: Sequence[Product],
) -> InRounds | None:
    """Of Clover-2's heads. native: the layers that augment; norms, and two products of each: of how
    tokens are taken in before these, and into a drafted state (queries; keys and values), and of
    what the LM head multiplies (of a row's state; of a later one beside its token). None where
    products aren't C++'s.
    """
    if (maps := _maps_of(native, drawn.head, products)) is None:
        return None
    held, parts = _parts(native, drawn)
    each = zip(map(pointer, norms), maps[::2], maps[1::2], strict=True)
    clover = _Clover(*parts, pointer(embedding_VH), pointer(state_BH), *chain(*each))
    made = native.made
    return called(clover, (held, norms, products), made.draft_clover, made.told_clover)


def falcon_rounds(
    native: NativeBody,
    drawn: Draws,
    state_BW: Tensor,
    embedding_VH: Tensor,
    block: int,
    gates: Sequence[Product],
) -> InRounds | None:
    """Of Falcon. native: its layer; gates: of both layers of the LSTM what these read is mapped to,
    then their last output. None where products aren't C++'s.
    """
    if (maps := _maps_of(native, drawn.head, gates)) is None:
        return None
    held, parts = _parts(native, drawn)
    falcon = _Falcon(*parts, pointer(embedding_VH), pointer(state_BW), block, *maps)
    return called(falcon, (held, gates), native.made.draft_falcon, native.made.told_falcon)


def either_rounds(
    first: InRounds,
    other: InRounds,
    size: tuple[int, int],
    kept: tuple[Tensor, Tensor],
    how: tuple[float, ...],
) -> InRounds:
    """Where the first isn't to draft alone the other does, and the first beside it. size: levels of
    the other one at most, and nodes of both; kept: how often the first tokens of both were emitted,
    and seen [2, X], and of each row the other one's, and expected [B, 2], which a call keeps up;
    how: `places` to `fades` of `Asked` in round.h.
    """
    parts, made = list[Any](), library()
    for draft, hear, own in (first.call, other.call):
        parts += [draft, hear, ctypes.cast(own, _P)]
    (levels, nodes), (kept_2X, own_B2) = size, kept
    rows = len(own_B2)
    verified_B, drafted_B, place_B, guess_B = torch.empty(4, rows, dtype=torch.int64)
    tree_2BN = place_B.new_empty(2, rows, nodes)
    sees_BNN, sure_B = (torch.empty(rows, n, dtype=torch.uint8) for n in (nodes**2, 1))
    of_rows = verified_B, drafted_B, tree_2BN, sees_BNN
    asked = *kept_2X, place_B, guess_B, sure_B, own_B2
    either = _Either(*parts, levels, *map(pointer, (*of_rows, *asked)), *how)
    held = first, other, of_rows, asked
    return called(either, held, made.draft_either, made.told_either)


def _parts(
    native: NativeBody, drawn: Draws, pool: KVPool | None = None
) -> tuple[list[Any], list[int]]:
    """A body, where a pass's keys and values lie (by default where the draws say), and how chains
    are drawn: themselves, and where they lie.
    """
    head, pool = drawn.head, pool or drawn.pool
    how = ChainCall(0, len(head.weight), drawn.context, pool.slots)
    how.temperature = drawn.temperature
    how.head, how.bias, how.ids = map(pointer, (*sides(head), head.ids_D))
    how.preview = head.previewed
    held = [native.body, _pass(native, pool), how]
    follow([head.weight])
    return [*held, head.preview], [*map(ctypes.addressof, held)]


def _light(native: NativeBody, head: VocabHead, parts: LightParts) -> _Light | None:
    """None where its products, or what their sizes are, aren't C++'s."""
    maps = _maps_of(native, head, [*parts.maps, *parts.cell])
    if maps is None or any(number % STEP for number in parts.numbers[:2]):
        return None
    places = *maps[: len(parts.maps)], *[None] * (2 - len(parts.maps)), *maps[len(parts.maps) :]
    follow(parts.tensors)
    kind, tensors = LIT.index(parts.kind), map(pointer, parts.tensors)
    return _Light(kind, *parts.numbers, *tensors, *places)


def _maps_of(native: NativeBody, head: VocabHead, products: Sequence[Product]) -> list[int] | None:
    """Where the maps of products lie; None where one of these, or the LM head's, isn't C++'s."""
    natives = [product.native for product in products]
    if not native.reads_out(head) or None in natives:
        return None
    follow(weight for product in products for weight in product.tensors[0])
    return [ctypes.addressof(one.maps) for one in natives if one is not None]


def _pass(native: NativeBody, pool: KVPool) -> PassCall:
    """Of all layers over a token a row."""
    return PassCall(n=1, width=pool.slots, last=native.layers, **laid(pool))


def _fusing(draft: _Draft, fuse: Sequence[Any], state_BH: Tensor) -> tuple[_Head, Any]:
    """With what the taps become the states beside tokens by (see `head_rounds`); and what lives as
    long.
    """
    of_all, of_taps, weight, bias = fuse
    norms = (_P * len(of_taps))(*map(pointer, of_taps))
    wide = state_BH.shape[1] if weight is None else weight.shape[1]
    each = ctypes.addressof(norms) if len(norms) else None
    fusing = pointer(of_all), each, pointer(weight), pointer(bias), wide
    follow([weight])
    return _Head(draft, *fusing, pointer(state_BH)), norms


def called(drafter: ctypes.Structure, held: Any, *how: Any) -> InRounds:
    """By these functions, how it drafts and how it hears (None: not at all), of what is in C++."""
    functions = (None if one is None else ctypes.cast(one, _P) for one in how)
    return InRounds((*functions, ctypes.byref(drafter)), held)
