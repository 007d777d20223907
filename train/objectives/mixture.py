"""What Mixture of Attentions is trained for: EAGLE-1's loss without noise, and a memory as old as
in decoding.

A round's memory ends at its first token, however far that drafts. So it is cut at every k-th token
of a document, k drawn for each row of text and step; up to the next cut all see it to there.
Held-out depth d is a memory that ends d tokens early. Legend: B rows, T positions.
"""

import torch
from torch import Tensor

from draftsmith.train.objectives.eagle import EagleObjective
from draftsmith.train.text.batches import Batch

EVERY = (6, 15)  # k: from, to below


class MixtureObjective(EagleObjective):
    def drawn(self, batch: Batch) -> dict[str, Tensor]:
        """How old the memory is, by torch's generator."""
        at_BT = batch.position_ids
        return {"stale_BT": at_BT % torch.randint(*EVERY, (len(at_BT), 1), device=at_BT.device)}
