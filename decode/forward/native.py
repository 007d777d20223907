"""The lean body on a few new tokens in one call of C++ (`native.cpp`), on the model's own weights.

A step of a small model on a CPU is mostly torch's dispatch, not arithmetic. This is for bf16, on
one thread (larger models: only where torch has one too); it is compiled once with the machine's own
compiler and kept in the user's cache. Where there is none, or for more tokens or other widths,
`lean.py` goes on as it is. The runner compares it with the model's own forward before it is used.

Shapes: B rows, N tokens, H hidden.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from draftsmith.decode.forward.kv import SlotCache

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
WIDTHS = (32, 64, 96, 128)  # of a head
SMALL = 64 << 20  # bytes of layers that one thread reads as fast as torch calls several
STEP = 16  # what all other widths are multiples of

_P, _N = ctypes.c_void_p, ctypes.c_int64


class _Body(ctypes.Structure):
    _fields_ = [(n, _N) for n in ("layers", "hidden", "heads", "kv_heads", "width", "inner")]
    _fields_ += [(n, _P) for n in ("embedding", "norm", "cos", "sin")]
    _fields_ += [("epsilon", ctypes.c_double), ("scale", ctypes.c_double), ("layer", _P)]


class _Pass(ctypes.Structure):
    _fields_ = [(n, _N) for n in ("rows", "n", "width")]
    _fields_ += [(n, _P) for n in ("tokens", "positions", "slots", "lens", "allowed")]
    _fields_ += [("keys", _P), ("values", _P), ("layer_step", _N), ("row_step", _N)]
    _fields_ += [("states", _P), ("out", _P)]


@cache
def library() -> Any:
    """The compiled functions; None where this machine can't compile them."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    try:
        info = Path("/proc/cpuinfo")
        cpu = info.read_text().split("\n\n")[0] if info.exists() else platform.processor()
        kind = [line for line in cpu.splitlines() if line.startswith(("model name", "flags"))]
        mark = hashlib.sha256("\n".join([SOURCE.read_text(), *FLAGS, compiler, *kind]).encode())
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"
        made = folder / f"native-{mark.hexdigest()[:16]}.so"
        if not made.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as part:
                built = Path(part) / "native.so"
                command = [compiler, *FLAGS, "-w", str(SOURCE), "-o", str(built)]
                subprocess.run(command, check=True, capture_output=True, timeout=120)
                built.replace(made)  # whole or not at all: others may be building it too
        return ctypes.CDLL(str(made))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None


class NativeBody:
    """The same as a lean body's call, on whole layers from the first on."""

    def __init__(self, body: Any, made: Any) -> None:
        self.run, self.most, self.layers = made.body, made.most(), len(body.layers)
        first, embedding_VH = body.layers[0], body.embedding_VH
        heads, kv_heads, width = first.sizes
        self.hidden = embedding_VH.shape[1]
        inner = first.exit[2].tensors[0][0].shape[0]
        self.tensors = [embedding_VH, body.norm.weight, body.cos_SE, body.sin_SE]
        at = [tensor.data_ptr() for tensor in self.tensors]
        parts = [part for layer in body.layers for part in parts_of(layer)]
        self.pointers = (_P * len(parts))(*(None if t is None else t.data_ptr() for t in parts))
        self.small = sum(part.nbytes for part in parts if part is not None) <= SMALL
        sizes = self.layers, self.hidden, heads, kv_heads, width, inner
        self.body = _Body(
            *sizes, *at, body.norm.epsilon, first.scale, ctypes.addressof(self.pointers)
        )

    @classmethod
    def of(cls, body: Any) -> "NativeBody | None":
        """The native form of a lean body; None where there is none."""
        if not fits(body) or (made := library()) is None:
            return None
        native = cls(body, made)
        return native if native.alone else None

    @property
    def alone(self) -> bool:
        """Whether one thread is as fast as torch's."""
        return self.small or torch.get_num_threads() == 1

    def takes(self, tokens_BN: Tensor, cache: SlotCache) -> bool:
        """Whether a pass is one of those it is for."""
        attend = cache.attend
        if attend is None or cache.flat_slots is None or tokens_BN.numel() > self.most:
            return False
        plain = attend.backend == "masked" and attend.seen.at is None
        return plain and self.alone and type(tokens_BN) is Tensor

    def __call__(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        cache: SlotCache,
        taken: dict[int, Tensor | None],
    ) -> Tensor:
        assert cache.attend is not None and cache.flat_slots is not None
        seen, pool, allowed_BNS = cache.attend.seen, cache.pool, None
        if seen.block is not None:
            allowed_BNS = cache.attend.allowed(None).contiguous()
        whole = [x.contiguous() for x in (tokens_BN, positions_BN, cache.flat_slots, seen.lens_B)]
        shape = (*tokens_BN.shape, self.hidden)
        states_LBNH = pool.kv_2LBSHE.new_empty((self.layers + 1, *shape))
        out_BNH = pool.kv_2LBSHE.new_empty(shape)
        sides = pool.keys_LBSHE, pool.values_LBSHE
        call = _Pass(
            *tokens_BN.shape,
            seen.width,
            *(x.data_ptr() for x in whole),
            None if allowed_BNS is None else allowed_BNS.data_ptr(),
            *(side.data_ptr() for side in sides),
            *sides[0].stride()[:2],
            states_LBNH.data_ptr(),
            out_BNH.data_ptr(),
        )
        self.run(ctypes.byref(self.body), ctypes.byref(call))
        for layer in taken:
            taken[layer] = states_LBNH[layer]
        return out_BNH


def parts_of(layer: Any) -> Sequence[Tensor | None]:
    """A lean layer's tensors in the order of `Layer` in native.cpp."""
    norm, qkv, *own = layer.entry
    out, after, gate_up, down = layer.exit
    (q, k, v), biases = qkv.tensors[0], qkv.tensors[1] or (None,) * 3
    parts = [norm.weight, q, k, v, *biases, *(n if n is None else n.weight for n in own)]
    for product in (out, gate_up, down):
        weights, some = product.tensors
        for weight, bias in zip(weights, some or (None,) * len(weights), strict=True):
            parts += [weight, bias]
        if product is out:
            parts.append(after.weight)
    return parts


def fits(body: Any) -> bool:
    """Whether every layer is whole, packed and of widths that native.cpp knows."""
    if body.embedding_VH.device.type != "cpu" or body.embedding_VH.dtype != torch.bfloat16:
        return False
    for place, layer in enumerate(body.layers):
        products = (layer.entry[1], layer.exit[0], *layer.exit[2:])
        if not all(getattr(product, "packs", False) for product in products):
            return False
        same = (layer.sizes, layer.scale) == (body.layers[0].sizes, body.layers[0].scale)
        norms = [n for n in (layer.entry[0], *layer.entry[2:], layer.exit[1]) if n is not None]
        same = same and all(norm.epsilon == body.norm.epsilon for norm in norms)
        whole = layer.index == place and len(layer.halves) == 2 and layer.entry[0] is not None
        known = isinstance(layer.activation, nn.SiLU | SiLUActivation)
        inputs = [weight.shape[1] for product in products for weight in product.tensors[0]]
        even = layer.sizes[2] in WIDTHS and all(width % STEP == 0 for width in inputs)
        laid = all(t is None or t.is_contiguous() for t in parts_of(layer))
        if not (same and whole and known and even and laid):
            return False
    return bool(body.layers)
