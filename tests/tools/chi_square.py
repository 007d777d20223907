"""Whether counts follow a law."""

import math

import torch


def chi_square_p(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """P(chi-square this large), by the Wilson-Hilferty normal approximation."""
    expected = probs.double() * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    df = len(counts) - 1
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))
