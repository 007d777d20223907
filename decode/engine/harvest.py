"""What a target knew while it answered, kept row by row for drafts to learn from: a round computes
the target's states at every node; those of the kept path are written, on the device, to where their
tokens are. Nothing is read until a request ends.

Shapes: B rows, R of them just admitted, S slots, N nodes or prompt tokens, L tokens of a kept path,
A answer tokens but the last, T all tokens but the last, H hidden, U width of the taps.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.drafters.base import Admitted
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.forward.kv import KVPool


class Harvested(NamedTuple):
    """Of one finished request, on the CPU. norm_AH: the target's states after the final norm at the
    answer's tokens but the last; row i gives the law of answer token i + 1 (the first one is never
    drafted). taps_TU: of all tokens but the last, None for drafters that read no states.
    """

    norm_AH: Tensor
    taps_TU: Tensor | None


class Harvest:
    """The states of the rows of one batch."""

    def __init__(self, pool: KVPool, hidden: int, taps: int) -> None:
        shape, zeros = (pool.rows, pool.slots), pool.kv_2LBSHE.new_zeros
        self.norm_BSH = zeros(*shape, hidden)
        self.taps_BSU = zeros(*shape, taps) if taps else None

    def admit(self, admitted: Admitted) -> None:
        """Take the taps' states at prompts."""
        if self.taps_BSU is not None and admitted.taps_RNU is not None:
            length = admitted.taps_RNU.shape[1]
            self.taps_BSU[admitted.rows_R, :length] = admitted.taps_RNU

    def keep(self, lens_B: Tensor, norm_BLH: Tensor, taps_BLU: Tensor | None) -> None:
        """Take a round's kept path, from position `lens_B` on; later rounds overwrite what lies
        beyond the accepted part.
        """
        at_BL = lens_B[:, None] + torch.arange(norm_BLH.shape[1], device=lens_B.device)
        at_BL = at_BL.clamp(max=self.norm_BSH.shape[1] - 1)
        row_B1 = torch.arange(len(lens_B), device=lens_B.device)[:, None]
        self.norm_BSH[row_B1, at_BL] = norm_BLH
        if self.taps_BSU is not None and taps_BLU is not None:
            self.taps_BSU[row_B1, at_BL] = taps_BLU

    def of(self, row: int, made: Completion) -> Harvested:
        """Copies of what a row holds of the request that has just ended there."""
        first, end = len(made.prompt_tokens), len(made.prompt_tokens) + len(made.tokens) - 1
        taps_TU = None if self.taps_BSU is None else self.taps_BSU[row, :end].to("cpu", copy=True)
        return Harvested(self.norm_BSH[row, first:end].to("cpu", copy=True), taps_TU)
