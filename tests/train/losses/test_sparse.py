"""The losses on listed tokens against the obvious form: dense buckets, autograd, pure losses.

Shapes: N rows, V vocabulary, J listed tokens of a row, B = J + 1 buckets.
"""

import math
from typing import NamedTuple

import pytest
import torch
from chunks import chunks_of
from torch import Tensor

from draftsmith.decode import top_k as buckets
from draftsmith.train.losses import chunked
from draftsmith.train.losses.chunked import Divergence, chunked_divergence
from draftsmith.train.losses.pure import DIVERGENCES, Loss, acceptance, divergence, mixed
from draftsmith.train.losses.top_k import TopKRows

ROWS, VOCABULARY, LISTED = 23, 37, 5


class Case(NamedTuple):
    q_hidden: Tensor
    q_head: Tensor
    ids: Tensor
    log_p: Tensor
    weight: Tensor


def likeliest(p_logits_NV: Tensor, listed: int) -> tuple[Tensor, Tensor]:
    log_p_NV = p_logits_NV.log_softmax(-1)
    ids_NJ = log_p_NV.topk(listed).indices
    outside_NV = torch.ones_like(log_p_NV).scatter(1, ids_NJ, 0.0)
    rest_N1 = (log_p_NV.exp() * outside_NV).sum(-1, keepdim=True).log()
    return ids_NJ, torch.cat([log_p_NV.gather(1, ids_NJ), rest_N1], -1)


def some(dtype: torch.dtype = torch.float64, listed: int = LISTED, sharp: float = 2.0) -> Case:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    p_logits, q_hidden, q_head = sharp * normal(ROWS, VOCABULARY), normal(ROWS, 8), normal(37, 8)
    ids, log_p = likeliest(p_logits, listed)
    weight = normal(ROWS).abs() * (torch.arange(ROWS) % 4 != 1)
    leaves = [x.to(dtype).requires_grad_() for x in (q_hidden, q_head)]
    return Case(*leaves, ids, log_p.to(dtype), weight.to(dtype))


def naive(loss: Loss, c: Case, transform=None) -> tuple[Tensor, ...]:
    """Each row's buckets one after the other, from probabilities that autograd follows."""
    logits = c.q_hidden @ c.q_head.T
    q_NV = (logits if transform is None else transform(logits)).softmax(-1)
    buckets = []
    for q_V, ids_J in zip(q_NV, c.ids, strict=True):
        listed = list(dict.fromkeys(ids_J.tolist()))
        rest = [v for v in range(len(q_V)) if v not in listed]
        empty = [q_V.new_zeros(())] * (len(ids_J) - len(listed))
        inside = [q_V[v] for v in listed]
        buckets.append(torch.stack([*inside, *empty, q_V[rest].sum()]))
    q_NB = torch.stack(buckets).clamp(min=0.0)
    q_log_NB = torch.where(q_NB > 0, q_NB.clamp(min=1e-300).log(), -math.inf)
    loss_N = loss(c.log_p, q_log_NB)
    counted = c.weight != 0
    total = (loss_N * c.weight).sum()
    gradients = torch.autograd.grad(total, (c.q_hidden, c.q_head))
    return total, loss_N * counted, acceptance(c.log_p, q_log_NB) * counted, *gradients


def divergence_of(loss: Loss, c: Case, transform=None) -> Divergence:
    return TopKRows(c.ids, c.log_p).divergence(loss, (c.q_hidden, c.q_head), c.weight, transform)


def ours(loss: Loss, c: Case, **options) -> tuple[Tensor, ...]:
    result = divergence_of(loss, c, **options)
    return *result, *torch.autograd.grad(result.total, (c.q_hidden, c.q_head))


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    names = ("total", "loss_N", "alpha_N", "d_hidden", "d_head")
    for name, a, b in zip(names, got, want, strict=True):
        bound = tolerance * max(1.0, b.abs().max().item())
        assert (a - b).abs().max() <= bound, f"{name}: off by {(a - b).abs().max()}"


def warm(z: Tensor) -> Tensor:
    return z / 0.7


