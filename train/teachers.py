"""The target's side of distillation: its distributions at every position of a batch.

A teacher turns a batch into rows, which compare a draft's with the target's. Rows from states are
exact: the target's last states, made by a pass or read from a cache, times its LM head.

Legend: N rows (positions of a batch, flat), V vocabulary, H / G hidden size of draft / target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.target import check_split, cut_rows, split_head, vocab_size
from draftsmith.train.chunked import Divergence, chunked_divergence
from draftsmith.train.data import Batch, Batches
from draftsmith.train.gradients import Transform
from draftsmith.train.losses import Loss
from draftsmith.train.taps import Cache, OnlineTaps, States, open_states


class TargetRows(Protocol):
    """The target's distributions p at the N positions of one batch."""

    def divergence(
        self,
        loss: Loss,
        q_hidden_NH: Tensor,
        q_head_VH: Tensor,
        weight_N: Tensor,
        transform: Transform,
    ) -> Divergence:
        """sum_n weight_n loss(p_n, q_n), and both parts of each row; see `chunked_divergence`."""


Teacher = Callable[[Batch], TargetRows]


@dataclass(frozen=True)
class StateRows:
    """Rows as the target's states and its LM head."""

    hidden_NG: Tensor
    head_VG: Tensor

    def divergence(
        self,
        loss: Loss,
        q_hidden_NH: Tensor,
        q_head_VH: Tensor,
        weight_N: Tensor,
        transform: Transform,
    ) -> Divergence:
        q, p = (q_hidden_NH, q_head_VH), (self.hidden_NG, self.head_VG)
        return chunked_divergence(loss, *q, *p, weight_N, transform=transform)


class StateTeacher:
    """Exact distributions from the target's last states.

    Args:
        states: where these come from; None: a pass of the target at each batch. Text that was
            written on the fly is in no cache, so it has its pass anyway.

    Raises ValueError for a target whose logits aren't one product of its last state.
    """

    def __init__(
        self, target: PreTrainedModel, vocab_size: int, states: States | None = None
    ) -> None:
        check_split(target)
        self.online = OnlineTaps(target, ())
        self.states = states or self.online
        self.head_VG = cut_rows(split_head(target)[1], vocab_size)

    def __call__(self, batch: Batch) -> StateRows:
        states = self.online if batch.places is None else self.states
        return StateRows(states(batch).norm_BTG.flatten(0, 1), self.head_VG)


def open_teacher(
    config: Cache,
    accelerator: Accelerator,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batches: Batches,
) -> Teacher:
    """What training compares with: the target itself, or its states from the folder `cache`, which
    is filled first.

    Raises ValueError for what `StateTeacher` and the cache refuse.
    """
    states = open_states(config, accelerator, target, tokenizer, (), batches)
    return StateTeacher(target, vocab_size(tokenizer), states)
