"""Consistency training (CLLM, Kou et al., arXiv 2403.00835): from any guess of a window of tokens
the model says at once what it would write, so that `drafter=jacobi:K` needs fewer passes.

    loss = sum_t KL(p(. | x_<=t) || p(. | x before the window, y up to t)) + ar sum_t CE(x_{t+1})

x is what the model wrote at temperature 0 before it was tuned (train/prepare.py), y a point on the
way there: random tokens of the text before the window, replaced by what the model chooses after
them, a drawn number of times. p(. | x) is a constant: no gradient. Before the first wrong token of
y both sides are the same, so the first sum starts there.

Where this differs from the paper and its code:
1. Labels are those of answers, not of prompts; they aren't smoothed.
2. Both sums are divided by the trained tokens of the step.
3. Windows of a text learn side by side, each behind the text itself: it is the fixed point. Their
   ways are made anew at each step by the model as it is, from tokens of all that comes before, and
   followed for `passes` steps at most. The text stays: a model that learns from what it now writes
   ends in text that is easy to guess.
4. Of the points of a way a share (`mended`) has about half of its wrong tokens put right.

Shapes: B rows, T positions, N = B * T, H hidden, V vocabulary, R rows of a tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.train.losses.chunked import bounded, chunked_divergence
from draftsmith.train.losses.closed_form import Scored, Workspace
from draftsmith.train.losses.pure import forward_kl
from draftsmith.train.run.loop import StepOutput
from draftsmith.train.text.batches import Batch
from draftsmith.train.tuning.windows import BesideText, inside, places, windows


@dataclass(kw_only=True)
class Consistency:
    """The group `consistency` of a recipe."""

    window: int = 16  # n, tokens
    passes: int = 8  # at most, from random tokens to the point that is trained
    mended: float = 0.5  # share of windows in which half of the wrong tokens are put right
    ar: float = 10.0  # weight of cross-entropy with the text

    def __post_init__(self) -> None:
        if self.window < 2 or self.passes < 0 or not 0 <= self.mended <= 1 or self.ar < 0:
            raise ValueError(
                f"consistency: got window={self.window}, passes={self.passes}, mended="
                f"{self.mended}, ar={self.ar}, expected 2 or more, 0 or more, a share, a weight"
            )


class ConsistencyObjective(BesideText):
    """See above. Metrics: `consistency` and `ar`, the two sums."""

    def __init__(
        self, model: PreTrainedModel, how: Consistency, *, drafted: int, vocab_size: int
    ) -> None:
        super().__init__(model, vocab_size)
        self.how, self.drafter = how, f"jacobi:{drafted}"

    def forward(self, batch: Batch) -> StepOutput:
        begin_BT = windows(batch, self.how.window)
        # The planner, whose draws are all 0, counts the most passes.
        most = self.how.passes
        guess_BT = self.guessed(batch, begin_BT, most - int((most + 1) * torch.rand(()).item()))
        draws_BT = torch.rand(begin_BT.shape, device=begin_BT.device)
        mended_BT = draws_BT.gather(1, begin_BT) < self.how.mended  # one draw a window
        right_BT = mended_BT & (torch.rand_like(draws_BT) < 0.5)
        return self.score(batch, begin_BT, torch.where(right_BT, batch.input_ids, guess_BT))

    def score(self, batch: Batch, begin_BT: Tensor, guess_BT: Tensor) -> StepOutput:
        """The sums for this guess."""
        wrong_BT = (guess_BT != batch.input_ids) & (begin_BT > 0)
        last_BT = torch.where(wrong_BT, places(batch), 0).cummax(1).values
        weight_N = (inside(begin_BT) & (last_BT >= begin_BT)).flatten().float()
        text, guess = self.sides(batch, guess_BT, begin_BT)
        cons = chunked_divergence(forward_kl, *guess, *text, weight_N).total
        ar = self.ar(batch, text)[0]
        metrics = {"consistency": cons.detach(), "ar": ar.detach()}
        return StepOutput(cons + self.how.ar * ar, batch.loss_mask.sum(), metrics)

    @torch.no_grad()
    def guessed(self, batch: Batch, begin_BT: Tensor, passes: int) -> Tensor:
        """[B, T]: random tokens of the text before each window, iterated."""
        start_BT = places(batch) - batch.position_ids  # of its document
        drawn_BT = torch.rand(begin_BT.shape, device=begin_BT.device)
        room_BT = (begin_BT - start_BT).clamp(min=0)
        guess_BT = batch.input_ids.gather(1, start_BT + (drawn_BT * room_BT).long())
        first_N1 = (places(batch) == begin_BT).flatten()[:, None]
        for _ in range(passes):
            (text_NH, head_VH), (own_NH, _) = self.sides(batch, guess_BT, begin_BT)
            # After token t - 1: of the text for a window's first, else of the guess.
            said_NH = torch.where(first_N1, text_NH.roll(1, 0), own_NH.roll(1, 0))
            weight_1N = (begin_BT > 0).flatten()[None].float()
            found_11N = bounded(chosen, 1, [said_NH], head_VH, None, weight_1N)[1]
            guess_BT = found_11N.long().view_as(guess_BT)
        return guess_BT


def chosen(_: Tensor, logits_SRV: Tensor, __: bool, ___: Workspace) -> Iterator[Scored]:
    """The likeliest token of each row, as a number that fp32 holds exactly."""
    for logits_RV in logits_SRV:
        wide = torch.promote_types(logits_RV.dtype, torch.float32)
        yield [logits_RV.argmax(-1).to(wide)], None
