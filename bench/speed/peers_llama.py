"""llama.cpp as arms of peers.py: its server, told by token ids, and its examples, a process a call.

Greedy, the likeliest token being the only one its sampler sees. Its server's clock begins after the
prefill and the first token, so these are outside; the speculative example's begins before the pass
that gives the first token.
"""

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from socket import socket
from typing import Any

BIN = "llama.cpp/build/bin"
GREEDY = ("--temp", "0", "--top-k", "1", "--samplers", "top_k", "--seed", "1")
STARTS = 120.0  # seconds that a server may take
TRIES = 5  # of an example: on a busy machine its log may lose its last lines
NGRAM = 3  # tokens that its lookup matches

DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
ENCODED = re.compile(r"encoded\s+(\d+) tokens")
COUNTED = re.compile(r"n_(drafted|accept)\s*=\s*(\d+)")


def read_example(said: str) -> dict[str, Any]:
    """What an example prints at its end: tokens and seconds of decoding, drafted and accepted
    tokens, and the prompt's tokens as it split them. ValueError where that isn't there.
    """
    decoded, encoded = DECODED.search(said), ENCODED.search(said)
    counts = {name: int(number) for name, number in COUNTED.findall(said)}
    if not (decoded and encoded and len(counts) == 2):
        raise ValueError(f"llama.cpp: got {said[-300:]!r}, expected what its example prints")
    return {
        "counted": int(decoded[1]),
        "seconds": float(decoded[2]),
        "drafted": counts["drafted"],
        "accepted": counts["accept"],
        "rounds": int(decoded[1]) - counts["accept"],
        "prompt": int(encoded[1]),
    }


def example(
    folder: str, name: str, options: Sequence[str], prompt: str, new_tokens: int
) -> dict[str, Any]:
    """One call of llama-<name>; ValueError with its last words where it fails."""
    command = [f"{folder}/{BIN}/llama-{name}", *options, *GREEDY, "-n", str(new_tokens)]
    command += ["-p", prompt, "--no-escape", "--ignore-eos", "--log-verbosity", "4"]
    for _ in range(TRIES):
        run = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if run.returncode:
            raise ValueError(f"llama-{name}: ended with code {run.returncode}: {run.stderr[-300:]}")
        if DECODED.search(run.stderr) and len(COUNTED.findall(run.stderr)) == 2:
            break
    return read_example(run.stderr)


def drafting(what: str, draft: str, K: int) -> list[str]:
    """The options of a server or the speculative example that drafts K tokens a round."""
    if what == "plain":
        return []
    if what == "prompt lookup":
        sizes = ("--spec-ngram-simple-size-n", str(NGRAM), "--spec-ngram-simple-size-m", str(K))
        return ["--spec-type", "ngram-simple", *sizes]
    return ["-md", draft, "--spec-type", "draft-simple", "--spec-draft-n-max", str(K)]


class LlamaServer:
    """llama-server with these options, until it is closed."""

    def __init__(self, folder: str, options: Sequence[str], log: Path) -> None:
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [f"{folder}/{BIN}/llama-server", *options, "--port", str(port)]
        command += ["--parallel", "1", "--ctx-size", "2048", "--no-webui"]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        ends = time.monotonic() + STARTS
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > ends:
                self.close()
                raise ValueError(f"llama-server didn't start: {log.read_text()[-300:]}, all: {log}")
            time.sleep(0.1)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as said:
                return said.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False

    def complete(self, ids: Sequence[int], new_tokens: int) -> dict[str, Any]:
        asked = {
            "prompt": list(ids),
            "n_predict": new_tokens,
            "ignore_eos": True,
            "seed": 1,
            "temperature": 0,
            "top_k": 1,
            "samplers": ["top_k"],
            "cache_prompt": False,
            "return_tokens": True,
        }
        head = {"Content-Type": "application/json"}
        body = json.dumps(asked).encode()
        request = urllib.request.Request(f"{self.url}/completion", body, head)
        with urllib.request.urlopen(request, timeout=600) as said:
            return read_server(json.load(said))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def read_server(said: dict[str, Any]) -> dict[str, Any]:
    """A completion's tokens and what was counted of its decoding."""
    timings, tokens = said["timings"], said["tokens"]
    accepted = timings.get("draft_n_accepted", 0)
    counted = len(tokens) - 1
    return {
        "tokens": tokens,
        "counted": counted,
        "seconds": timings["predicted_ms"] / 1000,
        "drafted": timings.get("draft_n", 0),
        "accepted": accepted,
        "rounds": counted - accepted,
    }
