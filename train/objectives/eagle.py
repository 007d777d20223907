"""What EAGLE heads are trained for: to run on from a frozen target's states by themselves.

    EAGLE-1: sum_t m [ smooth-L1(f'_t, f_{t+1}) + 0.1 KL(p_{t+1} || q_t) ], inputs f_t with noise
    EAGLE-3: sum_s decay^s sum_t m loss(p_{t+1+s}, q_{t,s}): S steps on its own outputs

Step s at position t reads the token x_{t+1+s} and predicts x_{t+2+s}. Rows are kept by the target's
position n = t + 1 + s; (t, s) is trained where `Batch.loss_mask[n]` says so and t is of the same
document, which is where n counts at least 1 + s tokens before it.

Where this differs from the papers: one normaliser, the trained tokens of the step, for all depths
(EAGLE-3's code divides by masked positions too); the soft cross-entropies are KL divergences, the
same gradient and 0 at its best.

Legend: B rows, T positions, N = B * T, S steps, H / G hidden size of the draft / the target, D
draft vocabulary, V the target's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.taps import TargetStates
from draftsmith.models.target import cut_rows, split_head
from draftsmith.train.losses.chunked import chunked_steps, measure_steps
from draftsmith.train.losses.pure import Loss, lk_weight, mixed, parse_loss
from draftsmith.train.objectives.heads import OnStates
from draftsmith.train.run.loop import StepOutput
from draftsmith.train.teachers.states import States
from draftsmith.train.text.batches import Batch


@dataclass(kw_only=True)
class Unroll:
    """The group `unroll` of a recipe: how a head is trained to go on from its own outputs."""

    steps: int = 7  # S; of EAGLE-1, the depths that are measured
    step_decay: float = 0.8  # of EAGLE-3, from one step to the next
    token_weight: float = 0.1  # of EAGLE-1's divergence
    noise: float = 0.2  # of EAGLE-1, on the target's states


NOISE_LENGTH = 512  # EAGLE-1's noise falls with the length of the text, and is 0.2 wide at this one


def trained(batch: Batch, steps: int) -> Tensor:
    """[S, N] bool: which (t, s) are trained, at n = t + 1 + s."""
    depth_S11 = torch.arange(1, steps + 1, device=batch.loss_mask.device).view(-1, 1, 1)
    return (batch.loss_mask & (batch.position_ids >= depth_S11)).flatten(1)


class EagleObjective(OnStates):
    """What both versions share: the unrolled head against the target.

    Args beyond `OnStates`:
        steps: S, how many `measure` runs.
        loss: a key of `pure.DIVERGENCES`, or weights of several. `lk` weighs its KL at each step
            by the mean alpha of that step in the optimizer step before (the first by 1).

    Raises ValueError for an unknown loss, or less than a step, too.

    Metrics are sums: count_s, the trained pairs of step s; alpha_s, of their sum_v min(p, q).
    Training compares on the draft vocabulary and calls that restricted_alpha_s unless it is the
    whole one; `measure` gives alpha_s by p over the whole vocabulary, and top1_s, how often both
    argmaxes agree.
    """

    head: Eagle

    def __init__(
        self,
        head: Eagle,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        states: States,
        *,
        steps: int,
        loss: str | Mapping[str, float] = "fkl",
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps: got {steps}, expected at least 1")
        super().__init__(head, target, tokenizer, states, depths=steps)
        self.steps = steps
        self.loss = {loss: 1.0} if isinstance(loss, str) else dict(loss)
        mixed(self.loss)  # what is wrong with it shows now
        # Rows past the tokenizer's are no tokens. The ids ascend: what is left is a prefix.
        ids_D = head.vocab.ids_D.to(target.device)
        own = slice(self.vocab_size) if head.vocab.is_full else ids_D < self.vocab_size
        ids_D = ids_D[own]
        head_VG = cut_rows(split_head(target)[1].detach(), self.vocab_size)
        whole = len(ids_D) == len(head_VG)
        self.alpha_name = "alpha" if whole else "restricted_alpha"
        # Frozen, so gathered once. Not buffers: they aren't saved.
        self._p_heads = (head_VG if whole else head_VG[ids_D], head_VG, ids_D)

    @staticmethod
    def of(unroll: Unroll, *given: Any, loss: str) -> "EagleObjective":
        """What a head of its version is trained for. given: head, target, tokenizer, states;
        loss: as recipes spell it.
        """
        shared: dict[str, Any] = {"steps": unroll.steps, "loss": parse_loss(loss)}
        if given[0].config.version == 3:
            return Eagle3Objective(*given, **shared, step_decay=unroll.step_decay)
        shared |= {"token_weight": unroll.token_weight, "noise": unroll.noise}
        return Eagle1Objective(*given, **shared)

    @torch.no_grad()
    def measure(self, batch: Batch, states: States | None = None) -> StepOutput:
        """The loss without noise, and the acceptance at every depth up to S.

        states: for text whose states are kept; by default they are computed.
        """
        seen = (states or self._states[1])(batch)
        steps_SNH = self.unrolled(batch, seen.taps_BTF, self.steps)
        weight_SN, losses = trained(batch, self.steps).float(), self._losses(self.steps)
        _, p_head_VG, ids_D = self._p_heads
        norm_NG = seen.norm_BTG.flatten(0, 1)
        scores = measure_steps(
            losses, steps_SNH, self._q_head(), norm_NG, p_head_VG, ids_D, weight_SN
        )
        rows = {"alpha": scores.alpha_SN, "top1": scores.top1_SN, "count": weight_SN}
        metrics = _sums(rows)
        loss_S = scores.loss_SN.sum(1)
        return StepOutput(
            self._measured(batch, seen, steps_SNH, loss_S), batch.loss_mask.sum(), metrics
        )

    def unrolled(self, batch: Batch, taps_BTF: Tensor, steps: int) -> list[Tensor]:
        """What the LM head multiplies at each step, [N, H]."""
        hidden_BTH = self.head.fuse(taps_BTF.to(self.head.fc.weight.dtype))
        states = self.head.unroll(
            hidden_BTH, batch.input_ids, batch.position_ids, batch.attention_mask, steps=steps
        )
        return [state_BTH.flatten(0, 1) for state_BTH in states]

    def compare(
        self, batch: Batch, seen: TargetStates, steps_SNH: list[Tensor], weight_SN: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted loss, and the metrics of training."""
        norm_NG = seen.norm_BTG.flatten(0, 1)
        losses, p_head_DG = self._losses(len(steps_SNH)), self._p_heads[0]
        scored = chunked_steps(losses, steps_SNH, self._q_head(), norm_NG, p_head_DG, weight_SN)
        rows = {self.alpha_name: scored.alpha_SN, "count": (weight_SN > 0).float()}
        return scored.total, _sums(rows)

    def _measured(
        self, batch: Batch, seen: TargetStates, steps_SNH: list[Tensor], loss_S: Tensor
    ) -> Tensor:
        """The training loss from the measured states."""
        raise NotImplementedError

    def _losses(self, steps: int) -> list[Loss]:
        return [mixed(self.loss, lk_weight(alpha)) for alpha in self.mean_alpha_D[:steps]]

    def _q_head(self) -> Tensor:
        return cut_rows(self.head.head_DH, len(self._p_heads[2]))