def top_nine(z: Tensor) -> Tensor:
    return z.masked_fill(z < z.topk(9).values[..., -1:], -torch.inf)


def cubed(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    return (p_logits.softmax(-1) - q_logits.softmax(-1)).abs().pow(3).sum(-1)


def named(name: str) -> Loss:
    if name == "mixed":
        return mixed({"fkl": 0.5, "tv": 2.0})
    return cubed if name == "own" else divergence(name, beta=0.3, kl_weight=0.6)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 3 rows, so that a chunk of 7 has whole and broken ones."""
    monkeypatch.setitem(chunked.TILE_LOGITS, "cpu", 3 * VOCABULARY)


@pytest.mark.parametrize("transform", [None, warm, top_nine])
@pytest.mark.parametrize("name", [*DIVERGENCES, "mixed", "own"])
def test_equals_dense_buckets(name: str, transform) -> None:
    """top_nine leaves q without most listed tokens, and now and then without any rest."""
    c = some()
    for chunk in (7, None):
        with chunks_of(chunk, VOCABULARY):
            got = ours(named(name), c, transform=transform)
        assert_same(got, naive(named(name), c, transform), 1e-10)


def test_the_comparison_would_catch_a_wrong_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's gradient outside the list is small: it must not hide in the tolerance."""
    c = some()
    want = naive(named("fkl"), c)
    spoiled = c._replace(log_p=torch.cat([c.log_p[:, :-1], c.log_p[:, -1:] + 1e-6], -1))
    with pytest.raises(AssertionError, match="off by"):
        assert_same(ours(named("fkl"), spoiled), want, 1e-10)


@pytest.mark.parametrize("name", [*DIVERGENCES, "own"])
def test_all_tokens_listed_is_the_dense_loss(name: str) -> None:
    """With and without one token as the rest; with none, its bucket is empty on both sides."""
    for listed in (VOCABULARY - 1, VOCABULARY):
        c = some(listed=listed)
        log_p_NV = torch.full((ROWS, VOCABULARY + 1), -math.inf, dtype=torch.float64)
        left_N1 = c.ids.new_full((ROWS, 1), VOCABULARY * (VOCABULARY - 1) // 2)
        left_N1 -= c.ids.sum(-1, keepdim=True)
        rest_N1 = left_N1 if listed < VOCABULARY else left_N1 + VOCABULARY
        log_p_NV.scatter_(1, torch.cat([c.ids, rest_N1], -1), c.log_p)
        # The identity as head: the states are the logits.
        p = (log_p_NV[:, :VOCABULARY], torch.eye(VOCABULARY, dtype=torch.float64))
        dense = chunked_divergence(named(name), c.q_hidden, c.q_head, *p, c.weight)
        gradients = torch.autograd.grad(dense.total, (c.q_hidden, c.q_head))
        assert_same(ours(named(name), c), (*dense, *gradients), 1e-10)


@pytest.mark.parametrize("name", ["fkl", "tv", "jsd", "nla", "lk", "tvpp"])
def test_a_target_cut_to_its_top_k_loses_nothing(name: str) -> None:
    """p is 0 outside the list: the gradient of the draft's whole tail is the dense one's."""
    c = some()
    log_p = c.log_p[:, :-1].log_softmax(-1)
    c = c._replace(log_p=torch.cat([log_p, torch.full((ROWS, 1), -math.inf)], -1))
    p_logits = torch.full((ROWS, VOCABULARY), -1e9, dtype=torch.float64).scatter(1, c.ids, log_p)
    eye = torch.eye(VOCABULARY, dtype=torch.float64)
    dense = chunked_divergence(
        named(name), *c[:2], p_logits, eye, c.weight,
        transform=lambda z: z.masked_fill(z < -1e8, -math.inf),
    )  # fmt: skip
    gradients = torch.autograd.grad(dense.total, (c.q_hidden, c.q_head))
    got = ours(named(name), c)
    if name == "tvpp":  # its value is no distance, and differs
        assert_same((*dense[:2], *got[2:]), (*dense, *gradients), 1e-10)
    else:
        assert_same(got, (*dense, *gradients), 1e-10)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_rows_with_fewer_listed_tokens(name: str) -> None:
    """Places that repeat the first token are empty, whatever stands in their log-probability."""
    c = some()
    ids, log_p = c.ids.clone(), c.log_p.clone()
    log_p[::2, -1] = log_p[::2, 3:].logsumexp(-1)
    ids[::2, 3:], log_p[::2, 3:-1] = ids[::2, :1], -math.inf
    c = c._replace(ids=ids, log_p=log_p)
    assert_same(ours(named(name), c), naive(named(name), c), 1e-10)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("side", ["p", "q"])
def test_a_rest_of_almost_nothing_is_safe(name: str, side: str) -> None:
    """1e-40 of mass outside the list in fp32, where 1 minus the listed ones would be 0 or less."""
    c = some(torch.float32, sharp=60.0 if side == "p" else 2.0)
    if side == "q":  # the listed tokens' logits tower over the others
        high_NV = torch.zeros(ROWS, VOCABULARY).scatter(1, c.ids, 90.0)
        head = torch.eye(VOCABULARY).requires_grad_()
        c = c._replace(q_hidden=high_NV.requires_grad_(), q_head=head)
    got = ours(named(name), c)
    assert all(torch.isfinite(x).all() for x in got)
    wide = Case(
        *(x.detach().double().requires_grad_() for x in c[:2]), c.ids, *map(Tensor.double, c[3:])
    )
    want = naive(named(name), wide)
    assert_same(tuple(x.double() for x in got), want, 3e-4 if name == "tvpp" else 3e-5)


def test_buckets_bound_the_dense_loss() -> None:
    """Below it for divergences, above it for alpha, and closer with more tokens."""
    c = some()
    draw = torch.Generator().manual_seed(1)
    p_logits = 2.0 * torch.randn(ROWS, VOCABULARY, generator=draw, dtype=torch.float64)
    q, eye = c[:2], torch.eye(VOCABULARY, dtype=torch.float64)
    whole = TopKRows(*likeliest(p_logits, 20))
    for name in ("fkl", "rkl", "jsd", "tv"):
        rows = [whole.first(k) for k in (2, 8, 20)]
        found = [x.divergence(named(name), q, c.weight, lambda z: z) for x in rows]
        found.append(chunked_divergence(named(name), *q, p_logits, eye, c.weight))
        losses, alphas = (torch.stack(x) for x in list(zip(*found, strict=True))[1:])
        assert (losses.diff(dim=0) >= -1e-12).all() and (losses[-1] - losses[0]).max() > 0.01
        assert (alphas.diff(dim=0) <= 1e-12).all() and (alphas[0] - alphas[-1]).max() > 0.01


@pytest.mark.parametrize("transform", [None, warm])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_common_offset_changes_nothing(name: str, transform) -> None:
    """Logits in sixteenths, which fp32 holds beside these offsets: of the draft's and of those that
    the listed tokens are taken from.
    """
    draw = torch.Generator().manual_seed(2)
    p_logits, q_logits = torch.randint(-80, 80, (2, ROWS, VOCABULARY), generator=draw) / 16
    found = []
    for offset in (0.0, 1e3, 1e6):
        head = (q_logits + offset).T.contiguous().requires_grad_()
        rows = buckets.likeliest(p_logits + offset, LISTED)
        case = Case(torch.eye(ROWS), head, *rows, torch.ones(ROWS))
        result = divergence_of(named(name), case, transform)
        found.append((*result, *torch.autograd.grad(result.total, head)))
    for got in found:
        for a, b in zip(got, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_shapes_that_do_not_fit_are_refused() -> None:
    c = some()
    with pytest.raises(ValueError, match=r"ids of shape \(23, 5\) and .*\(23, 5\), expected"):
        divergence_of(named("fkl"), c._replace(log_p=c.log_p[:, :-1]))
    with pytest.raises(ValueError, match=r"expected \[22, J\]"):
        divergence_of(named("fkl"), c._replace(q_hidden=c.q_hidden[1:]))
