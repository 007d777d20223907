"""What heads with an LM head a depth are trained for, as Medusa's and Hydra's: the tokens ahead,
from the states of a target.

Head d at position t predicts x_{t+2+d}: the target itself has written x_{t+1}. It is compared with
that token, or with the target's own p_{t+1+d}, made from its state at t+1+d. A pair (t, d) is
trained where the text says that token t+2+d is (`Batch.loss_mask[t+1+d]`) and t is of the same
document. A head that goes on through the target's own layers predicts x_{t+1}, with p_t beside it:
that is depth -1 (`HeadObjective.begins`).

Legend: B rows, T positions, S = T - 1 - d positions with a token at depth d, N = B * S, H hidden
size, F = (number of taps) * H, V vocabulary, D depths.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.heads.head import Head
from draftsmith.models.target import check_split, cut_rows, head_weight
from draftsmith.models.tokenizer import vocab_size
from draftsmith.train.losses.chunked import Side, chunked_cross_entropy, chunked_divergence
from draftsmith.train.losses.pure import agreement, apart, divergence, lk_weight
from draftsmith.train.run.loop import Objective, StepOutput
from draftsmith.train.teachers.states import OnlineTaps, States
from draftsmith.train.text.batches import Batch


def trained_pairs(batch: Batch, depth: int) -> Tensor:
    """[B, S] bool: which positions t have a trained token t + 2 + depth in their document."""
    at = 1 + depth
    positions_BT = batch.position_ids
    same_BS = positions_BT[:, at:] == positions_BT[:, : max(0, positions_BT.shape[1] - at)] + at
    return batch.loss_mask[:, at:] & same_BS


class OnStates(Objective):
    """What objectives of heads share. Only the head, bound to the frozen target, is a submodule.

    states: the target's of a training batch; held-out ones are always computed. depths: how many
    have a mean alpha. Raises ValueError for a target whose logits aren't one product.
    """

    mean_alpha_D: Tensor  # of the step before
    alpha_name = "alpha"  # of the metric
    begins = 0  # the depth of what is drafted first; -1: the only one, and all are like it

    def __init__(
        self,
        head: Head,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        states: States,
        *,
        depths: int,
    ) -> None:
        super().__init__()
        check_split(target)
        self.head = head
        self._target, self._states = (target,), (states, OnlineTaps(target, head.taps))
        self.vocab_size = vocab_size(tokenizer)
        self.register_buffer("mean_alpha_D", torch.zeros(depths))

    @property
    def target(self) -> PreTrainedModel:
        return self._target[0]

    def observe(self, means: dict[str, float]) -> None:
        super().observe(means)
        for depth in range(len(self.mean_alpha_D)):
            pairs, alpha = (means.get(f"{name}_{depth}") for name in ("count", self.alpha_name))
            if pairs and alpha is not None:
                self.mean_alpha_D[depth] = alpha / pairs


class HeadObjective(OnStates):
    """sum_d decay^d sum_t loss(t, d) over the trained pairs; one normaliser for all depths, the
    trained tokens of the step.

    loss, beyond the arguments of `OnStates`: "ce", cross-entropy with the text's token, or a key of
    `pure.DIVERGENCES` with the target's distribution, ValueError for another. `lk` weighs its KL at
    each depth by the mean alpha of that depth in the step before (the first step by 1). The head
    gives `head_VH(depth)`, the LM head of each depth.

    Metrics are sums: count_d (trained pairs at depth d), alpha_d where the loss knows it, and in
    `measure` always alpha_d and top1_d (both argmaxes agree).

    state: weight of smooth-L1, its mean over H, between what the head's LM head multiplies and the
    target's state, beside each pair's loss. A head reads the states that it taps.
    """

    head: Any
    # Keys of a recipe that only this family reads; those without a group are arguments of it.
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, head: Head, *given: Any, loss: str, decay: float, state: float = 0.0
    ) -> None:
        super().__init__(head, *given, depths=1 if self.begins < 0 else head.levels)
        if loss != "ce":
            divergence(loss)  # what is wrong with it shows now
        if state < 0:
            raise ValueError(f"state: got {state}, expected a weight, 0 or more")
        self.loss, self.decay, self.state = loss, decay, state

    @staticmethod
    def fresh(recipe: Any, target: PreTrainedModel) -> Head:
        """The head of a recipe (see train/heads.py), with random weights."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> StepOutput:
        return self.score(batch, *self._states[0](batch))

    @torch.no_grad()
    def measure(self, batch: Batch) -> StepOutput:
        """As forward, on states made now, with alpha_d and top1_d."""
        return self.score(batch, *self._states[1](batch), fully=True)

    def drafted(self, batch: Batch, taps_BTF: Tensor) -> list[Tensor]:
        """What each depth's LM head multiplies, [B, S, H] or longer. taps: in the head's type."""
        raise NotImplementedError

    def score(
        self, batch: Batch, norm_BTH: Tensor, taps_BTF: Tensor, *, fully: bool = False
    ) -> StepOutput:
        """The step's sums from the target's states; fully: with what costs another pass."""
        total = torch.zeros((), device=norm_BTH.device)
        metrics: dict[str, Tensor] = {}
        compared = self._compared(batch, norm_BTH, taps_BTF)
        for depth, (q, p, tokens_N, mask_N) in enumerate(compared):
            weight_N = mask_N * self.decay**depth
            if self.state:
                total = total + self.state * (weight_N * apart(q[0], p[0])).sum()
            if self.loss == "ce":
                loss, _ = chunked_cross_entropy(*q, tokens_N, weight_N)
            else:
                of_pair = divergence(self.loss, kl_weight=lk_weight(self.mean_alpha_D[depth]))
                scored = chunked_divergence(of_pair, *q, *p, weight_N)
                loss, metrics[f"alpha_{depth}"] = scored.total, scored.alpha_N.sum()
            total = total + loss
            if fully:
                agreeing = chunked_divergence(agreement, *q, *p, mask_N)
                metrics[f"alpha_{depth}"] = agreeing.alpha_N.sum()
                metrics[f"top1_{depth}"] = agreeing.total
            metrics[f"count_{depth}"] = mask_N.sum()
        return StepOutput(total, batch.loss_mask.sum(), metrics)

    def _compared(
        self, batch: Batch, norm_BTH: Tensor, taps_BTF: Tensor
    ) -> Iterator[tuple[Side, Side, Tensor, Tensor]]:
        """Of each depth, flat: the head's states and rows, the target's, the tokens, a float mask
        of the pairs that count.
        """
        p_head_VH = cut_rows(head_weight(self.target), self.vocab_size)
        own = next(self.head.parameters()).dtype
        for depth, q_hidden_BTH in enumerate(self.drafted(batch, taps_BTF.to(own))):
            at = 1 + depth + self.begins
            mask_BS = trained_pairs(batch, depth + self.begins)
            q_hidden_NH = q_hidden_BTH[:, : mask_BS.shape[1]].flatten(0, 1)
            p_hidden_NH = norm_BTH[:, at:].flatten(0, 1).to(p_head_VH.dtype)
            # The last position of S has no token one further on, and is never trained.
            tokens_BT = batch.input_ids.roll(-1 - at, dims=1)
            yield (
                (q_hidden_NH, cut_rows(self.head.head_VH(depth), self.vocab_size)),
                (p_hidden_NH, p_head_VH),
                tokens_BT[:, : mask_BS.shape[1]].flatten(),
                mask_BS.flatten().float(),
            )