class Eagle3Objective(EagleObjective):
    """The training-time test: S steps on the head's own outputs.

    Args beyond `EagleObjective`:
        step_decay: weight of step s is step_decay^s.

    Where the target's likeliest token is outside the draft vocabulary it trains on what is left of
    p, as speculators does: the rest of such a p is still what drafts are accepted by. The LM head
    is left as it was where its weight needs no gradient.
    """

    def __init__(self, *given: Any, step_decay: float = 0.8, **about: Any) -> None:
        super().__init__(*given, **about)
        if not 0 < step_decay <= 1:
            raise ValueError(f"step_decay: got {step_decay}, expected above 0 and at most 1")
        self.step_decay = step_decay

    def forward(self, batch: Batch) -> StepOutput:
        seen = self._states[0](batch)
        kept_SN = trained(batch, self.steps)
        weight_SN = kept_SN * self._decay(kept_SN.device).unsqueeze(1)
        steps_SNH = self.unrolled(batch, seen.taps_BTF, self.steps)
        loss, metrics = self.compare(batch, seen, steps_SNH, weight_SN)
        return StepOutput(loss, batch.loss_mask.sum(), metrics)

    def _decay(self, device: torch.device) -> Tensor:
        """The weights of the steps, [S] in fp32. No buffer: DeepSpeed casts those."""
        return self.step_decay ** torch.arange(self.steps, dtype=torch.float32, device=device)

    def _measured(
        self, batch: Batch, seen: TargetStates, steps_SNH: list[Tensor], loss_S: Tensor
    ) -> Tensor:
        return (loss_S * self._decay(loss_S.device)).sum()


class Eagle1Objective(EagleObjective):
    """One step: the next state by smooth-L1 (mean over H), the next token by a divergence.

    Args beyond `EagleObjective`:
        token_weight: of the second; the first counts 1.
        noise: width of the uniform noise on the target's states in a document of 512 tokens; it
            falls with its length. Drawn from torch's generator, which the loop seeds at every step.
    """

    def __init__(
        self, *given: Any, token_weight: float = 0.1, noise: float = 0.2, **about: Any
    ) -> None:
        super().__init__(*given, **about)
        self.token_weight, self.noise = token_weight, noise

    def forward(self, batch: Batch) -> StepOutput:
        seen = self._states[0](batch)
        taps_BTF = seen.taps_BTF
        if self.noise:
            width_BT1 = self.noise * NOISE_LENGTH / batch.lengths.unsqueeze(2)
            taps_BTF = taps_BTF + (torch.rand_like(taps_BTF) - 0.5) * width_BT1
        steps_SNH = self.unrolled(batch, taps_BTF, 1)
        weight_SN = trained(batch, 1).float()
        tokens, metrics = self.compare(batch, seen, steps_SNH, self.token_weight * weight_SN)
        loss = tokens + self._feature_loss(batch, seen, steps_SNH[0])
        return StepOutput(loss, batch.loss_mask.sum(), metrics)

    def _feature_loss(self, batch: Batch, seen: TargetStates, first_NH: Tensor) -> Tensor:
        """sum_t m smooth-L1(f'_t, f_{t+1}): the draft's state is the target's one further on."""
        found_NH = first_NH.roll(1, 0).float()
        loss_N = F.smooth_l1_loss(
            found_NH, seen.norm_BTG.flatten(0, 1).float(), reduction="none"
        ).mean(-1)
        return loss_N[trained(batch, 1)[0]].sum()

    def _measured(
        self, batch: Batch, seen: TargetStates, steps_SNH: list[Tensor], loss_S: Tensor
    ) -> Tensor:
        return self._feature_loss(batch, seen, steps_SNH[0]) + self.token_weight * loss_S[0]


def _sums(rows_SN: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"{name}_{step}": total
        for name, values_SN in rows_SN.items()
        for step, total in enumerate(values_SN.sum(1))
    }
