"""A server that learns, measured: what online distillation wins when the topic changes, and what it
costs those who are served meanwhile.

    python bench/evidence/online.py              # 3 seeds; about 10 minutes each on two quiet cores

A stream of questions (GSM8K), then of Python source, then of both, comes to a real server over HTTP
as a Poisson process at 60% of what the server was measured to hold. The server decodes on one
thread; the learner has what that and the traffic leave of two cores (SCHED_IDLE). The first
requests of the stream are served without the learner too, and once more with a learner whose
versions are never good enough to be published. Three drafts:

    frozen    distilled on the target's answers to GSM8K; what the server starts with
    online    the versions that served, as they were swapped in
    ceiling   the frozen one, distilled offline on the target's answers to Python source

alpha of each request is taken afterwards, teacher-forced on the answer that was served: answers are
the target's, whatever drafts, so the three are paired request by request. What has been done is
kept in `trained`, seed by seed; docs/results/online.* is made from it.
"""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from draftsmith.bench.evidence import online_page
from draftsmith.bench.evidence.traffic import Ask, Endpoint, Reply, at_rate, by_clients, latencies
from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run
from draftsmith.bench.speed.workers import train
from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.metrics import bootstrap
from draftsmith.decode.evaluate.teacher_forced import teacher_forced
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.serve.buffer import ReplayBuffer
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.models.tokenizer import load_tokenizer, vocab_size
from draftsmith.train.run.recipe import gsm8k

Rows = list[dict[str, Any]]
CLIENTS = (1, 8, 32)
DRAFTS = ("frozen", "ceiling")
READY = 120.0  # seconds that a server has to come up
TOGETHER = 25  # requests that are drawn together for an interval of latency


@dataclass
class Evidence:
    target: str = field(default_factory=lambda: gsm8k("target"))
    gsm8k: str = field(default_factory=lambda: gsm8k("data"))
    seeds: int = 3
    first: int = 0  # seed to begin with
    maths: int = 50  # requests of each part of the stream
    python: int = 700
    mixed: int = 60
    paired: int = 250  # the first of them, which are served without the learner too
    share: float = 0.6  # of the measured capacity
    max_tokens: int = 48
    keep_top_k: int = 512
    rows: int = 8
    K: int = 3
    trained: str = "runs/online"
    out: str = "docs/results"


def main(argv: list[str]) -> None:
    """Measure the seeds that aren't done, then write rows and page of all that are."""
    settings = parse(Evidence, argv)
    distil_offline(settings)
    for number in range(settings.first, settings.seeds):
        seed = Seed(settings, number)
        seed.once("rows", seed.measure)
        seed.once("cost", seed.measure_cost)
    files = sorted(Path(settings.trained).glob("seed-*/*.json"))
    rows = [row for file in files for row in json.loads(file.read_text())]
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "online.json").write_text(json.dumps(rows, separators=(",", ":")) + "\n")
    (out / "online.svg").write_text(online_page.picture(rows))
    (out / "online.md").write_text(online_page.page(rows))
    Console().print(f"written: {out}/online.json, {out}/online.md, {out}/online.svg")


def distil_offline(settings: Evidence) -> None:
    """The frozen drafts and the ceilings, unless that was done (answers to GSM8K are what
    recipe=gsm8k/prepare and a first draft what recipe=gsm8k/draft left).
    """
    need("target", settings.target)
    need("answers")
    need("draft")
    trained, few = Path(settings.trained), ("heldout.limit=16", "heldout.max_new_tokens=64")
    answers = trained / "python-answers"
    written = ("prompts=stdlib", "limit=2000", "max_new_tokens=64")
    train("prepare", answers / "answers-00000-of-00001.jsonl", "recipe=gsm8k/prepare", *written)
    for seed in range(settings.first, settings.seeds):
        frozen, ceiling = (trained / f"seed-{seed}" / name / "drafter" for name in DRAFTS)
        how = ("recipe=gsm8k/distill", f"seed={seed}", *few)
        train("distill", frozen, *how, "eval_every=150")
        more = (f"draft={frozen}", f"data={answers}", "heldout=stdlib", "steps=300")
        train("distill", ceiling, *how, *more, "eval_every=300")


