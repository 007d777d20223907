"""kill -9 of whole processes, the server's and the learner's, where it hurts most."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from forked import Forked, free_port
from killed_midway import LEARNER, SERVER
from live_server import read_metrics, save_pair, truth, wait_until_up
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.serve.buffer import ReplayBuffer
from draftsmith.decode.serve.versions import Versions
from draftsmith.models.draft_lm import load_draft

SERVER_SPOTS, LEARNER_SPOTS = tuple(SERVER), tuple(LEARNER)
PROMPTS = [[which + 1, 5, 6] for which in range(20)]
SECONDS = 3000.0


class Mortal:
    """A process that is killed at one spot after another, and each time started again by the same
    command; the last one lives.
    """

    def __init__(self, entry: str, arguments: Sequence[str], spots: Sequence[str], told: Path):
        self.end = [entry, *arguments]
        self.spots, self.told = [*spots, "never"], told
        self.killed: list[str] = []
        self.process = self.start()

    def start(self) -> Forked:
        midway = Path(__file__).parents[2] / "tools/killed_midway.py"
        return Forked([str(midway), self.spots[0], str(self.told), *self.end])

    def dead(self) -> bool:
        """Whether it has been killed: it is running again then, with the next spot."""
        code = self.process.poll()
        if code is None:
            return False
        assert code == -signal.SIGKILL, (self.end[0], self.spots[0], code, self.process.told)
        self.killed.append(self.spots.pop(0))
        self.process = self.start()
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def tokens_of(url: str, which: int) -> list[int] | None:
    """An answer; None where the server died over it."""
    body = {"model": "tiny", "prompt": PROMPTS[which], "max_tokens": 12, "seed": which}
    body |= {"temperature": float(which % 2), "return_token_ids": True}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    except httpx.TransportError:
        return None
    return list(answer.raise_for_status().json()["choices"][0]["token_ids"])


def version_of(url: str) -> float:
    """Of the draft that serves."""
    return read_metrics(httpx.get(f"{url}/metrics", timeout=600).text)["draftsmith:draft_version"]


@pytest.mark.parametrize(
    ("server_spots", "learner_spots"),
    [
        (SERVER_SPOTS[:1], LEARNER_SPOTS[2:3]),
        pytest.param(SERVER_SPOTS, LEARNER_SPOTS, marks=pytest.mark.slow),
    ],
    ids=("one of each", "all"),
)
def test_a_server_and_its_learner_may_be_killed_anywhere(
    server_spots: tuple[str, ...],
    learner_spots: tuple[str, ...],
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    target, draft = save_pair(tmp_path, tiny_target, tiny_draft, tiny_tokenizer)
    online, told, port = tmp_path / "online", tmp_path / "told", free_port()
    truths = [
        truth(
            *(tiny_target, tiny_tokenizer, prompt),
            temperature=float(which % 2),
            seed=which,
            max_new_tokens=12,
        )
        for which, prompt in enumerate(PROMPTS)
    ]
    versions, url = Versions(online / "default"), f"http://127.0.0.1:{port}"
    serve = [f"target={target}", f"drafter={draft}", f"online={online}", f"port={port}"]
    serve += ["max_length=64", "batch_size=4", "keep_top_k=8", "threads=1"]
    learn = [f"target.path={target}", f"drafter={draft}", f"online={online}", "loss=fkl"]
    learn += [
        f"out={tmp_path / 'run'}",
        "dtype=float32",
        "mix.requests_per_step=1",
        "batch_size=2",
    ]
    learn += ["steps=100000", "eval_every=2", "save_every=3", "idle_priority=false"]
    learn += ["publish={heldout_least: 2, margin: -1, rollback_requests: 100000}"]  # every time
    server = Mortal("serve", serve, server_spots, told)
    learner = Mortal("online", learn, learner_spots, told)
    try:
        wait_until_up(server.process, url)
        asked, after, deadline = 0, 0, time.monotonic() + SECONDS
        # Until both have nothing left to die of, and a version that came after that serves.
        while after < 30 or version_of(url) <= len(learner_spots):
            assert time.monotonic() < deadline, (server.spots, learner.spots)
            tokens = tokens_of(url, asked % len(PROMPTS))
            if tokens is None:
                server.process.wait(timeout=600)
            else:
                assert tokens == truths[asked % len(PROMPTS)], server.killed + learner.killed
                asked += 1
                after += server.spots == learner.spots == ["never"]
            pointed, _ = versions.current()
            if server.dead():
                wait_until_up(server.process, url)
                assert version_of(url) >= pointed
            learner.dead()
    finally:
        server.kill()
        learner.kill()
    assert (server.killed, learner.killed) == (list(server_spots), list(learner_spots))
    version, path = versions.current()
    assert version > len(learner_spots) and path is not None
    load_draft(path)
    buffer = ReplayBuffer(online / "default" / "buffer")
    found = [*buffer.numbers(), *buffer.heldout_numbers()]
    acknowledged = [int(line) for line in told.read_text().splitlines()]
    assert len(acknowledged) > asked // 2 and set(acknowledged) <= set(found)
    assert len(set(acknowledged)) == len(acknowledged)
    for number in found:
        assert buffer.read(number).prompt == 3
