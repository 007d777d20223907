"""A head's linear maps as products: the same outputs, wherever the head goes and is changed."""

import copy

import pytest
import torch
from torch import nn

from draftsmith.decode.forward.product import quick


def maps(dtype: torch.dtype) -> tuple[nn.Sequential, nn.Sequential]:
    """The same maps as they are, and quick."""
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 48, bias=False)).to(dtype)
    return own.requires_grad_(False), made_quick(own)


def made_quick(own: nn.Sequential) -> nn.Sequential:
    made = copy.deepcopy(own)
    quick(made)
    return made


@pytest.mark.parametrize("tokens", [1, 5, 6, 7, 40, 200])
def test_outputs_are_the_maps_own(tokens: int) -> None:
    own, made = maps(torch.bfloat16)
    x = torch.randn(2, tokens, 64).bfloat16()
    exact = copy.deepcopy(own).float()
    with torch.inference_mode():
        wanted, got, told = own(x).float(), made(x).float(), exact(x.float())
    assert got.shape == wanted.shape and not torch.equal(got, torch.zeros_like(got))
    # No further from fp32 than torch's own product.
    assert (got - told).abs().max() <= 1.5 * (wanted - told).abs().max()


def test_fp32_is_left_alone() -> None:
    own, made = maps(torch.float32)
    x = torch.randn(3, 64)
    with torch.inference_mode():
        assert torch.equal(own(x), made(x))


@torch.no_grad()  # tensors made in inference mode count no versions
def test_copies_and_changes_are_followed() -> None:
    """A copy holds no address of what it was copied from."""
    _, made = maps(torch.bfloat16)
    x = torch.randn(4, 64).bfloat16()
    first = made(x)
    other = copy.deepcopy(made)
    other[0].weight.zero_()
    other[0].bias.zero_()
    assert torch.equal(made(x), first) and not other(x).any()
    made[1].weight.mul_(2)
    assert torch.equal(made(x), 2 * first)
    made[1].weight.data = torch.zeros_like(made[1].weight)
    assert not made(x).any()


def test_what_learns_has_its_gradient() -> None:
    own, made = maps(torch.bfloat16)
    x = torch.randn(4, 64).bfloat16()
    for one in (own, made):
        one.requires_grad_(True)
        one(x).sum().backward()
    for a, b in zip(own.parameters(), made.parameters(), strict=True):
        assert b.grad is not None and torch.equal(a.grad, b.grad)
