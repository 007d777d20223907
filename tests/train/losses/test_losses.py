"""The per-token losses against loops over the vocabulary in double precision, and their limits."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.train.losses import pure as losses
from draftsmith.train.losses.pure import DIVERGENCES, LOG_ZERO, divergence

INF = math.inf
# tvpp's value isn't what its gradient descends
SMOOTH = ["fkl", "rkl", "jsd", "tv", "nla", "lk", "match"]


def logits(*shape: int, seed: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def law(row: list[float]) -> list[float]:
    top = max(row)
    parts = [math.exp(z - top) for z in row]
    return [part / sum(parts) for part in parts]


def log_law(row: list[float]) -> list[float]:
    top = max(row)
    log_sum = top + math.log(sum(math.exp(z - top) for z in row))
    return [LOG_ZERO if z == -INF else z - log_sum for z in row]


def kl(a: list[float], b: list[float]) -> float:
    terms = zip(law(a), log_law(a), log_law(b), strict=True)
    return sum(w * (log_a - log_b) for w, log_a, log_b in terms if w > 0)


def loop_jsd(p: list[float], q: list[float], beta: float) -> float:
    total = 0.0
    for a, b in zip(law(p), law(q), strict=True):
        middle = beta * a + (1 - beta) * b
        total += beta * a * math.log(a / middle) if a > 0 else 0.0
        total += (1 - beta) * b * math.log(b / middle) if b > 0 else 0.0
    return total


def loop_alpha(p: list[float], q: list[float]) -> float:
    return sum(min(a, b) for a, b in zip(law(p), law(q), strict=True))


def loop_advantage(p: list[float], q: list[float]) -> list[float]:
    draft = law(q)
    reward = [1.0 if a > b else 0.0 for a, b in zip(law(p), draft, strict=True)]
    mean = sum(b * r for b, r in zip(draft, reward, strict=True))
    deviation = math.sqrt(sum(b * (r - mean) ** 2 for b, r in zip(draft, reward, strict=True)))
    return [(r - mean) / deviation if deviation > 1e-6 else 0.0 for r in reward]


def loop_tvpp(p: list[float], q: list[float]) -> float:
    terms = zip(law(q), loop_advantage(p, q), log_law(q), strict=True)
    return -sum(b * a * log_b for b, a, log_b in terms)


def loop_match(p: list[float], q: list[float]) -> float:
    pairs = list(zip(law(p), law(q), strict=True))
    both = [(a, b) for a, b in pairs if min(a, b) > 0]
    return 1 - sum(1 / sum(max(c / a, d / b) for c, d in pairs) for a, b in both)


LOOPS: dict[str, Callable[[list[float], list[float]], float]] = {
    "fkl": kl,
    "rkl": lambda p, q: kl(q, p),
    "jsd": lambda p, q: loop_jsd(p, q, 0.3),
    "tv": lambda p, q: 0.5 * sum(abs(a - b) for a, b in zip(law(p), law(q), strict=True)),
    "tvpp": loop_tvpp,
    "nla": lambda p, q: -math.log(loop_alpha(p, q)),
    "lk": lambda p, q: 0.7 * kl(p, q) + 0.3 * (1 - loop_alpha(p, q)),
    "match": loop_match,
}


def named(name: str) -> losses.Loss:
    return divergence(name, beta=0.3, kl_weight=0.7)


def cut(z: Tensor, *tokens: int) -> Tensor:
    z = z.clone()
    z[..., list(tokens)] = -INF
    return z


def cases() -> list[tuple[Tensor, Tensor]]:
    p, q = logits(3, 4, 9, seed=0), logits(3, 4, 9, seed=1)
    wide = logits(3, 4, 9, seed=2, scale=15.0)
    return [(p, q), (p, wide), (cut(p, 0, 5), q), (p, cut(q, 1)), (cut(p, 0, 5), cut(q, 5, 7))]


def by_loop(name: str, p: Tensor, q: Tensor) -> Tensor:
    pairs = zip(p.flatten(0, -2).tolist(), q.flatten(0, -2).tolist(), strict=True)
    values = [LOOPS[name](a, b) for a, b in pairs]
    return torch.tensor(values, dtype=torch.float64).view(p.shape[:-1])


@pytest.mark.parametrize("name", DIVERGENCES)
def test_loss_equals_a_loop_over_the_vocabulary(name: str) -> None:
    for p, q in cases():
        expected = by_loop(name, p, q)
        torch.testing.assert_close(named(name)(p, q), expected, rtol=1e-10, atol=1e-10)
        single = named(name)(p.float(), q.float())
        assert single.dtype == torch.float32 and single.shape == p.shape[:-1]
        torch.testing.assert_close(single.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["fkl", "rkl", "jsd", "tvpp", "nla", "lk"])
def test_the_loop_would_catch_swapped_sides_and_lost_options(name: str) -> None:
    p, q = cases()[0]
    expected = by_loop(name, p, q)
    twins = {"swapped": named(name)(q, p)}
    if name == "jsd":
        twins["other beta"] = divergence("jsd", beta=0.7)(p, q)
    if name == "lk":
        twins["other weight"] = divergence("lk", kl_weight=0.3)(p, q)
    if name == "nla":  # symmetric in p and q, so the twin is another one
        twins = {"no log": 1 - losses.acceptance(p, q)}
    if name == "tvpp":
        reward = (torch.softmax(p, -1) > torch.softmax(q, -1)).double()
        twins["no advantage"] = -(q.softmax(-1) * reward * q.log_softmax(-1)).sum(-1)
    for twin, value in twins.items():
        assert (value - expected).abs().max() > 0.03, twin


def test_match_is_how_often_one_race_has_one_winner() -> None:
    p, q = logits(12, seed=3), logits(12, seed=4)
    race = -torch.empty(200_000, 12).exponential_(generator=torch.Generator().manual_seed(0)).log()
    same = ((p + race).argmax(-1) == (q + race).argmax(-1)).double().mean()
    assert abs(1 - losses.match(p, q) - same) < 5e-3  # four standard errors
    assert abs(losses.acceptance(p, q) - same) > 0.03


def test_match_tells_the_likeliest_apart_and_is_off_by_less_than_the_rest() -> None:
    p, q = logits(6, 400, seed=5, scale=3.0), logits(6, 400, seed=6, scale=3.0)
    top = torch.maximum(p.softmax(-1), q.softmax(-1)).topk(losses.MATCHED, -1).indices
    rest = [1 - z.softmax(-1).gather(-1, top).sum(-1) for z in (p, q)]
    off = (losses.match(p, q) - by_loop("match", p, q)).abs()
    assert bool((off <= torch.maximum(*rest)).all()) and off.max() > 1e-6
    assert torch.autograd.gradcheck(
        lambda z: losses.match(p[:2, :129], z), q[:2, :129].requires_grad_()
    )


def test_match_has_no_slope_where_both_are_one() -> None:
    p = logits(3, 9, seed=7)
    q = p.clone().requires_grad_()
    (slope,) = torch.autograd.grad(losses.match(p, q).sum(), q)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_by_finite_differences(name: str) -> None:
    p, q = cases()[0]
    assert torch.autograd.gradcheck(lambda z: named(name)(p, z), q.requires_grad_())


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_through_a_cut_is_that_of_the_finite_loss(name: str) -> None:
    p, q = cases()[0]
    kept = torch.ones(9, dtype=torch.bool)
    kept[[1, 6]] = False

    def through_cut(z: Tensor) -> Tensor:
        return named(name)(cut(p, 0, 6), z.masked_fill(~kept, -INF))

    assert torch.autograd.gradcheck(through_cut, q.requires_grad_())


def gradient(name: str, p: Tensor, q: Tensor) -> Tensor:
    q = q.clone().requires_grad_()
    return torch.autograd.grad(named(name)(p, q).sum(), q)[0]


def test_gradients_equal_the_published_forms() -> None:
    p_logits, q_logits = cases()[0]
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    log_ratio = q.log() - p.log()
    sign = 0.5 * (q - p).sign()
    rkl = (q * log_ratio).sum(-1, keepdim=True)
    alpha = torch.minimum(p, q).sum(-1, keepdim=True)
    tv_gradient = q * (sign - (q * sign).sum(-1, keepdim=True))
    pairs = zip(p_logits.flatten(0, -2).tolist(), q_logits.flatten(0, -2).tolist(), strict=True)
    advantage = torch.tensor([loop_advantage(a, b) for a, b in pairs], dtype=p.dtype).view_as(q)
    expected = {
        "fkl": q - p,
        "rkl": q * (log_ratio - rkl),
        "tv": tv_gradient,
        "nla": tv_gradient / alpha,
        "lk": 0.7 * (q - p) + 0.3 * tv_gradient,
        "tvpp": -q * advantage,
    }
    for name, form in expected.items():
        torch.testing.assert_close(gradient(name, p_logits, q_logits), form, msg=name)


def test_jsd_tends_to_both_kl() -> None:
    p, q = cases()[0]
    near_p = divergence("jsd", beta=1e-7)(p, q) / 1e-7
    near_q = divergence("jsd", beta=1 - 1e-7)(p, q) / 1e-7
    torch.testing.assert_close(near_p, losses.forward_kl(p, q), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(near_q, losses.reverse_kl(p, q), rtol=1e-4, atol=1e-6)


def test_identities() -> None:
    for p, q in cases():
        alpha = losses.acceptance(p, q)
        torch.testing.assert_close(losses.tv(p, q), 1 - alpha)
        torch.testing.assert_close(losses.nla(p, q), -alpha.log())
        torch.testing.assert_close(losses.lk(p, q, 1.0), losses.forward_kl(p, q))
        torch.testing.assert_close(losses.lk(p, q, torch.tensor(0.0)), losses.tv(p, q))
        assert alpha.min() >= 0 and alpha.max() <= 1
    p, q = logits(500, 6, seed=3), logits(500, 6, seed=4)
    one_hot_p, one_hot_q = (
        torch.full_like(z, -INF).scatter(-1, z.argmax(-1, keepdim=True), 0.0) for z in (p, q)
    )
    agreement = losses.agreement(p, q)
    assert 0 < agreement.mean() < 1
    torch.testing.assert_close(losses.acceptance(one_hot_p, one_hot_q).float(), agreement)
    for name in SMOOTH:
        assert named(name)(p, p).abs().max() < 1e-12, f"{name} of equal models"


def test_tvpp_descends_total_variation() -> None:
    p, q = logits(1, 40, seed=5), logits(1, 40, seed=6)
    before = losses.tv(p, q).item()
    for _ in range(50):
        q = q - gradient("tvpp", p, q)
    assert losses.tv(p, q).item() < 0.7 * before
    assert gradient("tvpp", p, p).abs().max() == 0, "no reward, no gradient"


@pytest.mark.parametrize("name", DIVERGENCES)
def test_extreme_and_disjoint_laws_stay_finite(name: str) -> None:
    p, q = cut(logits(5, 8, seed=7), 0, 1, 2, 3), cut(logits(5, 8, seed=8), 4, 5, 6, 7)
    far_p, far_q = 1e4 * logits(5, 8, seed=9), 1e4 * logits(5, 8, seed=10)
    for a, b in [(p, q), (far_p, far_q), (p, far_q)]:
        a, b = a.float(), b.float()
        assert named(name)(a, b).isfinite().all()
        assert gradient(name, a, b).isfinite().all()
    assert torch.isnan(named(name)(p, q * math.nan)).all(), "a NaN must be seen"


def test_disjoint_laws_cost_what_the_docstring_says() -> None:
    p, q = cut(logits(5, 8, seed=7), 0, 1, 2, 3), cut(logits(5, 8, seed=8), 4, 5, 6, 7)
    assert losses.acceptance(p, q).max() == 0
    assert gradient("nla", p, q).abs().max() == 0
    assert losses.nla(p, q).min() > 700  # -log of the smallest normal float64
    entropy = -(p.softmax(-1) * p.log_softmax(-1).nan_to_num(neginf=0.0)).sum(-1)
    torch.testing.assert_close(losses.forward_kl(p, q), -LOG_ZERO - entropy)
    kept = gradient("fkl", p, q)
    assert (kept[:, 4:] == 0).all(), "nothing can raise an impossible token"


def test_far_off_but_possible_tokens_keep_their_gradient() -> None:
    p = torch.tensor([[0.0, 0.0, -5.0]])
    q = torch.tensor([[0.0, -150.0, 0.0]])  # q = 0 in fp32, yet its log is known
    expected = q.softmax(-1) - p.softmax(-1)
    torch.testing.assert_close(gradient("fkl", p, q), expected)
    assert losses.forward_kl(p, q).item() > 70


@pytest.mark.parametrize("name", [*DIVERGENCES, "acceptance", "ce"])
def test_a_common_offset_changes_nothing(name: str) -> None:
    """Logits in sixteenths, which fp32 holds beside these offsets."""
    p, q = (logits(5, 37, seed=seed).mul(16).round().div(16).float() for seed in (14, 15))
    found = []
    for offset in (0.0, 1e3, -1e3, 1e6):
        far = (q + offset).requires_grad_()
        if name == "ce":
            loss = losses.cross_entropy(far, torch.arange(5))
        else:
            loss = (losses.acceptance if name == "acceptance" else named(name))(p + offset, far)
        found.append((loss, torch.autograd.grad(loss.sum(), far)[0]))
    for results in found:
        for got, want in zip(results, found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_target_gets_no_gradient_and_bf16_is_widened() -> None:
    for name in DIVERGENCES:
        p = logits(4, 6, seed=11).bfloat16().requires_grad_()
        q = logits(4, 6, seed=12).bfloat16().requires_grad_()
        loss = named(name)(p, q)
        assert loss.dtype == torch.float32
        loss.sum().backward()
        assert p.grad is None and q.grad is not None
        torch.testing.assert_close(loss, named(name)(p.float(), q.float()))


def test_cross_entropy_equals_torch() -> None:
    z = logits(3, 5, 9, seed=13, scale=6.0).requires_grad_()
    tokens = torch.randint(9, (3, 5), generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.cross_entropy(z.flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(losses.cross_entropy(z, tokens).mean(), expected)
    ours, theirs = (
        torch.autograd.grad(x, z)[0] for x in (losses.cross_entropy(z, tokens).mean(), expected)
    )
    torch.testing.assert_close(ours, theirs)
    impossible = cut(z.detach(), 2)
    assert losses.cross_entropy(impossible, torch.full((3, 5), 2)).eq(-LOG_ZERO).all()


def test_lk_weight_falls_with_acceptance_and_carries_no_gradient() -> None:
    assert losses.lk_weight(torch.tensor(0.0)) == 1.0
    alpha = torch.tensor(0.4, requires_grad=True)
    weight = losses.lk_weight(alpha)
    assert not weight.requires_grad
    assert weight.item() == pytest.approx(math.exp(-1.2))


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, math.nan])
def test_beta_at_or_past_the_ends_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match=r"strictly between 0 and 1.*fkl"):
        divergence("jsd", beta=beta)


def test_wrong_choices_are_named() -> None:
    with pytest.raises(
        ValueError, match="'kl', expected one of fkl, rkl, jsd, tv, tvpp, nla, lk, match"
    ):
        divergence("kl")
    with pytest.raises(ValueError, match=r"kl_weight: got 1\.5"):
        divergence("lk", kl_weight=1.5)
