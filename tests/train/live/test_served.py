"""Finished requests as training data: what a step reads, draws, and waits for."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from served_requests import (
    PROMPTS,
    folder_of,
    fresh_head,
    lessons,
    serve,
    serve_by_head,
    serve_by_lm,
    whole,
)
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.serve.buffer import ReplayBuffer, Served
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.target import vocab_size
from draftsmith.train.live.batches import Buffered, Feed, Mix, kept_states
from draftsmith.train.live.idle_time import Duty
from draftsmith.train.live.learner import open_learner
from draftsmith.train.objectives.distillation import Distillation
from draftsmith.train.objectives.eagle import EagleObjective, Unroll
from draftsmith.train.teachers.states import OnlineTaps
from draftsmith.train.teachers.teachers import StateTeacher


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


def test_a_batch_trains_answers_without_their_first_token(by_lm: dict[int, Served]) -> None:
    some = torch.arange(12) % 3 == 1
    requests = [by_lm[0], replace(by_lm[11], corrected_A=some)]
    batch = whole(requests)
    for row, served in enumerate(requests):
        trained = batch.loss_mask[row].nonzero().flatten().tolist()
        assert trained == list(range(served.prompt, len(served.tokens_T) - 1))
        assert batch.input_ids[row, : len(served.tokens_T)].tolist() == served.tokens_T.tolist()
    rejected = whole(requests, rejected=True).loss_mask
    for row, served in enumerate(requests):
        corrected = served.corrected_A.nonzero().flatten() + served.prompt - 1
        assert rejected[row].nonzero().flatten().tolist() == corrected.tolist()
    assert 0 < rejected.sum() < batch.loss_mask.sum()
    short = whole(requests, max_length=by_lm[0].prompt + 3)
    assert short.input_ids.shape[1] == by_lm[0].prompt + 3
    assert short.loss_mask[0].nonzero().flatten().tolist() == [by_lm[0].prompt, by_lm[0].prompt + 1]


def test_the_loss_is_that_of_a_pass_of_the_target(
    by_lm: dict[int, Served],
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """With the whole vocabulary listed, loss and alpha are the exact ones; with less of it, alpha
    is an upper bound.
    """
    folder = folder_of(tmp_path / "draft", "lm", tiny_draft, tiny_target, tiny_tokenizer)
    mark = fingerprint(tiny_target, tiny_tokenizer)
    learner = open_learner(folder, lessons(), tiny_target, tiny_tokenizer, mark)
    every = serve(Decoder(tiny_target, tiny_tokenizer, batch_size=4), PROMPTS[:3], k=320)
    batch = whole([every[i] for i in range(3)])
    exact = StateTeacher(tiny_target, vocab_size(tiny_tokenizer))
    written = replace(batch, places=None)  # of which the teacher makes a pass
    assert isinstance(learner.objective, Distillation)
    kept, made = learner.objective.measure(batch), learner.objective.measure(written, exact)
    assert kept.tokens == made.tokens == 33
    torch.testing.assert_close(kept.loss, made.loss, rtol=2e-3, atol=0)  # log_p is float16
    torch.testing.assert_close(kept.metrics["alpha"], made.metrics["alpha"], rtol=2e-3, atol=0)
    few = whole([by_lm[i] for i in range(3)])
    bound, _ = learner.alpha(few)
    true, _ = learner.alpha(replace(few, places=None), exact)
    assert bound > true
    mixed = whole([by_lm[0], every[1]])  # a server that was started anew with another k
    apart = [learner.alpha(whole([one]))[0] for one in (by_lm[0], every[1])]
    assert learner.alpha(mixed)[0] == pytest.approx(sum(apart), rel=1e-5)


def test_kept_states_are_those_of_a_pass(
    by_head: dict[int, Served],
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    head: Eagle,
) -> None:
    batch = whole([by_head[i] for i in range(6)])
    seen, made = kept_states(batch), OnlineTaps(tiny_target, head.taps)(batch)
    mask_BT = batch.loss_mask
    torch.testing.assert_close(seen.norm_BTG[mask_BT], made.norm_BTG[mask_BT], atol=2e-2, rtol=1e-2)
    objective = EagleObjective(Unroll(steps=3), head, tiny_target, tiny_tokenizer, kept_states)
    kept, computed = objective.measure(batch, kept_states), objective.measure(batch)
    for depth in range(3):
        assert kept.metrics[f"count_{depth}"] == computed.metrics[f"count_{depth}"] > 0
        near = {"rtol": 1e-2, "atol": 0}  # bfloat16
        alpha = f"alpha_{depth}"
        torch.testing.assert_close(kept.metrics[alpha], computed.metrics[alpha], **near)


class NoMore:
    """Nothing will come."""

    to_go_on = ""

    def more(self) -> bool:
        return False


def filled(folder: Path, requests: list[Served]) -> ReplayBuffer:
    buffer = ReplayBuffer(folder)
    for served in requests:
        buffer.add(served)
    return buffer


def drawn(mix: Mix, buffer: ReplayBuffer, steps: int) -> list[int]:
    """The numbers that some steps take."""
    taken: list[int] = []

    def noted(requests: Any, numbers: Any) -> Any:
        taken.extend(numbers)
        return whole(requests)

    batches = Buffered(mix, buffer, noted, NoMore(), Duty(1.0), print, batch_size=16, seed=0)
    for step in range(steps):
        batches.batch(step, 0, 0, accumulation=1, world=1)
    return taken


def test_what_a_step_draws(tmp_path: Path, by_lm: dict[int, Served]) -> None:
    requests = [by_lm[i] for i in range(24)]
    requests[5] = replace(requests[5], corrected_A=torch.zeros(12, dtype=torch.bool))
    buffer = filled(tmp_path, requests)
    one = {"recent": 0.0, "reservoir": 0.0, "disagreement": 0.0, "window": 4}
    recent = drawn(Mix(**one | {"recent": 1.0}), buffer, 6)
    assert set(recent) == {20, 21, 22, 23}
    anything = drawn(Mix(**one | {"reservoir": 1.0}), buffer, 20)
    assert set(anything) == set(range(24)) - {0, 8, 16}, "held-out ones are never trained on"
    assert anything == drawn(Mix(**one | {"reservoir": 1.0}), buffer, 20)
    disagreed = drawn(Mix(**one | {"disagreement": 1.0}), buffer, 20)
    assert disagreed.count(5) < anything.count(5), "nothing to learn where all was accepted"
    assert 5 not in drawn(Mix(**one | {"reservoir": 1.0, "positions": "rejected"}), buffer, 20)
    with pytest.raises(ValueError, match="expected shares"):
        drawn(Mix(**one), buffer, 1)
    with pytest.raises(ValueError, match="positions: got 'all of them'"):
        drawn(Mix(positions="all of them"), buffer, 1)


def test_a_step_waits_for_its_requests(tmp_path: Path, by_lm: dict[int, Served]) -> None:
    buffer, said = ReplayBuffer(tmp_path), []

    @dataclass
    class Slowly:
        """One request at each look."""

        left: list[Served]
        looks: int = 0
        to_go_on: str = "ask again"

        def more(self) -> bool:
            self.looks += 1
            if self.left:
                buffer.add(self.left.pop())
            return bool(self.left)

    feed = Slowly([by_lm[i] for i in range(9)])
    mix, one = Mix(requests_per_step=3), {"batch_size": 1, "seed": 0}
    batches = Buffered(mix, buffer, lambda r, n: whole(r), feed, Duty(1.0), said.append, **one)
    counts = []
    for step in range(3):
        batches.batch(step, 0, 0, accumulation=1, world=1)
        counts.append(len(buffer.numbers()) + len(buffer.heldout_numbers()))
    assert counts == [3, 6, 9] and feed.looks == 9
    assert "step 1 waits for requests in" in said[0] and "0 of 3" in said[0]
    assert len(said) == 1, "a short wait isn't told again"
    assert batches.state(3) == {"first": 0}
    batches.heed([15])
    stopped = batches.batch(3, 0, 0, accumulation=1, world=1)
    assert not stopped.loss_mask.any() and feed.looks == 9, "a signal ends the waiting"
    assert batches.to_go_on == "ask again"
    empty = Buffered(
        mix, ReplayBuffer(tmp_path / "no"), lambda r, n: whole(r), NoMore(), Duty(1.0), **one
    )
    with pytest.raises(ValueError, match="got 0 requests to train on"):
        empty.batch(0, 0, 0, accumulation=1, world=1)
    # A learner that comes back after 1,000 steps, while the server began its buffer anew, or after
    # more requests than are still there: what is there counts once.
    for first in (0, -5000):
        back = Buffered(mix, buffer, lambda r, n: whole(r), NoMore(), Duty(1.0), **one)
        back.restore({"first": first})
        for step in range(1000, 1003):
            back.batch(step, 0, 0, accumulation=1, world=1)
            assert back.state(step) == {"first": 9 - 9 - 3000}
    mix = Mix(requests_per_step=1, max_length=3)  # all prompts are longer
    short = Buffered(mix, buffer, lambda r, n: whole(r), NoMore(), Duty(1.0), said.append, **one)
    with pytest.raises(ValueError, match="none of them with a trained token"):
        short.batch(0, 0, 0, accumulation=1, world=1)
    assert "9 of 1, none with a token to train at positions=all and max_length=3" in said[-1]


def test_a_step_waits_again_where_its_last_request_is_dropped(
    tmp_path: Path, by_lm: dict[int, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = filled(tmp_path, [by_lm[0], by_lm[1]])  # the first is held out

    class Another(Feed):
        def more(self) -> bool:
            buffer.add(by_lm[2])
            return True

    def dropped(number: int) -> Served:
        if number == 1:
            (tmp_path / f"{number:012d}.safetensors").unlink(missing_ok=True)
        return ReplayBuffer.read(buffer, number)

    monkeypatch.setattr(buffer, "read", dropped)
    mix, one, taken = Mix(requests_per_step=1), {"batch_size": 1, "seed": 0}, []
    feed, duty = Another(), Duty(1.0)
    batches = Buffered(mix, buffer, lambda r, n: taken.extend(n), feed, duty, **one)
    batches.batch(0, 0, 0, accumulation=1, world=1)
    assert taken == [2]


def test_a_long_wait_tells_when_its_requests_will_be_there(
    tmp_path: Path, by_lm: dict[int, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, said, clock = ReplayBuffer(tmp_path), [], [0.0]
    monkeypatch.setattr("draftsmith.train.live.batches.time.monotonic", lambda: clock[0])

    class EveryTwentySeconds(Feed):
        def more(self) -> bool:
            clock[0] += 20
            buffer.add(by_lm[0])
            return True

    mix, one = Mix(requests_per_step=5), {"batch_size": 1, "seed": 0}
    feed = EveryTwentySeconds()
    batches = Buffered(mix, buffer, lambda r, n: whole(r), feed, Duty(1.0), said.append, **one)
    batches.batch(0, 0, 0, accumulation=1, world=1)
    assert [line.rpartition(": ")[2] for line in said] == [
        "0 of 5",
        "2 of 5, 60 s left",
        "4 of 5, 20 s left",
    ]
