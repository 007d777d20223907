"""Placeholders behind the pending token: what the target chooses after them is drafted, and the
next round verifies it. For targets tuned to say what a placeholder stands for
(train/tuning/units.py).

    pads:K      K placeholders, the token that the target's config names as padding

Two rounds in turn: one asks, whose placeholders are never kept, one verifies; so K tokens cost two
passes at best, (K + 2) / 2 a pass.

Shapes: B rows, R of them just admitted, K guesses.
"""

from typing import Self

import torch
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Kept
from draftsmith.decode.untrained.jacobi import JacobiDrafter


class PadsDrafter(JacobiDrafter):
    """Guesses are placeholders, or the choices after these."""

    kind = "pads"
    pad: int

    @classmethod
    def named(cls, kind: str, says: str, target: PreTrainedModel, vocab_size: int) -> Self:
        """pads:K; ValueError for anything else, and for a target without a padding token."""
        pad = target.config.get_text_config().pad_token_id
        if not says.isdecimal() or not 0 < int(says) < 512 or pad is None:
            raise ValueError(
                f"drafter: got pads:{says} for a target whose pad_token_id is {pad}, expected "
                "pads:K, of 1 to 511 of them, and a token"
            )
        made = cls(int(says), target.device)
        made.pad = pad
        return made

    def prefill(self, admitted: Admitted) -> None:
        self.guess_BK[admitted.rows_R] = self.pad

    def extend(self, kept: Kept) -> None:
        asked_B1 = (self.guess_BK == self.pad).all(1, keepdim=True) | (kept.n_new_B == 0)[:, None]
        super().extend(kept)
        self.guess_BK.copy_(torch.where(asked_B1, self.guess_BK, self.pad))
