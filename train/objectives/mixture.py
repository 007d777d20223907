"""What Mixture of Attentions is trained for: EAGLE-1's loss, with a memory as old as in decoding.

    loss = sum_t m [ smooth-L1(f'_t, f_{t+1}) + 0.1 KL(p_{t+1} || q_t) ]

In a round the memory ends at its first token, however far that has drafted. So here it is cut at
every k-th position of a document, k drawn for each row of text and step, and until the next cut all
tokens ask the memory up to there. Held-out depth d is a memory that ends d tokens early.

Legend: B rows, T positions.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.train.objectives.eagle import EagleObjective, Unroll
from draftsmith.train.text.batches import Batch

EVERY = (6, 15)  # tokens from one cut to the next: from, to below


class MixtureObjective(EagleObjective):
    """See `EagleObjective`; the states that it reads have no noise."""

    def __init__(self, unroll: Unroll, *given: Any, **about: Any) -> None:
        super().__init__(replace(unroll, noise=0.0), *given, **about)

    def drawn(self, batch: Batch) -> dict[str, Tensor]:
        """How old the memory is, by torch's generator."""
        at_BT = batch.position_ids
        return {"stale_BT": at_BT % torch.randint(*EVERY, (len(at_BT), 1), device=at_BT.device)}
