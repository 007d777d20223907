"""A product with fixed matrices, in the form that is fastest where it runs. No matrix is changed.

Linear maps of one input are one product where their matrices lie side by side in memory, which
`lay_side_by_side` does for models that are the decoder's own; elsewhere a product each. On a CPU in
bf16 products are C++'s (`NativeProduct`). Where there is no compiler, matrices are packed, merged,
for oneDNN's kernels, which else rearrange a matrix in every call: the packed copy costs their size
again, once for all decoders. A processor that has none of these kernels multiplies in fp32.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.decode.forward.compiled import library
from draftsmith.decode.forward.compressed import STEP, compressed, follow, version
from draftsmith.models.target import is_quantised, native_bf16

PACK_FOR = 4  # rows that the packing is tuned for: a round's worth
HALF = (torch.bfloat16, torch.float16)
# Whether oneDNN multiplies in bf16 here. torch's own product then takes 3 to 10 times an fp32 one.
ONEDNN = native_bf16("cpu")
# Whether this torch multiplies half-precision matrices into fp32.
FP32_PRODUCT = "dtype" in torch.ops.aten.mm.overloads()
# The linear maps of a layer that read the same input.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
PART = 8192  # rows of a matrix that are at once in fp32
BEST = 64  # rows of an LM head, at least, that are read beside its preview
# Packed matrices in use, by what they hold.
_packed: "WeakValueDictionary[tuple[torch.Size, bytes], Tensor]" = WeakValueDictionary()
# Products of maps that aren't copied with them, since they hold addresses.
_quick: "WeakKeyDictionary[QuickLinear, tuple[int, Product]]" = WeakKeyDictionary()

_P, _N = ctypes.c_void_p, ctypes.c_int64


class _Map(ctypes.Structure):
    _fields_ = [("weight", _P), ("bias", _P), ("out", _N)]


class NativeProduct:
    """The same products by C++ (`products.h`), on the weights compressed, or as they lie; None of
    inputs that aren't bf16. Half of oneDNN's time for up to 8 tokens, 0.75 to 1.25 from 256 on.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        each = zip_longest((w.data_ptr() for w in weights), (b.data_ptr() for b in biases))
        found = (_Map(*at, len(w)) for at, w in zip(each, weights, strict=True))
        self.maps, self.weights = (_Map * len(weights))(*found), tuple(weights)
        self.compressed = compressed(self.weights, wholly=True)
        self.sizes = weights[0].shape[1], sum(map(len, weights))
        self.call = library().maps
        self.call.argtypes = _P, _N, _P, _P, _N, _N, _N, _N

    @classmethod
    def of(cls, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> "NativeProduct | None":
        """None for sizes that it doesn't know, or without a compiler."""
        laid = all(tensor.is_contiguous() for tensor in (*weights, *biases))
        known = laid and weights[0].shape[1] % STEP == 0 and (made := library()) is not None
        return cls(weights, biases) if known and made.most() else None

    def __call__(self, x: Tensor) -> Tensor | None:
        if type(x) is not Tensor or x.dtype != torch.bfloat16:
            return None
        inputs, outputs = self.sizes
        follow(self.weights)
        x, made = x.contiguous(), x.new_empty((*x.shape[:-1], outputs))
        at, tokens = (x.data_ptr(), made.data_ptr()), x.numel() // inputs
        self.call(self.maps, len(self.maps), *at, tokens, *self.sizes, torch.get_num_threads())
        return made


class Product:
    """x [..., I] -> [..., O] with weights [O_i, I], and biases [O_i] or none, whose outputs follow
    one another; changes in place are followed. tensors: the weights, and the biases.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        assert len(biases) in (0, len(weights)), "some of the maps have a bias, others none"
        self.tensors = tuple(weights), tuple(biases)
        self.packs = packs(self.weight)
        self.native = NativeProduct.of(*self.tensors) if self.packs else None
        self.version = -1
        if self.packs and ONEDNN and self.native is None:
            self._pack()
        elif not self.packs:
            whole, bias = joined(weights), joined(biases)
            self.tensors = (whole, bias) if len(whole) == len(bias) or not biases else self.tensors

    @classmethod
    def of(cls, linears: Sequence[nn.Linear]) -> "Product":
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return cls([linear.weight for linear in linears], biases)

    @property
    def weight(self) -> Tensor:
        """The first of the matrices, the only one of a product of one."""
        return self.tensors[0][0]

    def __call__(self, x: Tensor) -> Tensor:
        made = self.outputs(x)
        return made[0] if len(made) == 1 else torch.cat(made, -1)

    def outputs(self, x: Tensor) -> list[Tensor]:
        """What each map gives, or all in one tensor."""
        if not self.packs:
            return linear(x, *self.tensors)
        if self.native is not None and (made := self.native(x)) is not None:
            return [made]
        if not ONEDNN:
            wider = ([part.float() for part in parts] for parts in self.tensors)
            return [made.to(x.dtype) for made in linear(x.float(), *wider)]
        if self.version != self._version():
            self._pack()
        return [torch.ops.mkldnn._linear_pointwise(x, *self.packed, "none", [], "")]

    def _pack(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            weights, biases = ([part.detach() for part in parts] for parts in self.tensors)
            self.packed = packed(torch.cat(weights)), torch.cat(biases) if biases else None
        self.version = self._version()

    def _version(self) -> int:
        return sum(version(tensor) for tensors in self.tensors for tensor in tensors)


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """What each of the maps gives."""
    return [F.linear(x, weight, bias) for weight, bias in zip_longest(weights, biases)]


def sides(product: Product) -> list[Tensor | None]:
    """Weight and bias of each of its maps."""
    weights, biases = product.tensors
    pairs = zip(weights, biases or (None,) * len(weights), strict=True)
    return [side for pair in pairs for side in pair]


class QuickLinear(nn.Linear):
    """A linear map that multiplies as `Product` does while nothing is learned; see `quick`."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not packs(self.weight):
            return super().forward(x)
        place, product = _quick.get(self, (0, None))
        if product is None or place != self.weight.data_ptr():
            product = Product.of([self])
            _quick[self] = self.weight.data_ptr(), product
        return product(x)


def quick(module: nn.Module) -> None:
    """Make a module's linear maps, on a CPU in bf16, products as here: several times as fast."""
    for part in module.modules():
        if type(part) is nn.Linear and packs(part.weight):
            part.__class__ = QuickLinear


class _Preview(ctypes.Structure):
    _fields_ = [("down", _P), ("up", _P), ("rank", _N), ("least", _N)]


class Preview:
    """What foretells an LM head's logits for a share of its bytes: its nearest map of a rank, W ~
    up [V, R] down [R, H] (SVD-softmax, Shim et al., NIPS 2017). It doesn't follow changes of W.
    """

    def __init__(self, weight_VH: Tensor, rank: int) -> None:
        parts = weight_VH.detach().split(PART)
        squares_HH = sum(part_CH.float().T @ part_CH.float() for part_CH in parts)
        down_HR = torch.linalg.eigh(squares_HH).eigenvectors[:, -rank:]
        up_VR = torch.cat([part_CH.float() @ down_HR for part_CH in parts])
        self.down, self.up = (
            Product([x.to(weight_VH.dtype).contiguous()]) for x in (down_HR.T, up_VR)
        )
        at = (x.weight.data_ptr() for x in (self.down, self.up))
        self.native = _Preview(*at, rank, BEST)


def numbers_read(rows: int, hidden: int, rank: int) -> int:
    """For one state, of an LM head of this size with a preview of a rank (0: none): both maps, and
    about twice BEST rows.
    """
    return rank * (rows + hidden) + min(2 * BEST, rows) * hidden if rank else rows * hidden


class VocabHead(Product):
    """An LM head whose logits are in the order of the tokenizer's `size` tokens. rows_DH, bias_D:
    of the tokens ids_D in ascending order (None: of the first D); beyond `size` lies padding.
    """

    def __init__(
        self,
        rows_DH: Tensor,
        ids_D: Tensor | None,
        size: int,
        bias_D: Tensor | None = None,
    ) -> None:
        self.size, kept = size, size if ids_D is None else int((ids_D < size).sum())
        biases = [] if bias_D is None else [bias_D.detach()[:kept]]
        super().__init__([rows_DH[:kept]], biases)
        self.ids_D = None if ids_D is None else ids_D[:kept].to(rows_DH.device)
        self.preview: Preview | None = None

    def foretell(self, rank: int) -> None:
        """From now on by a preview of this rank: the logits of the BEST tokens by that are exact,
        and others foretold. ValueError for a rank that C++ doesn't know, or without use.
        """
        hidden = self.weight.shape[1]
        if type(rank) is not int or not 0 < rank < hidden or rank % STEP:
            raise ValueError(
                f"preview: got a rank of {rank!r}, expected a multiple of {STEP} below the hidden "
                f"size, {hidden}"
            )
        self.preview = Preview(self.weight, rank)

    @property
    def previewed(self) -> int | None:
        """Where C++ finds the preview."""
        return None if self.preview is None else ctypes.addressof(self.preview.native)

    @property
    def bytes_read(self) -> int:
        """Of its weights, for one state."""
        if self.preview is None:
            return self.weight.nbytes
        rows, hidden = self.weight.shape
        return self.weight.itemsize * numbers_read(rows, hidden, self.preview.native.rank)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] fp32 of states [..., H]; -inf for tokens that have no row."""
        # Flat: for rows that aren't contiguous torch would copy the head once for each of them.
        flat = hidden.flatten(0, -2)
        wide = hidden.device.type in ("cuda", "meta")  # meta: CUDA's path without a device
        if self.preview is not None:
            logits = self._foretold(flat, self.preview)
        elif wide and FP32_PRODUCT and self.weight.dtype in HALF:
            # Half-precision logits tie: the product's own fp32 sums are kept.
            logits = torch.mm(flat, self.weight.T, out_dtype=torch.float32)
            for bias in self.tensors[1]:
                logits = logits + bias
        else:
            logits = self(flat).float()
        logits_XD = logits.unflatten(0, hidden.shape[:-1])
        if self.ids_D is None:
            return logits_XD
        logits_XV = logits_XD.new_full((*logits_XD.shape[:-1], self.size), float("-inf"))
        return logits_XV.index_copy_(-1, self.ids_D, logits_XD)

    def _foretold(self, states_TH: Tensor, preview: Preview) -> Tensor:
        """Logits [T, D] fp32."""
        logits_TD = preview.up(preview.down(states_TH)).float()
        for bias_D in self.tensors[1]:
            logits_TD = logits_TD + bias_D
        best_TM = logits_TD.topk(min(BEST, logits_TD.shape[1])).indices
        return logits_TD.scatter_(1, best_TM, self._read(states_TH, best_TM))

    def _read(self, states_TH: Tensor, rows_TM: Tensor) -> Tensor:
        """The logits [T, M] fp32 of these rows."""
        parts = zip(states_TH.split(BEST), rows_TM.split(BEST), strict=True)
        found = [
            (self.weight[rows_CM].float() @ states_CH.float()[..., None])[..., 0]
            for states_CH, rows_CM in parts
        ]
        return torch.cat(found) + sum(bias_D[rows_TM].float() for bias_D in self.tensors[1])

    def corrected(self, logits_XV: Tensor, states_XH: Tensor, ids_XM: Tensor) -> Tensor:
        """With the exact logits of these tokens, of those that are drafted."""
        old_XM, rows_XM = logits_XV.gather(-1, ids_XM), ids_XM
        if self.ids_D is not None:
            rows_XM = torch.searchsorted(self.ids_D, ids_XM.contiguous())
            rows_XM = rows_XM.clamp(max=len(self.ids_D) - 1)
        exact_TM = self._read(states_XH.flatten(0, -2), rows_XM.flatten(0, -2))
        new_XM = exact_TM.view_as(old_XM).masked_fill(old_XM.isneginf(), -torch.inf)
        return logits_XV.scatter(-1, ids_XM, new_XM)


def packs(weight: Tensor) -> bool:
    """Whether products with it are a CPU's in bf16, by a packed copy or in C++."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return on_cpu and not is_quantised(weight)


