"""Chimera as the drafter: a pass of its layer a level.

A row of n committed tokens keeps the layer's keys and values of h_0 .. h_{n-1}. A node lies beyond,
of this round alone: as a trigram while it is fed, then as f, for those below it.

Shapes: B rows, R just admitted, L tokens of a kept path, F nodes fed, T tokens of a text, H hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Fed, Feed, Frontier, Kept, Round, picked
from draftsmith.decode.drafting.head_drafter import HeadDrafter
from draftsmith.models.heads.chimera import Chimera
from draftsmith.models.layers.layer import Keep


class ChimeraDrafter(HeadDrafter):
    """tail_B3 holds each row's last three tokens, the third one pending."""

    head: Chimera
    attends = False
    held = ("pool", "state_BH", "tail_B3")

    def __init__(self, head: Chimera, target: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(head, target, head.config)
        heads = map(head.head_VH, range(head.levels))
        self.outputs = tuple(self.vocab_head(head_VI, vocab_size) for head_VI in heads)

    def reset(self, rows: int, slots: int) -> None:
        super().reset(rows, slots)
        self.tail_B3 = torch.zeros(rows, 3, dtype=torch.int64, device=self.device)

    def read(self, taps_BNU: Tensor, next_BN: Tensor, where: tuple[Tensor, Keep]) -> Tensor:
        self.head.keep(taps_BNU, *where)
        return taps_BNU

    def prefill(self, admitted: Admitted) -> None:
        super().prefill(admitted)
        last_R2 = admitted.lens_R[:, None] - torch.arange(2, 0, -1, device=self.device)
        tail = admitted.tokens_RN.gather(1, last_R2.clamp(min=0)), admitted.pending_R[:, None]
        self.tail_B3[admitted.rows_R] = torch.cat(tail, 1)

    def extend(self, kept: Kept) -> None:
        super().extend(kept)
        last_B3 = kept.n_new_B[:, None] + torch.arange(3, device=self.device)
        self.tail_B3.copy_(torch.cat([self.tail_B3, kept.tokens_BL], 1).gather(1, last_B3))

    def feed(self, request: Round) -> Feed:
        width = self.pool.width(request.top + request.plan.slots)
        grams_BF3, base_B1H = self.tail_B3[:, None], self.state_BH[:, None]

        def feed(frontier: Frontier) -> Fed:
            nonlocal grams_BF3
            if frontier.depth:
                if frontier.of_BF is not None:
                    grams_BF3 = picked(grams_BF3, frontier.of_BF)
                grams_BF3 = torch.cat([grams_BF3[..., 1:], frontier.tokens_BF[..., None]], -1)
            at_BF, slots_BF, seen = frontier.placed(request.lens_B[:, None], width)
            at_BF, attention = self.pool.fed(at_BF, slots_BF, seen)
            f_BFH = self.head.step(grams_BF3, at_BF, attention)
            self.head.keep(f_BFH, at_BF, self.pool.added(slots_BF)[1])
            state_BFI = torch.cat([base_B1H.expand_as(f_BFH), f_BFH], -1)
            return Fed(self.outputs[frontier.depth].logits(state_BFI), f_BFH)

        return feed

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor:
        """After the first token, before which there is no state, 0."""
        at_BT = torch.arange(ids_BT.shape[1], device=self.device).expand(len(ids_BT), -1)
        states_BTI = next(self.head.unroll(taps_BTU.to(self.dtype), ids_BT, at_BT))
        return F.pad(self.outputs[0].logits(states_BTI[:, :-1]), (0, 0, 1, 0))
