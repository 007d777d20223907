"""Traffic to an OpenAI endpoint: requests that come at a rate, whoever is being served, or from so
many clients; and how long each waited.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

TIMEOUT = 300.0  # seconds


@dataclass(frozen=True)
class Ask:
    """One request of a stream. number: its place, and its seed; topic: what it is about."""

    number: int
    topic: str
    prompt: list[int]


@dataclass(frozen=True)
class Reply:
    """What became of a request. sent: seconds since the traffic began; seconds: until the whole
    answer was there; tokens: of it.
    """

    number: int
    topic: str
    sent: float
    seconds: float
    tokens: int
    text: str


class Endpoint:
    """Sends completions. body: what all requests say beside prompt and seed."""

    def __init__(self, url: str, **body: Any) -> None:
        self.url, self.body = url, body

    async def send(self, client: httpx.AsyncClient, ask: Ask, began: float) -> Reply:
        body = self.body | {"prompt": ask.prompt, "seed": ask.number}
        sent = time.perf_counter()
        answer = await client.post(f"{self.url}/v1/completions", json=body, timeout=TIMEOUT)
        seconds = time.perf_counter() - sent
        answer.raise_for_status()
        found = answer.json()
        tokens, text = found["usage"]["completion_tokens"], found["choices"][0]["text"]
        return Reply(ask.number, ask.topic, sent - began, seconds, tokens, text)


def at_rate(endpoint: Endpoint, asks: Sequence[Ask], rate: float, seed: int) -> list[Reply]:
    """Requests that arrive as a Poisson process of `rate` a second, however many are on their way:
    a slow server doesn't slow its users. The arrivals are a function of the seed.
    """
    waits = np.random.default_rng(seed).exponential(1 / rate, len(asks))

    async def run() -> list[Reply]:
        async with _client() as client:
            began = time.perf_counter()
            sent = []
            for ask, due in zip(asks, began + waits.cumsum(), strict=True):
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                sent.append(asyncio.create_task(endpoint.send(client, ask, began)))
            return await asyncio.gather(*sent)

    return asyncio.run(run())


def by_clients(endpoint: Endpoint, asks: Sequence[Ask], clients: int) -> list[Reply]:
    """As many clients, each of which sends its next request when it has its answer."""

    async def run() -> list[Reply]:
        left, replies = list(reversed(asks)), []
        async with _client() as client:
            began = time.perf_counter()

            async def ask_on() -> None:
                while left:
                    replies.append(await endpoint.send(client, left.pop(), began))

            await asyncio.gather(*(ask_on() for _ in range(clients)))
        return replies

    return asyncio.run(run())


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(limits=httpx.Limits(max_connections=None))


def latencies(replies: Sequence[Reply]) -> dict[str, float]:
    """p50 and p99 of the time to a whole answer, and tokens a second from first request to last
    answer.
    """
    seconds = np.array([reply.seconds for reply in replies])
    wall = max(r.sent + r.seconds for r in replies) - min(r.sent for r in replies)
    return {
        "p50": float(np.quantile(seconds, 0.5)),
        "p99": float(np.quantile(seconds, 0.99)),
        "tokens_per_s": sum(r.tokens for r in replies) / wall,
        "requests_per_s": len(replies) / wall,
    }
