"""A stream of prompts served and learned from in one process, as fast as it goes: what a learning
draft is worth beside a frozen one and one that knew all topics before.

Each finished request is a line of `stream.jsonl`: number, index (its place in the stream), topic,
version (of the draft that it began with), tau (tokens a target call, as served), rounds, emitted,
drafted, accepted, positions, seconds (since the start, measuring included), and `alpha` of the
frozen, online and ceiling drafts as each is at this moment: exact, teacher-forced on this answer,
before anything was learned from it. Of heads alpha is over all depths.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.recorder import Harvested
from draftsmith.decode.engine.request import Request, open_request
from draftsmith.decode.prompts.prompts import beginning, load_prompts
from draftsmith.decode.report.charts import Trend, drawing, scatter
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.serve.buffer import ReplayBuffer, Served, as_served
from draftsmith.train.live.batches import Feed

MIX = "mix"
ARMS = {"frozen": "d", "online": "a", "ceiling": "c"}  # with their colours
AVERAGED = 50  # requests: of the moving mean in the picture


class StreamPrompt(NamedTuple):
    topic: str
    tokens: list[int]


@dataclass(kw_only=True)
class Replay:
    """The group `replay` of a recipe: a stream that is served here; empty: a server's requests."""

    # A JSONL file of {"prompt", "topic"}; or parts such as gsm8k:300,stdlib:1000,mix:300 (commas or
    # +), each a source and how many of its prompts; mix takes from all before it in turn.
    stream: str = ""
    sources: dict[str, str] = field(default_factory=dict)  # what names in it stand for
    split: str = "report"  # of a source: report | tune | train, see prompts.load_prompts
    prompt_tokens: int = 32  # of a document, where it is to be continued
    max_new_tokens: int = 128
    temperature: float = 1.0
    batch_size: int = 8  # requests decoded at a time
    K: int = 4  # drafted tokens a round
    keep_top_k: int = 64  # likeliest tokens of a position that are kept
    ceiling: str = ""  # a drafter folder that was distilled on all topics; empty: none


def read_stream(
    replay: Replay, tokenizer: PreTrainedTokenizerBase, seed: int
) -> list[StreamPrompt]:
    """The prompts of a stream, in order; none comes twice. seed: of the order within a source.
    ValueError: what `load_prompts` raises, a part that can't be read, or too few prompts.
    """
    stream = replay.stream
    if Path(stream).suffix == ".jsonl":
        return _read_file(Path(stream), tokenizer)
    left: dict[str, list[list[int]]] = {}
    asked: list[StreamPrompt] = []
    for words in re.split(r"[,+]", stream):
        name, _, count = words.strip().rpartition(":")
        if not name or not count.isdecimal() or (name == MIX and not left):
            raise ValueError(
                f"replay.stream: got {words!r} in {stream!r}, expected <source>:<number of "
                f"prompts>, {MIX} after others; or a .jsonl file"
            )
        if name != MIX and name not in left:
            found = load_prompts(
                replay.sources.get(name, name),
                tokenizer,
                limit=None,
                prompt_tokens=replay.prompt_tokens,
                split=replay.split,
            )
            order = np.random.default_rng((seed, len(left))).permutation(len(found))
            left[name] = [found[i].tokens for i in order]
        turns = list(left) if name == MIX else [name]
        for turn in range(int(count)):
            of = turns[turn % len(turns)]
            if not left[of]:
                raise ValueError(
                    f"replay.stream: {of} has no prompt left for {words!r} of {stream!r}; ask for "
                    "fewer"
                )
            asked.append(StreamPrompt(name, left[of].pop()))
    return asked