class Seed:
    """One seed's drafts, stream and figures."""

    def __init__(self, settings: Evidence, seed: int) -> None:
        self.settings, self.seed = settings, seed
        self.folder = Path(settings.trained) / f"seed-{seed}"
        self.drafters = {name: self.folder / name / "drafter" for name in DRAFTS}
        self.tokenizer = load_tokenizer(settings.target)

    def once(self, name: str, measure: Callable[[], Rows]) -> None:
        """Measure and keep rows, unless that was done before."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            about = {
                "target": self.settings.target,
                "data": "gsm8k, python source",
                "seed": self.seed,
                **about_run(),
            }
            file.write_text(json.dumps([row | about for row in measure()], indent=1))

    def measure(self) -> Rows:
        """Capacity and latency without the loop; the stream without it, and with it; alpha."""
        asks, warm = self.stream()
        with self.server() as endpoint:
            by_clients(endpoint, warm, self.settings.rows)
            # Of both topics, a request to each client at least.
            some = random.Random(self.seed).sample(asks, min(64, len(asks)))
            rows: Rows = [
                {"what": "latency", "clients": n, **latencies(by_clients(endpoint, some, n))}
                for n in CLIENTS
            ]
        rate = self.settings.share * rows[-1]["requests_per_s"]
        off, on = self.both(asks, warm, rate)
        rows += compared("loop", rate, off, on)
        rows.append({"what": "loop-on, all", "rate": rate, **latencies(on)})
        of_number = {ask.number: ask for ask in asks}
        return rows + self.alphas(self.folder / "online", of_number, on)

    def measure_cost(self) -> Rows:
        """The stream's beginning without the loop, and with one that publishes nothing: what
        keeping requests and training cost where nobody gains by it.
        """
        asks, warm = self.stream()
        rows = json.loads((self.folder / "rows.json").read_text())
        [rate] = [row["rate"] for row in rows if row["what"] == "loop-off"]
        few = asks[: self.settings.paired]
        return compared("unpublished", rate, *self.both(few, warm, rate, "publish.margin=1"))

    def both(
        self, asks: list[Ask], warm: list[Ask], rate: float, *how: str
    ) -> tuple[list[Reply], list[Reply]]:
        """The stream's beginning without the loop, and all of it with the loop, on a fresh server
        each; which comes first changes from seed to seed. how: more of the learner's settings.
        """

        def without() -> list[Reply]:
            with self.server() as endpoint:
                by_clients(endpoint, warm, self.settings.rows)
                return at_rate(endpoint, asks[: self.settings.paired], rate, self.seed)

        def with_it() -> list[Reply]:
            place = self.folder / ("unpublished" if how else "online")
            with self.learning_server(place, warm, *how) as endpoint, self.versions_kept(place):
                return at_rate(endpoint, asks, rate, self.seed)

        if self.seed % 2:
            on = with_it()
            return without(), on
        return without(), with_it()

    @contextmanager
    def learning_server(self, place: Path, warm: list[Ask], *how: str) -> Iterator[Endpoint]:
        """A server and its learner, both from the start; how: more of the learner's settings."""
        for left in (place, self.folder / "learner", self.folder / "served"):
            shutil.rmtree(left, ignore_errors=True)
        kept = f"keep_top_k={self.settings.keep_top_k}"
        with self.server(f"online={place}", kept) as endpoint:
            by_clients(endpoint, warm, self.settings.rows)
            with self.learner(place, *how):
                yield endpoint
            time.sleep(3)  # the last requests are being written

    def stream(self) -> tuple[list[Ask], list[Ask]]:
        """The requests in their order, drawn anew for each seed; and others to warm up with."""
        settings, draw = self.settings, random.Random(self.seed)
        prompts = {
            topic: [
                p.tokens for p in load_prompts(source, self.tokenizer, limit=6000, split="train")
            ]
            for topic, source in (("maths", settings.gsm8k), ("python", "stdlib"))
        }
        for found in prompts.values():
            draw.shuffle(found)
        parts = (("maths", settings.maths), ("python", settings.python), ("mixed", settings.mixed))
        asks: list[Ask] = []
        for topic, count in parts:
            for i in range(count):
                of = topic if topic in prompts else ("maths", "python")[i % 2]
                asks.append(Ask(len(asks), topic, prompts[of].pop()))
        others = [prompts["maths"].pop() for _ in range(2 * settings.rows)]
        return asks, [Ask(len(asks) + i, "", prompt) for i, prompt in enumerate(others)]

    @contextmanager
    def server(self, *more: str) -> Iterator[Endpoint]:
        """A server of the frozen draft."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = self.settings
        command = [
            *(sys.executable, "-m", "draftsmith", "serve", f"target={settings.target}"),
            *(f"drafter={self.drafters['frozen']}", "name=target", f"port={port}", "threads=1"),
            *(
                f"batch_size={settings.rows}",
                f"K={settings.K}",
                "max_length=1024",
                "max_queue=100000",
                "dtype=float32",
                *more,
            ),
        ]
        url = f"http://127.0.0.1:{port}"
        with self.running(command, "server") as process:
            deadline = time.monotonic() + READY
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"no server: see {self.folder / 'server.log'}")
                time.sleep(0.2)
            body = {"model": "target", "max_tokens": settings.max_tokens, "temperature": 1.0}
            yield Endpoint(url, **body)

    @contextmanager
    def learner(self, place: Path, *how: str) -> Iterator[None]:
        """The learner, which runs when nobody else does."""
        command = [
            *(sys.executable, "-m", "draftsmith", "train", "online", "processes=1"),
            *("recipe=online/gsm8k", f"online={place}"),
            *(f"drafter={self.drafters['frozen']}", f"out={self.folder / 'learner'}"),
            *(f"target.path={self.settings.target}", f"seed={self.seed}", *how),
        ]
        with self.running(command, "learner"):
            yield

    @contextmanager
    def running(self, command: list[str], name: str) -> Iterator[subprocess.Popen[bytes]]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            try:
                yield process
            finally:
                process.terminate()
                process.wait()

    @contextmanager
    def versions_kept(self, place: Path) -> Iterator[None]:
        """Copies all versions while they are there: the learner itself keeps the last few."""
        source, kept = place / "default" / "versions", self.folder / "served"
        kept.mkdir()
        over = threading.Event()

        def copy_new() -> None:
            for path in source.glob("[0-9]*"):
                if not (kept / path.name).exists():
                    half = kept / f".{path.name}"
                    shutil.rmtree(half, ignore_errors=True)
                    with suppress(FileNotFoundError, shutil.Error):  # dropped meanwhile
                        shutil.copytree(path, half)
                        half.rename(kept / path.name)

        def copy() -> None:
            while not over.wait(0.2):
                copy_new()
            copy_new()

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def alphas(self, place: Path, asks: dict[int, Ask], replies: Sequence[Reply]) -> Rows:
        """alpha of every request that the buffer holds, under each of the drafts: a row a draft."""
        target, tokenizer = load_target(TargetSpec(self.settings.target, dtype="float32"), "cpu")
        runner = Runner(target, vocab_size(tokenizer))
        params = SamplingParams(temperature=1.0)
        drafters: dict[str, Any] = {}

        def alpha(path: Path, made: Completion) -> float:
            if str(path) not in drafters:
                drafters[str(path)] = load_drafter(str(path), target, tokenizer)
            [found] = teacher_forced(runner, drafters[str(path)], [made], params)
            return round(found.alpha / found.positions, 5)

        buffer = ReplayBuffer(place / "default" / "buffer")
        numbers = sorted([*buffer.numbers(), *buffer.heldout_numbers()])
        of_prompt = {tuple(ask.prompt): ask for ask in asks.values()}
        rows: Rows = []
        for number in numbers:
            served = buffer.read(number)
            tokens = served.tokens_T.tolist()
            ask = of_prompt.get(tuple(tokens[: served.prompt]))
            if ask is None:  # it warmed the server up
                continue
            made = Completion(ask.number, tokens[: served.prompt], tokens[served.prompt :])
            version = self.folder / "served" / f"{served.version:06d}"
            arms = self.drafters | {
                "online": version if served.version else self.drafters["frozen"]
            }
            about = {"number": ask.number, "topic": ask.topic, "version": served.version}
            counts = {name: served.about[name] for name in ("rounds", "drafted", "emitted")}
            for what, path in arms.items():
                row = {"what": what, **about, "alpha": alpha(path, made)}
                rows.append(row | (counts if what == "online" else {}))
        return online_page.folded(rows)


def compared(what: str, rate: float, off: Sequence[Reply], on: Sequence[Reply]) -> Rows:
    """Two rows: the same requests in the same arrivals, without the loop and with it."""
    pairs = list(zip(off, on, strict=False))
    on = [pair[1] for pair in pairs]
    rows: Rows = [
        {"what": f"{what}-{name}", "rate": rate, **latencies(replies)}
        for name, replies in (("off", off), ("on", on))
    ]
    rows[1] |= {
        "identical": sum(a.text == b.text for a, b in pairs),
        "compared": len(pairs),
        "p50_ratio": rows[1]["p50"] / rows[0]["p50"],
        "p50_ratio_interval": _ratio_of_medians(pairs),
    }
    return rows


def _ratio_of_medians(pairs: Sequence[tuple[Reply, Reply]]) -> list[float]:
    """The 95% interval of p50 with the loop / p50 without it, over runs of requests that came one
    after another: those wait for each other.
    """
    whole = len(pairs) // TOGETHER * TOGETHER
    off, on = (
        np.array([pair[side].seconds for pair in pairs[:whole]]).reshape(-1, TOGETHER)
        for side in (0, 1)
    )
    return bootstrap(lambda i: float(np.median(on[i]) / np.median(off[i])), len(on))


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    run_command(main, Evidence)
