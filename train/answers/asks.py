"""Requests to a target: every prompt of the data, `samples` times, each with its own seed."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.decode.prompts.chat import before_answer
from draftsmith.decode.prompts.prompts import as_chat, prompt_ids
from draftsmith.decode.prompts.rows import Message, Row
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.decode.sampling import request_seeds
from draftsmith.train.text.prepared import is_prepared
from draftsmith.train.text.tokenise import text_prompts


@dataclass(frozen=True)
class Ask:
    """One request. `index` is prompt * samples + sample; `text` is the prompt without BOS."""

    index: int
    ids: list[int]
    text: str
    messages: tuple[Message, ...]  # of a chat, up to the answer
    seed: int  # the request's own
    top_logprobs: int = 0  # how many of the likeliest tokens to tell with each token
    tools: tuple[dict[str, Any], ...] = ()  # that a chat may call


def from_rows(
    rows: list[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int | None,
    window: int,
    samples: int,
    seed: int,
    top_logprobs: int = 0,
) -> list[Ask]:
    """`samples` requests for each prompt: one prompt a row, or `limit` windows of documents.
    ValueError for documents without a limit, or what `prompt_ids` and `text_prompts` raise.

    limit: prompts at most, None for all rows; window: tokens of a document's; seed: the run's,
    which places the windows and makes each request's seed; top_logprobs: of each request.
    """
    prompts: list[tuple[list[int], tuple[Message, ...], tuple[dict[str, Any], ...]]] = []
    if rows[0].kind == "text":
        if limit is None:
            raise ValueError("documents have no prompts of their own: say limit=<how many windows>")
        windows = text_prompts(rows, tokenizer, count=limit, length=window, seed=seed)
        prompts += [(ids, (), ()) for ids in windows]
    else:
        for row in rows[:limit]:
            chat = as_chat(row, tokenizer)
            before = tuple(before_answer(chat)) if chat else ()
            prompts.append((prompt_ids(row, tokenizer), before, row.tools))
    asks = []
    for number, (ids, messages, tools) in enumerate(prompts):
        text = str(tokenizer.decode(ids[ids[0] == tokenizer.bos_token_id :]))
        for index in range(number * samples, (number + 1) * samples):
            own = request_seeds(seed, index)
            asks.append(Ask(index, ids, text, messages, own, top_logprobs, tools))
    return asks


def fitting(asks: list[Ask], *, longest: int, leave_out: bool) -> list[Ask]:
    """Those of at most `longest` prompt tokens; ValueError for others without `leave_out`."""
    kept = [ask for ask in asks if len(ask.ids) <= longest]
    long = [ask for ask in asks if len(ask.ids) > longest]
    if long and not (leave_out and kept):
        remedy = f"max_prompt_tokens={longest} leaves them out" if kept else "give shorter ones"
        raise ValueError(
            f"got {len(long)} of {len(asks)} prompts longer than {longest} tokens, request "
            f"{long[0].index} for one has {len(long[0].ids)} ({long[0].text[:40]!r} ...); expected "
            f"room for an answer within the target's context; {remedy}"
        )
    return kept


def prompts_hash(asks: list[Ask]) -> str:
    return hashlib.sha256(json.dumps([(ask.index, ask.ids) for ask in asks]).encode()).hexdigest()


def prompts_for_development(
    data: str, tokenizer: PreTrainedTokenizerBase, *, limit: int, prompt_tokens: int
) -> list[list[int]]:
    """At most `limit` prompts that choices are made on while training, of the held-out part to tune
    on: never those of final figures. prompt_tokens: of a prompt that is a document's window.
    ValueError: prepared answers, which have no held-out side; no rows; too few windows.
    """
    if limit < 1:
        raise ValueError(f"limit: got {limit}, expected at least 1")
    if is_prepared(data):
        raise ValueError(
            f"{data} holds answers to training prompts only: say heldout.prompts=<what the prompts "
            "came from>"
        )
    rows = load_rows(data, "tune")
    asks = from_rows(rows, tokenizer, limit=limit, window=prompt_tokens, samples=1, seed=0)
    return [ask.ids for ask in asks]
