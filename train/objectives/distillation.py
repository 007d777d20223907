"""What a draft is trained for: modules that hold the draft and give a micro-batch's summed loss.

The target isn't a submodule, so that it is neither wrapped, sharded, optimised nor saved.

Legend: B rows, T positions, N = B * T, H hidden size of the draft, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.draft_lm import mask_token
from draftsmith.models.target import check_split, cut_rows, output_head, without_bias
from draftsmith.train.losses.chunked import Divergence, Side, chunked_cross_entropy
from draftsmith.train.losses.pure import (
    agreement,
    divergence,
    forward_kl,
    lk_weight,
    mixed,
    parse_loss,
)
from draftsmith.train.losses.token_selection import Weighting, check, depth_weights, selected
from draftsmith.train.run.loop import Counting, Objective, StepOutput
from draftsmith.train.scoring.joint import AcceptanceLoss
from draftsmith.train.teachers.teachers import TargetRows, Teacher
from draftsmith.train.text.batches import Batch


class NextToken(Objective):
    """Cross-entropy of `model` with the text itself."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> StepOutput:
        next_N, weight_N = batch.input_ids.roll(-1, 1).flatten(), batch.loss_mask.flatten().float()
        q = hidden_and_head(self.model, batch)
        return StepOutput(chunked_cross_entropy(*q, next_N, weight_N)[0], weight_N.sum(), {})


@dataclass(kw_only=True)
class Losses:
    """The group `loss` of a recipe: what the draft is trained to."""

    name: str = "fkl"  # see losses.parse_loss: fkl, tv, 0.5*ce+0.5*fkl ...
    beta: float = 0.5  # of jsd
    second: str = ""  # takes over after second_from of the steps; empty: none
    second_from: float = 0.5


# The weights of a loss's parts by the step that each stage begins at; beta of jsd.
Stages = tuple[dict[int, dict[str, float]], float]


