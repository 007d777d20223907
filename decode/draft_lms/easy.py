"""A draft LM whose layers go side by side.

    easy:G+FOLDER       the LM in FOLDER, its layers in groups of G (EasySpec, arXiv 2502.02493)

Shapes as in lm.py, M tokens fed again.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafting.base import Admitted, Drafter, Kept, picked
from draftsmith.decode.drafting.side_by_side import side_by_side
from draftsmith.decode.forward.runner import Seen, in_parts


class EasyDrafter(LMDrafter):
    """One that drafts all but a round's first token with its layers side by side. The first draft
    call is exact and feeds the round's kept tokens again: of what the others wrote nothing stays.
    """

    kind = "easy"
    levels = 8  # and so the tokens that the first call feeds, the pending one too, are one more
    held = (*LMDrafter.held, "text_BS")
    native = None

    def __init__(self, whole: LMDrafter, size: int) -> None:
        if whole.runner.leader is not None:
            raise in_parts("the target itself, side by side")
        vars(self).update(vars(whole))
        self.deeper = side_by_side(self.runner, size)

    @classmethod
    def over(
        cls, says: str, own: Drafter | None, target: PreTrainedModel, vocab_size: int
    ) -> "LMDrafter":
        """Of a name's group size and the LM of its folder; ValueError for others."""
        if type(own) is not LMDrafter or own.reads or not says.isdecimal() or int(says) < 1:
            raise ValueError(
                f"drafter: got easy:{says} with a drafter of kind {getattr(own, 'kind', None)}, "
                "expected easy:G+FOLDER, groups of 1 layer or more of a draft LM"
            )
        return cls(own, int(says))

    def reset(self, rows: int, slots: int) -> None:
        super().reset(rows, slots)
        self.text_BS = torch.zeros(rows, self.pool.slots, dtype=torch.int64).to(self.runner.device)

    def prefill(self, admitted: Admitted) -> None:
        super().prefill(admitted)
        admitted.write(self.text_BS)

    def extend(self, kept: Kept) -> None:
        kept.write(self.text_BS)

    def catch_up(self, kept: Kept) -> None:
        """And what the first call would have fed again meanwhile."""
        self.extend(kept)
        first_B1 = (kept.lens_B[:, None] - self.levels).clamp(min=0)
        size = kept.tokens_BL.shape[1] + self.levels
        at_BM = first_B1 + torch.arange(size, device=first_B1.device)
        at_BM = at_BM.clamp(max=self.text_BS.shape[1] - 1)
        self._take_in(self.text_BS.gather(1, at_BM), first_B1, kept)

    def _read_tail(self, lens_B1: Tensor, width: int) -> Tensor:
        """The state [B, 1, H] of the pending token, after those that a round may have kept."""
        first_B1 = (lens_B1 - self.levels).clamp(min=0)
        at_BM = first_B1 + torch.arange(self.levels + 1, device=lens_B1.device)
        # What lies beyond a short text's end is written over before anything sees it.
        tokens_BM, seen = self.text_BS.gather(1, at_BM), Seen(first_B1[:, 0], width)
        hidden_BMH, _ = self.runner.verify(self.pool, tokens_BM, at_BM, at_BM, seen)
        return picked(hidden_BMH, lens_B1 - first_B1)
