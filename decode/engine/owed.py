"""What rounds that drafted nothing owe the drafter: a pass of its model a round would be wasted on
them, so that their tokens wait and are taken in together before the next draft.

Shapes: B rows, W tokens that can wait, U width of the taps' states, M tokens taken in.
"""

import torch
from torch import Tensor

from draftsmith.decode.drafting.base import Kept

TOKENS, STATES = 512, 32  # that wait: of drafters that read tokens alone, and of those with taps


class Owed:
    """lens_B: tokens of each row when the first of these rounds set off. Of more than W the oldest
    are lost: the drafter then lacks them, which costs acceptance and no more. wide: U.
    """

    def __init__(self, rows: int, wide: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows_B = torch.arange(rows, device=device)
        self.lens_B = torch.zeros_like(self.rows_B)
        shape = rows, STATES if wide else TOKENS
        self.tokens_BW = torch.zeros(shape, dtype=torch.int64, device=device)
        self.taps_BWU: Tensor | None = None
        if wide:
            self.taps_BWU = torch.zeros(*shape, wide, dtype=dtype, device=device)

    @torch.inference_mode()
    def begin(self, rows: slice | Tensor, lens: Tensor) -> None:
        """Of these rows nothing is owed yet."""
        self.lens_B[rows] = lens

    def take(self, kept: Kept) -> None:
        """A round's one token, and the states before it, in the place of their position."""
        place = self.rows_B, kept.lens_B % self.tokens_BW.shape[1]
        self.tokens_BW[place] = kept.tokens_BL[:, 0]
        if self.taps_BWU is not None:
            assert kept.taps_BLU is not None, "the engine gives what `taps` asks for"
            self.taps_BWU[place] = kept.taps_BLU[:, 0]

    def settled(self, lens_B: Tensor, rounds: int, top: int) -> Kept:
        """All that is owed to rows of now `lens_B` tokens after at most so many rounds, as if a
        round had kept it.
        """
        window = self.tokens_BW.shape[1]
        size = min(window, 1 << (rounds - 1).bit_length())
        n_new_B = (lens_B - self.lens_B).clamp(max=size)
        first_B = lens_B - n_new_B
        at_BM = (first_B[:, None] + torch.arange(size, device=lens_B.device)) % window
        taps_BMU = None
        if self.taps_BWU is not None:
            taps_BMU = self.taps_BWU.gather(
                1, at_BM[..., None].expand(-1, -1, self.taps_BWU.shape[2])
            )
        tokens_BM = self.tokens_BW.gather(1, at_BM)
        return Kept(tokens_BM, n_new_B, None, first_B, taps_BMU, top)