def _read_file(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[StreamPrompt]:
    asked = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            asked.append(StreamPrompt(str(row["topic"]), beginning(row["prompt"], tokenizer)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}:{number}: got {line!r:.80}, expected {{"prompt": ..., "topic": ...}}'
            ) from error
    if not asked:
        raise ValueError(f"{path} is empty, expected a prompt a line")
    return asked


@dataclass(eq=False)
class ReplayFeed(Feed):
    """Serves a stream from its beginning, in steps: ValueError where its record is there."""

    replay: Replay
    asked: Sequence[StreamPrompt]
    decoder: Decoder
    buffer: ReplayBuffer
    alphas: Callable[[Served], dict[str, tuple[float, float]]]  # of a finished request, by arms
    record: Path  # the file that gets a line a request

    def __post_init__(self) -> None:
        if self.record.exists():
            raise ValueError(
                f"{self.record} is of a replay that was cut off, which can't go on: remove its "
                "folder, or give another with out=..."
            )
        replay, decoder, asked = self.replay, self.decoder, self.asked
        self.version = self.added = 0
        self.begun: dict[int, int] = {}  # by request on its way, the version it began with
        self.to_go_on = f"a replay starts over; remove {self.record.parent} first"
        self.started = time.monotonic()
        longest = max(len(one.tokens) for one in asked) + replay.max_new_tokens
        how: dict[str, Any] = {"tokenizer": decoder.tokenizer, "context": decoder.context}
        how |= {"end_ids": decoder.eos_ids}
        how |= {"params": SamplingParams(replay.temperature, max_new_tokens=replay.max_new_tokens)}
        self.session = decoder.open_session(
            replay.batch_size, longest, finished=self._finished, harvest=True
        )
        for index, one in enumerate(asked):
            self.session.submit(open_request(one.tokens, index, index, **how))

    def more(self) -> bool:
        added = self.added
        while self.session.busy and self.added == added:
            for request, _, _ in self.session.step():
                self.begun.setdefault(request.completion.index, self.version)
        return self.session.busy

    def swap(self, drafter: Drafter, version: int) -> None:
        """Draft with another version from the next round on."""
        self.session.swap_drafter(drafter)
        self.version = version

    def _finished(self, request: Request, harvested: Harvested | None) -> None:
        assert harvested is not None
        runner, k = self.decoder.runner, self.replay.keep_top_k
        version, states = self.begun.pop(request.completion.index, self.version), bool(runner.taps)
        served = as_served(request, harvested, runner, k=k, version=version, states=states)
        if served is None:
            return
        alphas = self.alphas(
            replace(served, norm_NH=harvested.norm_AH, taps_TU=harvested.taps_TU)  # exact
        )
        number = self.buffer.add(served)
        self.added += 1
        about = served.about
        line: dict[str, Any] = {
            "number": number,
            "index": about["index"],
            "topic": self.asked[about["index"]].topic,
            "version": served.version,
            "tau": about["emitted"] / about["rounds"] if about["rounds"] else None,
            **{name: about[name] for name in ("rounds", "emitted", "drafted")},
            "accepted": int(served.accepted_A.sum()),
            "positions": max(count for _, count in alphas.values()),
            "alpha": {arm: total / max(1, count) for arm, (total, count) in alphas.items()},
            "seconds": round(time.monotonic() - self.started, 3),
        }
        with self.record.open("a") as file:
            file.write(json.dumps(line) + "\n")


def draw(record: Path, picture: Path) -> None:
    """The moving mean of each arm's alpha over a replay, and where the topic changed."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    weights = np.array([line["positions"] for line in lines])
    trends = []
    for arm, css in ARMS.items():
        if arm in lines[0]["alpha"]:
            alphas = np.array([line["alpha"][arm] for line in lines])
            lately = [slice(max(0, i - AVERAGED), i) for i in range(1, len(lines) + 1)]
            mean = [float(np.average(alphas[i], weights=weights[i])) for i in lately]
            trends.append(Trend(arm, css, (), (), list(enumerate(mean, 1))))
    seen: dict[str, float] = {}
    for at, line in enumerate(lines, 1):  # at the border requests of both topics end in turn
        seen.setdefault(line["topic"], at)
    title = f"alpha, mean of the last {AVERAGED} requests"
    marks = [(at, topic) for topic, at in seen.items()]
    chart = scatter(title, trends, x_label="requests", y_label="alpha", log=False, marks=marks)
    legend = [(trend.css, trend.name) for trend in trends]
    picture.write_text(drawing([chart], legend))
