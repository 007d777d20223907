"""The target's side of distillation: its distributions at every position of a batch.

A teacher turns a batch into rows, which compare a draft's with the target's. Rows from states are
exact: the target's last states, made by a pass or read from a cache, times its LM head. Rows of the
likeliest tokens (`losses/top_k.py`) come from a cache, or with the answers of a server.

Legend: N rows (positions of a batch, flat), V vocabulary, H / G hidden size of draft / target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from rich import print as show
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.target import check_split, cut_rows, output_head, vocab_size, without_bias
from draftsmith.train.losses.chunked import Divergence, Side, chunked_divergence
from draftsmith.train.losses.closed_form import Transform
from draftsmith.train.losses.pure import Loss, forward_kl
from draftsmith.train.losses.top_k import TopKRows
from draftsmith.train.teachers.likeliest import TopKCache, open_top_logprobs
from draftsmith.train.teachers.states import Cache, OnlineTaps, States, open_states
from draftsmith.train.text.batches import Batch, Batches


class StateRows(NamedTuple):
    """The target's distributions p at the N positions of one batch, as its states and LM head."""

    hidden_NG: Tensor
    head_VG: Tensor

    def divergence(self, loss: Loss, q: Side, weight_N: Tensor, transform: Transform) -> Divergence:
        """sum_n weight_n loss(p_n, q_n), and both parts of each row; see `chunked_divergence`. q:
        the draft's states and head.
        """
        return chunked_divergence(loss, *q, *self, weight_N, transform=transform)


TargetRows = StateRows | TopKRows
Teacher = Callable[[Batch], TargetRows]
SHOWN_TOKENS = 512


class StateTeacher:
    """Exact distributions from the target's last states, from `states` or by a pass at each batch.
    Text that was written on the fly is in no cache, so it has its pass anyway. ValueError for a
    target whose logits aren't one product of its last state.
    """

    def __init__(
        self, target: PreTrainedModel, vocab_size: int, states: States | None = None
    ) -> None:
        check_split(target)
        self.online = OnlineTaps(target, ())
        self.states = self.online if states is None else states
        self.vocab_size = vocab_size
        self.head = output_head(target)[1:]

    def __call__(self, batch: Batch) -> StateRows:
        states = self.online if batch.places is None else self.states
        hidden_NG, head_VG = without_bias(states(batch).norm_BTG.flatten(0, 1), *self.head)
        return StateRows(hidden_NG, cut_rows(head_VG, self.vocab_size))


@dataclass(frozen=True)
class TopKTeacher:
    """The target's likeliest tokens, from where they are kept; of text that was written on the fly,
    exact distributions by a pass.
    """

    kept: Callable[[Tensor, torch.device], TopKRows]  # of places in the text [N]
    itself: StateTeacher  # for the other text

    def __call__(self, batch: Batch) -> TargetRows:
        if batch.places is None:
            return self.itself(batch)
        places_N = batch.places.flatten().cpu()
        # Padding has no weight: any place will do.
        places_N = places_N.where(places_N >= 0, places_N.max())
        return self.kept(places_N, batch.input_ids.device)


def open_teacher(
    keep: Cache,
    data: str,
    warp: SamplingParams,
    accelerator: Accelerator,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batches: Batches,
    draft: PreTrainedModel | None = None,
) -> Teacher:
    """What training compares with: the target itself; its states or likeliest tokens from the
    folder `keep.path`, which is filled first; or, without one, the log-probabilities that a server
    told with the answers in `data`.

    warp: how both sides are compared; draft: what the likeliest tokens lose is shown for it.
    ValueError for what `StateTeacher`, the caches and `open_top_logprobs` refuse.
    """
    itself = StateTeacher(target, vocab_size(tokenizer))
    told = None if keep.path else open_top_logprobs(data, tokenizer, warp)
    if told is not None:
        accelerator.print(
            f"{data}: training compares with the log-probabilities there, from a server; "
            "held-out figures and text of the draft's own with target.path"
        )
        return TopKTeacher(told, itself)
    if not keep.top_k:
        states = open_states(keep, accelerator, target, tokenizer, (), batches)
        return StateTeacher(target, vocab_size(tokenizer), states)
    if not keep.path or keep.int8:
        raise ValueError(
            f"got cache.top_k={keep.top_k}, cache.path={keep.path!r}, cache.int8={keep.int8}, "
            "expected cache=<a folder>, and int8 of states alone"
        )
    with accelerator.autocast():
        cache = TopKCache(Path(keep.path), target, tokenizer, batches, keep.top_k, warp)
        cache.fill(accelerator)
        teacher = TopKTeacher(cache.rows, itself)
        if draft is not None:
            first = batches.batch(0, 0, 0, accumulation=1, world=1)
            table = lost(teacher, draft, first, warp)  # all run it, if the target is sharded
            if accelerator.is_main_process:
                show(table)
    return teacher


@torch.no_grad()
def lost(teacher: TopKTeacher, draft: PreTrainedModel, batch: Batch, warp: SamplingParams) -> Table:
    """The forward KL and alpha of a draft against the likeliest tokens, and fewer of them, beside
    those against the full distributions: means over the first trained positions of a batch.
    """
    batch = batch.to(draft.device)
    rows, exact = teacher(batch), teacher.itself(batch)
    assert isinstance(rows, TopKRows)
    training, k = draft.training, rows.ids_NJ.shape[1]
    mine = StateTeacher(draft.eval(), teacher.itself.vocab_size)(batch)
    draft.train(training)
    mask_N = batch.loss_mask.flatten()
    weight_N = (mask_N & (mask_N.cumsum(0) <= SHOWN_TOKENS)).float()
    tokens = int(weight_N.sum())
    table = Table(title=f"top-k against full logits: this draft, {tokens:,} tokens")
    for name in ("k", "mass outside", "fkl", "alpha, at most"):
        table.add_column(name, justify="right")
    cuts: dict[str, TargetRows] = {
        f"{few}": rows.first(few) for few in sorted({max(1, k // 16), max(1, k // 4), k})
    }
    for few, cut in (cuts | {"all": exact}).items():
        found = cut.divergence(forward_kl, mine, weight_N, warp.transform)
        outside = ""
        if isinstance(cut, TopKRows):
            outside = f"{(cut.log_p_NB[:, -1].exp() * weight_N).sum() / tokens:.2%}"
        kl, alpha = found.total / tokens, found.alpha_N.sum() / tokens
        table.add_row(few, outside, f"{kl:.4f}", f"{alpha:.4f}")
    return table
