"""What EAGLE heads are trained for: to run on from a frozen target's states by themselves.

    EAGLE-1: sum_t m [ smooth-L1(f'_t, f_{t+1}) + 0.1 KL(p_{t+1} || q_t) ], inputs f_t with noise
    EAGLE-3, MTP: sum_s decay^s sum_t m loss(p_{t+1+s}, q_{t,s}): S steps on its own outputs

Step s at position t reads the token x_{t+1+s} and predicts x_{t+2+s}. Rows are kept by the target's
position n = t + 1 + s; (t, s) is trained where `Batch.loss_mask[n]` says so and t is of the same
document, which is where n counts at least 1 + s tokens before it.

Where this differs from the papers: one normaliser, the trained tokens of the step, for all depths
(EAGLE-3's code divides by masked positions too); the soft cross-entropies are KL divergences, the
same gradient and 0 at its best.

Legend: B rows, T positions, N = B * T, S steps, H / G hidden size of the draft / the target, D
draft vocabulary, V the target's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.command import check_least
from draftsmith.models.heads.head import Head
from draftsmith.models.taps import TargetStates
from draftsmith.models.target import cut_rows, head_weight
from draftsmith.train.losses.chunked import chunked_steps, measure_steps
from draftsmith.train.losses.pure import Loss, apart, lk_weight, mixed, parse_loss
from draftsmith.train.objectives.heads import OnStates
from draftsmith.train.run.loop import StepOutput
from draftsmith.train.teachers.states import States
from draftsmith.train.text.batches import Batch


@dataclass(kw_only=True)
class Unroll:
    """The group `unroll` of a recipe: how a head is trained to go on from its own outputs."""

    steps: int = 7  # S; of EAGLE-1, the depths that are measured; of P-EAGLE it is head.parallel
    step_decay: float = 0.8  # of EAGLE-3, from one step to the next
    token_weight: float = 0.1  # of EAGLE-1's divergence
    noise: float = 0.2  # of EAGLE-1, on the target's states
    keep: float = 0.7  # of P-EAGLE, the share of places that goes on from one depth to the next
    least: float = 0.2  # of P-EAGLE, the least share of them at any depth

    def __post_init__(self) -> None:
        check_least(self, token_weight=0, noise=0)


NOISE_LENGTH = 512  # EAGLE-1's noise falls with the length of the text, and is 0.2 wide at this one


def trained(batch: Batch, steps: int) -> Tensor:
    """[S, N] bool: which (t, s) are trained, at n = t + 1 + s."""
    depth_S11 = torch.arange(1, steps + 1, device=batch.loss_mask.device).view(-1, 1, 1)
    return (batch.loss_mask & (batch.position_ids >= depth_S11)).flatten(1)


class EagleObjective(OnStates):
    """The unrolled head against the target.

    Where the target's likeliest token is outside the draft vocabulary, EAGLE-3 trains on what is
    left of p, as speculators does: the rest of such a p is still what drafts are accepted by. The
    LM head is left as it was where its weight needs no gradient. EAGLE-1's smooth-L1 is a mean over
    H; its noise is uniform, from torch's generator, which the loop seeds at every step.

    loss, beyond the arguments of `OnStates`: see `pure.parse_loss`, but not ce. `lk` weighs its KL
    at each step by the mean alpha of that step in the optimizer step before (the first by 1).
    ValueError for an unknown loss, less than a step, or a decay out of range, too.

    Metrics are sums: count_s, the trained pairs of step s; alpha_s, of their sum_v min(p, q).
    Training compares on the draft vocabulary and calls that restricted_alpha_s unless it is the
    whole one; `measure` gives alpha_s by p over the whole vocabulary, and top1_s, how often both
    argmaxes agree.
    """

    head: Any

    def __init__(
        self, unroll: Unroll, head: Head, target: PreTrainedModel, *given: Any, loss: str = "fkl"
    ) -> None:
        if unroll.steps < 1:
            raise ValueError(f"unroll.steps: got {unroll.steps}, expected at least 1")
        if not 0 < unroll.step_decay <= 1:
            raise ValueError(f"step_decay: got {unroll.step_decay}, expected above 0 and at most 1")
        super().__init__(head, target, *given, depths=unroll.steps)
        self.unroll, self.steps, self.loss = unroll, unroll.steps, parse_loss(loss)
        self.first = head.kind in ("eagle1", "dovetail", "mixture")
        mixed(self.loss)  # what is wrong with it shows now
        # Rows past the tokenizer's are no tokens. The ids ascend: what is left is a prefix.
        ids_D = self.head.vocab.ids_D.to(target.device)
        own = slice(self.vocab_size) if self.head.vocab.is_full else ids_D < self.vocab_size
        ids_D = ids_D[own]
        head_VG = cut_rows(head_weight(target).detach(), self.vocab_size)
        whole = len(ids_D) == len(head_VG)
        self.alpha_name = "alpha" if whole else "restricted_alpha"
        # Frozen, so gathered once. Not buffers: they aren't saved.
        self._p_heads = (head_VG if whole else head_VG[ids_D], head_VG, ids_D)

    def forward(self, batch: Batch) -> StepOutput:
        seen = self._states[0](batch)
        if self.head.kind in ("eagle1", "dovetail") and self.unroll.noise:
            width_BT1 = self.unroll.noise * NOISE_LENGTH / batch.lengths.unsqueeze(2)
            noise_BTF = (torch.rand_like(seen.taps_BTF) - 0.5) * width_BT1
            seen = seen._replace(taps_BTF=seen.taps_BTF + noise_BTF)
        weights_S = self._weights(seen.norm_BTG.device)
        weight_SN = trained(batch, len(weights_S)) * weights_S.unsqueeze(1)
        given = self.drawn(batch)
        losses, steps_SNH, q_head_DH, norm_NG = self._compared(batch, seen, len(weights_S), **given)
        total, _, alpha_SN = chunked_steps(
            losses, steps_SNH, q_head_DH, norm_NG, self._p_heads[0], weight_SN
        )
        if self.first:
            total = total + _state_loss(batch, seen, steps_SNH[0])
        metrics = _sums({self.alpha_name: alpha_SN, "count": (weight_SN > 0).float()})
        return StepOutput(total, batch.loss_mask.sum(), metrics)

    @torch.no_grad()
    def measure(self, batch: Batch, states: States | None = None) -> StepOutput:
        """The loss without noise, and the acceptance at every depth up to S. states: for text whose
        states are kept; by default they are computed.
        """
        seen = (states or self._states[1])(batch)
        weight_SN = trained(batch, self.steps).float()
        losses, steps_SNH, q_head_DH, norm_NG = self._compared(batch, seen, self.steps)
        loss_SN, alpha_SN, top1_SN = measure_steps(
            losses, steps_SNH, q_head_DH, norm_NG, *self._p_heads[1:], weight_SN
        )
        weights_S = self._weights(weight_SN.device)
        total = (loss_SN.sum(1)[: len(weights_S)] * weights_S).sum()
        if self.first:
            total = total + _state_loss(batch, seen, steps_SNH[0])
        metrics = _sums({"alpha": alpha_SN, "top1": top1_SN, "count": weight_SN})
        return StepOutput(total, batch.loss_mask.sum(), metrics)

    def drawn(self, batch: Batch) -> dict[str, Tensor]:
        """What a training step draws for the head's `unroll`."""
        return {}

    def _weights(self, device: torch.device) -> Tensor:
        """Of the trained steps, in fp32. No buffer: DeepSpeed casts those."""
        steps_S = torch.arange(1 if self.first else self.steps, dtype=torch.float32, device=device)
        return (self.unroll.token_weight if self.first else 1.0) * self.unroll.step_decay**steps_S

    def _compared(
        self, batch: Batch, seen: TargetStates, steps: int, **drawn: Tensor
    ) -> tuple[list[Loss], list[Tensor], Tensor, Tensor]:
        """Losses, the head's states and LM head, the target's states, for `chunked_steps`."""
        hidden_BTH = self.head.fuse(seen.taps_BTF.to(self.head.fc.weight.dtype))
        text = (batch.input_ids, batch.position_ids, batch.attention_mask)
        states = self.head.unroll(hidden_BTH, *text, steps=steps, **drawn)
        losses = [mixed(self.loss, lk_weight(alpha)) for alpha in self.mean_alpha_D[:steps]]
        q_head_DH = cut_rows(self.head.head_DH, len(self._p_heads[2]))
        return losses, [s.flatten(0, 1) for s in states], q_head_DH, seen.norm_BTG.flatten(0, 1)


def _state_loss(batch: Batch, seen: TargetStates, first_NH: Tensor) -> Tensor:
    """sum_t m smooth-L1(f'_t, f_{t+1}): the draft's state is the target's one further on."""
    loss_N = apart(first_NH.roll(1, 0), seen.norm_BTG.flatten(0, 1))
    return loss_N[trained(batch, 1)[0]].sum()


def _sums(rows_SN: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"{name}_{step}": total
        for name, values_SN in rows_SN.items()
        for step, total in enumerate(values_SN.sum(1))
    }
