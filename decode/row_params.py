"""Sampling parameters of a batch whose rows don't all sample alike.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.decode.sampling import SamplingParams


class RowParams:
    """`SamplingParams`, row by row: what a round asks of them, for rows of several laws.

    Each row's logits go through the very transform of its own parameters. A greedy row's noise is
    0, which is the argmax.
    """

    greedy = False  # not all rows: those would be of one law

    def __init__(self, of_B: Sequence[SamplingParams], device: torch.device) -> None:
        rows: dict[tuple[float, ...], list[int]] = {}
        for row, params in enumerate(of_B):
            rows.setdefault(params.law, []).append(row)
        self.law = tuple(number for params in of_B for number in params.law)
        self.groups = [
            (of_B[found[0]], torch.tensor(found, device=device)) for found in rows.values()
        ]
        self.greedy_B = torch.tensor([params.greedy for params in of_B], device=device)

    def transform(self, logits: Tensor) -> Tensor:
        """`sampling.transform` of raw logits [B, ..., V] with each row's values."""
        found = torch.empty_like(
            logits, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32
        )
        for params, rows_G in self.groups:
            found[rows_G] = params.transform(logits[rows_G])
        return found

    def quiet(self, race: Tensor) -> Tensor:
        """The noise [B, ..., V], 0 in greedy rows."""
        return race.masked_fill_(self.greedy_B.view(-1, *[1] * (race.ndim - 1)), 0.0)


BatchParams = SamplingParams | RowParams


def together(of_B: Sequence[SamplingParams], device: torch.device) -> BatchParams:
    """The parameters of rows 0..B-1: one for all of them where they sample alike."""
    alike = len({params.law for params in of_B}) == 1
    return of_B[0] if alike else RowParams(of_B, device)
