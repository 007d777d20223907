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
from draftsmith.train.losses.top_k import TopKRows
from draftsmith.train.teachers.top_k_cache import law
from draftsmith.train.text.prepared import finished_answers, is_prepared, read_identity

TopLogprobs = list[dict[int, float]]
AS_IT_IS = law(SamplingParams(1.0))
# What the listed probabilities may add up to, in a server's rounding.
MOST = 1.01


def check_asked(k: int, endpoint: str, api: str, params: list[SamplingParams]) -> None:
    """Raises ValueError where a server couldn't tell `k` log-probabilities so that they're sure."""
    if k and not (k > 0 and endpoint and api in ("auto", "tokens")):
        raise ValueError(
            f"endpoint_top_logprobs: got {k} with endpoint={endpoint!r}, endpoint_api={api}, "
            "expected 0 (none), or some of a server that is asked by endpoint_api=tokens; with a "
            "local target, train with cache=<a folder> cache_top_k=<k> instead"
        )
    laws = {given.law for given in params}
    if k and laws != {AS_IT_IS}:
        raise ValueError(
            f"endpoint_top_logprobs: got temperature, top_k, top_p, min_p = {laws}, expected "
            f"{AS_IT_IS}: servers differ in whether they tell log-probabilities before these act "
            "or after; only without them is it the same"
        )


def asked(k: int) -> dict[str, Any]:
    """What a request says to have `k` of them."""
    return {"logprobs": k, "return_tokens_as_token_ids": True} if k else {}


def read_top_logprobs(choice: dict[str, Any], tokens: int, size: int) -> TopLogprobs:
    """The log-probabilities {token: value} of each of an answer's `tokens`, likeliest first.

    size: of the vocabulary.

    Raises ValueError where they aren't there, aren't told by ids, or can't be log-probabilities.
    """
    told = (choice.get("logprobs") or {}).get("top_logprobs") or []
    what, found = "", []
    if len(told) != tokens or not all(told):
        what = f"{len(told)} for {tokens} tokens"
    for entry in told if not what else []:
        named = {name.removeprefix("token_id:"): float(value) for name, value in entry.items()}
        ids = [name for name in named if name.isdecimal() and int(name) < size]
        by_id = len(ids) == len(named) and all(name.startswith("token_id:") for name in entry)
        if not by_id or not math.fsum(map(math.exp, named.values())) <= MOST:
            what = f"{entry!r:.120}"
            break
        ordered = sorted(named.items(), key=lambda pair: -pair[1])
        found.append({int(name): round(value, 6) for name, value in ordered})
    if what:
        raise ValueError(
            f"logprobs.top_logprobs: got {what}, expected for each token of the answer some "
            f'"token_id:<number below {size}>": <log-probability>, as vLLM tells them with '
            "return_tokens_as_token_ids; leave out endpoint_top_logprobs with this server"
        )
    return found


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
