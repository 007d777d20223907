"""Chains that are drafted in several rounds of one call (`several` in rows.cpp), by what lies in
native.cpp too.

Shapes: B rows, H hidden, U width of the taps side by side.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from draftsmith.decode.forward.compiled import pointer
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.native import ChainCall, NativeBody, PassCall, laid
from draftsmith.decode.forward.product import VocabHead

_P = ctypes.c_void_p


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
    _fields_ += [("wide", ctypes.c_int64), ("state", _P)]


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


def _parts(native: NativeBody, drawn: Draws) -> tuple[tuple[Any, ...], list[int]]:
    """A body, where a pass's keys and values lie, and how chains are drawn: themselves, and where
    they lie.
    """
    head, pool = drawn.head, drawn.pool
    how = ChainCall(0, len(head.weight), drawn.context, pool.slots)
    how.temperature, bias = drawn.temperature, (head.tensors[1] or (None,))[0]
    how.head, how.bias, how.ids = map(pointer, (head.weight, bias, head.ids_D))
    at = PassCall(0, 1, pool.slots, 0, native.layers, *(None,) * 5, 0, 0, None, *laid(pool))
    held = native.body, at, how
    return held, [*map(ctypes.addressof, held)]


def called(drafter: ctypes.Structure, held: tuple[Any, ...], *how: Any) -> InRounds:
    """By these functions, how it drafts and how it hears, of what it is in C++."""
    functions = (ctypes.cast(one, _P) for one in how)
    return InRounds((*functions, ctypes.byref(drafter)), held)
