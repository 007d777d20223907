"""Attention of blocks against the formula, and what no row may see."""

import pytest
import torch
from attention_formulas import block_attention
from torch import Tensor

from draftsmith.models.layers import flash as attention
from draftsmith.models.layers.block_attention import Blocks, beside, own_bias

ROWS, TEXT, BLOCKS, BLOCK = 2, 11, 3, 4


def sides(dtype: torch.dtype, heads: int = 4, shared: int = 2) -> list[Tensor]:
    """Queries, the context's keys and values, the blocks' keys and values."""
    noise = torch.Generator().manual_seed(0)
    shapes = [(heads, BLOCKS * BLOCK), *[(shared, TEXT)] * 2, *[(shared, BLOCKS * BLOCK)] * 2]
    made = [torch.randn(ROWS, *shape, 8, generator=noise, dtype=dtype) for shape in shapes]
    return [side.requires_grad_() for side in made]


def allowed() -> Tensor:
    """Each block sees up to its anchor, not before its document."""
    at_T, anchor_M = torch.arange(TEXT), torch.tensor([2, 5, 9])
    allowed_MT = (at_T < anchor_M[:, None]) & (at_T >= torch.tensor([0, 3, 3])[:, None])
    return allowed_MT.expand(ROWS, -1, -1)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_merged_parts_are_one_softmax(
    kernel: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, with flash and without, of heads that share keys."""
    monkeypatch.setattr(attention, "HAS_CPU", kernel)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        given = sides(dtype)
        bias = torch.zeros(allowed().shape, dtype=dtype).masked_fill(~allowed(), -torch.inf)
        about = bias.repeat_interleave(BLOCK, 1)[:, None], own_bias(BLOCK, causal, bias.device)
        weight = torch.linspace(-1, 1, given[0].numel(), dtype=dtype).view_as(given[0])
        found = []
        for form in (beside, block_attention):
            mixed = form(*given, *about)
            found.append([mixed, *torch.autograd.grad((mixed * weight).sum(), given)])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_sees_its_context_and_its_own_block_alone(causal: bool) -> None:
    """Which keys have a gradient: a leak here is the family's published bug."""
    query, *others = [side.transpose(1, 2) for side in sides(torch.float64)]
    context_key, context_value, key, value = others
    attend = Blocks(allowed(), BLOCK, causal=causal)
    attend.keep(0, context_key, context_value)
    row = 1 * BLOCK + 2  # the third row of the second block
    mixed = attend(0, query, key, value)[:, row].sum()
    of_context, of_own = torch.autograd.grad(mixed, [context_value, value])
    seen = [set(d[0].abs().sum((1, 2)).nonzero().flatten().tolist()) for d in (of_context, of_own)]
    assert seen == [{3, 4}, {4, 5, 6} if causal else {4, 5, 6, 7}]