class Distillation(Counting):
    """A divergence of the draft from the target, after the one transform on both sides.

    vocab_size: tokens of the tokenizer; logits beyond are padding. warp: temperature, top-k and
    top-p of the comparison; at temperature 0 the distributions are compared as they are, and alpha
    is the agreement of the argmaxes (in `measure`). weighting: which tokens count; None: all alike.
    reference: the frozen draft that the weighting compares with, where it does. head: an acceptance
    head that is trained along, on all trained tokens.

    ValueError for a wrong weighting, or a draft whose logits aren't one product of its last state.

    `lk` weighs its KL by the mean alpha of the step before, over all processes and micro-batches
    (the first step by 1); the paper's code takes the alpha of the same micro-batch. `by_depth`
    divides its weights by their mean in the step before, too. A loss that is cross-entropy alone
    runs no target, and has no alpha to show.
    """

    mean_alpha: Tensor
    mean_worth: Tensor
    masks = False  # whether it shows the draft MASKs

    def __init__(
        self,
        draft: PreTrainedModel,
        teacher: Teacher,
        loss: Stages,
        *,
        vocab_size: int,
        warp: SamplingParams,
        weighting: Weighting | None = None,
        reference: PreTrainedModel | None = None,
        head: AcceptanceLoss | None = None,
    ) -> None:
        super().__init__()
        self.weighting = weighting or Weighting()
        check(self.weighting)
        check_split(draft)
        if mask_token(vars(draft.config)) is not None and not self.masks:
            raise ValueError(
                "draft: got one that drafts a round in one pass (pard_token), expected pard.levels "
                "with it: training that shows it no MASKs would unlearn them"
            )
        self.stages, self.beta = loss
        self.draft, self.head = draft, head
        self._teacher, self._reference = teacher, (reference,)
        self.vocab_size, self.warp = vocab_size, warp
        self.register_buffer("mean_alpha", torch.zeros(()))
        if self.weighting.by_depth:
            self.register_buffer("mean_worth", torch.ones(()))

    @property
    def chooses(self) -> str:
        return "tokens.select" if self.weighting.select else ""

    def tokens(self, batch: Batch) -> int:
        """ValueError where `tokens.keep` leaves none."""
        tokens, keep = super().tokens(batch), self.weighting.keep
        count = int(keep * tokens) if self.weighting.select else tokens
        if tokens and not count:
            raise ValueError(
                f"tokens.keep: got {keep} of the {tokens} trained tokens in examples "
                f"{list(batch.rows)}, which leaves none; raise keep or batch_size"
            )
        return count

    def forward(self, batch: Batch) -> StepOutput:
        counts = self.weighting.select or self.weighting.by_depth
        rows: Any = None
        if counts or self.head is not None or self._parts().keys() != {"ce"}:
            with torch.no_grad():
                rows = self._teacher(batch)
        q = hidden_and_head(self.draft, batch, self.vocab_size)
        weight_N = batch.loss_mask.flatten().float()
        if counts:
            weight_N = self._weights(batch, rows, q)
        metrics = {}
        if self.weighting.by_depth:
            metrics["worth"] = weight_N.sum()
            weight_N = weight_N / self.mean_worth
        loss, alpha_N = self._score(batch, rows, q, weight_N)
        if alpha_N is not None:
            metrics["alpha"] = (alpha_N * (weight_N > 0)).sum()
        tokens = self.tokens(batch)
        if self.head is not None:
            mean = self.head(rows, q, batch.loss_mask.flatten(), self.warp.transform)
            loss = loss + self.head.weight * tokens * mean
            metrics["head"] = tokens * mean.detach()
        return StepOutput(loss, torch.tensor(tokens, device=loss.device), metrics)

    @torch.no_grad()
    def measure(self, batch: Batch, teacher: Teacher | None = None) -> StepOutput:
        """The loss on all trained tokens, alpha, and where the argmaxes agree. teacher: for text
        that the one of training doesn't know.
        """
        q = hidden_and_head(self.draft, batch, self.vocab_size)
        return self._measured(batch, (teacher or self._teacher)(batch), q)

    def _measured(self, batch: Batch, rows: TargetRows, q: Side) -> StepOutput:
        weight_N = batch.loss_mask.flatten().float()
        loss, _ = self._score(batch, rows, q, weight_N)
        found = rows.divergence(agreement, q, weight_N, self.warp.transform)
        alpha = found.total if self.warp.greedy else found.alpha_N.sum()
        return StepOutput(loss, batch.loss_mask.sum(), {"alpha": alpha, "agreement": found.total})

    def observe(self, means: dict[str, float]) -> None:
        super().observe(means)
        for name in {"alpha", "worth"} & means.keys():
            self.get_buffer(f"mean_{name}").fill_(means[name])

    def _parts(self) -> dict[str, float]:
        """The loss of the stage that the run is in."""
        return self.stages[max(first for first in self.stages if first <= int(self.steps_done))]

    def _score(
        self, batch: Batch, rows: Any, q: Side, weight_N: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The loss's sum, and alpha of each position where the loss has to do with the target."""
        parts, total = self._parts(), weight_N.new_zeros(())
        if "ce" in parts:
            next_N = batch.input_ids.roll(-1, 1).flatten()
            total = total + parts["ce"] * chunked_cross_entropy(*q, next_N, weight_N)[0]
        of_target = {name: weight for name, weight in parts.items() if name != "ce"}
        if not of_target:
            return total, None
        loss = mixed(of_target, lk_weight(self.mean_alpha), self.beta)
        scored = rows.divergence(loss, q, weight_N, self.warp.transform)
        return total + scored.total, scored.alpha_N

    @torch.no_grad()
    def _weights(self, batch: Batch, rows: TargetRows, q: Side) -> Tensor:
        """What each position counts."""
        mask_N, select = batch.loss_mask.flatten(), self.weighting.select

        def scored(side: Side) -> Divergence:
            return rows.divergence(forward_kl, side, mask_N.float(), self.warp.transform)

        if self.weighting.by_depth:
            alpha_BT = scored(q).alpha_N.view_as(batch.loss_mask)
            return depth_weights(alpha_BT, batch.loss_mask, self.weighting.by_depth).flatten()
        loss_N = reference_N = torch.zeros(len(mask_N), device=mask_N.device)
        if select in ("adaspec", "bottom"):
            loss_N = scored(q).loss_N
        if select != "random":
            assert self._reference[0] is not None, "no reference draft"
            of_reference = hidden_and_head(self._reference[0], batch, self.vocab_size)
            reference_N = scored(of_reference).loss_N
        return selected(select, self.tokens(batch), mask_N, loss_N, reference_N)


def stages(loss: Losses, steps: int) -> Stages:
    """The stages of a run of so many steps. ValueError: an unknown loss, a beta that jsd hasn't, or
    a stage without any step.
    """
    found = {0: parse_loss(loss.name)}
    if loss.second:
        first = round(loss.second_from * steps)
        if not 0 < first < steps:
            raise ValueError(
                f"loss.second_from: got {loss.second_from}, which leaves {first} and "
                f"{steps - first} of {steps} steps; expected some for each stage"
            )
        found[first] = parse_loss(loss.second)
    if any("jsd" in parts for parts in found.values()):
        divergence("jsd", loss.beta)  # what is wrong with it shows now
    return found, loss.beta


def hidden_and_head(model: PreTrainedModel, batch: Batch, rows: int | None = None) -> Side:
    """The states [N, H] that `model`'s head [V, H] turns into logits; rows: of it that count."""
    body, head_VH, bias_V = output_head(model)
    hidden_BTH = body(**batch.inputs, use_cache=False).last_hidden_state
    hidden_NH, head_VH = without_bias(hidden_BTH.flatten(0, 1), head_VH, bias_V)
    return hidden_NH, cut_rows(head_VH, rows or len(head_VH))
