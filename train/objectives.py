"""What a draft is trained for: modules that hold the draft and give a micro-batch's summed loss.

The target isn't a submodule, so that it is neither wrapped, sharded, optimised nor saved.

Legend: B rows, T positions, N = B * T, H / G hidden size of draft / target, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.target import check_split, split_head
from draftsmith.models.tokenizer import vocab_size
from draftsmith.train.chunked import Divergence, chunked_cross_entropy, chunked_divergence
from draftsmith.train.data import Batch
from draftsmith.train.loop import Objective, StepOutput
from draftsmith.train.losses import Loss, agreement, divergence, lk_weight

# Of draft and target: hidden [N, H], head [V, H], hidden [N, G], head [V, G].
States = tuple[Tensor, Tensor, Tensor, Tensor]


class NextToken(Objective):
    """Cross-entropy of `model` with the text itself."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> StepOutput:
        hidden_NH, head_VH = hidden_and_head(self.model, batch)
        next_N = batch.input_ids.roll(-1, dims=1).flatten()
        weight_N = batch.loss_mask.flatten().float()
        total, _ = chunked_cross_entropy(hidden_NH, head_VH, next_N, weight_N)
        return StepOutput(total, weight_N.sum(), {})


class Distillation(Objective):
    """A divergence of the draft from the target, after the one transform on both sides.

    Args:
        draft: trained.
        target: frozen, on the same device.
        loss: a key of `losses.DIVERGENCES`; beta belongs to `jsd`.
        warp: temperature, top-k and top-p of the comparison. At temperature 0 the distributions are
            compared as they are, and alpha is the agreement of the argmaxes (in `measure`).

    Raises:
        ValueError: an unknown loss, or a model whose logits aren't one product of its last state.

    `lk` weighs its KL by the mean alpha of the step before, over all processes and micro-batches
    (the first step by 1); the reference takes the alpha of the same micro-batch.
    """

    mean_alpha: Tensor

    def __init__(
        self,
        draft: PreTrainedModel,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        loss: str,
        beta: float,
        warp: SamplingParams,
    ) -> None:
        super().__init__()
        # What is wrong with them shows now, not at the first step.
        divergence(loss, beta)
        check_split(target)
        check_split(draft)
        self.draft = draft
        self._target = (target,)
        self.vocab_size = vocab_size(tokenizer)
        self.loss, self.beta, self.warp = loss, beta, warp
        self.register_buffer("mean_alpha", torch.zeros(()))

    def forward(self, batch: Batch) -> StepOutput:
        scored = self._compare(self._divergence(), batch, self._states(batch))
        return StepOutput(scored.total, batch.loss_mask.sum(), {"alpha": scored.alpha_N.sum()})

    @torch.no_grad()
    def measure(self, batch: Batch) -> StepOutput:
        """As forward, with the share of positions where the argmaxes agree."""
        states = self._states(batch)
        scored = self._compare(self._divergence(), batch, states)
        agreeing = self._compare(agreement, batch, states).total
        alpha = agreeing if self.warp.greedy else scored.alpha_N.sum()
        metrics = {"alpha": alpha, "agreement": agreeing}
        return StepOutput(scored.total, batch.loss_mask.sum(), metrics)

    def observe(self, means: dict[str, float]) -> None:
        self.mean_alpha.fill_(means["alpha"])

    def _divergence(self) -> Loss:
        return divergence(self.loss, self.beta, kl_weight=lk_weight(self.mean_alpha))

    def _states(self, batch: Batch) -> States:
        with torch.no_grad():
            p_hidden_NG, p_head_VG = hidden_and_head(self._target[0], batch)
        q_hidden_NH, q_head_VH = hidden_and_head(self.draft, batch)
        rows = self.vocab_size
        return q_hidden_NH, cut_rows(q_head_VH, rows), p_hidden_NG, cut_rows(p_head_VG, rows)

    def _compare(self, loss: Loss, batch: Batch, states: States) -> Divergence:
        weight_N = batch.loss_mask.flatten().float()
        return chunked_divergence(loss, *states, weight_N, transform=self.warp.transform)


def cut_rows(head_VH: Tensor, rows: int) -> Tensor:
    """An LM head's first rows, without padding. A slice of all would cost a copy backward."""
    return head_VH if len(head_VH) == rows else head_VH[:rows]


def hidden_and_head(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """The states [N, H] that `model`'s head [V, H] turns into logits."""
    body, head_VH = split_head(model)
    hidden_BTH = body(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
    ).last_hidden_state
    return hidden_BTH.flatten(0, 1), head_VH
