"""Speed over all prompts and by category, on counts and seconds small enough to check by hand."""

import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from draftsmith.decode.engine.request import Completion, Counters
from draftsmith.decode.evaluate import speed
from draftsmith.decode.evaluate.arms import Arm, Evaluation, Loaded
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.policies import timing as measure
from draftsmith.decode.policies.timing import SANE, least_times, median_times
from draftsmith.decode.prompts.prompts import Prompt
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.decode.untrained.ngram import NgramDrafter


def prompts(*categories: str) -> list[Prompt]:
    return [Prompt([1], category, i, "") for i, category in enumerate(categories)]


def arm(*turns: tuple[int, int, float, float]) -> Arm:
    """One answer a turn: (prompt, emitted, prefill seconds, decode seconds); two tokens a round."""
    found = Arm()
    last = -1
    for index, emitted, prefill, decode in turns:
        counters = Counters(
            rounds=emitted // 2, emitted=emitted, prefill_seconds=prefill, decode_seconds=decode
        )
        # The prefill's own token comes on top.
        found.completions.append(
            Completion(index, [1], tokens=[0] * (emitted + 1), counters=counters)
        )
        if index != last:
            found.tokens.append(0)
            found.seconds.append(0.0)
        found.tokens[-1] += emitted
        found.seconds[-1] += decode
        last = index
    return found


PLAIN = arm((0, 10, 1.0, 10.0), (1, 6, 0.5, 6.0), (1, 4, 0.5, 4.0), (2, 20, 1.0, 20.0))
SPEC = arm((0, 10, 1.0, 5.0), (1, 6, 0.5, 2.0), (1, 4, 0.5, 3.0), (2, 20, 1.0, 4.0))


def test_the_two_ways_by_hand() -> None:
    got = speed.speedups(PLAIN, SPEC, 1)
    assert got["speedup"] == pytest.approx((40 / 14) / (40 / 40))
    # A question's tokens and seconds are those of its turns together, prefill included.
    assert speed.rates(SPEC) == pytest.approx([11 / 6, 12 / 6, 21 / 5])
    assert got["speedup_specbench"] == pytest.approx(
        (11 / 6 + 12 / 6 + 21 / 5) / (11 / 11 + 12 / 11 + 21 / 21)
    )
    assert got["speedup_interval"][0] <= got["speedup"] <= got["speedup_interval"][1]


def test_spec_bench_takes_mt_bench_as_one() -> None:
    asked = prompts("writing", "coding", "qa")
    tables = speed.by_category(asked, PLAIN, SPEC, 1)
    fine, grouped = tables["categories"], tables["specbench"]
    assert list(fine) == ["writing", "coding", "qa"]
    assert [row["n_prompts"] for row in fine.values()] == [1, 1, 1]
    assert list(grouped) == ["mt_bench", "qa", "overall"]
    assert grouped["mt_bench"]["n_prompts"] == 2 and grouped["overall"]["n_prompts"] == 3
    assert grouped["mt_bench"]["tau"] == 2.0
    assert grouped["mt_bench"]["speedup"] == pytest.approx((20 / 10) / (20 / 20))
    assert grouped["mt_bench"]["speedup_specbench"] == pytest.approx(
        (11 / 6 + 12 / 6) / (11 / 11 + 12 / 11)
    )
    assert grouped["qa"] == fine["qa"]
    everything = speed.speedups(PLAIN, SPEC, 1)
    for key in ("speedup", "speedup_specbench"):
        assert grouped["overall"][key] == pytest.approx(everything[key])
    mine = prompts("writing", "mine", "qa")
    assert speed.by_category(mine, PLAIN, SPEC, 1)["specbench"] == {}


def test_one_batch_has_no_interval() -> None:
    """Resampled, it would be [x, x]: certainty out of one measurement."""
    together, faster = arm((0, 10, 1.0, 10.0)), arm((0, 10, 1.0, 4.0))
    one = speed.speedups(together, faster, 8)
    assert one["speedup"] == pytest.approx(2.5) and one["speedup_interval"] is None
    # A batch whose answers ended with their first tokens wasn't timed.
    silent = (1, 0, 1.0, 0.0)
    more = arm((0, 10, 1.0, 10.0), silent), arm((0, 10, 1.0, 4.0), silent)
    assert speed.speedups(*more, 1)["speedup_interval"] is None
    assert len(speed.speedups(PLAIN, SPEC, 1)["speedup_interval"]) == 2


