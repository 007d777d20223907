"""Matrices in 12 bits a weight, of which none is lost, laid as products in C++ read them
(`compressed.h`): those of few tokens wait for the memory, a pass of a 500M target on one core falls
by a quarter; those of many for sums of vectors, which they need no more.

The matrices stay where they are, for all other products, so that a model takes three quarters of
its size more; it isn't done where that would leave the machine little memory. Then they are laid so
for each call, which takes three times as long for one token.
"""

import ctypes
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import psutil
import torch
from torch import Tensor

from draftsmith.decode.forward.compiled import in_large_pages, library, place, pointer

ROOM = 2  # times the size of what is to be compressed that must be free
SPARE = 10  # and of all memory one part in so many
STRIP, TABLE = 32, 64  # outputs that lie side by side, and bytes before them
STEP = 16  # what inputs of products in C++ are multiples of
AFTER = 16  # products with a changed matrix that take as long as to compress it
SLAB = 32 << 20  # bytes of forms that lie side by side: on an Intel Xeon a sixth of the time
PATCHES = 1000  # weights that have one with other exponents than the table's, at most
CGROUP = Path("/sys/fs/cgroup")  # of a container, which may have less than its machine

_left = torch.empty(0, dtype=torch.uint8)  # of a slab
_making = threading.RLock()  # a form's buffers are of one thread until they are read
_known: "WeakValueDictionary[int, Compressed]" = WeakValueDictionary()  # by the matrix's address


class _Compressed(ctypes.Structure):
    _fields_ = [("matrix", ctypes.c_void_p), ("into", ctypes.c_int64), ("out", ctypes.c_int64)]
    _fields_ += [("bytes", ctypes.c_void_p), ("patches", ctypes.c_void_p)]


class Compressed:
    """A matrix [O, I] whose products in C++ read its compressed form while this lives."""

    def __init__(self, weight: Tensor) -> None:
        # Its storage, which nobody else gets for another matrix; it counts the same versions.
        self.weight = weight.detach()
        self.left: int | None  # products until it is made anew
        self.held: tuple[Tensor, Tensor] | None = None  # the form, and its patches
        self.at = _Compressed(pointer(weight), weight.shape[1], len(weight))
        weakref.finalize(self, library().compressed, ctypes.byref(self.at), ctypes.c_int64(False))
        self.make()

    def make(self) -> None:
        """Compress the matrix as it is now, if it can be."""
        self.version, self.left, at = version(self.weight), None, self.at
        shape = -(-at.out // STRIP), TABLE + at.into * STRIP * 3 // 2
        room = self.held[0] if self.held else room_of(shape)
        patches = torch.empty(self.weight.numel() // PATCHES + 16, dtype=torch.int64)
        sizes = map(ctypes.c_int64, (at.into, at.out))
        to = *map(place, (room, patches)), ctypes.c_int64(len(patches) - 1)
        made = library().compress(place(self.weight), *sizes, *to) >= 0
        self.held = (room, patches) if made else None
        at.bytes, at.patches = map(pointer, self.held or (None, None))
        self.tell(made)

    def tell(self, read: bool) -> None:
        """Whether it is to be read from now on, or the matrix as it lies."""
        library().compressed(ctypes.byref(self.at), ctypes.c_int64(read))
        self.read = read

    def follow(self, wholly: bool = False, after: int = AFTER) -> bool:
        """If the matrix has been changed, as far as torch counts that, or, wholly, in whatever way,
        for which all of it is compared: read it as it lies, and make this anew `after` so many
        products. Whether it is as the matrix is now.
        """
        if self.version == version(self.weight) and self.left is None and not wholly:
            return True
        with _making:
            same = self.version == version(self.weight)
            if same and wholly and self.read:
                same = bool(library().compressed_matches(ctypes.byref(self.at)))
            if not same:
                self.tell(False)
                self.version, self.left = version(self.weight), after
            if self.left is not None:
                self.left = min(self.left, after) - 1
                if self.left < 0:
                    self.make()
            return self.left is None


def room_of(shape: tuple[int, int]) -> Tensor:
    """Bytes of a form, on large pages with others', or, of a large one, alone."""
    global _left
    size = shape[0] * shape[1]
    if size > SLAB // 2:
        return in_large_pages(torch.empty(shape, dtype=torch.uint8))
    if len(_left) < size:
        _left = in_large_pages(torch.empty(SLAB, dtype=torch.uint8))
    found, _left = _left[:size], _left[size:]
    return found.view(shape)


def version(parameter: Tensor) -> int:
    """A number that grows when a parameter is changed in place."""
    # Tensors made in inference mode count no versions, and aren't changed any more.
    return 0 if parameter.is_inference() else parameter._version


def follow(weights: Iterable[Tensor | None], wholly: bool = False, after: int = AFTER) -> None:
    """As of `Compressed`, of those of them that have a form."""
    for weight in weights if _known else ():
        if weight is not None and (form := _known.get(weight.data_ptr())) is not None:
            form.follow(wholly, after)


def compressed(weights: Iterable[Tensor | None], wholly: bool = False) -> list[Compressed]:
    """Of some matrices on a CPU the forms that there are, followed, and those that could be made;
    no further ones where memory is short.
    """
    found = [weight for weight in weights if weight is not None and fits(weight)]
    with _making:
        follow(found, wholly, 0)
        forms = [form for form in map(known_of, found) if form is not None]
        without = [weight for weight in found if known_of(weight) is None]
        size = sum(weight.nbytes for weight in without)
        spare = psutil.virtual_memory().total // SPARE if size else 0
        if size and memory_free() >= max(ROOM * size, size + spare):
            for weight in without:
                if known_of(weight) is None:  # none of the same before it
                    _known[weight.data_ptr()] = made = Compressed(weight)
                    forms.append(made)
    return forms


def known_of(weight: Tensor) -> Compressed | None:
    """The form of a matrix that has one, which may be of more rows."""
    form = _known.get(weight.data_ptr())
    rows, into = (0, 0) if form is None else form.weight.shape
    return form if into == weight.shape[1] and rows >= len(weight) else None


def fits(weight: Tensor) -> bool:
    """Whether it is laid as such matrices are."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % STEP == 0 and weight.is_contiguous()


def memory_free() -> int:
    """Bytes of a CPU's memory that this process may still take."""
    free = [psutil.virtual_memory().available]
    with suppress(OSError, ValueError):  # there is no such limit
        most, now = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        free.append(most - now)
    return min(free)
