"""Requests in the tokens of a draft that has its own, and what it learns from them (OmniDraft,
Ramakrishnan et al., arXiv 2507.02659).

    loss = sum_t D(p_t, q_t)  -  ngram * sum of log q(d_j) over n-grams, from their second token on

p_t: what the target's next token begins with, in the draft's tokens. n-grams: of `NgramCache`.

Legend: B rows, T positions in the target's tokens, S in the draft's, N positions with a law, K
of them trained, M = B * S, J listed tokens of a row, V vocabulary of the target.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.ngram_cache import NgramCache
from draftsmith.train.live.batches import ServedBatch, listed_rows
from draftsmith.train.losses.chunked import Side, chunked_cross_entropy
from draftsmith.train.losses.top_k import TopKRows
from draftsmith.train.objectives.distillation import Distillation, Stages
from draftsmith.train.text.batches import Batch


@dataclass(frozen=True)
class RespelledBatch(ServedBatch):
    """ngram_BS: 1 where the next token goes on with what spells a token of the target."""

    ngram_BS: Tensor = field(kw_only=True)


def respelled(batch: ServedBatch, cache: NgramCache) -> RespelledBatch:
    """The same requests. What is compared with the target is what follows each of its tokens."""
    assert batch.places is not None, "requests have them"
    # Of what is trained, after a first row that stands for all the rest.
    trained_K = batch.loss_mask.flatten().nonzero()[:, 0]
    all_ = listed_rows(batch)
    at_K = torch.cat([trained_K.new_zeros(1), trained_K])
    listed, known_K = beginnings(TopKRows(all_.ids_NJ[at_K], all_.log_p_NB[at_K]), cache)
    known_K[0] = False
    of_BT = torch.zeros_like(batch.input_ids)
    of_BT.view(-1)[trained_K] = torch.arange(1, len(at_K))
    lengths = (batch.places >= 0).sum(1).tolist()
    ids, at, ngrams = [], [], []
    for row, length in enumerate(lengths):
        grams, _ = cache.spelled(batch.input_ids[row, :length].tolist())
        sizes_T = torch.tensor([len(gram) for gram in grams])
        ids.append(torch.tensor([i for gram in grams for i in gram]))
        at.append((sizes_T.cumsum(0) - 1).clamp(min=0))  # the last token of each
        inner_S = batch.loss_mask[row, :length].roll(1).repeat_interleave(sizes_T)
        inner_S[(sizes_T.cumsum(0) - sizes_T)[sizes_T > 0]] = False  # beginnings are in p
        ngrams.append(inner_S.roll(-1).float())
    ids_BS = pad_sequence(ids, batch_first=True)
    of_BS, places_BS = torch.zeros_like(ids_BS), torch.full_like(ids_BS, -1)
    for row, at_T in enumerate(at):
        of_BS[row, at_T] = of_BT[row, : len(at_T)]
        places_BS[row, : len(ids[row])] = torch.arange(len(ids[row]))
    of_M = of_BS.flatten()
    return RespelledBatch(
        ids_BS,
        torch.arange(ids_BS.shape[1]).expand(ids_BS.shape),
        known_K[of_BS],
        None,
        batch.rows,
        places_BS,
        listed=TopKRows(listed.ids_NJ[of_M], listed.log_p_NB[of_M]),
        ngram_BS=pad_sequence(ngrams, batch_first=True),
    )


def beginnings(listed: TopKRows, cache: NgramCache) -> tuple[TopKRows, Tensor]:
    """The target's laws of what its next token begins with, in the draft's tokens; and where any of
    the listed ones can be spelled [N].
    """
    first_V = torch.full((cache.size,), -1)
    for token in listed.ids_NJ.unique().tolist():
        first_V[token] = next(iter(cache.spelled([token])[0][0]), -1)
    ids_NJ, order_NJ = first_V[listed.ids_NJ].sort(1)
    p_NJ = listed.log_p_NB.exp().gather(1, order_NJ) * (ids_NJ >= 0)
    # Those that begin alike lie side by side now: a place for each of these groups.
    group_NJ = ids_NJ.diff(dim=1, prepend=ids_NJ[:, :1]).bool().cumsum(1)
    p_NJ = torch.zeros_like(p_NJ).scatter_add(1, group_NJ, p_NJ)
    p_NJ, order_NJ = p_NJ.sort(1, descending=True)
    ids_NJ = torch.zeros_like(ids_NJ).scatter(1, group_NJ, ids_NJ).gather(1, order_NJ)
    known_N = p_NJ[:, 0] > 0
    p_NJ[~known_N, 0] = 1.0
    ids_NJ = torch.where(p_NJ > 0, ids_NJ, ids_NJ[:, :1]).clamp(min=0)
    log_p_NB = torch.cat([p_NJ.log(), listed.log_p_NB[:, -1:]], 1)
    return TopKRows(ids_NJ, log_p_NB.log_softmax(1)), known_N


class Hybrid(Distillation):
    """The divergence where a token of the target begins, and the likelihood of n-grams beside."""

    def __init__(
        self, draft: PreTrainedModel, cache: NgramCache, loss: Stages, ngram: float
    ) -> None:
        size = max(cache.own.bytes_of) + 1
        super().__init__(draft, listed_rows, loss, vocab_size=size, warp=SamplingParams(1.0))
        self.ngram = ngram

    def _score(
        self, batch: Batch, rows: TopKRows, q: Side, weight_N: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(batch, RespelledBatch), "as `respelled` makes them"
        total, alpha_N = super()._score(batch, rows, q, weight_N)
        next_M, several_M = batch.input_ids.roll(-1, 1).flatten(), batch.ngram_BS.flatten()
        return total + self.ngram * chunked_cross_entropy(*q, next_M, several_M)[0], alpha_N
