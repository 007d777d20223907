"""The arms of peers.py: what answers one prompt greedily, ours or a peer's, and what it counted.

Every arm says the seconds of its decoding alone and the tokens that fell into them: the prefill and
the token that it gives are outside on all sides, but for llama.cpp's speculative example, whose
clock holds the first token's pass too (a token of it is counted).
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from draftsmith.bench.speed.arms import assisted, generate
from draftsmith.bench.speed.peers_llama import LlamaServer, drafting, example
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.draft_lm import load_draft

WORKER = Path(__file__).with_name("peers_openvino.py")
DYNAMIC = (20, "constant", 0.4)  # assisted generation as it is without settings
PLAIN, DRAFTED, LOOKED = "plain", "speculative", "prompt lookup"


@dataclass
class Told:
    """One answer. counted: tokens of `seconds`; rounds: passes of the target in them; text: where a
    peer tells no ids; drafted, accepted: 0 where it tells none.
    """

    seconds: float
    counted: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    prompt: int = 0  # tokens that a peer made of the prompt's text
    done: Completion | None = None  # ours alone

    @property
    def rate(self) -> float:
        return self.counted / self.seconds


class Who(NamedTuple):
    """An arm's name. K: drafted tokens a round; "" where there are none."""

    what: str
    peer: str
    K: str = ""


Call = Callable[[list[int], int], Told]


@dataclass
class Place:
    """What all arms of a pair decode with. exported: of the files that peers read, by name."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: str
    dtype: str
    threads: int
    peers: str  # the folder of their environments
    exported: dict[str, Path]
    stack: ExitStack
    isa: str = ""  # of OpenVINO's oneDNN at most
    servers: dict[Who, LlamaServer] = field(default_factory=dict)
    decoders: dict[tuple[str, str], Decoder] = field(default_factory=dict)  # ours: what, K


def ours(place: Place, what: str, K: int) -> Call:
    name = {PLAIN: None, DRAFTED: place.drafter, LOOKED: "ngram"}[what]
    drafter = load_drafter(name, place.target, place.tokenizer, allow_target_mismatch=True)
    decoder = Decoder(place.target, place.tokenizer, drafter, **({"K": K} if K else {}))
    place.decoders[what, str(K)] = decoder

    def call(ids: list[int], new_tokens: int) -> Told:
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        [done] = decoder.generate([ids], params)
        seen = done.counters
        told = Told(seen.decode_seconds, seen.emitted, done.tokens, rounds=seen.rounds, done=done)
        told.drafted = seen.nodes
        told.accepted = sum(kept * rounds for kept, rounds in enumerate(seen.histogram))
        return told

    return call


class Clock(BaseStreamer):  # type: ignore[misc]
    """When tokens came, and how many: `generate` hands it the prompt, then each round's."""

    def __init__(self) -> None:
        self.came: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.came.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        pass

    def told(self, tokens: list[int]) -> Told:
        (first, _), *rounds = self.came[1:]
        self.came = []
        return Told(rounds[-1][0] - first, sum(n for _, n in rounds), tokens, rounds=len(rounds))


def transformers(place: Place, what: str, K: str) -> Call:
    clock = Clock()
    # An assistant of its own: transformers keeps the state of a schedule in its config.
    assistant = load_draft(place.drafter, place.dtype).eval() if what == DRAFTED else None

    def call(ids: list[int], new_tokens: int) -> Told:
        if assistant is not None:
            setting = DYNAMIC if K == "dynamic" else (int(K), "constant", 0.0)
            arm = assisted(place.target, new_tokens, assistant, setting, streamer=clock)
        else:
            more = {"prompt_lookup_num_tokens": int(K)} if what == LOOKED else {}
            arm = generate(place.target, new_tokens, streamer=clock, **more)
        [done] = arm([ids])
        return clock.told(done.tokens)

    return call


