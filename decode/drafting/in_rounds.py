"""Chains that are drafted in several rounds of one call (`several` in rows.cpp), by what lies in
native.cpp too.

Shapes: B rows, H hidden, U width of the taps side by side.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.forward.compiled import library, pointer
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.native import ChainCall, NativeBody, PassCall, laid, sides
from draftsmith.decode.forward.product import Product, VocabHead

_P, _N = ctypes.c_void_p, ctypes.c_int64


class InRounds(NamedTuple):
    """What a call is given: how a chain is drafted, how what a round came to is heard, and of what;
    and what that reads, which must live as long.
    """

    call: tuple[Any, ...] = (None, None, None)
    held: tuple[Any, ...] = ()


class _Draft(ctypes.Structure):
    _fields_ = [(n, _P) for n in ("body", "pass_", "chain", "tail")]


class _Head(ctypes.Structure):
    _fields_ = [("draft", _Draft), *((n, _P) for n in ("of_all", "of_taps", "fuse", "bias"))]
    _fields_ += [("wide", _N), ("state", _P)]


class _Block(ctypes.Structure):
    _fields_ = [(n, _P) for n in ("weight", "bias", "skip", "skip_bias")]


class _Level(ctypes.Structure):
    _fields_ = [("block", _P), ("blocks", _N), ("head", _P), ("bias", _P)]


class _Heads(ctypes.Structure):
    _fields_ = [("hidden", _N), *((n, _P) for n in ("chain", "level", "embedding", "state"))]


class Draws(NamedTuple):
    """How tokens are drafted: by which LM head, at which temperature, and where keys and values go,
    of so many positions.
    """

    head: VocabHead
    temperature: float
    pool: KVPool
    context: int


def lm_rounds(native: NativeBody, drawn: Draws, tail_B2: Tensor) -> InRounds:
    """Of a draft LM. tail_B2: each row's last two tokens, which the call keeps up."""
    held, parts = _parts(native, drawn)
    draft = _Draft(*parts, pointer(tail_B2))
    return called(draft, held, native.made.draft_lm, native.made.told_lm)


def head_rounds(
    native: NativeBody, drawn: Draws, state_BH: Tensor, fuse: Sequence[Any]
) -> InRounds:
    """Of a head whose state the call keeps up. fuse: what the taps become the states beside tokens
    by: the norm of all, or those of each, then weight and bias; None for what there isn't.
    """
    held, parts = _parts(native, drawn)
    of_all, of_taps, weight, bias = fuse
    norms = (_P * len(of_taps))(*map(pointer, of_taps))
    wide = native.hidden if weight is None else weight.shape[1]
    each = ctypes.addressof(norms) if len(norms) else None
    fusing = pointer(of_all), each, pointer(weight), pointer(bias), wide
    head = _Head(_Draft(*parts, None), *fusing, pointer(state_BH))
    return called(head, (held, norms), native.made.draft_head, native.made.told_head)


def heads_rounds(
    blocks: Sequence[Sequence[Sequence[Tensor | None]]],
    outputs: Sequence[Product],
    temperature: float,
    state_BH: Tensor,
    embedding_VH: Tensor | None = None,
) -> InRounds | None:
    """Of heads without attention: of every level residual blocks, each weight and bias of a map and
    where there is one of what that is added to, and an LM head. embedding_VH: of those that read
    their path's tokens. None where products of a few tokens aren't C++'s.
    """
    few = all(one.few is not None for one in outputs) and torch.get_num_threads() == 1
    if not few or state_BH.dtype != torch.bfloat16:
        return None
    held = [(_Block * len(own))(*(_Block(*map(pointer, maps)) for maps in own)) for own in blocks]
    levels = (
        _Level(ctypes.addressof(own), len(own), *map(pointer, sides(output)))
        for own, output in zip(held, outputs, strict=True)
    )
    laid = (_Level * len(outputs))(*levels)
    how = ChainCall(size=len(outputs[0].weight), temperature=temperature)
    parts = ctypes.addressof(how), ctypes.addressof(laid), pointer(embedding_VH), pointer(state_BH)
    made = library()
    heads = _Heads(state_BH.shape[1], *parts)
    return called(heads, (how, laid, held), made.draft_heads, made.told_heads)


def _parts(native: NativeBody, drawn: Draws) -> tuple[tuple[Any, ...], list[int]]:
    """A body, where a pass's keys and values lie, and how chains are drawn: themselves, and where
    they lie.
    """
    head, pool = drawn.head, drawn.pool
    how = ChainCall(0, len(head.weight), drawn.context, pool.slots)
    how.temperature = drawn.temperature
    how.head, how.bias, how.ids = map(pointer, (*sides(head), head.ids_D))
    at = PassCall(0, 1, pool.slots, 0, native.layers, *(None,) * 5, 0, 0, None, *laid(pool))
    held = native.body, at, how
    return held, [*map(ctypes.addressof, held)]


def called(drafter: ctypes.Structure, held: tuple[Any, ...], *how: Any) -> InRounds:
    """By these functions, how it drafts and how it hears, of what it is in C++."""
    functions = (ctypes.cast(one, _P) for one in how)
    return InRounds((*functions, ctypes.byref(drafter)), held)
