"""Answers that follow a JSON schema, by llguidance.

A schema is a part of the target's law: what it rules out has a logit of -inf before the one
transform, at every node that is verified and in plain decoding alike. So a draft changes nothing of
such an answer. The draft itself isn't told of the schema.

Shapes: B rows, N nodes, V vocabulary.
"""

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.models.tokenizer import vocab_size

# Between two tokens of JSON; without an end, a model could write nothing else.
OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{1,64}"}
_known: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, ...], Any]]" = (
    weakref.WeakKeyDictionary()
)


class Grammar:
    """What one answer may still say. schema: of JSON, as its text; end_ids: what may end an answer
    that is whole; error: why it can't be followed any more. ValueError for a schema that can't be
    followed, a slow tokenizer, or where llguidance isn't installed.
    """

    def __init__(
        self, schema: str, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]
    ) -> None:
        try:
            from llguidance import LLMatcher, hf
        except ImportError as error:
            missing = "json_schema: got one, which needs pip install 'draftsmith[grammar]'"
            raise ValueError(missing) from error
        ends, of = tuple(sorted(end_ids)), _known.setdefault(tokenizer, {})
        try:
            if ends not in of:  # a second for 128k tokens
                fast: Any = tokenizer
                of[ends] = hf.from_tokenizer(fast, vocab_size(tokenizer), list(ends) or None)
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
            wrong = LLMatcher.validate_grammar(grammar, of[ends])
        except ValueError as error:
            wrong = str(error)
        if wrong:
            why = " ".join(wrong.split())
            raise ValueError(f"json_schema: {why:.300}; expected one that llguidance can follow")
        self.matcher, self.ends, self.error = LLMatcher(of[ends], grammar), {*ends}, ""

    def take(self, tokens: Sequence[int]) -> None:
        """Take in the answer's next tokens, which it allowed."""
        self.matcher.try_consume_tokens(list(tokens))

    def allowed(self, tokens_N: Sequence[int], parents_N: Sequence[int], vocab: int) -> Tensor:
        """What may follow each node of a tree [N, V], bool; node 0 is the last token taken in. All
        of it after a node that isn't allowed itself or ends the answer: no path leads on from it.
        """
        found_NV = np.ones((len(tokens_N), vocab), dtype=np.bool_)
        paths: list[list[int]] = []
        taken: list[int] = []  # nodes, from the root's child down
        for node, parent in enumerate(parents_N):
            paths.append([*paths[parent], node] if node else [])
            shared = sum(a == b for a, b in zip(taken, paths[node], strict=False))
            self.matcher.rollback(len(taken) - shared)
            del taken[shared:]
            for step in paths[node][shared:]:
                token = tokens_N[step]
                if token in self.ends or token >= vocab:  # a prompt's: no text has it
                    break
                if not self.matcher.try_consume_tokens([token]):
                    break
                taken.append(step)
            if taken == paths[node]:
                bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
                found_NV[node] = np.unpackbits(bits, count=vocab, bitorder="little")
        self.matcher.rollback(len(taken))
        if self.matcher.is_error():  # too much for its limits
            self.error = f"json_schema: {' '.join(self.matcher.get_error().split()):.300}"
        return torch.from_numpy(found_NV)


def ruled(
    logits_BNV: Tensor, grammars: Sequence[Grammar | None], tokens_BN: Tensor, parent: Tensor
) -> Tensor:
    """Raw logits with -inf at what each row's grammar rules out after each node; NaN throughout a
    row whose grammar can't be followed any more. parent: of the nodes, [N] or [B, N].
    """
    found_BNV, parents = logits_BNV.clone(), parent.expand_as(tokens_BN).tolist()
    rows = zip(grammars, tokens_BN.tolist(), parents, strict=False)
    for row, (grammar, tokens_N, parents_N) in enumerate(rows):
        if grammar is None:
            continue
        allowed_NV = grammar.allowed(tokens_N, parents_N, logits_BNV.shape[-1])
        found_BNV[row].masked_fill_(~allowed_NV.to(logits_BNV.device), -torch.inf)
        if grammar.error:
            found_BNV[row] = torch.nan
    return found_BNV