class OpenVino:
    """The worker in its own environment; one for all its arms."""

    def __init__(self, place: Place, log: Path) -> None:
        python = f"{place.peers}/openvino/bin/python"
        files = [place.exported["target.ov"], place.exported["draft.ov"]]
        precision = {"bfloat16": "bf16", "float32": "f32"}[place.dtype]
        self.log = place.stack.enter_context(log.open("w"))
        self.process = subprocess.Popen(
            [python, WORKER, *map(str, files), str(place.threads), precision],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | ({"ONEDNN_MAX_CPU_ISA": place.isa} if place.isa else {}),
        )
        place.stack.callback(self.process.communicate)

    def call(self, arm: str, K: int, ids: list[int], new_tokens: int) -> Told:
        assert self.process.stdin is not None and self.process.stdout is not None
        asked = {"arm": arm, "ids": ids, "new_tokens": new_tokens, "K": K}
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(
                f"OpenVINO: the worker ended with code {self.process.wait()}; what it said: "
                f"{self.log.name}; of code -8, by AMX: try openvino_isa=AVX512_CORE_BF16"
            )
        return Told(**json.loads(line))


def llama_server(place: Place, who: Who, log: Path) -> Call:
    """Its server, started at the first call; `place.servers` has it."""
    options = llama_options(place, who.what, who.K)

    def call(ids: list[int], new_tokens: int) -> Told:
        if who not in place.servers:
            place.servers[who] = LlamaServer(place.peers, options, log)
            place.stack.callback(place.servers[who].close)
        return Told(**place.servers[who].complete(ids, new_tokens))

    return call


def llama_example(place: Place, what: str, K: str) -> Call:
    """The speculative example, which also drafts by lookup. ValueError where it splits the prompt's
    text into other tokens.
    """
    options = ["--ctx-size", "2048", "-fit", "off", *llama_options(place, what, K)]

    def call(ids: list[int], new_tokens: int) -> Told:
        text = str(place.tokenizer.decode(ids))
        # It stops once it has more tokens than this.
        told = Told(**example(place.peers, "speculative-simple", options, text, new_tokens - 1))
        if told.prompt != len(ids):
            raise ValueError(
                f"llama.cpp: got {told.prompt} tokens of {text!r}, expected {len(ids)}"
            )
        return told

    return call


def llama_options(place: Place, what: str, K: str) -> list[str]:
    threads = str(place.threads)
    each = ["-t", threads, "-tb", threads]
    if what == DRAFTED:
        each += ["-td", threads, "-tbd", threads]
    if place.dtype == "float32":  # by itself the KV is kept in 16 bits
        each += ["-ctk", "f32", "-ctv", "f32"]
        each += ["-ctkd", "f32", "-ctvd", "f32"] if what == DRAFTED else []
    draft = str(place.exported.get("draft.gguf", ""))
    more = drafting(what, draft, int(K or 0))
    return ["-m", str(place.exported["target.gguf"]), *each, *more]


def candidates(
    place: Place, Ks: Sequence[int], peers: Sequence[str], logs: Path
) -> dict[Who, Call]:
    """Every arm: each way of drafting at each K."""
    arms: dict[Who, Call] = {Who(PLAIN, "ours"): ours(place, PLAIN, 0)}
    drafted = [(what, K) for what in (DRAFTED, LOOKED) for K in Ks]
    arms |= {Who(what, "ours", str(K)): ours(place, what, K) for what, K in drafted}
    if "transformers" in peers:
        arms[Who(PLAIN, "transformers")] = transformers(place, PLAIN, "")
        names = [(what, str(K)) for what, K in drafted]
        for what, K in [*names, (DRAFTED, "dynamic")]:
            arms[Who(what, "transformers", K)] = transformers(place, what, K)
    if "openvino" in peers:
        worker = OpenVino(place, logs / f"openvino-{place.threads}.log")
        arms[Who(PLAIN, "OpenVINO")] = partial(worker.call, "plain", 0)
        arms[Who(PLAIN, "OpenVINO, SDPA")] = partial(worker.call, "plain, SDPA", 0)
        for what, K in drafted:
            arm = "speculative" if what == DRAFTED else "lookup"
            arms[Who(what, "OpenVINO", str(K))] = partial(worker.call, arm, K)
    if "llama.cpp" in peers:
        for what, K in [(PLAIN, ""), *((what, str(K)) for what, K in drafted)]:
            who = Who(what, "llama.cpp server", K)
            log = logs / f"{'-'.join((*who, str(place.threads))).replace(' ', '-')}.log"
            arms[who] = llama_server(place, who, log)
            if what == DRAFTED:
                arms[Who(what, "llama.cpp example", K)] = llama_example(place, what, K)
    return arms
