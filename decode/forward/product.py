"""A product with a fixed matrix, in the form that is fastest where it runs.

Linear maps of one input are merged into one. On a CPU in bf16 the matrix is also packed once for
oneDNN's kernels; unpacked, it is rearranged in every call, which takes longer than the product. On
the quickstart's target (6 layers of 256, one core) a step falls from 3.3 to 2.2 ms. The packed copy
costs the matrix's size again.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACK_FOR = 4  # rows that the packing is tuned for: a round's worth
HALF = (torch.bfloat16, torch.float16)
# Whether this torch multiplies half-precision matrices into fp32.
FP32_PRODUCT = "dtype" in torch.ops.aten.mm.overloads()


class Product:
    """x [..., I] -> [..., O] with weight [O, I].

    sources: the parameters whose storage the weight is; changed in place, they are changed here,
    and packed again at the next call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, sources: Sequence[Tensor]) -> None:
        self.weight, self.bias, self.sources = weight, bias, list(sources)
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        self.packs = on_cpu and torch.backends.mkldnn.is_available()
        self.packed: Tensor | None = None
        self.version = -1
        if self.packs:
            self._pack()

    @classmethod
    def of(cls, linears: Sequence[nn.Linear]) -> "Product":
        """One or several linear layers at once; their outputs follow one another, and their own
        weights become views of the merged one.
        """
        weight, bias = merge(linears)
        return cls(weight, bias, [linear.weight for linear in linears])

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias

    @property
    def current(self) -> bool:
        """Whether the parameters still are where the weight is (not moved, not cast)."""
        first = self.sources[0]
        return first.data_ptr() == self.weight.data_ptr() and first.dtype == self.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packs:
            return F.linear(x, self.weight, self.bias)
        if self.version != sum(map(version, self.sources)):
            self._pack()
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return made

    def _pack(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            weight = self.weight.clone() if self.weight.is_inference() else self.weight.detach()
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_FOR)
        self.version = sum(map(version, self.sources))


class VocabHead(Product):
    """An LM head whose logits are in the order of the tokenizer's `size` tokens.

    rows_DH, bias_D: its rows and biases, of the tokens ids_D in ascending order (None: of the first
    D); those beyond `size` are padding. source: the parameter that they are rows of, or, copied,
    themselves.
    """

    def __init__(
        self,
        rows_DH: Tensor,
        ids_D: Tensor | None,
        size: int,
        source: Tensor,
        bias_D: Tensor | None = None,
    ) -> None:
        kept = size if ids_D is None else int((ids_D < size).sum())
        bias_D = None if bias_D is None else bias_D[:kept]
        super().__init__(rows_DH[:kept], bias_D, [source])
        self.size = size
        self.ids_D = None if ids_D is None else ids_D[:kept].to(rows_DH.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] fp32 of states [..., H]; -inf for tokens that have no row."""
        logits_XD = head_logits(self, hidden)
        if self.ids_D is None:
            return logits_XD
        logits_XV = logits_XD.new_full((*logits_XD.shape[:-1], self.size), float("-inf"))
        return logits_XV.index_copy_(-1, self.ids_D, logits_XD)


def head_logits(head: Product, hidden: Tensor) -> Tensor:
    """Logits [..., V] fp32 of states [..., H] by an LM head."""
    # Flat: for rows that aren't contiguous torch would copy the head once for each of them.
    flat = hidden.flatten(0, -2)
    wide = hidden.device.type in ("cuda", "meta")  # meta: CUDA's path without a device
    if wide and FP32_PRODUCT and head.weight.dtype in HALF:
        # Half-precision logits tie: the product's own fp32 sums are kept.
        logits = torch.mm(flat, head.weight.T, out_dtype=torch.float32)
        logits = logits if head.bias is None else logits + head.bias
    else:
        logits = head(flat).float()
    return logits.unflatten(0, hidden.shape[:-1])


def version(parameter: Tensor) -> int:
    """A number that grows when a parameter is changed in place."""
    # Tensors made in inference mode count no versions, and aren't changed any more.
    return 0 if parameter.is_inference() else parameter._version


def merge(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) of one linear map whose outputs are those of `linears` in a row.

    The linears' own parameters become views of it; where they are that already, nothing is moved.
    """
    weight = _merge([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "some of the projections have a bias, others none"
    return weight, _merge(biases) if biases else None


def _merge(parts: Sequence[Tensor]) -> Tensor:
    first, rows = parts[0], sum(len(part) for part in parts)
    place, joined = first.data_ptr(), True
    for part in parts:
        joined &= part.data_ptr() == place and part.is_contiguous()
        place += part.numel() * part.element_size()
    if joined and first.untyped_storage().nbytes() >= place - first.data_ptr():
        shape = (rows, *first.shape[1:])
        return first.detach().as_strided(shape, first.stride(), first.storage_offset())
    with torch.inference_mode(False):
        merged = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, merged.split([len(part) for part in parts]), strict=True):
        part.data = view
    return merged
