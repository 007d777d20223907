"""How well a classifier's scores foretell what happens, and the two numbers that mend their scale.

Nothing here is weighted: a trainer may up-weight one class, what it foretells must not show it.

Shapes: N rows, M bins.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decode.report.charts import Series, columns, drawing

# Pull of the scale towards 1, in nats a row: decides where the rows don't, as they can't where a
# scorer gives all the same logit, or where it never errs.
RIDGE = 1e-8
BINS = 10
Bin = tuple[float, float, int]  # mean foretold, share that happened, rows


def platt(logit_N: Tensor, label_N: Tensor) -> tuple[float, float]:
    """(scale, shift) for which sigmoid(scale * logit + shift) has the least cross-entropy with the
    labels (Platt, 1999), by Newton's method; the problem is convex. label_N: in [0, 1], soft ones
    too. ValueError for logits that aren't finite.
    """
    _finite(logit_N)
    logit_N, label_N = logit_N.double(), label_N.double()
    # In units of the logits' own spread, so that the two directions are of one size.
    middle, spread = float(logit_N.mean()), float(logit_N.std(correction=0)) or 1.0
    x_N2 = torch.stack([(logit_N - middle) / spread, torch.ones_like(logit_N)], 1)
    start = torch.tensor([spread, middle], dtype=torch.float64)  # scale 1, shift 0
    pull = torch.tensor([RIDGE, 0.0], dtype=torch.float64)

    def loss(w: Tensor) -> Tensor:
        entropy = F.binary_cross_entropy_with_logits(x_N2 @ w, label_N)
        return entropy + (pull * (w - start) ** 2).sum() / 2

    w, now = start, loss(start)
    for _ in range(100):
        p_N = (x_N2 @ w).sigmoid()
        slope = x_N2.T @ (p_N - label_N) / len(x_N2) + pull * (w - start)
        curve = (x_N2 * (p_N * (1 - p_N))[:, None]).T @ x_N2 / len(x_N2)
        step = torch.linalg.solve(curve + pull.diag() + 1e-12 * torch.eye(2), slope)
        size = 1.0
        while size > 1e-9 and loss(w - size * step) > now:
            size /= 2
        after = loss(w - size * step)
        if not after < now:
            break
        w, now = w - size * step, after
    scale = float(w[0]) / spread
    return scale, float(w[1]) - scale * middle


def brier(p_N: Tensor, kept_N: Tensor) -> float:
    """Mean squared distance of the foretold probability from what happened (0 or 1)."""
    return float((p_N.double() - kept_N.double()).square().mean())


def auc(score_N: Tensor, kept_N: Tensor) -> float:
    """Chance that a row that happened scores above one that didn't, ties counted half. ValueError
    unless both are there.
    """
    yes_N = kept_N.bool()
    yes, no = int(yes_N.sum()), int((~yes_N).sum())
    if not yes or not no:
        raise ValueError(f"AUC: got {yes} rows of class 1 and {no} of class 0, expected both")
    _, place_N, count_U = score_N.double().unique(return_inverse=True, return_counts=True)
    # Mean rank (from 1) of each distinct score.
    rank_U = count_U.cumsum(0) - (count_U - 1) / 2
    above = float(rank_U[place_N][yes_N].sum()) - yes * (yes + 1) / 2
    return above / (yes * no)


def reliability(p_N: Tensor, kept_N: Tensor, bins: int = BINS) -> list[Bin]:
    """Rows by their foretold probability, in bins of equal counts; empty ones left out."""
    order_N = p_N.argsort(stable=True)
    p_N, kept_N = p_N[order_N].double(), kept_N[order_N].double()
    edges = [len(p_N) * i // bins for i in range(bins + 1)]
    spans = [(a, b) for a, b in pairwise(edges) if b > a]
    return [(float(p_N[a:b].mean()), float(kept_N[a:b].mean()), b - a) for a, b in spans]


def figures(logit_N: Tensor, kept_N: Tensor) -> dict[str, Any]:
    """What is told of log-odds on rows that they weren't fitted to; errors as in `auc`, and for
    logits that aren't finite. `brier_constant`: of the best constant on these very rows; `ece`:
    expected calibration error, the mean over rows of |foretold - happened| of their bin.
    """
    _finite(logit_N)
    p_N, rate = logit_N.double().sigmoid(), float(kept_N.double().mean())
    table = reliability(p_N, kept_N)
    return {
        "rows": len(p_N),
        "rate": rate,
        "brier": brier(p_N, kept_N),
        "brier_constant": rate * (1 - rate),
        # By the logits: probabilities near 1 may be equal where these aren't.
        "auc": auc(logit_N, kept_N),
        "ece": sum(n * abs(p - share) for p, share, n in table) / len(p_N),
        "reliability": [list(one) for one in table],
    }


def _finite(logit_N: Tensor) -> None:
    bad, rows = int((~logit_N.isfinite()).sum()), len(logit_N)
    if bad or not rows:
        raise ValueError(f"logits: got {bad} of {rows} that aren't finite, expected numbers")


def picture(table: Sequence[Bin], title: str) -> str:
    """The reliability table as an SVG file's content: what was foretold beside what happened."""
    told, happened = ([one[i] for one in table] for i in range(2))
    series = [
        Series(name, css, values, "{:.2f}".format)
        for name, css, values in (("foretold", "b", told), ("happened", "a", happened))
    ]
    places, axes = [str(i + 1) for i in range(len(table))], ("tenth of the rows", "share kept")
    chart = columns(title, places, series, x_label=axes[0], y_label=axes[1], top=1.0)
    return drawing([chart], [(one.css, one.name) for one in series])
