"""The server through the real `openai` client, over loopback: it answers what plain decoding says,
whoever else asks and whatever drafts.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from head_folders import made, ours
from live_server import TEXTS, Live, ask_all, asked, expected, live, truth, until
from saved_drafts import save_draft
from tiny_llama import build_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.prompts.chat import chat_prompt
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.serve import learning as serving_drafts
from draftsmith.decode.serve.buffer import ReplayBuffer
from draftsmith.decode.serve.versions import Versions
from draftsmith.train.answers.asks import Ask
from draftsmith.train.answers.endpoint import Endpoint, EndpointSpec

IDS = {"extra_body": {"return_token_ids": True}}


@pytest.fixture(scope="module")
def draft_folder(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_draft: LlamaForCausalLM,
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    folder = tmp_path_factory.mktemp("drafts") / "first"
    return save_draft(folder, tiny_draft, tiny_target, tiny_tokenizer)


@pytest.fixture(scope="module")
def running(
    draft_folder: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> Iterator[Live]:
    drafts = (f"twin={draft_folder}", "lookup=ngram", "plain=none")
    how = {"drafter": str(draft_folder), "drafters": drafts, "batch_size": 16, "K": 2}
    how |= {"policy": "fixed"}  # whose counts are known
    with live(tiny_target, tiny_tokenizer, **how) as made:
        yield made


@pytest.fixture(scope="module")
def truths(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> list[list[int]]:
    """Of the 60 requests that there are."""
    return [expected(number, tiny_target, tiny_tokenizer) for number in range(60)]


SCHEMA = {"enum": [{"kind": "cat", "age": 3}, {"kind": "dog"}, ["none"]]}
NAMED = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("drawn", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
def test_formats_are_followed_whatever_drafts(running: Live, drawn: dict[str, Any]) -> None:
    pytest.importorskip("llguidance", reason="needs pip install 'draftsmith[grammar]'")
    client, asked = running.client(), {"messages": [{"role": "user", "content": "hello"}], **drawn}
    flat, told = {"type": "json_schema", **NAMED["json_schema"]}, set()  # type: ignore[dict-item]
    for model in ("tiny:plain", "tiny", "tiny:twin", "tiny:lookup"):
        made = client.chat.completions.create(model=model, response_format=NAMED, **asked)
        told.add(made.choices[0].message.content)
        how = {"input": "hello", "text": {"format": flat}, "model": model, **drawn}
        seed = {"extra_body": {"seed": how.pop("seed")}} if "seed" in how else {}
        response = client.responses.create(**how, **seed)
        told.add(response.output_text)
        assert response.text.format.schema_ == SCHEMA and response.status == "completed"
    [text] = told
    assert json.loads(text) in SCHEMA["enum"]
    free = client.chat.completions.create(model="tiny", max_tokens=8, **asked)
    assert free.choices[0].message.content != text
    loose = {"type": "json_object"}
    made = client.chat.completions.create(model="tiny", response_format=loose, **asked)
    assert made.choices[0].message.content.startswith("{")


def test_prompts_and_samples_are_plain_decodings(
    running: Live, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = [[7, 8, 9], [20, 21]]
    got = running.client().completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=12, temperature=0.8, seed=5, **IDS
    )
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(got.choices):
        want = truth(
            *(tiny_target, tiny_tokenizer, prompts[index // 2], index),
            temperature=0.8, seed=5, max_new_tokens=12,
        )  # fmt: skip
        assert choice.token_ids == want  # type: ignore[attr-defined]
        ended = want[-1] == 0
        assert choice.finish_reason == ("stop" if ended else "length")
        assert choice.text == tiny_tokenizer.decode(want[:-1] if ended else want)
    assert got.usage is not None
    read, written = 5, sum(len(c.token_ids) for c in got.choices)  # type: ignore[attr-defined]
    counted = (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens)
    assert counted == (read, written, read + written)


@pytest.mark.parametrize("model", ["tiny", "tiny:twin", "tiny:lookup", "tiny:plain"])
def test_text_is_the_same_streamed_and_whole_from_every_draft(
    running: Live, model: str, truths: list[list[int]], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    client = running.client()
    for number in (0, 1, 5):
        whole = client.completions.create(model=model, **asked(number))
        assert whole.choices[0].token_ids == truths[number]  # type: ignore[attr-defined]
        stream = client.completions.create(
            model=model, stream=True, stream_options={"include_usage": True}, **asked(number)
        )
        *chunks, last = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * len(chunks[1:])
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert not last.choices and last.usage == whole.usage


def test_a_draft_may_be_named_by_its_tag(running: Live) -> None:
    before = running.backend.service.lanes["twin"].decoder.policy
    body = {"model": "tiny", "prompt": [5], "seed": 1, "max_tokens": 4}
    twin = running.post(body | {"draft": "twin"}).json()["choices"]
    assert twin == running.post(body | {"model": "tiny:twin"}).json()["choices"]
    assert before is running.backend.service.lanes["twin"].decoder.policy
    names = [(m.id, m.draft["tag"], m.draft["kind"]) for m in running.client().models.list()]  # type: ignore[attr-defined]
    assert names == [
        ("tiny", "default", "lm"),
        ("tiny:twin", "twin", "lm"),
        ("tiny:lookup", "lookup", "ngram"),
        ("tiny:plain", "plain", None),
    ]
    assert running.client().models.retrieve("tiny:twin").id == "tiny:twin"
    with pytest.raises(openai.NotFoundError):
        running.client().models.retrieve("tiny:none")


def test_chats_go_through_the_template(
    running: Live, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    talk.append({"role": "user", "content": [{"type": "text", "text": "again"}]})  # type: ignore[dict-item]
    plain = [*talk[:2], {"role": "user", "content": "again"}]
    prompt = chat_prompt(plain, tiny_tokenizer)
    how: dict[str, Any] = {"model": "tiny", "messages": talk, "temperature": 0, **IDS}
    client = running.client()
    got = client.chat.completions.create(max_completion_tokens=20, **how)
    want = truth(tiny_target, tiny_tokenizer, prompt, max_new_tokens=20)
    assert got.choices[0].token_ids == want  # type: ignore[attr-defined]
    assert got.usage is not None and got.usage.prompt_tokens == len(prompt)
    chunks = list(client.chat.completions.create(max_tokens=20, stream=True, **how))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == got.choices[0].message.content
    # What an answer's own object says may be sent back.
    again = [*talk, got.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(**(how | {"messages": again}), max_tokens=2).choices
    # A chat that doesn't say may be as long as the server allows.
    unsaid = client.chat.completions.create(**how, seed=3)
    assert len(unsaid.choices[0].token_ids) > 16 or unsaid.choices[0].finish_reason == "stop"  # type: ignore[attr-defined]


def test_stop_strings_end_an_answer_and_are_not_shown(
    running: Live, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    how = {"temperature": 1.0, "seed": 2, "ignore_eos": True}
    text = tiny_tokenizer.decode(
        truth(tiny_target, tiny_tokenizer, [5, 6], max_new_tokens=60, **how)
    )
    stop = next(text[i : i + 2] for i in range(12, 40) if text[i : i + 2].isascii())
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 60, "stop": ["never there", stop]}
    choice = running.post(body | how).json()["choices"][0]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    with running.http.stream(
        "POST", "/v1/completions", json=body | how | {"stream": True}
    ) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == choice["text"]


def test_300_requests_from_16_clients_are_all_plain_decodings(
    running: Live, truths: list[list[int]]
) -> None:
    models = ["tiny", "tiny", "tiny", "tiny:twin", "tiny:lookup"]
    before = running.counts()
    got = asyncio.run(ask_all(running, list(range(300)), models))
    assert [tokens for tokens in got if not tokens] == []
    wrong = [number for number in range(300) if got[number] != truths[number % 60]]
    assert wrong == []
    after = running.counts()
    ours = [number for number in range(300) if models[number % 5] == "tiny"]

    def more(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert more("vllm:generation_tokens_total") == sum(len(got[number]) for number in ours)
    reasons = [name for name in after if name.startswith("vllm:request_success_total/")]
    assert sum(map(more, reasons)) == len(ours) == more("vllm:e2e_request_latency_seconds_count")
    assert more("vllm:time_to_first_token_seconds_count") == len(ours)
    spec = "vllm:spec_decode_num"
    kept = [more(f"{spec}_accepted_tokens_per_pos_total/{place}") for place in range(2)]
    assert kept[0] > kept[1] > 0
    assert sum(kept) == more(f"{spec}_accepted_tokens_total")
    rounds = more(f"{spec}_drafts_total")
    assert more(f"{spec}_draft_tokens_total") == 2 * rounds
    # The prefill gives a token, a round those kept and one more, unless that ends the answer.
    given = len(ours) + sum(kept) + rounds
    assert given - len(ours) <= more("vllm:generation_tokens_total") <= given
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


def test_our_own_client_reads_the_tokens(
    running: Live, truths: list[list[int]], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = list(tiny_tokenizer(TEXTS[1]).input_ids)
    ask = Ask(index=0, ids=ids, text=TEXTS[1], messages=(), seed=1)
    endpoint = Endpoint(EndpointSpec(url=running.url, model="tiny", retries=0), tiny_tokenizer)
    params = SamplingParams(temperature=1.0, max_new_tokens=16)
    [reply] = endpoint.answers([ask], params)
    assert reply["token_ids"] == truths[1] and not reply["retokenised"]


def test_a_draft_that_changes_or_breaks_changes_no_answer(
    draft_folder: Path,
    tmp_path: Path,
    truths: list[list[int]],
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_drafts, "POLL_S", 0.02)
    versions = Versions(tmp_path / "default")

    def random_draft(seed: int, layers: int = 1) -> Any:
        draft = build_llama(len(tiny_tokenizer), layers=layers, hidden=32, seed=seed)
        return lambda folder: save_draft(folder, draft, tiny_target, tiny_tokenizer)

    def cut_short(folder: Path) -> None:
        random_draft(9)(folder)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])

    def swaps(made: Live) -> tuple[float, float]:
        counts = made.counts()
        names = ("draft_swaps_total", "draft_swaps_refused_total")
        return counts[f"draftsmith:{names[0]}"], counts[f"draftsmith:{names[1]}"]

    versions.publish(random_draft(7), "there before the server")
    with live(tiny_target, tiny_tokenizer, drafter=str(draft_folder), online=str(tmp_path)) as made:
        until(lambda: made.lane.version == 1)
        first = asyncio.run(ask_all(made, list(range(6)), ["tiny"]))
        seen: list[list[int]] = []
        traffic = threading.Thread(
            target=lambda: seen.extend(asyncio.run(ask_all(made, list(range(120)), ["tiny"])))
        )
        traffic.start()
        until(lambda: made.lane.on_way > 0)
        versions.publish(random_draft(8), "another")
        until(lambda: made.lane.version == 2)
        versions.publish(cut_short, "broken")
        until(lambda: swaps(made) == (2, 1))
        versions.publish(random_draft(3, layers=2), "of another shape")
        until(lambda: swaps(made) == (2, 2))
        assert made.lane.version == 2
        second = asyncio.run(ask_all(made, list(range(6)), ["tiny"]))
        versions.point(0, "back to the first")
        until(lambda: made.lane.version == 0)
        traffic.join()
        assert seen == [truths[number % 60] for number in range(120)]
        assert first == second == truths[:6]
        seen += first + second
        taught = sum(len(tokens) > 1 for tokens in seen)
        until(lambda: made.counts()["draftsmith:buffer_examples_total"] == taught)
    buffer = ReplayBuffer(tmp_path / "default" / "buffer")
    numbers = sorted(buffer.numbers() + buffer.heldout_numbers())
    assert numbers == list(range(taught))
    answers = [buffer.read(number) for number in numbers]
    got = sorted(one.tokens_T[one.prompt :].tolist() for one in answers)
    assert got == sorted(tokens for tokens in seen if len(tokens) > 1)
    assert {1, 2} <= {one.version for one in answers} <= {0, 1, 2}


def test_a_head_is_swapped_and_its_states_are_kept(
    tmp_path: Path,
    truths: list[list[int]],
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_drafts, "POLL_S", 0.02)
    torch.manual_seed(0)
    folder = ours(tmp_path / "head", made("eagle3", tiny_target), tiny_target, tiny_tokenizer)
    online = tmp_path / "online"
    with live(tiny_target, tiny_tokenizer, drafter=str(folder), online=str(online)) as server:
        before = asyncio.run(ask_all(server, list(range(10)), ["tiny"]))
        head = made("eagle3", tiny_target)  # other numbers
        Versions(online / "default").publish(
            lambda new: ours(new, head, tiny_target, tiny_tokenizer), "another"
        )
        until(lambda: server.lane.version == 1)
        after = asyncio.run(ask_all(server, list(range(10)), ["tiny"]))
        assert before == after == truths[:10]
        until(lambda: server.counts()["draftsmith:buffer_examples_total"] >= 10)
    buffer = ReplayBuffer(online / "default" / "buffer")
    last = buffer.read(max(buffer.numbers()))
    assert last.version == 1 and last.norm_NH is not None and last.taps_TU is not None
    assert last.taps_TU.shape == (len(last.tokens_T) - 1, len(head.taps) * 32)
