"""The advice of an evaluation, in worlds whose costs and acceptance are known."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evaluated import arguments

from draftsmith.decode.__main__ import main
from draftsmith.decode.engine.request import Completion, Counters
from draftsmith.decode.evaluate import advice
from draftsmith.decode.evaluate.arms import Arm, Evaluation
from draftsmith.decode.policies.policy import Costs
from draftsmith.decode.report.schema import schema_problems
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.models.folder.drafter_folder import read_meta

GROUPS = 3
HISTOGRAM = [8, 4, 2, 1, 1]  # every drafted token is kept half the time, K = 4


def arm(rounds: list[int], round_s: float) -> Arm:
    """GROUPS equal answers whose rounds kept 0, 1, ... drafted tokens so many times."""
    found = Arm()
    for index in range(GROUPS):
        counters = Counters(prefill_seconds=0.1)
        for kept, times in enumerate(rounds):
            for _ in range(times):
                counters.record(len(rounds) - 1, kept, kept + 1)
        answer = Completion(prompt_tokens=[1] * 10, tokens=[2] * 30, index=index)
        answer.counters = counters
        found.completions.append(answer)
        found.tokens.append(counters.emitted)
        found.seconds.append(counters.rounds * round_s)
    return found


def advised(
    monkeypatch: pytest.MonkeyPatch, c: float, loop: float = 1.0, verify: float = 1.0
) -> dict[str, Any]:
    """In a world where a plain step takes a second, a draft call c, a round `loop` times its
    forwards, and half of what is drafted is kept.
    """
    sizes = (1, 2, 4, 8, 16)
    costs = Costs(sizes, (1.0, *[verify] * 4), (c,) * 5)
    monkeypatch.setattr(advice, "measured_costs", lambda *_: costs)

    def world(settings: Evaluation, pair: Any, *_: Any) -> dict[str | None, Arm]:
        K = pair.decoding["d"].K
        rounds = [2 ** (4 - k) for k in range(1, K + 1)] + [2 ** (4 - K)]
        return {None: arm([16], 1.0), "d": arm(rounds, loop * (verify + K * c))}

    monkeypatch.setattr(advice, "time_arms", world)
    drafter, plan = SimpleNamespace(levels=5), SimpleNamespace(plan=chain_plan(4))
    pair = SimpleNamespace(
        drafters={"d": drafter},
        decoding={"d": plan},
        decoder=lambda *_: SimpleNamespace(runner=None),
    )
    monkeypatch.setattr(advice, "replace", lambda one, **new: SimpleNamespace(**new))
    timed = {None: arm([16], 1.0), "d": arm(HISTOGRAM, loop * (verify + 4 * c))}
    settings: Any = SimpleNamespace(policy="fixed", batch_size=1)
    found = advice.advise(settings, pair, "d", [], timed, lambda: None)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("loop", [1.0, 1.2])
def test_every_depth_is_foretold_from_one_run(monkeypatch: pytest.MonkeyPatch, loop: float) -> None:
    found = advised(monkeypatch, c=0.22, loop=loop)
    tau = [1 + sum(0.5**i for i in range(1, k + 1)) for k in range(6)]
    assert [one["K"] for one in found["depths"]] == list(range(6))
    # The fifth depth wasn't drafted: by the last conditional acceptance, of one round in two.
    assert [one["tau"] for one in found["depths"]] == pytest.approx(tau)
    speedup = [1.0] + [t / (loop * (1 + k * 0.22)) for k, t in enumerate(tau) if k]
    assert [one["speedup"] for one in found["depths"]] == pytest.approx(speedup)
    assert found["best"] == 1 and found["measured"] == pytest.approx(1.5 / (1.22 * loop))
    low, high = found["depths"][1]["interval"]
    assert low == pytest.approx(high) == pytest.approx(speedup[1])  # all groups are alike
    assert advice.pays(found)
    assert f"draft K=1: {found['measured']:.2f}" in found["says"]


@pytest.mark.parametrize(
    ("c", "verify", "words"),
    [
        # K = 1 breaks even where 60% are kept, 1.2 times as many, or at c = .4, 1.25 times less.
        (0.5, 1.1, "keep 60% of its first tokens, not 50%, or a draft call costs too much"),
        (1.5, 1.0, "pay here: a draft call costs too much: it would have to be c = 0.50"),
        (0.3, 1.45, "keep 75% of its first tokens, not 50%, or a draft call"),
        (0.1, 1.7, "pay here: it is accepted too seldom: it would have to keep 80%"),
        (0.6, 1.6, "pay here: a pass over two tokens costs too much"),
    ],
)
def test_where_drafting_does_not_pay_it_says_which_is_at_fault(
    monkeypatch: pytest.MonkeyPatch, c: float, verify: float, words: str
) -> None:
    found = advised(monkeypatch, c=c, verify=verify)
    assert found["best"] == 0 and found["measured"] is None and not advice.pays(found)
    assert found["says"].startswith("drafting doesn't pay here")
    assert words in found["says"]


def test_the_advised_k_is_measured_saved_and_served(
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A draft that is always right and, as the clock is made to say, free: draft all one can."""
    shutil.copytree(folders / "itself", tmp_path / "itself")
    sizes = (1, 2, 4, 8, 16)
    free = Costs(sizes, (1.0,) * 5, (0.0,) * 5)
    monkeypatch.setattr(advice, "measured_costs", lambda *_: free)
    monkeypatch.setattr(advice, "pays", lambda found: True)  # whatever this machine's clock says
    monkeypatch.setattr("draftsmith.decode.__main__.pays", lambda found: True)
    asked = (f"drafter={tmp_path / 'itself'}", "advice=true", "save=true", "identity=false")
    out = tmp_path / "out"
    main(arguments(folders, out, *asked, "dtype=float32"))
    report = json.loads((out / "report.json").read_text())
    assert not schema_problems(report)
    found = report["advice"]
    assert [one["K"] for one in found["depths"]] == list(range(8))
    speedups = [one["speedup"] for one in found["depths"]]
    assert found["best"] == speedups.index(max(speedups)) > 0
    assert found["measured"] > 0 and found["measured"] != report["speedup"]
    told = capsys.readouterr().out
    assert f"draft K={found['best']}" in told and "speed-up, foretold" in told
    assert f'"num_speculative_tokens": {found["best"]}' in told
    assert read_meta(tmp_path / "itself")["defaults"]["K"] == found["best"]


def test_nothing_is_saved_where_drafting_does_not_pay(
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    costly = Costs((1, 2, 4, 8, 16), (1.0,) * 5, (9.0,) * 5)
    monkeypatch.setattr(advice, "measured_costs", lambda *_: costly)
    monkeypatch.setattr(advice.speed, "speedup", lambda *_: 0.1)
    draft = folders / "draft"
    main(arguments(folders, tmp_path, f"drafter={draft}", "advice=true", "save=true"))
    told = capsys.readouterr().out
    assert told.lstrip().startswith("drafting doesn't pay here: a draft call costs too much")
    assert "nothing saved" in told and read_meta(draft)["defaults"]["K"] == 3
