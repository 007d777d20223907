"""A text with a second version of itself beside it, in one pass of a model.

    text     x_1 ... x_T, as ever
    version  y_1 ... y_T at the same positions: y_t sees x before its window and y in its window

A window is some tokens in a row that the text trains. So what the model says after y_t is what it
would say after x up to the window, then y up to t, whatever the other windows hold.

Shapes: B rows, T positions, N = B * T, H hidden.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.target import check_split, cut_rows, output_head, without_bias
from draftsmith.train.losses.chunked import Side, chunked_cross_entropy
from draftsmith.train.objectives.distillation import hidden_and_head
from draftsmith.train.run.loop import Objective, StepOutput
from draftsmith.train.text.batches import Batch


def places(batch: Batch) -> Tensor:
    """[B, T]: each token's place in its row."""
    length = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    return length.expand_as(batch.input_ids)


def windows(batch: Batch, size: int, wanted_BT: Tensor | None = None, phase: int = 0) -> Tensor:
    """begin_BT: where the window of each token begins, 0 for tokens that aren't wanted, or that the
    text doesn't train. Windows of `size` follow one another from the first token of each run of
    them, of which the first is shorter by `phase`; the last may be shorter.
    """
    at_BT, wanted = places(batch), batch.loss_mask.roll(1, 1)
    wanted = wanted if wanted_BT is None else wanted & wanted_BT
    first_BT = torch.where(wanted & ~wanted.roll(1, 1), at_BT, 0).cummax(1).values
    begin_BT = torch.maximum(first_BT, at_BT - (at_BT - first_BT + phase) % size)
    return torch.where(wanted, begin_BT, 0)


def inside(begin_BT: Tensor) -> Tensor:
    """[B, T] bool: whether the token after t is of t's window."""
    same_BT = (begin_BT == begin_BT.roll(-1, 1)) & (begin_BT > 0)
    same_BT[:, -1] = False
    return same_BT


def sides(
    model: PreTrainedModel, batch: Batch, version_BT: Tensor, begin_BT: Tensor, vocab_size: int
) -> list[Side]:
    """States [N, H] and LM head of the text, and of its version; of the tokenizer's rows."""
    body, head_VH, bias_V = output_head(model)
    at_BT, many = places(batch), version_BT.shape[1]
    seen_BTT = at_BT[:, None, :] <= at_BT[:, :, None]
    if batch.attention_mask is not None:
        seen_BTT = batch.attention_mask[:, 0]
    text_BTT = torch.cat([seen_BTT, torch.zeros_like(seen_BTT)], 2)
    before_BTT = seen_BTT & (at_BT[:, None, :] < begin_BT[:, :, None])
    own_BTT = seen_BTT & (begin_BT[:, None, :] == begin_BT[:, :, None])
    mask = torch.cat([text_BTT, torch.cat([before_BTT, own_BTT], 2)], 1)[:, None]
    inputs: dict[str, Any] = {"input_ids": torch.cat([batch.input_ids, version_BT], 1)}
    inputs["position_ids"] = batch.position_ids.repeat(1, 2)
    states_BTH = body(**inputs, attention_mask=mask, use_cache=False).last_hidden_state
    found = (part.flatten(0, 1) for part in states_BTH.split(many, 1))
    pairs = [without_bias(part_NH, head_VH, bias_V) for part_NH in found]
    return [(hidden_NH, cut_rows(rows_VH, vocab_size)) for hidden_NH, rows_VH in pairs]


class BesideText(Objective):
    """What objectives of such versions share. ValueError: logits that aren't a state's product."""

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        super().__init__()
        check_split(model)
        self.model, self.vocab_size = model, vocab_size

    @torch.no_grad()
    def measure(self, batch: Batch) -> StepOutput:
        """Cross-entropy with the text alone."""
        side = hidden_and_head(self.model, batch, self.vocab_size)
        return StepOutput(self.ar(batch, side)[0], batch.loss_mask.sum(), {})

    def sides(self, batch: Batch, version_BT: Tensor, begin_BT: Tensor) -> list[Side]:
        return sides(self.model, batch, version_BT, begin_BT, self.vocab_size)

    def ar(self, batch: Batch, side: Side, weight_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cross-entropy with the next tokens, its sum and each row's; of all trained ones, unless
        weights are given.
        """
        weight_N = batch.loss_mask.flatten().float() if weight_N is None else weight_N
        return chunked_cross_entropy(*side, batch.input_ids.roll(-1, 1).flatten(), weight_N)
