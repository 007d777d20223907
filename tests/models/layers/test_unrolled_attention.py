"""The training-time test's attention: flash kernels with merged columns against the formula."""

import pytest
import torch
from attention_formulas import unrolled_attention
from torch import Tensor

from draftsmith.models.layers import flash as attention
from draftsmith.models.layers.unrolled_attention import Unrolled, merged

B, T, E = 2, 19, 8
FLASH = pytest.mark.parametrize("flash", [True, False])


def inputs(dtype: torch.dtype, heads: tuple[int, int], steps: int) -> tuple[Tensor, list]:
    torch.manual_seed(0)

    def leaf(count: int) -> Tensor:
        return torch.randn(B, count, T, E, dtype=dtype, requires_grad=True)

    return leaf(heads[0]), [(leaf(heads[1]), leaf(heads[1])) for _ in range(steps)]


def documents() -> Tensor:
    """[B, 1, T, T] bool: causal inside three documents a row."""
    document_BT = torch.tensor([[0] * 5 + [1] * 13 + [2], [0] * 2 + [1] * 2 + [2] * 15])
    return (document_BT[:, :, None] == document_BT[:, None]).tril()[:, None]


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)


@pytest.fixture
def kernels(monkeypatch, flash):
    """With the kernel of the CPU, or without it: plain products, as where there is none."""
    assert attention.HAS_CPU, "this torch's kernel takes other arguments"
    monkeypatch.setattr(attention, "HAS_CPU", flash)


@FLASH
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_values_and_gradients_are_the_formulas(kernels, masked, heads, steps) -> None:
    query, kept = inputs(torch.float64, heads, steps)
    bias = bias_of(documents(), torch.float64) if masked else None
    leaves = [query, *(x for pair in kept for x in pair)]
    upstream = torch.randn_like(query)
    found, want = merged(query, kept, bias), unrolled_attention(query, kept, bias)
    assert torch.allclose(found, want, atol=1e-12)
    gradients = [torch.autograd.grad(out, leaves, upstream) for out in (found, want)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


@FLASH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_near_as_its_rounding(kernels, dtype) -> None:
    """Held against float64, and allowed twice the formula's own distance from it."""
    query, kept = inputs(torch.float64, (4, 2), 5)
    leaves = [query, *(x for pair in kept for x in pair)]
    low = [x.detach().to(dtype).requires_grad_() for x in leaves]
    low_kept = list(zip(low[1::2], low[2::2], strict=True))
    upstream = torch.randn_like(query)
    want = [query, kept]
    exact = [
        unrolled_attention(query, kept),
        *torch.autograd.grad(unrolled_attention(*want), leaves, upstream),
    ]
    worst = []
    for attend in (merged, unrolled_attention):
        out = attend(low[0], low_kept)
        assert out.dtype == dtype
        results = [out, *torch.autograd.grad(out, low, upstream.to(dtype))]
        differences = zip(results, exact, strict=True)
        worst.append(max((a.double() - b).abs().max() for a, b in differences))
    assert worst[0] <= 2 * worst[1], worst


@FLASH
def test_gradcheck(kernels) -> None:
    torch.manual_seed(0)
    q, *sides = (torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(7))

    def attend(q: Tensor, *sides: Tensor) -> Tensor:
        return merged(q, list(zip(sides[::2], sides[1::2], strict=True)))

    assert torch.autograd.gradcheck(attend, (q, *sides))


def test_steps_and_layers_are_kept_apart() -> None:
    """Calls go by layer; a bool mask is what the formula adds as numbers."""
    layers, steps, mask = 2, 3, documents()
    torch.manual_seed(0)
    made = torch.randn(steps, layers, 3, B, T, 4, E)
    attention = Unrolled(mask)
    for step in range(steps):
        for layer in range(layers):
            found = attention(layer, *made[step, layer])
            kept = [(k.transpose(1, 2), v.transpose(1, 2)) for _, k, v in made[: step + 1, layer]]
            query = made[step, layer, 0].transpose(1, 2)
            want = unrolled_attention(query, kept, bias_of(mask, torch.float32))
            assert torch.allclose(found, want.transpose(1, 2).flatten(2), atol=1e-5)


def test_autocast_lowers_it_as_torchs_own_attention() -> None:
    query = torch.randn(B, T, 4, E)
    with torch.autocast("cpu", torch.bfloat16):
        assert Unrolled(documents())(0, query, query, query).dtype == torch.bfloat16


def test_nothing_of_the_size_of_the_scores_is_kept() -> None:
    query, kept = inputs(torch.float32, (4, 2), 3)
    sizes = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        merged(query, kept)
    assert max(sizes) == query.numel() < B * 4 * T * T
