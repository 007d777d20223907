"""Matrices in 12 bits a weight, of which none is lost, for products of few tokens in C++, which
wait for the memory (`compressed.h`): a pass of a 500M target on one core falls by a quarter.

The matrices stay where they are, for all other products, so that a model takes three quarters of
its size more; it isn't done where that would leave the machine little memory.
"""

import ctypes
import weakref
from collections.abc import Sequence
from weakref import WeakValueDictionary

import psutil
import torch
from torch import Tensor

from draftsmith.decode.forward.compiled import library, place, pointer
from draftsmith.decode.forward.product import version

LEAST = 16 << 20  # bytes of matrices together: smaller ones are in the nearer caches
ROOM = 2  # times their size that must be free
COLUMNS, TABLE = 64, 64  # of a block, and bytes before the blocks of four rows, as in compressed.h
PATCHES = 1000  # weights that have one with other exponents than the table's, at most

_known: "WeakValueDictionary[tuple[int, torch.Size, int], Compressed]" = WeakValueDictionary()


class _Compressed(ctypes.Structure):
    _fields_ = [("matrix", ctypes.c_void_p), ("into", ctypes.c_int64), ("out", ctypes.c_int64)]
    _fields_ += [("bytes", ctypes.c_void_p), ("patches", ctypes.c_void_p)]


class Compressed:
    """A matrix [O, I] that products of few tokens read by its compressed form, while this lives."""

    def __init__(self, weight: Tensor, held: tuple[Tensor, Tensor]) -> None:
        self.weight, self.held, self.version = weight, held, version(weight)
        out, into = weight.shape
        self.at = _Compressed(pointer(weight), into, out - out % 4, *map(pointer, held))
        self._told(True)
        weakref.finalize(self, library().compressed, ctypes.byref(self.at), ctypes.c_int64(False))

    def follow(self) -> None:
        """Read the matrix as it lies from now on if it has been changed."""
        if self.version != version(self.weight):
            self._told(False)

    def _told(self, on: bool) -> None:
        library().compressed(ctypes.byref(self.at), ctypes.c_int64(on))


def compressed(weights: Sequence[Tensor]) -> list[Compressed]:
    """Those of a model's matrices, bf16 on a CPU, that could be compressed, with room for all."""
    size = sum(weight.nbytes for weight in weights)
    if size < LEAST or psutil.virtual_memory().available < ROOM * size:
        return []
    return [made for weight in weights if (made := _compressed(weight)) is not None]


def _compressed(weight: Tensor) -> Compressed | None:
    key = weight.data_ptr(), weight.shape, version(weight)
    made = _known.get(key)
    out, into = weight.shape
    if made is not None or out < 4 or into % COLUMNS or not weight.is_contiguous():
        return made
    fours, most = out // 4, weight.numel() // PATCHES
    bytes_ = torch.empty(fours, TABLE + into * 6, dtype=torch.uint8)
    patches = torch.empty(most + 1, dtype=torch.int64)
    sizes = map(ctypes.c_int64, (into, 4 * fours))
    to = map(place, (bytes_, patches))
    count = library().compress(place(weight), *sizes, *to, ctypes.c_int64(most))
    if count < 0:
        return None
    made = _known[key] = Compressed(weight, (bytes_, patches[: count + 1].clone()))
    return made
