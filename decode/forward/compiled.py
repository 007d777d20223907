"""What is written in C++ (`native.cpp` and what it includes), compiled once with the machine's own
compiler and kept in the user's cache; and of that what needs no model: the noise.

Shapes: B rows, D positions, V vocabulary.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.cpp")
DECODE = SOURCE.parent.parent  # whose rooms' headers may be included
LARGE, HUGE = 2 << 20, 14  # bytes of a page; MADV_HUGEPAGE
FLAGS = ["-std=gnu++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-shared", "-fPIC", "-pthread"]


@cache
def library(source: Path = SOURCE) -> Any:
    """A file's compiled functions; None where this machine can't compile them."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    try:
        info = Path("/proc/cpuinfo")
        cpu = info.read_text().split("\n\n")[0] if info.exists() else platform.processor()
        kind = [line for line in cpu.splitlines() if line.startswith(("model name", "flags"))]
        flags = FLAGS + ["-DINTEL"] * ("GenuineIntel" in cpu)
        parts = [part.read_text() for part in (source, *sorted(DECODE.glob("*/*.h")))]
        mark = hashlib.sha256("\n".join([*parts, *flags, compiler, *kind]).encode())
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"
        made = folder / f"{source.stem}-{mark.hexdigest()[:16]}.so"
        if not made.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as part:
                built = Path(part) / "native.so"
                command = [compiler, *flags, "-w", str(source), "-o", str(built)]
                subprocess.run(command, check=True, capture_output=True, timeout=120)
                built.replace(made)  # whole or not at all: others may be building it too
        return ctypes.CDLL(str(made))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None


def pointer(tensor: Tensor | None) -> int | None:
    """Where it lies."""
    return None if tensor is None else tensor.data_ptr()


def place(tensor: Tensor | None) -> ctypes.c_void_p:
    """The same as an argument of C++."""
    return ctypes.c_void_p(pointer(tensor))


def in_large_pages(fresh: Tensor) -> Tensor:
    """Ask Linux to lay what nobody has written to yet on pages of 2 MB, which are read faster."""
    if fresh.device.type == "cpu" and type(fresh) is Tensor and fresh.nbytes >= 2 * LARGE:
        begin = -(-fresh.data_ptr() // LARGE) * LARGE
        size = (fresh.data_ptr() + fresh.nbytes) // LARGE * LARGE - begin
        with suppress(AttributeError):  # another system
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), HUGE)
    return fresh


def uniforms(keys_BD: Tensor, vocab_size: int) -> Tensor:
    """Numbers in (0, 1) [B, D, V] fp32, to the last bit those of `sampling.log_race`; only where
    there is a `library`.
    """
    found: Tensor = torch.ops.draftsmith.uniforms(keys_BD, vocab_size)
    return found


def _uniforms(keys_BD: Tensor, vocab_size: int) -> Tensor:
    found_BDV = _numbers_like(keys_BD, vocab_size)
    whole = keys_BD.contiguous()
    at = map(place, (whole, found_BDV))
    library().uniforms(*at, *map(ctypes.c_int64, (keys_BD.numel(), vocab_size)))
    return found_BDV


def _numbers_like(keys_BD: Tensor, vocab_size: int) -> Tensor:
    return keys_BD.new_empty((*keys_BD.shape, vocab_size), dtype=torch.float32)


# Operators, so that what records a round sees them; bare ones, which cost a tenth of `custom_op`'s.
OPERATORS = torch.library.Library("draftsmith", "DEF")
OPERATORS.define("uniforms(Tensor keys, int vocab_size) -> Tensor")
OPERATORS.impl("uniforms", _uniforms, "CPU")
OPERATORS.impl("uniforms", _numbers_like, "Meta")
