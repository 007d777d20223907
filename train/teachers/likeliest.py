"""The target's likeliest tokens at every position of a training text, as rows to train on: kept in
shards on disk, or told by a server with its answers.

A shard (`store.py`) holds for each token what the target says of the next one, after the one
transform (temperature, top-k, top-p, min-p):

    ids    [N, J]  its J likeliest tokens, likeliest first; uint16 where they fit, else int32
    log_p  [N, B]  their log-probabilities, and last that of all the rest, in float16

float16 errs by at most 2^-11 of a log-probability, an eighth of what bfloat16 does: for a small
Llama on GSM8K a total variation of 1e-4 in the mean, 4e-4 at worst. -inf is a token that the
transform cut. The rest has a number of its own, since 1 minus rounded numbers would be rounding
where it is small.

A server must say which tokens it means by their ids: /completions with `logprobs` and vLLM's
`return_tokens_as_token_ids`, where the keys of `top_logprobs` are "token_id:17". Text won't do,
since several tokens may have one. An answer of train/prepare.py then has, for each of its tokens,

    "top_logprobs": [{"17": -0.25, "4": -1.5, ...}, ...]       natural logarithms

Shapes: N tokens, T of a text, J listed tokens, B = J + 1, V vocabulary, G hidden size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.top_k import likeliest
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.target import cut_rows, output_head, vocab_size, without_bias
from draftsmith.train.answers.top_logprobs import AS_IT_IS
from draftsmith.train.losses.chunked import CHUNK_LOGITS, chunk_logits, matmul_type, rows_of
from draftsmith.train.losses.pure import centred
from draftsmith.train.losses.top_k import TopKRows
from draftsmith.train.teachers.store import TokenShards
from draftsmith.train.text.prepared import finished_answers, is_prepared, read_identity


@dataclass(eq=False)
class TopKCache(TokenShards):
    """The k likeliest tokens after each token of `batches`' pieces, in `folder`. warp: the
    transform that they are taken after. ValueError for a k that the vocabulary hasn't.
    """

    stem, what, remedy = "top-k", "the target's likeliest tokens", "lower cache.top_k"

    k: int
    warp: SamplingParams

    def __post_init__(self) -> None:
        self.vocab_size = vocab_size(self.tokenizer)
        if not 0 < self.k <= self.vocab_size:
            raise ValueError(
                f"cache.top_k: got {self.k}, expected 1 to {self.vocab_size}, the tokens of the "
                "vocabulary; 0 keeps the target's last states, which are exact"
            )
        self.ids_type = torch.uint16 if self.vocab_size <= 1 << 16 else torch.int32
        k, exact = self.k, 2 * output_head(self.target)[1].shape[1]
        first, end = self.batches.cut.spans.T
        size = k * self.ids_type.itemsize + (k + 1) * torch.float16.itemsize
        self.describe(
            holds={"top k": k, "transform": list(law(self.warp))},
            token_bytes=size,
            about=f"{k} likeliest tokens each, {size:,} bytes a token (its last state, which is "
            f"exact, has {exact:,}: {exact * (end - first).sum() / 1e9:.2f} GB)",
        )

    def rows(self, places_N: Tensor, device: torch.device) -> TopKRows:
        """What follows the tokens at these places in the text, all of them in some piece."""
        ids_NJ = torch.empty(len(places_N), self.k, dtype=torch.int64)
        log_p_NB = torch.empty(len(places_N), self.k + 1)
        for at_N, tensors, local_N in self.found(places_N):
            ids_NJ[at_N] = tensors["ids"][local_N].long()
            log_p_NB[at_N] = tensors["log_p"][local_N].float()
        return TopKRows(ids_NJ.to(device), log_p_NB.to(device))

    @torch.no_grad()
    def made(self, norm_TG: Tensor, taps_TF: Tensor) -> dict[str, Tensor]:
        _, head_VG, bias_V = output_head(self.target)
        hidden_TG, head_VG = without_bias(norm_TG, head_VG, bias_V)
        head_VG = cut_rows(head_VG, self.vocab_size).to(matmul_type("p", hidden_TG, head_VG))
        device, found = hidden_TG.device, []
        size = rows_of(CHUNK_LOGITS, device, len(head_VG))
        every_T = torch.arange(len(hidden_TG), device=device)
        with torch.autocast(device.type, enabled=False):
            for logits_CV in chunk_logits(hidden_TG, head_VG, every_T, size):
                found.append(likeliest(self.warp.transform(centred(logits_CV)), self.k))
        ids_TJ, log_p_TB = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
        return {"ids": ids_TJ.to(self.ids_type), "log_p": log_p_TB.half()}


def law(warp: SamplingParams) -> tuple[float, ...]:
    """The transform as numbers: greedy compares distributions as they are, so at temperature 1."""
    return AS_IT_IS if warp.greedy else warp.law


def open_top_logprobs(
    data: str, tokenizer: PreTrainedTokenizerBase, warp: SamplingParams
) -> Callable[[Tensor, torch.device], TopKRows] | None:
    """The rows (places in the text, device -> rows) that a folder of answers holds for itself, in
    memory; None where `data` is something else, or was prepared without log-probabilities.
    ValueError for another tokenizer's, a comparison after another transform, or a damaged folder.
    """
    identity = read_identity(Path(data)) if is_prepared(data) else {}
    if not identity.get("top_logprobs"):
        return None
    made_with, given = identity["target"]["tokenizer"], fingerprint(None, tokenizer)["tokenizer"]
    if made_with != given:
        raise ValueError(
            f"{data} holds log-probabilities of another tokenizer's tokens ({made_with[:12]}, "
            f"here {given[:12]}); take the target that they are from"
        )
    if law(warp) != AS_IT_IS:
        raise ValueError(
            f"{data} holds log-probabilities at temperature 1 without filters: got temperature, "
            f"top_k, top_p, min_p = {law(warp)}, expected {AS_IT_IS}; those can't be known from "
            "the likeliest tokens alone. Compare at temperature 1, or let the target itself do it "
            "with cache=<a folder>"
        )
    rows = as_rows(finished_answers(Path(data)), identity["top_logprobs"] + 1)

    def kept(places_N: Tensor, device: torch.device) -> TopKRows:
        ids_NJ, log_p_NB = (tensor[places_N].to(device) for tensor in rows)
        return TopKRows(ids_NJ.long(), log_p_NB)

    return kept


def as_rows(answers: list[dict[str, Any]], listed: int) -> tuple[Tensor, Tensor]:
    """(ids_NJ, log_p_NB) as in `TopKRows`, of all tokens of the answers in `load_prepared`'s order.
    Row n is about token n + 1; where no answer's token follows, it says nothing.

    listed: J. Those asked for, and the token written where it isn't one of them.
    """
    tokens = sum(len(a["prompt_ids"]) + len(a["token_ids"]) for a in answers)
    ids_NJ = torch.zeros(tokens, listed, dtype=torch.int32)
    log_p_NB = torch.full((tokens, listed + 1), -math.inf)
    end = 0
    for answer in answers:
        end += len(answer["prompt_ids"]) + len(answer["token_ids"])
        first = end - len(answer["token_ids"]) - 1
        for row, told in enumerate(answer["top_logprobs"], start=first):
            ids, values = list(map(int, told)), list(told.values())
            # A place that repeats the first token is empty.
            ids_NJ[row] = torch.tensor(ids + ids[:1] * (listed - len(ids)))
            log_p_NB[row, : len(ids)] = torch.tensor(values)
            rest = 1.0 - math.fsum(map(math.exp, values))
            log_p_NB[row, -1] = math.log(rest) if rest > 0 else -math.inf
    return ids_NJ, log_p_NB
