"""Matrices in 12 bits a weight, of which none is lost, for products of few tokens in C++, which
wait for the memory (`compressed.h`): a pass of a 500M target on one core falls by a quarter.

The matrices stay where they are, for all other products, so that a model takes three quarters of
its size more; it isn't done where that would leave the machine little memory.
"""

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import psutil
import torch
from torch import Tensor

from draftsmith.decode.forward.compiled import library, place, pointer

LEAST = 16 << 20  # bytes of a model's matrices: fewer are in the nearer caches
ROOM = 2  # times the size of what is to be compressed that must be free
COLUMNS, TABLE = 64, 64  # what inputs are multiples of, and bytes before the blocks of four rows
PATCHES = 1000  # weights that have one with other exponents than the table's, at most
CGROUP = Path("/sys/fs/cgroup")  # of a container, which may have less than its machine

_known: "WeakValueDictionary[int, Compressed]" = WeakValueDictionary()  # by the matrix's address


class _Compressed(ctypes.Structure):
    _fields_ = [("matrix", ctypes.c_void_p), ("into", ctypes.c_int64), ("out", ctypes.c_int64)]
    _fields_ += [("bytes", ctypes.c_void_p), ("patches", ctypes.c_void_p)]


class Compressed:
    """A matrix [O, I] that products of few tokens read by its compressed form, while this lives and
    until it is changed.
    """

    def __init__(self, weight: Tensor, held: tuple[Tensor, Tensor]) -> None:
        # Its storage, which nobody else gets for another matrix; it counts the same versions.
        self.weight, self.held, self.version = weight.detach(), held, version(weight)
        out, into = weight.shape
        self.at = _Compressed(pointer(weight), into, out - out % 4, *map(pointer, held))
        self.tell(True)
        weakref.finalize(self, library().compressed, ctypes.byref(self.at), ctypes.c_int64(False))

    def tell(self, read: bool) -> None:
        """Whether it is to be read from now on, or the matrix as it lies."""
        library().compressed(ctypes.byref(self.at), ctypes.c_int64(read))
        self.read = read

    def follow(self, wholly: bool = False) -> None:
        """Read the matrix from now on if it has been changed, as far as torch counts that; or,
        wholly, in whatever way, for which all of it is compared.
        """
        if not self.read:
            return
        same = self.version == version(self.weight)
        if wholly:
            same = bool(library().compressed_matches(ctypes.byref(self.at)))
        if not same:
            self.tell(False)


def version(parameter: Tensor) -> int:
    """A number that grows when a parameter is changed in place."""
    # Tensors made in inference mode count no versions, and aren't changed any more.
    return 0 if parameter.is_inference() else parameter._version


def follow(weights: Iterable[Tensor], wholly: bool = False) -> None:
    """As of `Compressed`, of those of them that have a form."""
    for weight in weights if _known else ():
        if (form := _known.get(weight.data_ptr())) is not None:
            form.follow(wholly)


def compressed(weights: Sequence[Tensor]) -> list[Compressed]:
    """Those of a model's matrices, bf16 on a CPU, that are or could be compressed; none of a small
    model, and no further ones where memory is short.
    """
    if sum(weight.nbytes for weight in weights) < LEAST:
        return []
    forms = [known_of(weight) for weight in weights]
    without = [w for w, form in zip(weights, forms, strict=True) if form is None]
    if memory_free() >= ROOM * sum(weight.nbytes for weight in without):
        forms += map(made_of, without)
    return [form for form in forms if form is not None]


def known_of(weight: Tensor) -> Compressed | None:
    """The form of a matrix that has one."""
    form = _known.get(weight.data_ptr())
    fits = form is not None and form.read and form.weight.shape == weight.shape
    return form if fits else None


def made_of(weight: Tensor) -> Compressed | None:
    """The form of a matrix that has none; None where it can't be compressed."""
    out, into = weight.shape
    if out < 4 or into % COLUMNS or not weight.is_contiguous():
        return None
    fours, most = out // 4, weight.numel() // PATCHES
    bytes_ = torch.empty(fours, TABLE + into * 6, dtype=torch.uint8)
    patches = torch.empty(most + 1, dtype=torch.int64)
    sizes = map(ctypes.c_int64, (into, 4 * fours))
    to = map(place, (bytes_, patches))
    count = library().compress(place(weight), *sizes, *to, ctypes.c_int64(most))
    if count < 0:
        return None
    made = Compressed(weight, (bytes_, patches[: count + 1].clone()))
    _known[weight.data_ptr()] = made
    return made


def memory_free() -> int:
    """Bytes of a CPU's memory that this process may still take."""
    free = [psutil.virtual_memory().available]
    with suppress(OSError, ValueError):  # there is no such limit
        most, now = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        free.append(most - now)
    return min(free)
