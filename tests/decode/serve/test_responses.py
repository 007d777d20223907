"""/v1/responses through the real client: a chat's answer, in the other shape."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import Live, live, truth
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.prompts.chat import chat_prompt

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "again"},
]
HOW: dict[str, Any] = {"model": "tiny", "temperature": 0.9, "top_p": 0.9, "max_output_tokens": 20}
SEED = {"extra_body": {"seed": 3}}
LISTED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.fixture(scope="module")
def running(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> Iterator[Live]:
    with live(tiny_target, tiny_tokenizer, drafter="ngram", policy="fixed") as made:
        yield made


def test_it_answers_as_a_chat_does(
    running: Live, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    client = running.client()
    told = [{"type": "message", **turn} for turn in TALK[1:]]
    told[0]["content"] = [{"type": "input_text", "text": "hi"}]
    got = client.responses.create(input=told, instructions="be brief", **HOW, **SEED)
    chat = running.post(
        {"model": "tiny", "messages": TALK, "temperature": 0.9, "top_p": 0.9, "max_tokens": 20}
        | {"seed": 3},
        "chat/completions",
    ).json()
    assert got.output_text == chat["choices"][0]["message"]["content"]
    prompt = chat_prompt(TALK, tiny_tokenizer)
    law = {"temperature": 0.9, "top_p": 0.9, "seed": 3, "max_new_tokens": 20}
    want = truth(tiny_target, tiny_tokenizer, prompt, **law)
    assert got.output_text == tiny_tokenizer.decode([t for t in want if t])
    ended = want[-1] == 0
    assert got.status == ("completed" if ended else "incomplete")
    assert (got.incomplete_details is None) == ended
    counted = (got.usage.input_tokens, got.usage.output_tokens, got.usage.total_tokens)
    assert counted == (len(prompt), len(want), len(prompt) + len(want))
    # What was answered may be sent back.
    more = [*told, *(item.model_dump() for item in got.output), TALK[1]]
    assert client.responses.create(input=more, **HOW).output_text
    plain = client.responses.create(input="hi", **HOW, **SEED)
    alone = chat_prompt(TALK[1:2], tiny_tokenizer)
    assert plain.usage.input_tokens == len(alone)


@pytest.mark.parametrize("tokens", [6, 200])
def test_its_events_come_in_openais_order(running: Live, tokens: int) -> None:
    how = HOW | {"max_output_tokens": tokens, "temperature": 1.3} | LISTED | SEED
    whole = running.client().responses.create(input="hi", **how)
    events = list(running.client().responses.create(input="hi", stream=True, **how))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert kinds[-4:] == ends and {*kinds[4:-4]} == {"output_text.delta"} and len(kinds) > 9
    deltas = events[4:-4]
    assert "".join(event.delta for event in deltas) == whole.output_text == events[-4].text
    final = events[-1].response
    [said], [was] = final.output[0].content, whole.output[0].content
    assert final.output[0].id == events[2].item.id == deltas[0].item_id
    assert said == was == events[-3].part and final.usage == whole.usage
    told = [one.model_dump() for event in deltas for one in event.logprobs]
    assert len(told) == final.usage.output_tokens
    assert [one["logprob"] for one in told] == [one.logprob for one in said.logprobs]
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in said.logprobs)


def test_what_it_does_not_do_is_refused(running: Live) -> None:
    good = {"model": "tiny", "input": "a", "max_output_tokens": 1}
    nothing = {"tools": [], "text": {"format": {"type": "text"}}, "truncation": "disabled"}
    nothing |= {"store": True, "include": [], "reasoning": None, "metadata": {"a": "b"}}
    assert running.post(good | nothing, "responses").status_code == 200
    for body in (
        {"previous_response_id": "resp_1"},
        {"text": {"format": {"type": "grammar"}}},
        {"tools": [{"type": "web_search"}]},
        {"background": True},
        {"truncation": "auto"},
        {"include": ["file_search_call.results"]},
        {"n": 2},
        {"max_tokens": 5},
        {"max_output_tokens": 10**9},
        {"input": []},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "assistant", "content": "a"}]},
    ):
        [name] = body
        refused = running.post(good | body, "responses")
        assert refused.status_code == 400 and name in refused.json()["error"]["message"], body


def test_a_stream_that_fails_says_so(running: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    step, left = running.lane.session.step, [3]

    def slow() -> Any:
        left[0] -= 1
        if not left[0]:
            for job in list(running.backend.service._jobs.values()):
                job.request.completion.error = "NaN logits"
        return step()

    monkeypatch.setattr(running.lane.session, "step", slow)
    body = {"model": "tiny", "input": "a", "stream": True, "max_output_tokens": 20}
    with running.http.stream("POST", "/v1/responses", json=body) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line[:5] == "data:"]
    assert events[-1]["type"] == "error" and events[-1]["message"] == "NaN logits"
    assert events[-1]["sequence_number"] == len(events) - 1
