"""Learning from what is served: what is published, and the whole loop."""

import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from served_requests import folder_of, fresh_head, lessons, serve_by_head, serve_by_lm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.serve.buffer import ReplayBuffer, Served
from draftsmith.decode.serve.versions import Versions
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.heads.eagle import Eagle
from draftsmith.train import online
from draftsmith.train.live import idle_time
from draftsmith.train.live.batches import Alpha
from draftsmith.train.live.idle_time import Duty, yield_the_processor
from draftsmith.train.live.learner import open_learner
from draftsmith.train.live.publishing import Publisher, Publishing
from draftsmith.train.live.replay import Replay, read_stream


@pytest.fixture(scope="module")
def head(tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> Eagle:
    return fresh_head(tiny_target, tiny_tokenizer)


@pytest.fixture(scope="module")
def by_lm(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> dict[int, Served]:
    return serve_by_lm(tiny_target, tiny_draft, tiny_tokenizer)


@pytest.fixture(scope="module")
def by_head(
    tiny_target: PreTrainedModel, head: Eagle, tiny_tokenizer: PreTrainedTokenizerFast
) -> dict[int, Served]:
    return serve_by_head(tiny_target, head, tiny_tokenizer)


class Clock:
    """A time that passes only where somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_duty_is_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(idle_time, "time", clock)
    duty = Duty(0.25)
    for step in (1, 2, 3):
        clock.sleep(0.04)  # of work
        duty.rest([])
        assert clock.now == pytest.approx(4 * 0.04 * step)
    clock.sleep(0.04)
    duty.rest([15])
    assert clock.now == pytest.approx(13 * 0.04), "told to stop, it doesn't rest"
    with pytest.raises(ValueError, match="duty: got 0"):
        Duty(0.0)


# ---- what is published -----------------------------------------------------------------------


@dataclass
class Drafts:
    """Drafts whose alpha is said: by the number of the request, in its first token."""

    now: list[float]
    before: list[float]
    opened: list[Path | None] = field(default_factory=list)
    went_back: int = 0

    def candidate(self, served: Served) -> Alpha:
        return self.now[int(served.tokens_T[0])] * 10, 10

    def serving(self, served: Served) -> Alpha:
        return self.before[int(served.tokens_T[0])] * 10, 10

    def serve(self, path: Path | None) -> None:
        self.opened.append(path)

    def save(self, folder: Path, alpha: float) -> None:
        folder.mkdir()
        (folder / "alpha").write_text(str(alpha))

    def go_back(self) -> None:
        self.went_back += 1


def numbered(served: Served, number: int, **about: Any) -> Served:
    version = about.pop("version", 0)
    tokens_T = served.tokens_T.clone()
    tokens_T[0] = number
    return replace(served, tokens_T=tokens_T, version=version, about=served.about | about)


def publisher(folder: Path, drafts: Drafts, **more: Any) -> Publisher:
    config = Publishing(**{"heldout_requests": 8, "heldout_least": 4} | more)
    return Publisher(config, ReplayBuffer(folder / "buffer"), Versions(folder), drafts, print)


def test_only_what_is_surely_better_is_published(tmp_path: Path, by_lm: dict[int, Served]) -> None:
    buffer = ReplayBuffer(tmp_path / "buffer", heldout_every=8)
    base = [0.4 + 0.02 * (number % 5) for number in range(64)]
    drafts = Drafts(now=[alpha + 0.05 for alpha in base], before=base)
    gate = publisher(tmp_path, drafts)
    assert gate() == {"published": 0, "version": 0}, "nothing to measure on"
    for number in range(64):
        buffer.add(numbered(by_lm[1], number))
    figures = publisher(tmp_path, drafts, margin=0.051)()
    assert figures["version"] == 0 and figures["gain"] == pytest.approx(0.05)
    # Better in the mean, but by one request of eight alone.
    drafts.now = [*base[:8], 0.9, *base[9:]]
    assert gate()["published"] == 0
    drafts.now = [alpha + 0.01 for alpha in base]
    figures = gate()
    assert figures["version"] == figures["published"] == 1
    version, path = Versions(tmp_path).current()
    assert version == 1 and path is not None and drafts.opened[-1] == path
    heldout = [0.01 + base[number] for number in range(0, 64, 8)]
    assert float((path / "alpha").read_text()) == pytest.approx(sum(heldout) / 8)
    drafts.before = drafts.now
    assert gate()["published"] == 1, "what serves is what is compared with from then on"


@pytest.mark.parametrize(
    ("accepted", "alpha", "serves"), [(2, 0.5, 0), (5, 0.5, 1), (2, 0.2, 1), (2, 0.4, 0)]
)
def test_a_version_that_accepts_less_in_use_is_taken_back(
    tmp_path: Path, by_lm: dict[int, Served], accepted: int, alpha: float, serves: int
) -> None:
    """Unless its alpha on what was asked since falls as much: then the topic has changed."""
    buffer, versions = ReplayBuffer(tmp_path / "buffer"), Versions(tmp_path)
    versions.publish(lambda path: path.mkdir(), "better")
    drafts = Drafts(now=[0.5] * 64, before=[0.5] * 20 + [alpha] * 44)
    gate = publisher(tmp_path, drafts, rollback_requests=8, heldout_least=60)

    def accepts(many: int) -> Served:
        return replace(by_lm[1], accepted_A=torch.arange(12) < many)

    for number in range(20):
        buffer.add(numbered(accepts(5), number, drafted=10))
    for number in range(20, 28):
        assert gate()["version"] == 1, "too few to tell"
        buffer.add(numbered(accepts(accepted), number, drafted=10, version=1))
    assert gate()["version"] == serves == versions.current()[0]
    assert drafts.went_back == 1 - serves
    if not serves:
        assert "accepts 0.200" in json.loads((tmp_path / "current.json").read_text())["why"]
    for number in range(28, 44):  # what comes later is no reason: the topic may change
        buffer.add(numbered(accepts(1), number, drafted=10, version=serves))
    assert gate()["version"] == serves


def test_versions_that_follow_each_other_fast_are_judged_together(
    tmp_path: Path, by_lm: dict[int, Served]
) -> None:
    """Weights that are saved wrongly: the draft in training beats each version that it reads back,
    and publishes another before one alone has served enough.
    """
    buffer, versions = ReplayBuffer(tmp_path / "buffer", heldout_every=8), Versions(tmp_path)
    drafts = Drafts(now=[0.6] * 999, before=[0.5] * 999)
    gate = publisher(tmp_path, drafts, rollback_requests=16)
    said = []
    gate.tell = said.append
    serving = []
    for number in range(160):
        version = versions.current()[0]
        good = version == 0
        made = replace(by_lm[1], accepted_A=torch.arange(12) < (6 if good else 2))
        buffer.add(numbered(made, number, drafted=10, version=version))
        if number % 4 == 3:
            gate()
        serving.append(version)
    published = [line for line in said if "serves: alpha" in line]
    taken_back = [line for line in said if line.startswith("version 0 serves again")]
    assert len(published) >= 4 * len(taken_back) and len(taken_back) >= 4
    assert "accepts 0.200 of what it drafts, before it 0.600" in taken_back[0]
    assert len(set(serving)) > 10, "one version after another"
    # Never more than it takes to tell, in a row.
    since = [number for number, version in enumerate(serving) if version == 0]
    assert max(b - a for a, b in pairwise(since)) <= 16 + 4 + 1


# ---- the whole ---------------------------------------------------------------------------------


def test_streams(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("a", "b"):
        lines = [json.dumps({"prompt": f"{name} {i}"}) for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = {name: str(tmp_path / f"{name}.jsonl") for name in ("a", "b")}

    def of(words: str) -> Any:
        return read_stream(
            Replay(stream=words, sources=sources, split="train"), tiny_tokenizer, seed=0
        )

    asked = of("a:5,b:3+mix:6")
    assert [one.topic for one in asked] == ["a"] * 5 + ["b"] * 3 + ["mix"] * 6
    texts = [tiny_tokenizer.decode(one.tokens) for one in asked]
    assert [text[0] for text in texts] == [*"aaaaabbb", *"ababab"]
    assert len(set(texts)) == 14 and asked == of("a:5,b:3+mix:6")
    for wrong in ("a", "a:x", "mix:3", "a:3,mix", "a:300"):
        with pytest.raises(ValueError, match="stream: "):
            of(wrong)
    (tmp_path / "c.jsonl").write_text('{"prompt": "x"}')
    with pytest.raises(ValueError, match=r"c.jsonl:1: got"):
        of(str(tmp_path / "c.jsonl"))


@pytest.mark.parametrize("kind", ["lm", "eagle3"])
def test_a_learner_waits_for_its_server_and_goes_on_after_a_signal(
    tmp_path: Path,
    kind: str,
    request: pytest.FixtureRequest,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    served = list(request.getfixturevalue({"lm": "by_lm", "eagle3": "by_head"}[kind]).values())
    draft = request.getfixturevalue({"lm": "tiny_draft", "eagle3": "head"}[kind])
    target, place, out = tmp_path / "target", tmp_path / "online" / "sums", tmp_path / "run"
    tiny_target.save_pretrained(target)
    tiny_tokenizer.save_pretrained(target)
    folder = folder_of(tmp_path / "draft", kind, draft, tiny_target, tiny_tokenizer)
    arguments = [f"target.path={target}", f"drafter={folder}", f"out={out}", "tag=sums"]
    arguments += [f"online={tmp_path / 'online'}", f"kind={kind}", "loss=fkl", "steps=100"]
    arguments += [
        "dtype=float32",
        "mix.requests_per_step=2",
        "batch_size=2",
        "idle_priority=false",
    ]
    buffer, done = ReplayBuffer(place / "buffer"), 0

    def steps() -> list[int]:
        text = (out / "metrics.jsonl").read_text() if (out / "metrics.jsonl").exists() else ""
        return [
            json.loads(line)["step"] for line in text.splitlines(keepends=True) if line[-1:] == "\n"
        ]

    for many in (6, 4):
        for i in range(many):
            buffer.add(served[i % len(served)])
        done += many // 2

        def stop_when_it_waits(last: int) -> None:
            deadline = time.monotonic() + 1800
            while last not in steps() and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)

        AcceleratorState._reset_state(reset_partial_state=True)
        watcher = threading.Thread(target=stop_when_it_waits, args=(done,))
        watcher.start()
        with pytest.raises(SystemExit, match="130"):
            online.main(arguments)
        watcher.join()
        assert steps() == list(range(done + 1))
    assert Versions(place).current() == (0, None), "too few held-out requests to decide on"


def test_a_learner_leaves_the_processor_to_others() -> None:
    child = os.fork()
    if not child:
        try:
            yield_the_processor()
            idle = os.sched_getscheduler(0) == os.SCHED_IDLE
            os._exit(0 if idle and os.nice(0) == 19 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_draft_of_another_kind_is_refused(
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    folder = folder_of(tmp_path / "draft", "lm", tiny_draft, tiny_target, tiny_tokenizer)
    mark = fingerprint(tiny_target, tiny_tokenizer)
    with pytest.raises(ValueError, match="of kind lm and kind=eagle3"):
        open_learner(folder, lessons("eagle3"), tiny_target, tiny_tokenizer, mark)


@pytest.mark.parametrize("settings", [{"second": "tv"}, {"beta": 0.25}])
def test_what_a_head_cannot_heed_is_refused(
    tmp_path: Path,
    head: Eagle,
    settings: dict[str, Any],
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    folder = folder_of(tmp_path / "draft", "eagle3", head, tiny_target, tiny_tokenizer)
    wrong = lessons("eagle3", **settings)
    mark = fingerprint(tiny_target, tiny_tokenizer)
    with pytest.raises(ValueError, match=r"Losses\(.* expected loss.name alone"):
        open_learner(folder, wrong, tiny_target, tiny_tokenizer, mark)


def test_a_draft_learns_a_topic_while_it_serves(
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """A replay: versions are published and swapped in, and alpha rises over the frozen draft's."""
    target = tmp_path / "target"
    tiny_target.save_pretrained(target)
    tiny_tokenizer.save_pretrained(target)
    folder = folder_of(tmp_path / "draft", "lm", tiny_draft, tiny_target, tiny_tokenizer)
    asked = [json.dumps({"prompt": f"{i} plus {i} is", "topic": "sums"}) for i in range(96)]
    (tmp_path / "asked.jsonl").write_text("\n".join(asked))
    out = tmp_path / "run"
    arguments = [f"target.path={target}", f"drafter={folder}", f"out={out}", "seed=1"]
    arguments += [f"replay={tmp_path / 'asked.jsonl'}", "steps=1", "dtype=float32", "duty=1"]
    arguments += ["replay.max_new_tokens=24", "mix.requests_per_step=4", "eval_every=4", "lr=0.01"]
    arguments += [
        "publish.heldout_least=3",
        "idle_priority=false",
        "save_every=0",
        f"replay.ceiling={folder}",
    ]
    before = os.sched_getscheduler(0)
    online.main(arguments)
    assert os.sched_getscheduler(0) == before
    lines = [json.loads(line) for line in (out / "stream.jsonl").read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(96))
    last = lines[-24:]
    mean = {arm: sum(line["alpha"][arm] for line in last) / 24 for arm in last[0]["alpha"]}
    assert mean["ceiling"] == mean["frozen"]
    assert mean["online"] > mean["frozen"] + 0.02
    assert {line["version"] for line in lines} > {0, 1}, "swapped while rows were on their way"
    done = json.loads((out / "done.json").read_text())
    assert done["result"] == str(Versions(out / "online/default").current()[1])
    assert "<svg" in (out / "stream.svg").read_text()
    plain = Decoder.from_pretrained(str(target), dtype="float32")
    learned = Decoder.from_pretrained(str(target), done["result"], dtype="float32")
    asked_again = ["9 plus 9 is"], SamplingParams(max_new_tokens=24)
    assert plain.generate(*asked_again)[0].tokens == learned.generate(*asked_again)[0].tokens
