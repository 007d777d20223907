"""A server over the tests' tiny models, in a thread of this process, and what it must answer."""

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from forked import Forked, free_port
from plain_decoding import plain_decode
from prometheus_client.parser import text_string_to_metric_families
from saved_drafts import save_draft
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.serve.server import Backend, Server, ServerConfig

END = 0  # ends an answer

GOOD = {"model": "tiny", "prompt": "a", "max_tokens": 1}
LONG = {"max_tokens": 450, "ignore_eos": True, "seed": 0, "model": "tiny", "prompt": [5, 6]}
TEXTS = ["def f(x):", "hello", "x = 1\n", "for i in", "import os", "€ and ü"]
# Of one batch: greedy and sampled rows, with every filter.
LAWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.05},
]


@dataclass
class Live:
    """A running server."""

    backend: Backend
    server: Server
    url: str
    thread: threading.Thread
    http: httpx.Client

    @property
    def lane(self) -> Any:
        return next(iter(self.backend.service.lanes.values()))

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **({"api_key": "x"} | options))

    def asynchronous(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="x")

    def post(self, body: dict[str, Any] | bytes, path: str = "completions") -> httpx.Response:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {"Content-Type": "application/json"}
        return self.http.post(f"/v1/{path}", headers=headers, **content)  # type: ignore[arg-type]

    def counts(self) -> dict[str, float]:
        """The metrics of the first lane: `name`, or `name/label` -> value."""
        return read_metrics(self.http.get("/metrics").text)


def read_metrics(page: str, model: str = "tiny") -> dict[str, float]:
    """A model's metrics: `name`, or `name/label` where it has another label than the model."""
    return {
        "/".join([one.name, *(v for k, v in one.labels.items() if k != "model_name")]): one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
        if one.labels["model_name"] == model
    }


def save_pair(
    folder: Path,
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[Path, Path]:
    """A target's folder, with its tokenizer, and the draft's, for a server of its own process."""
    target.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    return folder / "tiny", save_draft(folder / "draft", draft, target, tokenizer)


def wait_until_up(process: Forked | subprocess.Popen[Any], url: str) -> None:
    """Until a server's own process answers."""

    def up() -> bool:
        assert process.poll() is None, process.returncode
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            time.sleep(0.1)
            return False

    until(up)


@contextmanager
def live(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> Iterator[Live]:
    """A server with these settings; it is drained at the end, unless it has ended before."""
    port = free_port()
    defaults = {
        "target": "tiny",
        "port": port,
        "batch_size": 4,
        "max_length": 512,
        "drain_s": 600.0,
    }
    how = ServerConfig(**(defaults | settings))
    how.api_key = settings.get("api_key", "")  # whatever the environment says
    backend = Backend(how, target, tokenizer)
    server = Server(backend)
    thread = threading.Thread(target=server.run)
    backend.start()
    thread.start()
    try:
        until(lambda: server.started)
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=600, verify=False) as http:
            yield Live(backend, server, url, thread, http)
    finally:
        server.should_exit = True
        thread.join()
        backend.stop()


def until(true: Callable[[], bool], seconds: float = 600.0) -> None:
    """Wait for something that a thread or process will make true, however busy the machine is."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.005)


def truth(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    index: int = 0,
    **params: Any,
) -> list[int]:
    """The tokens of plain decoding, one sequence at a time by transformers' own forward; index: of
    the answer in its request.
    """
    return plain_decode(
        target,
        prompt,
        SamplingParams(**params),
        vocab_size=len(tokenizer),
        stop_ids=() if params.get("ignore_eos") else (END,),
        index=index,
    )


def asked(number: int) -> dict[str, Any]:
    """The number-th of many different requests."""
    law = LAWS[number % len(LAWS)]
    beyond = {name: law[name] for name in ("top_k", "min_p") if name in law}
    return {
        "prompt": TEXTS[number % len(TEXTS)],
        "seed": number % 60,
        "max_tokens": 16,
        **{name: value for name, value in law.items() if name not in beyond},
        "extra_body": {"return_token_ids": True, **beyond},
    }


def expected(
    number: int, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """What `asked(number)` must be answered with."""
    one = asked(number)
    prompt = tokenizer(one["prompt"]).input_ids
    law = LAWS[number % len(LAWS)]
    return truth(target, tokenizer, prompt, seed=one["seed"], max_new_tokens=16, **law)


async def ask_all(
    made: Live, numbers: list[int], models: list[str], at_once: int = 16
) -> list[list[int]]:
    """The tokens of so many answers, every second one streamed."""
    client = made.asynchronous()
    room = asyncio.Semaphore(at_once)

    async def one(number: int) -> list[int]:
        model = models[number % len(models)]
        async with room:
            if number % 2:
                whole = await client.completions.create(model=model, **asked(number))
                return list(whole.choices[0].token_ids)  # type: ignore[attr-defined]
            tokens: list[int] = []
            stream = await client.completions.create(model=model, stream=True, **asked(number))
            async for chunk in stream:
                tokens += chunk.choices[0].token_ids
            return tokens

    async with client:
        return list(await asyncio.gather(*map(one, numbers)))
