"""Calibration against its slow and obvious forms, and against cases whose answer is known."""

import math
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.train.scoring.calibration import (
    auc,
    brier,
    figures,
    picture,
    platt,
    reliability,
)


def drawn(rows: int, seed: int, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    """True log-odds and what happened by them."""
    generator = torch.Generator().manual_seed(seed)
    odds_N = spread * torch.randn(rows, generator=generator, dtype=torch.float64) + 0.3
    return odds_N, torch.rand(rows, generator=generator, dtype=torch.float64) < odds_N.sigmoid()


def test_auc_counts_all_pairs() -> None:
    generator = torch.Generator().manual_seed(3)
    for ties in (True, False):
        score_N = torch.randn(60, generator=generator)
        score_N = score_N.mul(2).round() if ties else score_N
        kept_N = torch.rand(60, generator=generator) < 0.4
        pairs = [
            1.0 if yes > no else 0.5 if yes == no else 0.0
            for yes in score_N[kept_N].tolist()
            for no in score_N[~kept_N].tolist()
        ]
        assert auc(score_N, kept_N) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert auc(torch.ones(4), torch.tensor([0, 1, 1, 0])) == 0.5
    with pytest.raises(ValueError, match="got 3 rows of class 1 and 0 of class 0"):
        auc(torch.randn(3), torch.ones(3))


def test_brier_and_the_constant_by_hand() -> None:
    p_N, kept_N = torch.tensor([0.9, 0.5, 0.2]), torch.tensor([1, 0, 0])
    assert brier(p_N, kept_N) == pytest.approx((0.01 + 0.25 + 0.04) / 3, abs=1e-7)
    assert figures(p_N, kept_N)["brier_constant"] == pytest.approx(2 / 9)
    constants = [brier(torch.full((3,), c / 100), kept_N) for c in range(101)]
    assert min(constants) == pytest.approx(2 / 9, abs=1e-4)


def test_the_reliability_table_against_a_loop() -> None:
    odds_N, kept_N = drawn(103, seed=1)
    table = reliability(odds_N.sigmoid(), kept_N)
    rows = sorted(zip(odds_N.sigmoid().tolist(), kept_N.tolist(), strict=True))
    assert [n for *_, n in table] == [10, 10, 10, 11, 10, 10, 11, 10, 10, 11]
    first, gaps = 0, 0.0
    for mean, share, count in table:
        here = rows[first : first + count]
        first += count
        assert mean == pytest.approx(sum(p for p, _ in here) / count)
        assert share == pytest.approx(sum(k for _, k in here) / count)
        gaps += count * abs(mean - share)
    assert figures(odds_N, kept_N)["ece"] == pytest.approx(gaps / 103)
    assert len(reliability(odds_N[:4].sigmoid(), kept_N[:4])) == 4  # fewer rows than bins


@pytest.mark.parametrize("soft", [False, True])
def test_platt_finds_the_least_cross_entropy(soft: bool) -> None:
    """Against a grid that closes in, for labels that are sampled and for probabilities."""
    odds_N, kept_N = drawn(200, seed=5)
    logit_N = (3 * odds_N + 2).float()
    label_N = (odds_N.sigmoid() if soft else kept_N).double()
    scale, shift = platt(logit_N, label_N)
    best, reach = (1.0, 0.0), 4.0
    while reach > 1e-6:
        near = torch.linspace(-reach, reach, 17, dtype=torch.float64)
        scales_GG, shifts_GG = torch.meshgrid(best[0] + near, best[1] + near, indexing="ij")
        guess_GGN = scales_GG[..., None] * logit_N.double() + shifts_GG[..., None]
        label_GGN = label_N.expand_as(guess_GGN)
        each_GGN = F.binary_cross_entropy_with_logits(guess_GGN, label_GGN, reduction="none")
        place = int(each_GGN.mean(-1).argmin())
        best = (scales_GG.flatten()[place].item(), shifts_GG.flatten()[place].item())
        reach /= 2
    assert (scale, shift) == pytest.approx(best, abs=1e-5)
    if soft:
        assert (scale, shift) == pytest.approx((1 / 3, -2 / 3), abs=1e-5)


def test_platt_is_defined_where_the_rows_do_not_decide() -> None:
    same = platt(torch.full((8,), 2.0), torch.tensor([1, 1, 1, 0, 1, 1, 1, 0]))
    assert torch.tensor(same[0] * 2 + same[1]).sigmoid().item() == pytest.approx(0.75, abs=1e-6)
    scale, shift = platt(torch.tensor([-1.0, 1.0]), torch.tensor([0, 1]))
    assert scale > 1 and math.isfinite(scale) and abs(shift) < 1e-6
    scale, _ = platt(torch.tensor([1e4, 2e4, -3e4, 5e3]), torch.tensor([1, 0, 0, 1]))
    assert math.isfinite(scale)
    scale, _ = platt(torch.tensor([1.0, 2.0, -1.0, -2.0]), torch.tensor([0, 0, 1, 1]))
    assert scale < 0, "a scorer that is wrong about everything is turned round"
    with pytest.raises(ValueError, match="1 of 2 that aren't finite"):
        platt(torch.tensor([math.nan, 1.0]), torch.tensor([0, 1]))


def test_a_weight_on_rejections_divides_the_odds_and_platt_gives_them_back() -> None:
    """The population optimum of the weighted loss is the odds divided by w: a shift of log w."""
    weight, rows = 6.0, 40_000
    odds_N, kept_N = drawn(rows, seed=7)
    w = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    weight_N = torch.where(kept_N, 1.0, weight)
    fitting = torch.optim.LBFGS([w], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        fitting.zero_grad()
        logit_N = w[0] * odds_N + w[1]
        loss_N = F.binary_cross_entropy_with_logits(logit_N, kept_N.double(), reduction="none")
        loss = (weight_N * loss_N).sum() / weight_N.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    fitting.step(closure)  # type: ignore[no-untyped-call]
    assert w[1].item() == pytest.approx(-math.log(weight), abs=0.06)
    # On rows of their own.
    fresh_N, happened_N = drawn(rows, seed=8)
    logit_N = (w[0] * fresh_N + w[1]).detach()
    scale, shift = platt(logit_N, happened_N)
    # Standard errors: 0.017 of the scale, 0.024 of the shift (sandwich of both fits, doubled).
    assert scale == pytest.approx(1.0, abs=0.05)
    assert shift == pytest.approx(math.log(weight), abs=0.1)
    before, after = figures(logit_N, happened_N), figures(scale * logit_N + shift, happened_N)
    assert after["auc"] == before["auc"]
    assert after["brier"] < after["brier_constant"] < before["brier"]
    assert after["ece"] < 0.01 < 0.2 < before["ece"]
    assert after["rows"] == rows == sum(n for *_, n in after["reliability"])


def test_the_picture_is_a_drawing_of_the_table() -> None:
    odds_N, kept_N = drawn(300, seed=2)
    table = reliability(odds_N.sigmoid(), kept_N)
    root = ElementTree.fromstring(picture(table, "Kept"))
    hints = [one.text for one in root.iter() if one.tag.endswith("title")]
    assert len(hints) == 2 * len(table)
    assert hints[-1] == f"tenth of the rows 10, happened: {table[-1][1]:.2f}"
