"""The OpenAI-compatible client against a real HTTP server on loopback that fails in many ways."""

import json
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_endpoint import OK, PARAMS, Server, running
from thinking_template import TEMPLATE
from transformers import PreTrainedTokenizerFast

from draftsmith.decode.prompts.chat import set_template
from draftsmith.models.tokenizer import stand_in_tokenizer
from draftsmith.train.answers.asks import Ask
from draftsmith.train.answers.endpoint import Endpoint, EndpointSpec, GivenUp, Refused
from draftsmith.train.prepare import main as prepare
from draftsmith.train.text.prepared import load_prepared, read_answers


def test_prepare_keeps_what_a_server_answered(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    prompts = [{"prompt": f"def f{i}"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    out = tmp_path / "out"
    argv = [
        f"target.path={tmp_path / 'target'}",
        f"prompts={tmp_path / 'rows.jsonl'}",
        f"out={out}",
    ]
    with running(tiny_tokenizer, ids=False, apis="text", extra_tokens=1) as server:
        argv += [
            f"endpoint={server.url}",
            "endpoint.concurrency=2",
            "endpoint.retries=1",
            "split=all",
        ]
        argv += ["max_new_tokens=8", "temperature=0", "device=cpu"]
        server.faults = [OK] * 8 + [(503, {})] * 1000
        with pytest.raises(SystemExit, match=r"given up .*503(.|\n)*the same command goes on"):
            prepare(argv)
        kept = {answer["index"] for answer in read_answers(out)}
        assert 5 <= len(kept) <= 7, "8 requests went well, one of them asked for the api"
        with pytest.raises(ValueError, match=r"of 20 answers; run the same"):
            load_prepared(out)
        server.faults, before = [], len(server.bodies)
        prepare(argv)
        assert len(server.bodies) - before == 20 - len(kept) + 1
    told = " ".join(capsys.readouterr().out.split())
    assert "again from text: 20; 100.00% of the 20 whose token count the server told" in told
    examples = load_prepared(out)
    for i in range(20):
        ids = tiny_tokenizer(prompts[i]["prompt"])["input_ids"]
        assert examples.example(i)[0].tolist() == [*ids, *ids, tiny_tokenizer.eos_token_id]
        assert examples.prompt(i) == ids


@pytest.fixture(autouse=True)
def no_proxy_and_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def some_asks(tokenizer: PreTrainedTokenizerFast, count: int, chat: bool = False) -> list[Ask]:
    texts = [f"def f{i}" for i in range(count)]
    return [
        Ask(i, tokenizer(t)["input_ids"], t, ({"role": "user", "content": t},) * chat, 100 + i)
        for i, t in enumerate(texts)
    ]


def client(server: Server, **changes: Any) -> Endpoint:
    settings = {"retries": 3, "concurrency": 4, "timeout_s": 30.0} | changes
    return Endpoint(EndpointSpec(url=server.url, **settings), server.tokenizer)


def ask_all(server: Server, count: int = 12, chat: bool = False, **changes: Any) -> dict[int, Any]:
    asks = some_asks(server.tokenizer, count, chat)
    return {reply["index"]: reply for reply in client(server, **changes).answers(asks, PARAMS)}


def test_token_ids_go_in_and_come_out(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with running(tiny_tokenizer) as server:
        replies = ask_all(server)
        bodies = sorted(server.bodies, key=lambda body: body["seed"])
    asks = some_asks(tiny_tokenizer, 12)
    assert sorted(replies) == list(range(12))
    for ask, body in zip(asks, bodies, strict=True):
        reply = replies[ask.index]
        told = {"text": ask.text, "finish_reason": "stop", "mismatch": None, "retokenised": False}
        told |= {"token_ids": [*ask.ids, tiny_tokenizer.eos_token_id], "prompt_ids": ask.ids}
        assert reply.items() >= told.items()
        assert body == {
            "model": "the-model", "prompt": ask.ids, "return_token_ids": True, "seed": ask.seed,
            "max_tokens": 8, "temperature": 0.5, "top_k": 7, "top_p": 0.9,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("apis", "chat", "api"),
    [("chat text", True, "chat"), ("text", False, "text"), ("tokens", False, "tokens")],
)
def test_where_ids_are_refused_text_is_tokenised_again(
    tiny_tokenizer: PreTrainedTokenizerFast, apis: str, chat: bool, api: str
) -> None:
    with running(tiny_tokenizer, apis=apis, ids=False) as server:
        endpoint = client(server)
        replies = list(endpoint.answers(some_asks(tiny_tokenizer, 12, chat), PARAMS))
        assert len(server.bodies) == 12 + (api != "tokens"), "one request finds out, not each"
    assert endpoint.api == api
    for reply in replies:
        assert reply["token_ids"] == [*reply["prompt_ids"], tiny_tokenizer.eos_token_id]
        assert reply["retokenised"]
        assert reply["mismatch"] is False and reply["prompt_mismatch"] is False


def test_a_chat_is_asked_with_its_tools_and_the_templates_settings() -> None:
    tokenizer = stand_in_tokenizer(320)
    tokenizer.chat_template = TEMPLATE
    set_template(tokenizer, thinking=False)
    tools = ({"type": "function", "function": {"name": "f"}},)
    ask = replace(some_asks(tokenizer, 1, chat=True)[0], tools=tools)
    with running(tokenizer, apis="chat") as server:
        list(
            client(server, api="chat").answers([ask, some_asks(tokenizer, 1, chat=True)[0]], PARAMS)
        )
        with_tools, without = sorted(server.bodies, key=lambda body: "tools" not in body)
    assert with_tools["tools"] == list(tools) and "tools" not in without
    assert with_tools["chat_template_kwargs"] == {"enable_thinking": False}


def test_thinking_that_comes_apart_from_its_answer_is_refused(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    apart = {"reasoning_content": "hm"}
    told = pytest.raises(ValueError, match=r"without its thinking, .*'hm'.*api=tokens")
    with running(tiny_tokenizer, message=apart) as server, told:
        ask_all(server, 1, chat=True, api="chat")


@pytest.mark.parametrize("ends", [["<|user|>"], []])
def test_an_answer_ends_in_one_special_token_with_its_law(ends: list[str]) -> None:
    """Also in one that is special in added_tokens_decoder alone; a stop text leaves none."""
    tokenizer = stand_in_tokenizer(320)
    told = tokenizer.convert_tokens_to_ids(ends)
    assert not {*told} & {*tokenizer.all_special_ids}
    likely = {token: {token: -0.5, 7: -1.0} for token in range(320)}
    with running(tokenizer, ends=told, likely=likely.get) as server:
        [ask] = some_asks(tokenizer, 1)
        [reply] = client(server).answers([replace(ask, top_logprobs=2)], PARAMS)
    assert reply["token_ids"] == [*ask.ids, *(told or [tokenizer.eos_token_id])]
    law = likely[told[0]] if told else {tokenizer.eos_token_id: 0.0}
    assert reply["top_logprobs"][len(ask.ids) :] == [law]


def test_an_answer_that_was_cut_has_no_end_token(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with running(tiny_tokenizer, ids=False) as server:
        long = "x + y * z, " * 4
        ask = Ask(0, tiny_tokenizer(long)["input_ids"], long, (), 0)
        (reply,) = client(server).answers([ask], PARAMS)
    assert reply["token_ids"] == ask.ids[:8] and reply["finish_reason"] == "length"


@pytest.mark.parametrize(("extra", "mismatch"), [(0, False), (1, True), (-1, False), (-2, True)])
def test_a_token_count_that_cannot_be_is_a_mismatch(
    tiny_tokenizer: PreTrainedTokenizerFast, extra: int, mismatch: bool
) -> None:
    """Ended answers: n tokens, or n + 1 with the end token. The server counts n + 1 + extra."""
    with running(tiny_tokenizer, ids=False, extra_tokens=extra) as server:
        assert {reply["mismatch"] for reply in ask_all(server).values()} == {mismatch}
        endpoint = client(server, api="text")
        asks = [Ask(0, [5], "x + y * z, " * 4, (), 0)]
        (cut,) = endpoint.answers(asks, PARAMS)
    assert cut["finish_reason"] == "length" and cut["mismatch"] == (extra != 0)
    assert cut["prompt_mismatch"] is True, "the server read more tokens than the one we count"


@pytest.mark.parametrize(
    "fault",
    [(500, {}), (503, {}), (429, {}), (408, {}), "drop", "half"],
    ids=["500", "503", "429", "408", "drop", "half"],
)
def test_what_passes_is_tried_again(tiny_tokenizer: PreTrainedTokenizerFast, fault: Any) -> None:
    with running(tiny_tokenizer) as server:
        server.faults = [fault, OK, fault, fault, OK, fault]
        replies = ask_all(server)
        assert len(server.bodies) == 12 + 4
    asks = some_asks(tiny_tokenizer, 12)
    assert all(replies[a.index]["token_ids"] == [*a.ids, 0] for a in asks)


def test_a_silent_server_is_asked_again(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with running(tiny_tokenizer) as server:
        server.faults = ["silent"]
        # Short for a silent server; where a busy machine takes as long, it is asked once more.
        replies = ask_all(server, count=1, timeout_s=0.3, retries=1000)
        assert len(replies) == 1 and len(server.bodies) >= 2


def test_retry_after_is_kept_to(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with running(tiny_tokenizer) as server:
        server.faults = [(429, {"Retry_After": "1"})]
        ask_all(server, count=1)
        assert server.times[1] - server.times[0] >= 1.0


def test_waits_double(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.1)
    with running(tiny_tokenizer) as server:
        server.faults = [(500, {})] * 3
        ask_all(server, count=1)
        waits = [
            later - sooner for sooner, later in zip(server.times, server.times[1:], strict=False)
        ]
    for attempt, waited in enumerate(waits):
        assert waited >= 0.07 * 2**attempt


def test_no_more_than_concurrency_requests_are_under_way(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    three = threading.Barrier(3, timeout=600)
    with running(tiny_tokenizer, gate=three.wait) as server:
        assert len(ask_all(server, count=21, concurrency=3, api="tokens")) == 21
        assert server.most == 3


def test_giving_up_keeps_what_is_done_and_starts_no_more(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    replies: Counter[int] = Counter()
    with running(tiny_tokenizer) as server:
        server.faults = [OK] * 5 + [(503, {})] * 1000
        answers = client(server, retries=2).answers(some_asks(tiny_tokenizer, 40), PARAMS)
        with pytest.raises(GivenUp, match=r"given up after \d attempts, the last: 503"):
            for reply in answers:
                replies[reply["index"]] += 1
        assert len(replies) == 5 and max(replies.values()) == 1
        assert len(server.bodies) <= 5 + 4 * 3


def test_a_request_that_is_wrong_is_not_repeated(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with running(tiny_tokenizer) as server:
        server.faults = [OK, (400, {})]
        with pytest.raises(Refused, match=r"refuses: 400 .*not now"):
            ask_all(server, concurrency=1)
        assert len(server.bodies) == 2
        server.faults = [(401, {})]
        with pytest.raises(Refused, match="401"):
            ask_all(server)
        assert len(server.bodies) == 3, "401 does not mean that another api might do"
    with (
        running(tiny_tokenizer, apis="none") as server,
        pytest.raises(Refused, match="by api=chat"),
    ):
        ask_all(server, chat=True)


def test_an_unreachable_server_is_a_clear_error(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with running(tiny_tokenizer) as server:
        gone = server.url
    with pytest.raises(GivenUp, match=r"given up after 2 attempts, the last: ConnectError"):
        Endpoint(EndpointSpec(url=gone, retries=1), tiny_tokenizer)


def test_settings_are_checked(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="api: got 'grpc'"):
        Endpoint(EndpointSpec(url="http://x", model="m", api="grpc"), tiny_tokenizer)
    for url in ("localhost:8000", "ftp://x", "http://"):
        with pytest.raises(ValueError, match="endpoint: got"):
            Endpoint(EndpointSpec(url=url, model="m"), tiny_tokenizer)
    assert (
        Endpoint(EndpointSpec(url="http://x:1/", model="m"), tiny_tokenizer).url == "http://x:1/v1"
    )
    assert (
        Endpoint(EndpointSpec(url="https://x/api/v1/", model="m"), tiny_tokenizer).url
        == "https://x/api/v1"
    )
    with running(tiny_tokenizer, models=["a", "b"]) as server:
        with pytest.raises(ValueError, match=r"serves \['a', 'b'\]; say which"):
            client(server)
        assert client(server, model="b").model == "b"


def test_the_key_is_sent_when_there_is_one(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID", "BASE_URL"):
        monkeypatch.setenv(f"OPENAI_{name}", "http://not-for-this-server")
    with running(tiny_tokenizer) as server:
        ask_all(server, count=1)
        monkeypatch.setenv("DRAFTSMITH_API_KEY", "secret")
        ask_all(server, count=1)
        assert [h.get("authorization") for h in server.headers] == [None, "Bearer secret"]
        assert "not-for-this-server" not in str(server.headers)


def test_without_the_client_there_is_a_clear_error(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ValueError, match=r"no package openai, .*draftsmith\[endpoint\]"):
        Endpoint(EndpointSpec(url="http://x", model="m"), tiny_tokenizer)
