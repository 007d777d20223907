"""Ten thousand requests: no leak, no lost or mixed-up answer."""

import asyncio
import subprocess
import sys
from pathlib import Path

import openai
import psutil
import pytest
from forked import free_port
from live_server import save_pair, truth, wait_until_up
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

REQUESTS, WARM_UP, AT_ONCE, TOKENS, DIFFERENT = 10_000, 2_000, 16, 16, 200


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    return psutil.Process(pid).memory_info().rss


async def ask(url: str, numbers: range) -> list[list[int]]:
    """The tokens of so many requests; every third is streamed."""
    client = openai.AsyncOpenAI(base_url=url, api_key="x")
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> list[int]:
        which = number % DIFFERENT
        how = {"model": "tiny", "prompt": [which + 1, 5, 6], "max_tokens": TOKENS, "seed": which}
        how |= {"temperature": (0.0, 0.7, 1.0)[which % 3], "stream": number % 3 == 0}
        async with room:
            got = await client.completions.create(**how, extra_body={"return_token_ids": True})
            if not how["stream"]:
                return list(got.choices[0].token_ids)
            return [token async for chunk in got for token in chunk.choices[0].token_ids]

    async with client:
        return list(await asyncio.gather(*map(one, numbers)))


@pytest.mark.slow
def test_ten_thousand_requests_leave_no_trace(
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    port = free_port()
    target, draft = save_pair(tmp_path, tiny_target, tiny_draft, tiny_tokenizer)
    truths = [
        truth(
            *(tiny_target, tiny_tokenizer, [which + 1, 5, 6]),
            temperature=(0.0, 0.7, 1.0)[which % 3],
            seed=which,
            max_new_tokens=TOKENS,
        )
        for which in range(DIFFERENT)
    ]
    command = [sys.executable, "-m", "draftsmith", "serve", f"target={target}", f"port={port}"]
    command += [
        f"drafter={draft}",
        "max_length=64",
        "batch_size=16",
        f"online={tmp_path / 'online'}",
    ]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(process, url)
        held = []
        for start in range(0, REQUESTS, 1000):
            numbers = range(start, start + 1000)
            got = asyncio.run(ask(f"{url}/v1", numbers))
            wrong = [
                number
                for number, tokens in zip(numbers, got, strict=True)
                if tokens != truths[number % DIFFERENT]
            ]
            assert wrong == []
            held.append(resident(process.pid))
            print(start, held[-1] / 2**20, flush=True)
        warm = held[WARM_UP // 1000 - 1 :]
        assert max(warm) <= 1.02 * warm[0], [f"{size / 2**20:.1f} MiB" for size in held]
        process.terminate()
        assert process.wait(timeout=600) == 0
    finally:
        process.kill()
        process.wait()
