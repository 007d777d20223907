"""What P-EAGLE heads are trained for (arXiv 2602.01469): all rows of a pass, ever fewer of them.

    loss = sum_d decay^d sum_{t in A_d} loss(p_{t+1+d}, q_{t,d})        A_0 all, A_d part of A_{d-1}

Row d at t drafts x_{t+2+d} and is trained where `EagleObjective` trains step d. Of the places in a
row of text whose row 1 is trained, A_d is a share of max(keep^d, least), drawn anew at each step
(COD, conditional drop). Pairs count alike: what drops out makes depth d weigh less.

Where this differs from the paper: depth by depth, not all rows in one pass, so that long text needs
no segments; the same numbers. KL for cross-entropy, the same gradient.

Legend: B rows, T positions, M places, S depths, N of all rows, H / G hidden of draft / target.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.heads.peagle import PEagle
from draftsmith.models.target import cut_rows
from draftsmith.train.losses.chunked import chunked_divergence
from draftsmith.train.losses.pure import lk_weight, mixed
from draftsmith.train.objectives.eagle import EagleObjective, Unroll, trained
from draftsmith.train.run.loop import StepOutput
from draftsmith.train.text.batches import Batch


class PEagleObjective(EagleObjective):
    """A P-EAGLE head against the target; else as `EagleObjective`. `measure` is on all pairs; `lk`
    weighs its KL by the mean alpha of all depths. ValueError unless 0 < least <= keep <= 1.
    """

    head: PEagle

    def __init__(self, unroll: Unroll, head: PEagle, *given: Any, loss: str = "fkl") -> None:
        if not 0 < unroll.least <= unroll.keep <= 1:
            found = f"got keep={unroll.keep}, least={unroll.least}"
            raise ValueError(f"unroll: {found}, expected shares with 0 < least <= keep <= 1")
        super().__init__(replace(unroll, steps=head.levels), head, *given, loss=loss)

    def forward(self, batch: Batch) -> StepOutput:
        seen, (p_head_DG, _, ids_D) = self._states[0](batch), self._p_heads
        at, ends, pairs = zip(*self.drawn_places(batch), strict=True)
        hidden_BTH = self.head.fuse(seen.taps_BTF.to(self.head.fc.weight.dtype))
        text = (hidden_BTH, batch.input_ids, batch.position_ids, batch.attention_mask)
        states = self.head.unroll(*text, steps=self.steps, going_on=at[1:])
        q_NH = torch.cat([state_BMH.flatten(0, 1) for state_BMH in states])
        p_NG = seen.norm_BTG.flatten(0, 1)[torch.cat([end_BM.flatten() for end_BM in ends])]
        decays = self._weights(q_NH.device)
        weight_N = torch.cat([(x * w).flatten() for x, w in zip(pairs, decays, strict=True)])
        loss = mixed(self.loss, lk_weight(self.mean_alpha_D.mean()))
        q_head_DH = cut_rows(self.head.head_DH, len(ids_D))
        made = chunked_divergence(loss, q_NH, q_head_DH, p_NG, p_head_DG, weight_N)
        alphas = made.alpha_N.split([x.numel() for x in pairs])
        metrics = {f"{self.alpha_name}_{d}": alpha.sum() for d, alpha in enumerate(alphas)}
        metrics |= {f"count_{d}": pair_BM.sum() for d, pair_BM in enumerate(pairs)}
        return StepOutput(made.total, batch.loss_mask.sum(), metrics)

    def drawn_places(self, batch: Batch) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each depth, [B, M]: the places t of its rows, from depth 1 on the first of those
        before; t + 1 + d in the flat batch; whether the row is trained. By torch's generator.
        """
        (rows, length), trained_SN = batch.input_ids.shape, trained(batch, self.steps)
        place_T, made = torch.arange(length, device=trained_SN.device), []
        first_B1 = torch.arange(rows, device=place_T.device)[:, None] * length
        able_BT = trained_SN[:2][-1][first_B1 + (place_T + 2) % length]
        order_BT = torch.rand(rows, length, device=place_T.device).add(able_BT).argsort(1).flip(1)
        for depth in range(self.steps):
            share = max(self.unroll.keep**depth, self.unroll.least)
            at_BM = order_BT[:, : math.ceil(share * length)] if depth else place_T.expand(rows, -1)
            end_BM = first_B1 + (at_BM + 1 + depth) % length  # one that wraps round isn't trained
            drops_BM = place_T[: at_BM.shape[1]] >= share * able_BT.sum(1, keepdim=True)
            made.append((at_BM, end_BM, trained_SN[depth][end_BM] & ~(drops_BM & bool(depth))))
        return made
