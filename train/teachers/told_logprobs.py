"""The target's likeliest tokens as a server tells them with its answers, and as rows to train on.

A server must say which tokens it means by their ids: /completions with `logprobs` and vLLM's
`return_tokens_as_token_ids`, where the keys of `top_logprobs` are "token_id:17". Text won't do,
since several tokens may have one. An answer of train/prepare.py then has, for each of its tokens,

    "top_logprobs": [{"17": -0.25, "4": -1.5, ...}, ...]       natural logarithms

Shapes: N tokens, J listed tokens, B = J + 1.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.fingerprint import fingerprint
from draftsmith.train.answers.top_logprobs import (
    AS_IT_IS,
)
from draftsmith.train.losses.top_k import TopKRows
from draftsmith.train.teachers.cache import law
from draftsmith.train.text.prepared import finished_answers, is_prepared, read_identity


def open_top_logprobs(
    data: str, tokenizer: PreTrainedTokenizerBase, warp: SamplingParams
) -> Callable[[Tensor, torch.device], TopKRows] | None:
    """The rows (places in the text, device -> rows) that a folder of answers holds for itself, in
    memory; None where `data` is something else, or was prepared without log-probabilities.

    Raises:
        ValueError: another tokenizer's, a comparison after another transform, or what `answers`
            finds wrong with the folder.
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

    Row n is about token n + 1. Where no answer's token follows, the row says nothing.

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
