"""Draft vocabularies: the tokens that a head can propose, and how they map to the target's.

A head that drafts 32k of 128k tokens multiplies a quarter of the matrix. What it can't propose, it
can't get accepted, so the tokens are chosen by how often the target writes them.

Shapes: V tokens of the target (rows of its LM head), D of the draft.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ENOUGH = 0.95  # share of the target's own text that a draft vocabulary should cover


@dataclass(frozen=True)
class DraftVocab:
    """ids_D: the target's ids in ascending order, int64; size: V."""

    ids_D: Tensor
    size: int

    @classmethod
    def most_frequent(cls, counts_V: Tensor, draft_size: int) -> "DraftVocab":
        """The `draft_size` tokens counted most often; of equally many, the smaller ids. ValueError
        for a size outside 1..V.
        """
        size = len(counts_V)
        if not 1 <= draft_size <= size:
            raise ValueError(
                f"draft_vocab: got {draft_size}, expected 1 to the target's {size} tokens"
            )
        order_V = torch.sort(counts_V, descending=True, stable=True).indices
        return cls(order_V[:draft_size].sort().values, size)

    @classmethod
    def from_offsets(cls, d2t_D: Tensor, size: int) -> "DraftVocab":
        """From the stored form, d2t[i] = id - i; ValueError where it points outside the vocabulary
        or its ids don't ascend, as those of every toolkit do.
        """
        ids_D = d2t_D.long() + torch.arange(len(d2t_D), device=d2t_D.device)
        outside = ((ids_D < 0) | (ids_D >= size)).nonzero().flatten()
        if len(outside):
            at = int(outside[0])
            raise ValueError(
                f"d2t: got {len(outside)} entries that point outside the vocabulary (entry {at} to "
                f"token {int(ids_D[at])} of {size}), expected offsets, d2t[i] = id - i; this map "
                "holds ids, or belongs to another target"
            )
        falls = (ids_D.diff() <= 0).nonzero().flatten()
        if len(falls):
            at = int(falls[0])
            raise ValueError(
                f"d2t: got token {int(ids_D[at])} at entry {at} and {int(ids_D[at + 1])} after it, "
                "expected ascending ids, each once; sort the map, and the rows of the LM head alike"
            )
        return cls(ids_D, size)

    @property
    def is_full(self) -> bool:
        return len(self.ids_D) == self.size

    @property
    def d2t_D(self) -> Tensor:
        """Offsets, as EAGLE-3 folders store them: id of draft token i is i + d2t[i]."""
        return self.ids_D - torch.arange(len(self.ids_D), device=self.ids_D.device)

    @property
    def t2d_V(self) -> Tensor:
        """Which of the target's tokens the draft has, bool."""
        mask_V = torch.zeros(self.size, dtype=torch.bool, device=self.ids_D.device)
        mask_V[self.ids_D] = True
        return mask_V

    def coverage(self, counts_V: Tensor) -> float:
        """Share of the counted tokens that the draft can propose; 1 where nothing was counted."""
        total = int(counts_V.sum())
        return int(counts_V[self.ids_D].sum()) / total if total else 1.0
