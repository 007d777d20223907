"""What the server refuses, ends, or waits for: nothing that a client does stops it."""

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from forked import Forked, free_port
from live_server import (
    GOOD,
    LONG,
    Live,
    ask_all,
    expected,
    live,
    save_pair,
    truth,
    until,
    wait_until_up,
)
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.serve import server as serving_run
from draftsmith.decode.serve.answers import Limits
from draftsmith.decode.serve.server import Backend, ServerConfig
from draftsmith.decode.serve.server import main as serve

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objekt"}}}
BAD: list[tuple[int, dict[str, Any] | bytes, str]] = [
    (400, b"{", "isn't JSON"),
    (400, b"", "JSON object"),
    (400, b"[]", "JSON object"),
    (400, b'{"model": "tiny", "prompt": "\xff\xfe"}', "parsing the body"),
    (400, b"[" * 100_000, "parsing the body"),
    (400, b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "parsing"),
    (400, b'{"model": "tiny", "prompt": "\\ud800"}', "half of a character"),
    (400, b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', "unknown option"),
    (400, b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature"),
    (404, b'{"model": "\\ud800", "prompt": "a"}', "isn't served here"),
    (404, GOOD | {"model": "gpt-4"}, "isn't served here"),
    (404, GOOD | {"draft": "none such"}, "draft"),
    (404, GOOD | {"model": "tiny:twin", "draft": "lookup"}, "plain name"),
    (400, {"model": "tiny"}, "prompt"),
    (400, GOOD | {"prompt": ""}, "prompt"),
    (400, GOOD | {"prompt": []}, "prompt"),
    (400, GOOD | {"prompt": [[]]}, "prompt"),
    (400, GOOD | {"prompt": [1, "a"]}, "prompt"),
    (400, GOOD | {"prompt": [10**30]}, "token ids"),
    (400, GOOD | {"prompt": [-1]}, "prompt"),
    (400, GOOD | {"prompt": "a<|end|>"}, "ends an answer"),
    (400, GOOD | {"prompt": [5] * 512}, "expected fewer than the 512"),
    (400, GOOD | {"prompt": "a" * 5000}, "expected fewer than the 512"),
    (400, GOOD | {"max_tokens": 0}, "max_tokens"),
    (400, GOOD | {"max_tokens": -5}, "max_tokens"),
    (400, GOOD | {"max_tokens": 10**9}, "at most 1024"),
    (400, GOOD | {"max_tokens": "5"}, "max_tokens"),
    (400, GOOD | {"max_tokens": 1.5}, "max_tokens"),
    (400, GOOD | {"temperature": -1}, "temperature"),
    (400, GOOD | {"temperature": 1e-9}, "temperature"),
    (400, GOOD | {"top_p": 0}, "top_p"),
    (400, GOOD | {"top_p": 1.1}, "top_p"),
    (400, GOOD | {"min_p": 1}, "min_p"),
    (400, GOOD | {"n": 0}, "n: "),
    (400, GOOD | {"n": 128}, "at most 80"),
    (400, GOOD | {"seed": 2**63}, "seed"),
    (400, GOOD | {"stop": ""}, "stop"),
    (400, GOOD | {"stop": list("abcde")}, "stop"),
    (400, GOOD | {"stop": ["a", "a"]}, "stop"),
    (400, GOOD | {"stream": "yes"}, "stream"),
    (400, GOOD | {"stream_options": {"include_usage": True}}, "stream=true"),
    (400, GOOD | {"max_token": 5}, "unknown option"),
    (400, GOOD | {"echo": True}, "echo"),
    (400, GOOD | {"logprobs": 21}, "logprobs"),
    (400, GOOD | {"logprobs": True}, "logprobs"),
    (400, CHAT | {"logprobs": 2}, "logprobs"),
    (400, CHAT | {"top_logprobs": 2}, "without logprobs"),
    (400, GOOD | {"logit_bias": {"5": 1}}, "logit_bias"),
    (400, GOOD | {"best_of": 2}, "best_of"),
    (400, GOOD | {"suffix": "b"}, "suffix"),
    (400, GOOD | {"presence_penalty": 0.5}, "presence_penalty"),
    (400, CHAT | {"response_format": {"type": "json"}}, "response_format"),
    (400, CHAT | {"response_format": {"type": "json_schema"}}, "schema: got none"),
    (400, CHAT | {"response_format": SCHEMA | {"type": "text"}}, "schema: got one with type=text"),
    (400, CHAT | {"response_format": SCHEMA}, "json_schema: Invalid type: objekt"),
    (400, CHAT | {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    (400, CHAT | {"tools": [{"type": "function"}]}, "tools"),
    (400, CHAT | {"messages": []}, "messages"),
    (400, CHAT | {"messages": [{"role": "tool", "content": "a"}]}, "messages"),
    (400, CHAT | {"messages": [{"role": "assistant", "content": "a"}]}, "nothing to answer"),
    (400, CHAT | {"messages": [{"role": "user", "content": "\ud83d"}]}, "half of a character"),
    (400, CHAT | {"max_completion_tokens": 2}, "max_completion_tokens"),
    (413, b" " * (1 << 20) + b"  ", "bytes"),
]


@pytest.fixture(scope="module")
def running(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> Iterator[Live]:
    drafts = ("twin=ngram", "lookup=ngram")
    with live(tiny_target, tiny_tokenizer, batch_size=16, drafters=drafts) as made:
        yield made


@pytest.mark.parametrize(("status", "body", "message"), BAD)
def test_bad_input_is_refused(
    running: Live, status: int, body: dict[str, Any] | bytes, message: str
) -> None:
    chat = isinstance(body, dict) and "messages" in body
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    answer = running.post(body, "chat/completions" if chat else "completions")
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and message in error["message"]
    assert running.post(GOOD).status_code == 200


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": None, "tools": [], "presence_penalty": 0, "response_format": {"type": "text"}},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "echo": False, "best_of": 1},
        {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
        {"top_k": -1, "stop": None, "n": None, "seed": -5},
        {"prompt": "\x00\x1b[31m\x7f\u202e"},
    ],
)
def test_what_asks_for_nothing_passes(running: Live, options: dict[str, Any]) -> None:
    assert running.post(GOOD | options).status_code == 200


def test_paths_and_methods_that_are_not_there(running: Live) -> None:
    for path, status in (("/v1/completions", 405), ("/v1/nothing", 404), ("/nothing", 404)):
        answer = running.http.get(path)
        assert answer.status_code == status and answer.json()["error"]["message"]


def test_what_its_client_leaves_is_not_decoded_to_the_end(running: Live) -> None:
    service = running.backend.service
    before = running.counts()
    with running.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        running.http.post("/v1/completions", json=LONG, timeout=httpx.Timeout(600, read=0.05))
    until(lambda: service.lanes["default"].on_way == 0)
    after = running.counts()
    name = "vllm:request_success_total/abort"
    assert after[name] - before.get(name, 0) == 2
    written = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    assert written < 2 * 450


def test_a_client_that_never_reads_holds_up_nobody(
    running: Live, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    body = json.dumps(LONG | {"stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    address = ("127.0.0.1", running.backend.settings.port)
    silent = [socket.create_connection(address) for _ in range(3)]
    half = socket.create_connection(address)
    half.sendall(head + b"Content-Length: 100\r\n\r\n{")  # and nothing more
    for connection in silent:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    try:
        got = asyncio.run(ask_all(running, [1, 2, 3], ["tiny"]))
        assert got == [expected(n, tiny_target, tiny_tokenizer) for n in (1, 2, 3)]
        until(lambda: running.lane.on_way == 0)
    finally:
        for connection in (*silent, half):
            connection.close()


def test_a_full_queue_says_when_to_come_back(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with live(tiny_target, tiny_tokenizer, batch_size=1, max_queue=1) as made:
        threads = [threading.Thread(target=made.post, args=(LONG,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: made.lane.on_way == 2)
        until(lambda: made.counts()["vllm:num_requests_waiting"] == 1)
        full = made.post(GOOD)
        assert full.status_code == 429 and int(full.headers["Retry-After"]) > 0
        assert full.json()["error"]["code"] == "queue_full"
        # The real client waits and asks again.
        patient = made.client(max_retries=1000, timeout=600)
        assert patient.completions.create(**GOOD).choices
        for thread in threads:
            thread.join()


def test_the_time_limit_ends_an_answer(
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = SimpleNamespace(**asdict(Limits()))
    monkeypatch.setattr(serving_run, "Limits", lambda *_: limits)
    with live(tiny_target, tiny_tokenizer) as made:
        step = made.lane.session.step
        monkeypatch.setattr(made.lane.session, "step", lambda: (time.sleep(0.005), step())[1])
        limits.timeout_s = 0.1
        late = made.post(LONG)
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        # Long enough for a first token on a busy machine, and not for 450 of 5 ms.
        limits.timeout_s = 1.0
        lines = made.post(LONG | {"stream": True}).text.strip().split("\n\n")
        assert json.loads(lines[0][6:])["choices"][0]["text"] is not None
        assert json.loads(lines[-1][6:])["error"]["code"] == "timeout"
        with pytest.raises(openai.APIError, match="longer than this server allows"):
            list(made.client().completions.create(stream=True, **_plain(LONG)))
        until(lambda: made.lane.on_way == 0)
        limits.timeout_s = 600.0
        assert made.post(GOOD).status_code == 200
        limits.timeout_s = 0.1
        slow = socket.create_connection(("127.0.0.1", made.backend.settings.port))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert slow.recv(100).startswith(b"HTTP/1.1 408")
        slow.close()


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    """As the client's arguments."""
    beyond = {"ignore_eos": body["ignore_eos"]}
    return {k: v for k, v in body.items() if k not in beyond} | {"extra_body": beyond}


def test_a_key_is_asked_for(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with live(tiny_target, tiny_tokenizer, api_key="the key") as made:
        assert made.client(api_key="the key").completions.create(**GOOD).choices
        with pytest.raises(openai.AuthenticationError):
            made.client(api_key="the kez").completions.create(**GOOD)
        for given in (b"Bearer", b"Bearer the key2", b"Bearer th\xe9 key", b"Basic the key"):
            wrong = made.http.get("/v1/models", headers={"Authorization": given})
            assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
        assert made.http.get("/metrics").status_code == 401
        assert made.http.get("/health").status_code == 200


def test_draining_finishes_what_is_on_its_way(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    want = truth(
        *(tiny_target, tiny_tokenizer, [5, 6]),
        temperature=1.0, seed=0, ignore_eos=True, max_new_tokens=450,
    )  # fmt: skip
    answers: list[httpx.Response] = []
    with live(tiny_target, tiny_tokenizer, batch_size=1, drain_s=600.0) as made:
        ask = LONG | {"return_token_ids": True}
        threads = [
            threading.Thread(target=lambda: answers.append(made.post(ask))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: made.lane.on_way == 2)
        made.server.handle_exit(signal.SIGTERM, None)
        until(lambda: made.backend.service.draining)
        refused = made.post(GOOD)
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        assert made.http.get("/health").status_code == 503
        made.thread.join()
        for thread in threads:
            thread.join()
    assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == [want, want]


def test_what_a_drain_cuts_off_hears_503(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    answers: list[httpx.Response] = []
    with live(tiny_target, tiny_tokenizer, batch_size=1, drain_s=0.1) as made:
        asking = threading.Thread(
            target=lambda: answers.extend(made.post(LONG | {"n": 4}) for _ in range(1))
        )
        asking.start()
        until(lambda: made.lane.on_way == 4)
        made.server.handle_exit(signal.SIGTERM, None)
        asking.join()
    [answer] = answers
    assert answer.status_code == 503 and "Retry-After" in answer.headers
    assert answer.json()["error"]["code"] == "draining"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_says_so(
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> None:
        raise RuntimeError("out of memory")

    with live(tiny_target, tiny_tokenizer) as made:
        ended = threading.Event()
        made.backend.service.on_death = ended.set
        monkeypatch.setattr(made.lane.session, "step", broken)
        lost = made.post(GOOD)
        assert lost.status_code == 500 and "RuntimeError" in lost.json()["error"]["message"]
        assert ended.wait(600)
        assert made.post(GOOD).status_code == 500
        assert made.http.get("/health").status_code == 503
        until(lambda: made.backend.service.lack is not None)  # which `main` tells, without a trace


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"port": 1 << 16}, "port"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"drafters": ("a=x", "a=y")}, "drafters"),
        ({"drafters": ("default=x",)}, "drafters"),
        ({"drafters": ("../a=x",)}, "drafters"),
        ({"drafters": ("folder",)}, "drafters"),
        ({"keep_requests": 1}, "keep_requests"),
    ],
)
def test_settings_that_make_no_server(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig(target="t", **settings)
    with pytest.raises(ValueError, match="batch_size: got 0"):
        serve(["target=nowhere", "batch_size=0"])


def test_a_draft_that_cannot_learn_is_not_kept_for(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = ServerConfig(target="t", drafter="ngram", online=str(tmp_path / "online"))
    with pytest.raises(ValueError, match=r"no draft that can learn, expected one of kind lm,"):
        Backend(settings, tiny_target, tiny_tokenizer)


def test_the_command_drains_and_exits_with_0(
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    port = free_port()
    target, draft = save_pair(tmp_path, tiny_target, tiny_draft, tiny_tokenizer)
    command = ["-m", "draftsmith", "serve", f"target={target}", f"port={port}"]
    command += [f"drafter={draft}", "max_length=512", "batch_size=2", "drain_s=600"]
    process = Forked(command, {"DRAFTSMITH_API_KEY": "k"})
    url = f"http://127.0.0.1:{port}"

    try:
        wait_until_up(process, url)
        headers = {"Authorization": "Bearer k"}
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json=LONG | {"stream": True, "return_token_ids": True},
            headers=headers,
        ) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        tokens = [
            token
            for line in (first, *rest[:-1])
            for token in json.loads(line[6:])["choices"][0]["token_ids"]
        ]
        assert rest[-1] == "data: [DONE]" and len(tokens) == 450
        assert process.wait() == 0, process.err
    finally:
        process.kill()
        process.wait()
