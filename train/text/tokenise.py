"""Rows -> tokens: examples to train on, and prompts to answer."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.prompts.prompts import as_chat, beginning, plain_prompt, windows
from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.prompts.splits import load_rows
from draftsmith.train.text.batches import Examples
from draftsmith.train.text.chat_mask import chat_tokens
from draftsmith.train.text.prepared import is_prepared, load_prepared


def load_examples(data: str, tokenizer: PreTrainedTokenizerBase, split: str) -> Examples:
    """Examples of a folder that train/prepare.py wrote (all of it), or of the rows of a split."""
    return load_prepared(data) if is_prepared(data) else tokenise(load_rows(data, split), tokenizer)


def tokenise(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Examples:
    """Rows with their answers as examples, uncut (`batches.cut_long` knows the length).

    A document is trained whole and ends in EOS; of prompt and completion, the completion and EOS;
    of a chat, what the assistant wrote. A GSM8K or Alpaca row is a chat where the tokenizer has a
    template, otherwise the question, a newline, and the answer as plain text. ValueError with the
    row's place for no EOS or template where one is needed, a row without an answer, a chat whose
    mask can't be derived.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no EOS token, so a draft could not "
            "learn to stop; set its eos_token to the token that the target ends with"
        )
    how: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
    how |= {"return_attention_mask": False, "return_token_type_ids": False}
    # All documents in one call: it uses the cores, and the interpreter is free meanwhile.
    texts = [row.completion for row in rows if row.kind == "text"]
    documents = iter(tokenizer(texts, **how)["input_ids"] if texts else ())
    pairs: list[tuple[list[int], list[bool]]] = []
    rewritten = 0
    for row in rows:
        try:
            if row.kind in ("prompt", "turns") or (
                row.kind == "instruction" and not row.completion
            ):
                raise ValueError("a prompt without an answer; let train/prepare.py write answers")
            messages = as_chat(row, tokenizer)
            if messages:
                ids, trained, skipped = chat_tokens(messages, tokenizer, row.tools)
                rewritten += skipped
            else:
                prompt = beginning(plain_prompt(row), tokenizer)
                is_text = row.kind == "text"
                ids = next(documents) if is_text else tokenizer(row.completion, **how)["input_ids"]
                trained = [is_text] * len(prompt) + [True] * (len(ids) + 1)
                ids = [*prompt, *ids, tokenizer.eos_token_id]
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from error
        pairs.append((ids, trained))
    if rewritten:
        warnings.warn(
            f"{rewritten} earlier assistant turns are rewritten by the chat template (thinking "
            "removed, say) and are not trained; the last turn of each chat is",
            stacklevel=2,
        )
    return Examples.collect(pairs)


def text_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, count: int, length: int, seed: int
) -> list[list[int]]:
    """`count` windows of `length` tokens of the documents, without overlap, in seeded order.
    ValueError: rows that are no documents, or too few windows.
    """
    found = [window for row in rows for window in windows(row, tokenizer, length)]
    if len(found) < count:
        raise ValueError(
            f"got {len(found)} windows of {length} tokens in {len(rows)} documents, expected "
            f"{count}; ask for fewer or shorter ones"
        )
    chosen = np.random.default_rng(seed).permutation(len(found))[:count]
    return [found[i] for i in chosen]
