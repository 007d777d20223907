"""A sweep whose draft side multiplies two matrices side by side."""

import pytest
import torch
from chunks import chunks_of

from draftsmith.train.losses.chunked import chunked_divergence
from draftsmith.train.losses.pure import jsd


def test_several_heads_are_one_that_is_as_wide() -> None:
    """Values and gradients; a frozen one gets none; heads that differ in length are refused."""
    noise = torch.Generator().manual_seed(0)
    shapes = ((23, 9), (37, 9), (23, 7), (37, 7))
    given = [torch.randn(*s, generator=noise, dtype=torch.float64) for s in shapes]
    weight = torch.rand(23, generator=noise, dtype=torch.float64)
    hidden, head, *p = [x.requires_grad_() for x in given[:2]] + given[2:]
    d_hidden, d_head = torch.autograd.grad(
        chunked_divergence(jsd, hidden, head, *p, weight).total, [hidden, head]
    )
    frozen, learnt = (part.clone() for part in head.detach().tensor_split([5], 1))
    learnt.requires_grad_()
    with chunks_of(4, 37):
        parted = chunked_divergence(jsd, hidden, (frozen, learnt), *p, weight).total
    of_hidden, of_learnt = torch.autograd.grad(parted, [hidden, learnt])
    torch.testing.assert_close(of_hidden, d_hidden)
    torch.testing.assert_close(of_learnt, d_head[:, 5:])
    with pytest.raises(ValueError, match="as many rows in each"):
        chunked_divergence(jsd, hidden, (frozen, learnt[1:]), *p, weight)
