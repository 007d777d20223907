"""What a draft LM that drafts several tokens in a pass is trained for (PARD, An et al., arXiv
2504.18583): its own next token, and behind MASKs the ones after.

    loss = sum_k w_k mean_t D(p_t+k, q_t+k),   k = 0 ... K - 1,   sum_k w_k = 1
    q_t = draft(x_<t),   q_t+k = draft(x_<t, MASK ... MASK),  k of them,   w_k ~ exp(-k / decay)

MASKs stand at the positions of the tokens that they stand for. Of a text the positions t whose K
tokens are drafted are every K-th, and all of them in turn, as each step draws where it begins; what
is behind these goes through one pass beside the text (`windows.py`). The paper takes every position
t, of which ever fewer reach the deeper k, and cross-entropy with the text.

Shapes: B rows, T positions, N = B * T.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.draft_lm import mask_token, set_mask
from draftsmith.models.tokenizer import vocab_size
from draftsmith.train.losses.chunked import Side
from draftsmith.train.losses.pure import agreement
from draftsmith.train.objectives.distillation import Distillation
from draftsmith.train.run.loop import StepOutput
from draftsmith.train.text.batches import Batch
from draftsmith.train.tuning.windows import inside, places, sides, windows


@dataclass(kw_only=True)
class Pard:
    """The group `pard` of a recipe: a draft LM that drafts several tokens in a pass."""

    levels: int = 0  # so many, K; 0: one
    decay: float = 0.0  # w_k = exp(-k / decay); 0: all alike
    mask_token: int = -1  # MASK; -1: the draft's own, else a spare row, else the padding token

    def __post_init__(self) -> None:
        if self.levels < 0 or self.levels == 1 or self.decay < 0:
            raise ValueError(
                f"pard: got levels={self.levels}, decay={self.decay}, expected 0, or 2 tokens "
                "and more, and a number from 0 up"
            )


class PardDistillation(Distillation):
    """Distillation of such a draft; `alpha` is of the first token, `ahead` the mean of the others.
    ValueError with what chooses or weighs tokens by themselves.
    """

    masks = True

    def __init__(self, how: Pard, draft: PreTrainedModel, *given: Any, **options: Any) -> None:
        super().__init__(draft, *given, **options)
        if self.weighting.select or self.weighting.by_depth or self.head is not None:
            raise ValueError(
                "pard.levels: got it with tokens.select, tokens.by_depth or head.weight, "
                "expected none of these: they know one token after each position"
            )
        mask = mask_token(vars(draft.config))
        assert mask is not None, "`masked` has told the draft"
        self.how, self.mask = how, mask

    def forward(self, batch: Batch) -> StepOutput:
        levels, rows = self.how.levels, None
        if self._parts().keys() != {"ce"}:
            with torch.no_grad():
                rows = self._teacher(batch)
        text, version, depth_N = self._sides(batch, int(levels * torch.rand(()).item()))
        weight_K = torch.exp(-torch.arange(levels) / (self.how.decay or math.inf))
        weight_K = (weight_K / weight_K.sum()).to(depth_N.device)
        trained_N, behind_N = batch.loss_mask.flatten(), depth_N > 0
        weight_N = levels * weight_K[depth_N] * behind_N
        first, alpha_N = self._score(batch, rows, text, weight_K[0] * trained_N)
        others, ahead_N = self._score(batch, rows, version, weight_N)
        metrics: dict[str, Tensor] = {}
        if alpha_N is not None and ahead_N is not None:
            metrics = {"alpha": alpha_N.sum(), "ahead": _share(ahead_N, behind_N, trained_N)}
        return StepOutput(first + others, batch.loss_mask.sum(), metrics)

    @torch.no_grad()
    def measure(self, batch: Batch, teacher: Any = None) -> StepOutput:
        rows = (teacher or self._teacher)(batch)
        text, version, depth_N = self._sides(batch, 0)
        found, behind_N = self._measured(batch, rows, text), depth_N > 0
        behind = rows.divergence(agreement, version, behind_N.float(), self.warp.transform)
        kept_N = behind.loss_N if self.warp.greedy else behind.alpha_N
        ahead = _share(kept_N, behind_N, batch.loss_mask)
        return found._replace(metrics=found.metrics | {"ahead": ahead})

    def _sides(self, batch: Batch, phase: int) -> tuple[Side, Side, Tensor]:
        """States and LM head of the text, and behind MASKs; how many of these [N], 0: no such row
        is trained.
        """
        begin_BT = windows(batch, self.how.levels, phase=phase)
        masks_BT = torch.full_like(batch.input_ids, self.mask)
        text, version = sides(self.draft, batch, masks_BT, begin_BT, self.vocab_size)
        depth_BT = torch.where(inside(begin_BT), places(batch) - begin_BT + 1, 0)
        return text, version, depth_BT.flatten()


def _share(kept_N: Tensor, behind_N: Tensor, trained: Tensor) -> Tensor:
    """The mean of the rows behind MASKs, times the trained tokens that it will be divided by."""
    return (kept_N * behind_N).sum() * trained.sum() / behind_N.sum().clamp(min=1)


def masked(
    draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: Pard
) -> PreTrainedModel:
    """The draft, whose config now says what its MASK is, by PARD's names. ValueError for one that
    is no row of its embeddings, and where none is to be had.
    """
    rows, known = draft.config.get_text_config().vocab_size, vocab_size(tokenizer)
    spare = known if known < rows else tokenizer.pad_token_id
    told = [how.mask_token, mask_token(vars(draft.config)), spare]
    mask = next((token for token in told if token is not None and token >= 0), None)
    if mask is None or mask >= rows:
        raise ValueError(
            f"pard.mask_token: got {mask} for a draft of {rows} rows without a spare one or a "
            "padding token, expected the number of a token that no text holds"
        )
    set_mask(draft.config, mask, how.levels)
    return draft