def packed(weight: Tensor) -> Tensor:
    """A matrix packed for oneDNN, found by what it holds: decoders of one model share it, and one
    that is made after the model has changed, in whatever way, has its own.
    """
    bits: Any = weight.view(torch.uint8).numpy()
    mark = weight.shape, hashlib.sha256(bits).digest()
    made = _packed.get(mark)
    if made is None:
        made = _packed[mark] = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_FOR)
    return made


def lay_side_by_side(model: nn.Module) -> None:
    """Give the linear maps that read the same input one storage, so that products with them are
    one. For a frozen model that nobody else holds: its weights move.
    """
    for layer in model.modules():
        for names in TOGETHER:
            maps: list[Any] = [getattr(layer, name, None) for name in names]
            if all(type(one) is nn.Linear and _moves(one.weight) for one in maps):
                for parts in zip(*(one.parameters() for one in maps), strict=True):
                    whole = torch.cat([part.detach() for part in parts])
                    views = whole.split([len(part) for part in parts])
                    for part, view in zip(parts, views, strict=True):
                        part.data = view


def _moves(weight: Tensor) -> bool:
    return not packs(weight) and not is_quantised(weight)


def joined(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The one tensor that these are rows of, one after another in memory; else as they are."""
    if len(parts) < 2 or is_quantised(parts[0]):
        return tuple(parts)
    first, place = parts[0], parts[0].data_ptr()
    for part in parts:
        alien = part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        if alien or part.data_ptr() != place or not part.is_contiguous():
            return tuple(parts)
        place += part.nbytes
    shape = (sum(map(len, parts)), *first.shape[1:])
    return (first.detach().as_strided(shape, first.stride(), first.storage_offset()),)
