"""Closed-form gradients against autograd on the pure losses, where the cases are hard."""

import pytest
import torch

from draftsmith.train.losses import closed_form as gradients
from draftsmith.train.losses.pure import DIVERGENCES, Loss, acceptance, divergence


def named(name: str) -> Loss:
    return divergence(name, beta=0.3, kl_weight=0.6)


def test_every_loss_has_a_closed_form() -> None:
    assert all(gradients.closed_form(named(name)) is not None for name in DIVERGENCES)
    assert gradients.closed_form(acceptance) is None


@pytest.mark.parametrize("name", DIVERGENCES)
def test_closed_forms_hold_at_the_edges(name: str) -> None:
    """Equal models, disjoint supports, cuts on one side, gaps that leave fp32's exponent range."""
    generator = torch.Generator().manual_seed(3)
    z = 3 * torch.randn(2, 6, 8, generator=generator)
    low, high = z.clone(), z.clone()
    low[..., 4:], high[..., :4] = -torch.inf, -torch.inf
    for p, q in [
        (z[0], z[0]),
        (low[0], high[1]),
        (low[0], z[1]),
        (z[0], high[1]),
        (z[0], 50 * z[1]),
    ]:
        leaf = q.clone().requires_grad_()
        loss_R = named(name)(p, leaf)
        (expected,) = torch.autograd.grad(loss_R.sum(), leaf)
        score = gradients.divergence_score([named(name)], finite=False)
        (((value, _), slope),) = score(p, q[None], True, gradients.Workspace())
        torch.testing.assert_close(value, loss_R.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-5)
