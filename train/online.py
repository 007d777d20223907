"""Online distillation: a draft that goes on learning from what its server decodes (Online
Speculative Decoding, arXiv 2310.07177).

    draftsmith serve target=... drafter=DRAFTER online=FOLDER                     (decodes)
    draftsmith train online recipe=online/gsm8k drafter=DRAFTER online=FOLDER     (learns)
    draftsmith train online recipe=online/replay replay=gsm8k:300+stdlib:1000     (both)

    loss = sum_t D(p_t, q_t) / number of tokens,   p_t as the target said it while it served

The server writes each finished request into a buffer, with the target's likeliest tokens (for
heads: its states) at every position. A step waits for `mix.requests_per_step` further requests and
draws its batch: recent ones, any, and those the draft did badly on. A draft that does better on
held-out requests becomes the version that the server takes up between two steps
(train/live/publishing.py). Answers never change, whatever is drafted.

Where this differs from the paper:
1. The loss is on all positions of an answer; the paper's on those where the draft was rejected
   (`mix.positions=rejected`). Its code also shifts these by one, and takes in bonus tokens.
2. p is kept from serving, as likeliest tokens and a rest; there both models run again.
3. The buffer isn't cleared after a step: old requests are drawn again.
4. A new version has to prove itself; the paper swaps after every update.
5. A draft a topic is a draft a tag, and clients name the tag; there is no classifier.
"""

import json
import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.command import run_command
from draftsmith.decode.drafters.load import moved
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.serve.buffer import ReplayBuffer
from draftsmith.decode.serve.versions import Versions
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.train.drafts.start import tiny_drafter
from draftsmith.train.live.batches import Buffered, Feed, Mix
from draftsmith.train.live.idle_time import Duty, yield_the_processor
from draftsmith.train.live.learner import Lessons, OnlineDrafts
from draftsmith.train.live.publishing import Publisher, Publishing
from draftsmith.train.live.replay import Replay, ReplayFeed, draw, read_stream
from draftsmith.train.objectives.distillation import Losses
from draftsmith.train.objectives.eagle import Unroll
from draftsmith.train.plan.refuse import refuse
from draftsmith.train.run.launch import begin
from draftsmith.train.run.loop import fit
from draftsmith.train.run.settings import Settings


@dataclass(kw_only=True)
class OnlineRun(Settings):
    """What a recipe of this entry can say."""

    entry: str = "online"
    target: TargetSpec
    drafter: str  # what the server was started with: a drafter folder, or omni+FOLDER
    kind: str = "lm"  # of the drafter: lm | eagle1 | eagle3 | mtp
    online: str = ""  # the server's; of a replay, by default in the run folder
    tag: str = "default"
    loss: Losses = field(default_factory=lambda: Losses(name="jsd"))
    ngram: float = 0.2  # of omni+FOLDER: what the likelihood of n-grams weighs
    unroll: Unroll = field(default_factory=lambda: Unroll(steps=4))  # of EAGLE heads
    mix: Mix = field(default_factory=Mix)
    publish: Publishing = field(default_factory=Publishing)
    replay: Replay = field(default_factory=Replay)
    duty: float = 1.0  # the share of wall time that training may take; 1: all
    idle_priority: bool = True  # run only while nobody else has work for the processor
    best_metric: str = "published"  # the weights kept in the run folder: those published last
    best_mode: str = "max"

    @property
    def lessons(self) -> Lessons:
        what = (self.loss, self.unroll, self.steps, self.mix.max_length, self.ngram)
        return Lessons(self.drafter, self.kind, *what)


def main(argv: list[str]) -> None:
    # ---- the recipe, this process, the run folder --------------------------------------------
    config, accelerator, run = begin(OnlineRun, argv, shrunk, refuse, before_start)
    if run is None:
        return
    if accelerator.num_processes > 1:
        raise ValueError(f"got {accelerator.num_processes} processes, expected one learner a tag")
    replay = config.replay

    # ---- the frozen target, the draft as it serves now ---------------------------------------
    config.target = config.target.resolved(config.dtype)
    target, tokenizer = load_target(config.target, accelerator.device)
    place = Path(config.online or run.folder / "online") / config.tag
    buffer, versions = ReplayBuffer(place / "buffer"), Versions(place)
    _, path = versions.current()
    asked = read_stream(replay, tokenizer, config.seed) if replay.stream else []
    if replay.stream:
        config.steps = math.ceil(len(asked) / config.mix.requests_per_step)
    mark = fingerprint(target, tokenizer, config.target.path)
    if config.target.shrink:
        tiny_drafter(config.drafter, config.kind, target, tokenizer, mark)
    drafts = OnlineDrafts(config.lessons, config, accelerator, target, tokenizer, mark, path, argv)

    # ---- requests: those of a server, or of a stream that is served here ---------------------
    record = run.folder / "stream.jsonl"
    feed = Feed()
    if replay.stream:
        drafts.compare_with(replay.ceiling)
        first = drafts.drafter(path)
        decoder = Decoder(target, tokenizer, first, K=replay.K, batch_size=replay.batch_size)
        feed = ReplayFeed(replay, asked, decoder, buffer, drafts.arms, record)
        drafts.swapped = feed.swap
    batch_of = partial(drafts.batch_of, rejected=config.mix.positions == "rejected")
    tell = None if replay.stream else print
    order = {"batch_size": config.batch_size, "seed": config.seed}
    batches = Buffered(config.mix, buffer, batch_of, feed, Duty(config.duty), tell, **order)

    # ---- measure, publish, take back; learn until told to stop, or until the stream ends --------
    with versions.publishing():
        publisher = Publisher(config.publish, buffer, versions, drafts, print)

        def evaluate() -> dict[str, float]:
            drafts.steps = batches.steps
            return publisher()

        ended = fit(accelerator, drafts.learner.objective, batches, config, run, evaluate)
    if replay.stream:
        draw(record, record.with_suffix(".svg"))
    version, path = versions.current()
    result = moved(config.drafter, path)
    run.finish({"result": result, "version": version, **ended._asdict()})
    print(f"version {version} serves: {result}")


def shrunk(config: OnlineRun) -> OnlineRun:
    """Two steps of a tiny drafter on a tiny random target, with a stream of its own: shows that a
    recipe composes and runs.
    """
    stream, drafter = (str(Path(config.out, name)) for name in ("asked.jsonl", "drafter"))
    replay = replace(config.replay, stream=stream, max_new_tokens=8, ceiling="")
    mix = replace(config.mix, requests_per_step=4)
    short: dict[str, Any] = {"batch_size": 2, "warmup": 0, "mix": mix, "replay": replay}
    return replace(config, **short, drafter=drafter, online="", idle_priority=False, duty=1.0)


def before_start(config: OnlineRun) -> None:
    """Write a trial's stream; beside a server, take what that leaves of the processor."""
    if config.target.shrink:
        asked = [json.dumps({"prompt": f"What is {i} and {i}?", "topic": "sums"}) for i in range(8)]
        Path(config.out).mkdir(parents=True, exist_ok=True)
        Path(config.replay.stream).write_text("\n".join(asked))
    elif config.idle_priority and not config.replay.stream:
        yield_the_processor()


if __name__ == "__main__":
    run_command(main, OnlineRun)
