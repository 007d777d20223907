"""What P-EAGLE heads are trained for (arXiv 2602.01469): all rows of a pass, ever fewer of them.

    loss = sum_d decay^d sum_{t in A_d} loss(p_{t+1+d}, q_{t,d})        A_0 all, A_d part of A_{d-1}

Row d at t drafts x_{t+2+d} and is trained where `EagleObjective` trains step d. Of the N places in
a row of text whose row 1 is trained, A_d has max(keep^d, least) N, drawn at each step: rows of MASK
cost 2.4 N in place of 7 N with 8 depths (COD, conditional drop). Pairs count alike, so that what is
dropped makes depth d weigh less, as EAGLE-3's decay does.

Where this differs from the paper: depth by depth, not in one pass of all rows, so that no mask of
all rows by all rows is made, and long text needs no segments; the same numbers. KL in place of
cross-entropy, the same gradient. The divisor is the trained tokens of the step.

Legend: B rows, T positions, M places that go on, D depths, N = sum of all depths' pairs, H / G
hidden size of the draft / the target.
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
    """A P-EAGLE head against the target; `measure` is on all pairs. Arguments, errors and metrics
    as `EagleObjective`'s; ValueError for shares that aren't 0 < least <= keep <= 1, too. `lk`
    weighs its KL by the mean alpha of all depths.
    """

    head: PEagle

    def __init__(self, unroll: Unroll, head: PEagle, *given: Any, loss: str = "fkl") -> None:
        if not 0 < unroll.least <= unroll.keep <= 1:
            raise ValueError(
                f"unroll: got keep={unroll.keep}, least={unroll.least}, expected shares with 0 < "
                "least <= keep <= 1"
            )
        super().__init__(replace(unroll, steps=head.levels), head, *given, loss=loss)

    def forward(self, batch: Batch) -> StepOutput:
        seen, (p_head_DG, _, ids_D) = self._states[0](batch), self._p_heads
        at, pairs = self.drawn(batch)
        hidden_BTH = self.head.fuse(seen.taps_BTF.to(self.head.fc.weight.dtype))
        text = (hidden_BTH, batch.input_ids, batch.position_ids, batch.attention_mask)
        going_on = (at[min(1, self.steps - 1)], [x.shape[1] for x in at[1:]])
        states = self.head.unroll(*text, steps=self.steps, going_on=going_on)
        wide = seen.norm_BTG.shape[2]
        targets = [
            seen.norm_BTG.roll(-1 - depth, 1).gather(1, at_BM[..., None].expand(-1, -1, wide))
            for depth, at_BM in enumerate(at)
        ]
        q_NH, p_NG = (torch.cat([x.flatten(0, 1) for x in side]) for side in (states, targets))
        decays = self._weights(q_NH.device)
        weight_N = torch.cat([(x * w).flatten() for x, w in zip(pairs, decays, strict=True)])
        loss = mixed(self.loss, lk_weight(self.mean_alpha_D.mean()))
        q_head_DH = cut_rows(self.head.head_DH, len(ids_D))
        made = chunked_divergence(loss, q_NH, q_head_DH, p_NG, p_head_DG, weight_N)
        alphas = made.alpha_N.split([x.numel() for x in pairs])
        metrics = {f"{self.alpha_name}_{d}": alpha.sum() for d, alpha in enumerate(alphas)}
        metrics |= {f"count_{d}": pair_BM.sum() for d, pair_BM in enumerate(pairs)}
        return StepOutput(made.total, batch.loss_mask.sum(), metrics)

    def drawn(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Of each depth: the places [B, M] of its rows, those of d the first of those of d - 1 from
        1 on; and which of them [B, M] are trained. By torch's generator.
        """
        shape = batch.input_ids.shape
        # The target's position is t + 1 + d; what wraps round is never trained.
        of_N = trained(batch, self.steps).view(self.steps, *shape)
        pairs_DBT = torch.stack([of_BT.roll(-1 - d, 1) for d, of_BT in enumerate(of_N)])
        at, pairs = [torch.arange(shape[1], device=of_N.device).expand(shape)], [pairs_DBT[0]]
        can_BT = pairs_DBT[min(1, self.steps - 1)]
        order_BT = (torch.rand(shape, device=of_N.device) + can_BT).argsort(1, descending=True)
        for depth in range(1, self.steps):
            share = max(self.unroll.keep**depth, self.unroll.least)
            at_BM = order_BT[:, : math.ceil(share * shape[1])]
            rank_M = torch.arange(at_BM.shape[1], device=of_N.device)
            among_BM = rank_M < share * can_BT.sum(1, keepdim=True)
            at.append(at_BM)
            pairs.append(pairs_DBT[depth].gather(1, at_BM) & among_BM)
        return at, pairs
