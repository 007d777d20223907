"""Prompts behind a text that say what comes after the next token (PPD, Chen et al., arXiv
2405.18628): embeddings of some tokens beyond the tokenizer's, all that is trained of a target.

    loss = sum_t sum_k decay^(k - 1) KL(p_t+k || p(. | x_<=t, prompt_1 ... prompt_k)),   k = 1 ... M

p_t+k is the target's own law after x_1 ... x_t+k. Positions t are every M + 1-th, and all of them
in turn; what is behind these goes through one pass beside the text (`windows.py`). The paper draws
where a text is cut instead. `drafter=ppd:M` decodes with them.

Shapes: B rows, T positions, N = B * T, V tokens of the tokenizer, H hidden.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.train.losses.chunked import chunked_divergence
from draftsmith.train.losses.pure import forward_kl
from draftsmith.train.run.loop import StepOutput
from draftsmith.train.text.batches import Batch
from draftsmith.train.tuning.windows import BesideText, inside, places, windows


@dataclass(kw_only=True)
class Prompts:
    """The group `prompts` of a recipe."""

    count: int = 3  # M
    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 < self.decay <= 1:
            raise ValueError(
                f"prompts: got count={self.count}, decay={self.decay}, expected 1 or more, and a "
                "factor in (0, 1]"
            )


class PromptsObjective(BesideText):
    """See above. Metrics: `prompts`, the sum without its weights, and `asked`, of how many rows.
    The model is frozen but for the prompts, which it gets here if it has no such rows.
    """

    def __init__(self, model: PreTrainedModel, how: Prompts, *, vocab_size: int) -> None:
        super().__init__(model, vocab_size)
        self.how, self.drafter = how, f"ppd:{how.count}"

    def forward(self, batch: Batch) -> StepOutput:
        return self._scored(batch, int((self.how.count + 1) * torch.rand(()).item()))

    @torch.no_grad()
    def measure(self, batch: Batch) -> StepOutput:
        """Also the mean divergence behind prompts, `behind`."""
        found, scored = super().measure(batch), self._scored(batch, 0).metrics
        behind = scored["prompts"] / scored["asked"].clamp(min=1) * found.tokens
        return found._replace(metrics={"behind": behind})

    def _scored(self, batch: Batch, phase: int) -> StepOutput:
        begin_BT = windows(batch, self.how.count + 1, phase=phase)
        behind_BT = (places(batch) - begin_BT).clamp(max=self.how.count - 1)
        text, version = self.sides(batch, self.vocab_size + behind_BT, begin_BT)
        weight_N = (inside(begin_BT) * self.how.decay**behind_BT).flatten()
        (p_NH, head_VH), (q_NH, _) = text, version
        both = q_NH, head_VH.detach(), p_NH.detach(), head_VH.detach()  # LM heads are frozen
        found = chunked_divergence(forward_kl, *both, weight_N)
        metrics = {"prompts": found.loss_N.sum(), "asked": inside(begin_BT).sum()}
        return StepOutput(found.total, batch.loss_mask.sum(), metrics)


@torch.no_grad()
def with_prompts(model: PreTrainedModel, how: Prompts, vocab_size: int) -> PreTrainedModel:
    """The model with embeddings of so many tokens beyond the tokenizer's, which alone are trained;
    they begin as the mean of all.
    """
    table: Any = model.get_input_embeddings().weight
    if len(table) < vocab_size + how.count:
        model.resize_token_embeddings(vocab_size + how.count, mean_resizing=False)
    model.requires_grad_(False)
    table = model.get_input_embeddings().weight
    table[vocab_size:] = table[:vocab_size].mean(0)
    table.requires_grad_()
    mine_V1 = torch.arange(len(table), device=table.device)[:, None] >= vocab_size
    table.register_hook(lambda gradient_VH: gradient_VH * mine_V1)
    return model
