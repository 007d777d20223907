"""Muon where bf16 is slow: torch's, but for the precision."""

import pytest
import torch
from torch import nn
from torch.optim import _muon

from draftsmith.train.run.optim import Muon32, optimizers, orthogonal
from draftsmith.train.run.settings import Settings

NEWTON = (3.4445, -4.775, 2.0315), 5, 1e-7  # torch's own


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_it_orthogonalises_as_torch_does(shape: tuple[int, int]) -> None:
    """The same matrix up to bf16, nearly orthogonal; a twin of other coefficients is another."""
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs, ours = _muon._zeropower_via_newtonschulz(grad, *NEWTON), orthogonal(grad, *NEWTON)
    assert ours.dtype == torch.float32
    assert (ours - theirs.float()).norm() < 0.02 * ours.norm()
    assert (orthogonal(grad, (3.0, -3.0, 1.0), 5, 1e-7) - ours).norm() > 0.1 * ours.norm()
    assert torch.linalg.svdvals(ours).sub(1).abs().max() < 0.6


@pytest.mark.parametrize("native", [True, False])
def test_it_is_taken_where_bf16_is_slow(monkeypatch: pytest.MonkeyPatch, *, native: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    torch.manual_seed(0)
    map_, grad = nn.Linear(8, 12, bias=False), torch.randn(12, 8)
    theirs = torch.optim.Muon([map_.weight], lr=0.1, adjust_lr_fn="match_rms_adamw")
    before, found = map_.weight.detach().clone(), _muon._zeropower_via_newtonschulz
    [ours] = optimizers(map_, Settings(out="", steps=1, optimizer="muon", lr=0.1))
    assert (type(ours) is Muon32) is not native
    steps = []
    for optimizer in (theirs, ours):
        map_.weight.data.copy_(before)
        map_.weight.grad = grad.clone()
        optimizer.step()
        steps.append(map_.weight - before)
    assert (steps[0] - steps[1]).norm() < 0.02 * steps[0].norm()
    assert _muon._zeropower_via_newtonschulz is found
