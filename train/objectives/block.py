"""What block drafters are trained for: the tokens ahead of sampled anchors, all depths at once.

    loss = sum_A sum_k w_k [ (1 - base) D(p_{A+k}, q_k) + base D(p_{A+k}, u_k)
                             + state |h_{A+k} - s_k| ]

q_k: the drafter's law of x_{A+1+k} in the block at A, after the text's own tokens before it; u_k:
the same without the light head; p_{A+k}: the target's there; h, s_k: the states that the LM head
makes p and q of, |.| the mean of smooth L1 over them, as EAGLE-1 has it. A pair (A, k) is trained
where the text trains x_{A+1} .. x_{A+1+k}, so all of one document. w_k = exp(-k / decay) over the
sum of its kind. Of each row of text so many anchors are drawn, which stand for all of it: their
weight is the trained tokens of the row over the anchors drawn.

With `noise` the drafter is shown the race that the target's token wins. For a text that p wrote it
is drawn from its law given the token x: Z ~ Exp(1) is the winning time, E_x = p_x Z, and of the
others E_y = p_y Z + Exp(1): whoever doesn't know x sees numbers that are all Exp(1).

Legend: B rows, T positions, M anchors, n depths, N = B * M * n, R rows of blocks, H / G hidden size
of the draft / the target, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.heads.block import Block, Guess
from draftsmith.models.taps import TargetStates
from draftsmith.models.target import cut_rows, head_weight
from draftsmith.train.losses.chunked import (
    CHUNK_LOGITS,
    chunked_cross_entropy,
    chunked_divergence,
    chunked_steps,
    rows_of,
)
from draftsmith.train.losses.pure import agreement, apart, lk_weight, mixed, parse_loss
from draftsmith.train.objectives.heads import OnStates
from draftsmith.train.run.loop import Counting, StepOutput
from draftsmith.train.teachers.states import States
from draftsmith.train.text.batches import Batch


@dataclass(kw_only=True)
class Anchors:
    """The group `anchors` of a recipe."""

    count: int = 32  # drawn of each row of text in each step
    decay: float = 4.0  # w_k = exp(-k / decay); 0: all depths alike
    base: float = 0.0  # share of the loss that the drafter without its light head has
    base_ends: float = 0.0  # step at which it has fallen, evenly, to 0; 0: it stays
    state: float = 0.0  # weight of the distance from the target's states, beside the loss


class Drawn(NamedTuple):
    """Anchors of a batch. at_BM: their positions in the row; pair_BMn: which depths are trained;
    weight_BM1: what one stands for.
    """

    at_BM: Tensor
    pair_BMn: Tensor
    weight_BM1: Tensor


def trainable(batch: Batch) -> Tensor:
    """[B, T] bool: positions whose next token is trained, after another of their document."""
    return batch.loss_mask & (batch.position_ids > 0)


def draw(batch: Batch, count: int, levels: int, *, evenly: bool = False) -> Drawn:
    """`count` anchors of each row without repeats, by torch's generator or evenly; those that a row
    is short of weigh nothing.
    """
    can_BT = trainable(batch)
    count = min(count, can_BT.shape[1])
    if evenly or count == can_BT.shape[1]:  # one in the middle of each share; all, where few
        place_BT, many_B1 = can_BT.cumsum(1), can_BT.sum(1, keepdim=True).clamp(min=1)
        upto_BT, before_BT = (2 * (place_BT - 1 + ends) * count + many_B1 for ends in (1, 0))
        order_BT = (upto_BT // (2 * many_B1) > before_BT // (2 * many_B1)).float()
    else:
        order_BT = 1 + torch.rand(can_BT.shape, device=can_BT.device)
    drawn = (can_BT * order_BT).topk(count, 1)
    at_BM, order = drawn.indices.sort(1)
    real_BM = (drawn.values > 0).gather(1, order)
    step_n = torch.arange(levels, device=at_BM.device)
    at_BMn = (at_BM[..., None] + step_n).clamp(max=can_BT.shape[1] - 1)
    trained_BMn = batch.loss_mask.gather(1, at_BMn.flatten(1)).view_as(at_BMn)
    inside_BMn = at_BM[..., None] + step_n < can_BT.shape[1]
    pair_BMn = (trained_BMn & inside_BMn & real_BM[..., None]).long().cumprod(2).bool()
    tokens_B1 = batch.loss_mask.sum(1, keepdim=True)
    weight_BM = real_BM * tokens_B1 / real_BM.sum(1, keepdim=True).clamp(min=1)
    return Drawn(at_BM, pair_BMn, weight_BM[..., None])


class BlockObjective(OnStates, Counting):
    """A block drafter against the target.

    loss, beyond the arguments of `OnStates`: see `pure.parse_loss`. Its LM head, the target's, is
    frozen. Metrics are sums: count_k, the pairs of depth k; alpha_k, of their sum_v min(p, q) where
    the loss knows it, and in `measure` always, with top1_k (both argmaxes agree), on anchors spread
    evenly. ValueError for an unknown loss, or numbers out of range.
    """

    head: Block

    def __init__(
        self,
        anchors: Anchors,
        head: Block,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        states: States,
        *,
        loss: str = "fkl",
    ) -> None:
        if anchors.count < 1 or min(anchors.decay, anchors.base_ends, anchors.state) < 0:
            raise ValueError(
                f"anchors: got count={anchors.count}, decay={anchors.decay}, base_ends="
                f"{anchors.base_ends}, state={anchors.state}, expected at least 1 of them, and "
                "numbers from 0 up"
            )
        if not 0 <= anchors.base <= 1:
            raise ValueError(f"anchors.base: got {anchors.base}, expected a share, 0 to 1")
        super().__init__(head, target, tokenizer, states, depths=head.levels)
        self.anchors, self.loss = anchors, parse_loss(loss)
        mixed({name: weight for name, weight in self.loss.items() if name != "ce"} or {"fkl": 1.0})
        self._p_head_VG = (cut_rows(head_weight(target).detach(), self.vocab_size),)

    def forward(self, batch: Batch) -> StepOutput:
        drawn = draw(batch, self.anchors.count, self.head.levels)
        return self._scored(batch, self._states[0](batch), drawn)

    @torch.no_grad()
    def measure(self, batch: Batch) -> StepOutput:
        """As forward, with alpha_k and top1_k, and the anchors spread evenly."""
        drawn = draw(batch, self.anchors.count, self.head.levels, evenly=True)
        return self._scored(batch, self._states[1](batch), drawn, fully=True)

    def _scored(
        self, batch: Batch, seen: TargetStates, drawn: Drawn, *, fully: bool = False
    ) -> StepOutput:
        head, levels = self.head, self.head.levels
        step_n = torch.arange(levels, device=drawn.at_BM.device)
        at_BMn = (drawn.at_BM[..., None] + step_n).clamp(max=batch.input_ids.shape[1] - 1)
        flat_BN = at_BMn.flatten(1)
        p_head_VG = self._p_head_VG[0]
        wide = seen.norm_BTG.shape[2]
        p_NG = seen.norm_BTG.gather(1, flat_BN[..., None].expand(-1, -1, wide)).flatten(0, 1)
        p = p_NG.to(p_head_VG.dtype), p_head_VG
        next_N = batch.input_ids.roll(-1, 1).gather(1, flat_BN).flatten()
        guess = self._guess(p, next_N) if head.config.noise else None
        taps_BTU = seen.taps_BTF.to(head.fc.weight.dtype)
        text = (taps_BTU, batch.input_ids, batch.position_ids, drawn.at_BM)
        base_BMnH, lit_BMnI = head.drafted(*text, guess)
        depth_n = torch.exp(-step_n / (self.anchors.decay or math.inf))
        weight_BMn = drawn.pair_BMn * drawn.weight_BM1 * (depth_n / depth_n.sum())
        share = self._base_share() if head.light.rank or head.light.deep else 0.0
        heads = tuple(cut_rows(rows_VX, self.vocab_size) for rows_VX in head.heads)
        lit_NI, base_NH = lit_BMnI.flatten(0, 2), base_BMnH.flatten(0, 2)
        weight_N, q = weight_BMn.flatten(), (lit_NI, heads)
        total, alpha_N = self._compared(q, base_NH if share else None, p, next_N, weight_N, share)
        if self.anchors.state:
            far_N = apart(lit_NI[:, :wide], p_NG)
            total = total + self.anchors.state * (weight_N * far_N).sum()
        metrics = {} if alpha_N is None else self._by_depth("alpha", alpha_N, drawn)
        if fully:
            pairs_N = drawn.pair_BMn.flatten().float()
            agreeing = chunked_divergence(agreement, *q, *p, pairs_N)
            metrics |= self._by_depth("alpha", agreeing.alpha_N, drawn)
            metrics |= self._by_depth("top1", agreeing.loss_N, drawn)
        metrics |= self._by_depth("count", drawn.pair_BMn.float(), drawn)
        return StepOutput(total, batch.loss_mask.sum(), metrics)

    def _compared(
        self,
        q: tuple[Tensor, tuple[Tensor, ...]],
        base_NH: Tensor | None,
        p: tuple[Tensor, Tensor],
        next_N: Tensor,
        weight_N: Tensor,
        share: float,
    ) -> tuple[Tensor, Tensor | None]:
        """The weighted loss of all rows, of which the states without the light head have a share;
        and alpha of each row where a divergence gives it.
        """
        (lit_NI, heads), parts = q, dict(self.loss)
        alpha_N: Tensor | None = None
        states, weights = [lit_NI], [(1 - share) * weight_N]
        if base_NH is not None:
            low_NR = lit_NI.new_zeros(len(lit_NI), lit_NI.shape[1] - base_NH.shape[1])
            states.append(torch.cat([base_NH, low_NR], 1))
            weights.append(share * weight_N)
        total = torch.zeros((), device=weight_N.device)
        if "ce" in parts:
            own = zip(states, weights, strict=True)
            of_text = [
                chunked_cross_entropy(each, heads, next_N, weight)[0] for each, weight in own
            ]
            total = parts.pop("ce") * torch.stack(of_text).sum()
        if parts:
            losses = [mixed(parts, lk_weight(self.mean_alpha_D.mean()))] * len(states)
            # Row n of step s is read from n - 1 - s there: the target's logits serve both.
            turned = [each.roll(-1 - step, 0) for step, each in enumerate(states)]
            found = chunked_steps(losses, turned, heads, *p, torch.stack(weights))
            total, alpha_N = total + found[0], found[2][0]
        return total, alpha_N

    def _by_depth(self, name: str, values: Tensor, drawn: Drawn) -> dict[str, Tensor]:
        sums_n = (values.view(drawn.pair_BMn.shape) * drawn.pair_BMn).sum((0, 1))
        return {f"{name}_{depth}": total for depth, total in enumerate(sums_n)}

    def _base_share(self) -> float:
        """The share of the loss without the light head, in this step."""
        if not self.anchors.base_ends:
            return self.anchors.base
        left = 1 - float(self.steps_done) / self.anchors.base_ends
        return self.anchors.base * max(0.0, left)

    def _guess(self, p: tuple[Tensor, Tensor], next_N: Tensor) -> Guess:
        """What rows guess by a race that the text's tokens win."""

        @torch.no_grad()
        def guess(states_BRH: Tensor) -> Tensor:
            states_NH = states_BRH.flatten(0, 1)
            rows = rows_of(CHUNK_LOGITS, states_NH.device, len(p[1]))
            own_VH = cut_rows(self.head.target_head_VH, self.vocab_size)
            found = []
            parts = zip(states_NH.split(rows), p[0].split(rows), next_N.split(rows), strict=True)
            for own_CH, p_CG, token_C in parts:
                p_CV = (p_CG @ p[1].T).float().softmax(-1)
                q_logits_CV = (own_CH.to(own_VH.dtype) @ own_VH.T).float()
                found.append((q_logits_CV - posterior_race(p_CV, token_C)).argmax(-1))
            return torch.cat(found).view(states_BRH.shape[:2])

        return guess


def posterior_race(p_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """log E [N, V] of a race in which `tokens` win under p, drawn from its law given that: they
    come in at the least E_v / p_v. A token that p excludes is taken for barely possible.
    """
    p_NV = p_NV.clamp(min=torch.finfo(p_NV.dtype).tiny)
    time_N1 = torch.empty_like(p_NV[:, :1]).exponential_()
    later_NV = torch.empty_like(p_NV).exponential_().scatter_(1, tokens_N[:, None], 0.0)
    return (p_NV * time_N1 + later_NV).clamp(min=torch.finfo(p_NV.dtype).tiny).log()
