"""Answers that follow a schema: drafted ones are plain decoding's, and both parse."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_llama import build_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.grammar import Grammar
from draftsmith.decode.engine.request import Completion, open_request
from draftsmith.decode.sampling import SamplingParams, choose, request_race

llguidance = pytest.importorskip("llguidance", reason="needs pip install 'draftsmith[grammar]'")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "other"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "age"],
    "additionalProperties": False,
}
PROMPTS = ["a", "import os"]  # whose answers are short ones, of about a hundred tokens
GREEDY = SamplingParams(max_new_tokens=400, json_schema=json.dumps(SCHEMA))
DRAWN = replace(GREEDY, temperature=1.0, seed=3)
LAWS = [GREEDY, replace(DRAWN, temperature=0.7, top_k=5, min_p=0.1)]


def reference(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, index: int, params: SamplingParams
) -> list[int]:
    """One token at a time through transformers' own forward, by a matcher of its own."""
    from llguidance import hf

    encoded = hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=0)
    space = {"whitespace_pattern": r"[ \n\r\t]{1,64}"}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(params.json_schema, overrides=space)
    matcher, ids = llguidance.LLMatcher(encoded, grammar), tokenizer(PROMPTS[index]).input_ids
    tokens: list[int] = []
    while len(tokens) < params.max_new_tokens and tokens[-1:] != [0]:
        with torch.inference_mode():
            logits_V = target(torch.tensor([ids + tokens])).logits[0, -1, : len(tokenizer)]
        biased_V = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
        p_V = params.transform(logits_V.masked_fill(biased_V == 0, -torch.inf))
        at_1 = torch.tensor([len(ids) + len(tokens)])
        race_1V = request_race(params, index, at_1, len(tokenizer))
        tokens.append(int(choose(p_V, None if race_1V is None else race_1V[0])))
        assert matcher.consume_token(tokens[-1])
    return tokens


def ask(decoder: Decoder, params: SamplingParams) -> list[Completion]:
    return decoder.generate(PROMPTS, params)


@pytest.fixture(scope="module")
def truths(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> list[list[list[int]]]:
    indices = range(len(PROMPTS))
    return [[reference(tiny_target, tiny_tokenizer, i, law) for i in indices] for law in LAWS]


@pytest.mark.parametrize(
    ("tree", "near"),
    [
        *(("plain", True), ("chain", True), ("chain", False)),
        *(("medusa-63", True), ("dynamic:3,3,9", False)),
    ],
)
def test_drafted_answers_are_plain_ones_and_parse(
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    truths: list[list[list[int]]],
    tree: str,
    near: bool,
) -> None:
    near_one = build_llama(len(tiny_tokenizer), layers=3, hidden=32, seed=0)
    draft = near_one.requires_grad_(False) if near else tiny_draft
    drafter = None if tree == "plain" else LMDrafter(draft, len(tiny_tokenizer))
    how: dict[str, Any] = {} if tree == "plain" else {"tree": tree}
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=2, **how)
    for law, expected in zip(LAWS, truths, strict=True):
        made = ask(decoder, law)
        assert [one.tokens for one in made] == expected
        for one in made:
            assert one.finish_reason == "stop"
            found = json.loads(one.text)
            assert list(found) == SCHEMA["required"] and found["kind"] in ("cat", "dog", "other")
        if near and drafter is not None:
            assert sum(sum(one.accepted) for one in made) > 0
    free = replace(LAWS[0], json_schema="", max_new_tokens=12)
    alone = Decoder(tiny_target, tiny_tokenizer).generate(PROMPTS, free)
    assert [one.tokens for one in ask(decoder, free)] == [one.tokens for one in alone]


@pytest.mark.parametrize("rule", ["leviathan", "block", "traversal", "recursive"])
def test_rules_by_rejection_follow_it_too(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, rule: str
) -> None:
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, rule=rule, K=3, batch_size=3)
    made = ask(decoder, replace(DRAWN, json_schema='{"type": "string", "maxLength": 20}'))
    texts = [json.loads(one.text) for one in made]
    assert all(isinstance(text, str) and len(text) <= 20 for text in texts)


def test_a_session_of_answers_with_and_without_one(
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    truths: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where rounds are heard late, as on CUDA: with a grammar on its way, they aren't."""
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=3)
    free = SamplingParams(max_new_tokens=40, ignore_eos=True)
    alone = Decoder(tiny_target, tiny_tokenizer).generate(PROMPTS, free)
    for late in (False, True):
        monkeypatch.setattr(decoder, "late", late)
        session = decoder.open_session(batch_size=3, max_length=400)
        how: dict[str, Any] = {"tokenizer": tiny_tokenizer, "context": 400, "end_ids": (0,)}
        requests = [
            open_request(PROMPTS[i % 2], i, i % 2, params=params, **how)
            for i, params in enumerate([free, free, *LAWS[:1] * 2])
        ]
        for request in requests[:2]:
            session.submit(request)
        for turn in range(1000):
            session.step()
            if turn in (2, 3):  # with a round on its way
                session.submit(requests[turn])
        assert not session.busy
        session.close()
        assert [r.completion.tokens for r in requests[:2]] == [one.tokens for one in alone]
        assert [r.completion.tokens for r in requests[2:]] == truths[0]


def test_what_a_grammar_cannot_follow_is_one_line(
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = Decoder(tiny_target, tiny_tokenizer)
    for schema, why in (
        ("{", "json_schema: "),
        ('{"type": "objekt"}', "json_schema: Invalid type: objekt; expected one that llguidance"),
        ('{"type": "string", "pattern": "(?<=a)b"}', "look-around.* not supported"),
    ):
        with pytest.raises(ValueError, match=why) as caught:
            ask(decoder, replace(GREEDY, json_schema=schema))
        assert "\n" not in str(caught.value)
    drafter = LMDrafter(tiny_target, len(tiny_tokenizer))
    with pytest.raises(ValueError, match="json_schema: got one with lossy='typical"):
        how: dict[str, Any] = {"lossy": "typical:0.09,0.3", "allow_lossy": True}
        ask(Decoder(tiny_target, tiny_tokenizer, drafter, **how), GREEDY)
    with pytest.raises(ValueError, match="ignore_eos: got true with json_schema"):
        replace(GREEDY, ignore_eos=True)
    # What its limits end on the way ends the answer alone, with its reason.
    monkeypatch.setattr(Grammar, "allowed", broken)
    [one, *_] = ask(decoder, GREEDY)
    assert (one.finish_reason, one.error) == ("error", "json_schema: too much")
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'draftsmith\[grammar\]'"):
        ask(decoder, GREEDY)


def broken(grammar: Grammar, tokens: list[int], parents: list[int], vocab: int) -> torch.Tensor:
    grammar.error = "json_schema: too much"
    return torch.ones(len(tokens), vocab, dtype=torch.bool)