def test_what_would_be_ideal_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"plain": 8.0, "verify": 10.0, "draft": 1.0, "extend": None, "prefill": 20.0}
    asked: dict[str, Any] = {}
    monkeypatch.setattr(speed, "isolated_times", lambda *_, **given: asked.update(given) or times)
    monkeypatch.setattr(speed, "weights_read", lambda target: 800)
    plain, spec = arm((0, 10, 1.0, 10.0)), arm((0, 0, 1.0, 4.0))
    counters = spec.completions[0].counters
    # Four rounds: 2 * 3 + 2 * 1 drafted, so K = 2; 1 + 3 + 0 + 0 kept; 8 emitted, so tau = 2.
    for drafted, kept in ((3, 1), (3, 3), (1, 0), (1, 0)):
        counters.record(drafted, kept, kept + 1)
    spec.tokens = [counters.emitted]
    pair = SimpleNamespace(
        target=None,
        drafters={"d": SimpleNamespace(parameter_bytes=200)},
        decoder=lambda *_: SimpleNamespace(runner=None),
        decoding={"d": SimpleNamespace(plan=None)},
    )
    settings = Evaluation(target="t", drafter="d")
    arms = {None: plain, "d": spec}
    without = speed.speed_part(settings, cast(Loaded, pair), "d", arms)
    assert without["ideal_speedup"] == pytest.approx(2 * 8 / (10 + 2 * 1))
    times["extend"] = 2.0  # a head's pass over what was kept
    got = speed.speed_part(settings, cast(Loaded, pair), "d", arms)
    assert (got["K"], got["N"], got["tau"]) == (2.0, 3.0, 2.0)
    assert (asked["nodes"], asked["batch"], asked["prompt"]) == (3, 1, 1)
    assert got["ideal_speedup"] == pytest.approx(2 * 8 / (10 + 2 * 1 + 2))
    assert got["speedup"] == pytest.approx((8 / 4) / (10 / 10))
    assert got["efficiency"] == pytest.approx(2 / (16 / 14))
    assert got["c"] == 1 / 8
    assert got["mbsu"] == pytest.approx(2 / (1 + 2 * 200 / 800))


def test_a_recording_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of a call live as long as its replay, which reads them where they lie."""
    monkeypatch.setattr(measure, "CudaRecorder", lambda: lambda run: lambda: "replayed")
    read = torch.zeros(3)
    alive, call = weakref.ref(read), read.sum
    replay = measure.graphed(call, torch.device("cuda"))
    del read, call
    assert replay() == "replayed" and alive() is not None
    del replay
    assert alive() is None


def test_rows_that_shared_a_batch_have_no_speed_of_their_own() -> None:
    both = speed.speedups(PLAIN, SPEC, 2)
    assert both["speedup"] == pytest.approx(40 / 14) and both["speedup_specbench"] is None
    row = speed.by_category(prompts("a", "b", "a"), PLAIN, SPEC, 2)["categories"]["a"]
    assert row == {"tau": 2.0, "speedup": None, "speedup_specbench": None, "n_prompts": 2}
    nothing = arm((0, 0, 1.0, 0.0))
    row = speed.by_category(prompts("a"), nothing, nothing, 1)["categories"]["a"]
    assert row == {"tau": None, "speedup": None, "speedup_specbench": None, "n_prompts": 1}


def test_costs_agree_where_other_work_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls in three are held up, for longer than they take: medians say nothing there."""
    rng, now = random.Random(3), [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def busy(seconds: float) -> Callable[[], None]:
        def call() -> None:
            held_up = rng.expovariate(1 / 8e-3) if rng.random() < 2 / 3 else 0.0
            now[0] += seconds * rng.uniform(1, 1.2) + held_up

        return call

    cpu, calls = torch.device("cpu"), {"plain": busy(5e-3), "draft": busy(0.5e-3)}

    def spread(times: Callable[..., dict[str, float]]) -> float:
        c = [found["draft"] / found["plain"] for found in (times(calls, cpu) for _ in range(5))]
        return max(c) / min(c) - 1

    assert spread(least_times) < 0.1 < spread(median_times)
    # Slow calls end after some turns.
    slow, before = {"plain": busy(5.0)}, now[0]
    least_times(slow, cpu)
    assert 3 * 5 * measure.LEAST <= now[0] - before < 3 * 7 * measure.LEAST


def test_costs_that_cannot_be_are_refused(
    tiny_target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens never take clearly less than one: a machine that says so is asked thrice."""
    monkeypatch.setattr(measure, "SANE", SANE)
    for share, tries in ((SANE + 0.01, 1), (SANE - 0.01, 3)):
        asked: list[int] = []

        def least(calls: dict, *_: object, share: float = share, asked: list = asked) -> dict:
            asked.append(len(calls))
            return {name: 1.0 if name == 1 else share for name in calls}

        monkeypatch.setattr(measure, "least_times", least)
        given = Runner(tiny_target, 320), NgramDrafter(), chain_plan(7), 1, 64
        if tries == 1:
            assert measure.measured_costs(*given).verify == (1.0, *[share] * 3)
        else:
            with pytest.raises(ValueError, match=r"1e\+03 ms for one token .* 3 times over, which"):
                measure.measured_costs(*given)
        assert len(asked) == tries
