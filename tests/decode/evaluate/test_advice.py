"""The advice of an evaluation, in worlds whose costs and acceptance are known."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from evaluated import arguments

from draftsmith.decode.__main__ import main, pretend, tell
from draftsmith.decode.engine.request import Completion, Counters
from draftsmith.decode.engine.settings import DecodeSettings
from draftsmith.decode.evaluate import advice, metrics
from draftsmith.decode.evaluate.arms import Arm, Evaluation, Loaded, load, unsaid
from draftsmith.decode.policies.policy import Costs
from draftsmith.decode.report.results import rows_of
from draftsmith.decode.report.schema import schema_problems
from draftsmith.decode.tree_shapes import PUBLISHED, parse_tree
from draftsmith.models.folder.drafter_folder import META, read_meta

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
    monkeypatch: pytest.MonkeyPatch,
    c: float,
    loop: float = 0.0,
    verify: float = 1.0,
    again: float = 1.0,
    more: float = 0.0,
    probes: int = 16,
) -> dict[str, Any]:
    """In a world where a plain step takes a second, a draft call c, a round `loop` seconds beside
    its forwards and `more` of each level (all `again` times, when the advised one is run), and half
    of what is drafted is kept. While other depths are tried all takes three times as long, and
    plain decoding has `probes` rounds.
    """
    sizes = (1, 2, 4, 8, 16)
    costs = Costs(sizes, (1.0, *[verify] * 4), (c,) * 5)
    monkeypatch.setattr(advice, "measured_costs", lambda *_: costs)

    def world(settings: Evaluation, pair: Any, *_: Any) -> dict[str | None, Arm]:
        last = "d" in pair.decoding
        plain = arm([16], 1.0) if last else arm([probes], 3.0)
        found: dict[str | None, Arm] = {None: plain}
        for name, how in pair.decoding.items():
            rounds = [2 ** (5 - k) for k in range(1, how.K + 1)] + [2 ** (5 - how.K)]
            times = again if name == "d" else 3.0
            found[name] = arm(rounds, times * (loop + verify + how.K * (c + more)))
        return found

    monkeypatch.setattr(advice, "time_arms", world)
    monkeypatch.setattr(Loaded, "decoder", lambda *_: SimpleNamespace(runner=None))
    drafter: Any = SimpleNamespace(levels=5, remembers=False)
    nothing: Any = None
    pair = Loaded(nothing, nothing, {"d": drafter}, {"d": DecodeSettings(K=4)})
    timed = {None: arm([16], 1.0), "d": arm(HISTOGRAM, loop + verify + 4 * (c + more))}
    # By rejection, whose answers no replay knows.
    settings = Evaluation(target="t", drafter="d", rule="leviathan", temperature=1.0)
    found = advice.advise(settings, pair, "d", [], timed, lambda: None)
    assert found is not None
    return found


def fewer_rounds(plain: Arm, spec: Arm, groups: Any = None) -> float:
    """The speed-up of an arm where every round takes as long as a plain step."""
    taus = [metrics.block_efficiency(arm.counters) for arm in (spec, plain)]
    return taus[0] / taus[1]


@pytest.mark.parametrize(("loop", "more"), [(0.0, 0.0), (0.05, 0.0), (0.1, 0.04), (0.0, 0.1)])
def test_every_depth_is_foretold_from_one_run(
    monkeypatch: pytest.MonkeyPatch, loop: float, more: float
) -> None:
    """And from a few prompts by the first and the last, which tell what each level takes more than
    isolated forwards do.
    """
    found = advised(monkeypatch, c=0.22 - more, loop=loop, more=more)
    tau = [1 + sum(0.5**i for i in range(1, k + 1)) for k in range(6)]
    assert [one["K"] for one in found["depths"]] == list(range(6))
    # The fifth depth wasn't drafted: by the last conditional acceptance, of one round in two.
    assert [one["tau"] for one in found["depths"]] == pytest.approx(tau)
    speedup = [1.0] + [t / (loop + 1 + k * 0.22) for k, t in enumerate(tau) if k]
    assert [one["speedup"] for one in found["depths"]] == pytest.approx(speedup)
    assert found["best"] == 1 and found["measured"] == pytest.approx(1.5 / (1.22 + loop))
    low, high = found["depths"][1]["interval"]
    assert low == pytest.approx(high) == pytest.approx(speedup[1])  # all groups are alike
    assert found["pays"]
    assert f"draft with K=1: {found['measured']:.2f}" in found["says"]


def test_answers_of_one_token_tell_nothing_of_other_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no round: what the loop adds is then that of the depth that was run."""
    found = advised(monkeypatch, c=0.12, loop=0.1, more=0.1, probes=0)
    assert found["depths"][1]["speedup"] == pytest.approx(1.5 / (1 + 0.12 + 0.1 + 4 * 0.1))


def test_no_depth_is_foretold_to_be_faster_than_any_that_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where isolated forwards take longer than whole rounds, too."""
    found = advised(monkeypatch, c=0.5, more=-0.45)
    tau = [one["tau"] for one in found["depths"]]
    taken = [t / one["speedup"] for t, one in zip(tau, found["depths"], strict=True)]
    assert taken[1:] == pytest.approx([1 + 0.05 * k for k in range(1, 6)])
    found = advised(monkeypatch, c=0.0, loop=-0.9, more=0.0)
    assert all(one["speedup"] == pytest.approx(one["tau"] / 0.1) for one in found["depths"][1:])


@pytest.mark.parametrize(
    ("c", "verify", "words"),
    [
        # K = 1 breaks even where 60% are kept, 1.2 times as many, or at c = .4, 1.25 times less.
        (0.5, 1.1, "keep 60% of its first tokens, not 50%, or drafting one token costs too much"),
        (1.5, 1.0, "pay here: drafting one token costs too much: it would have to take 0.50"),
        (0.3, 1.45, "keep 75% of its first tokens, not 50%, or drafting one token"),
        (0.1, 1.7, "pay here: it is accepted too seldom: it would have to keep 80%"),
        (0.6, 1.6, "pay here: a pass over two tokens costs too much"),
    ],
)
def test_where_drafting_does_not_pay_it_says_which_is_at_fault(
    monkeypatch: pytest.MonkeyPatch, c: float, verify: float, words: str
) -> None:
    found = advised(monkeypatch, c=c, verify=verify)
    assert found["best"] == 0 and found["measured"] is None and not found["pays"]
    assert found["says"].startswith("drafting doesn't pay here")
    assert words in found["says"]


@pytest.mark.parametrize(("c", "again", "tried"), [(0.49, 1.2, [1, 4]), (0.15, 1.5, [1, 2, 4])])
def test_drafting_does_not_pay_only_where_one_token_was_tried(
    monkeypatch: pytest.MonkeyPatch, c: float, again: float, tried: list[int]
) -> None:
    """What was foretold to pay, and K = 1, are run first; a run slower than foretold ends so."""
    found = advised(monkeypatch, c=c, again=again)
    measured = {one["K"]: one["measured"] for one in found["depths"] if one["measured"]}
    assert sorted(measured) == tried and max(measured[K] for K in tried[:-1]) < 1
    best = max(tried[:-1], key=lambda K: measured[K])
    assert found["best"] == best and not found["pays"]
    assert f"doesn't pay here (K={best}: {measured[best]:.2f}" in found["says"]
    # By how much: from what was measured, not from what was foretold.
    assert f"keep {100 * (1.5 / measured[1] - 1):.0f}% of its first" in found["says"]


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
    twice = {"speedup": 2.0, "speedup_interval": [1.9, 2.1], "speedup_specbench": 2.0}
    monkeypatch.setattr(advice.speed, "speedups", lambda *_: twice)  # whatever the clock says
    monkeypatch.setattr(advice.speed, "speedup", fewer_rounds)
    monkeypatch.setattr(advice, "seconds_a_round", lambda *_: 1.0)
    asked = (f"drafter={tmp_path / 'itself'}", "advice=true", "save=true", "identity=false")
    out = tmp_path / "out"
    main(arguments(folders, out, *asked, "dtype=float32"))
    report = json.loads((out / "report.json").read_text())
    assert not schema_problems(report)
    found = report["advice"]
    rows = found["depths"]
    deep = [one["K"] for one in rows if (one["tree"], one["policy"]) == ("chain", "fixed")]
    assert deep == list(range(1, 8)) and rows[0]["K"] == 0
    assert {one["policy"] for one in rows} >= {"cost", "confidence", "entropy", "depth"}
    assert {one["tree"] for one in rows} >= {*PUBLISHED, advice.DYNAMIC}
    best = max(rows[:-1], key=lambda one: one["speedup"])  # the last is of `auto`, as it was run
    assert rows[-1]["policy"] == "auto"
    chosen = {"K": found["best"], "tree": found["tree"], "policy": found["policy"]}
    assert chosen.items() <= best.items()
    assert found["measured"] == best["measured"] == 2.0 and found["best"] > 0
    for one in rows:  # what is always right keeps its best path
        if one["tree"] in PUBLISHED:
            assert one["tau"] == 15 / -(-15 // (1 + one["K"]))
    told = capsys.readouterr().out
    assert f"draft with K={found['best']}" in told and "speed-up, foretold" in told
    assert f'"num_speculative_tokens": {found["served_K"]}' in told
    drafted = len(found["acceptance_by_position"])
    rates = ",".join(["1.0"] * min(drafted, found["served_K"]))
    assert f"--spec-draft-n-max {rates.count('1')}" in told.split("made-up answers:")[1]
    assert f"--spec-synth-rates {rates}\n" in told
    kept = read_meta(tmp_path / "itself")["defaults"]
    assert (kept["K"], kept["policy"], kept["served_K"]) == (
        *(found["best"], found["policy"], found["served_K"]),
    )


@pytest.mark.parametrize(
    ("changed", "printed"),
    [
        ({}, True),
        ({"tree": "eagle-25"}, False),
        ({"policy": "cost"}, False),
        ({"acceptance_by_position": [0.0, 0.0]}, False),
    ],
)
def test_only_a_fixed_chain_says_what_servers_would_accept(
    folders: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], printed: bool
) -> None:
    result = {"drafter": {"path": str(folders / "draft")}, "tree": "chain", "policy": "fixed"}
    pretend(result | {"acceptance_by_position": [0.61234567, 0.5]} | changed, "target")
    told = capsys.readouterr().out
    assert ("--spec-synth-rates 0.6123,0.5\n" in told) == bool(told) == printed


def test_a_tree_is_saved_for_us_and_a_chain_for_servers(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(folders / "draft", folder)
    settings = Evaluation(target=str(folders / "target"), drafter=str(folder), save=True)
    row = advice.row_of(5, "eagle-25", "fixed", 3.0, 1.6, None)
    row |= {"measured": 1.5, "measured_interval": [1.4, 1.6]}
    says = {"depths": [row], "best": 5, "served_K": 2, "pays": True, "says": "draft"}
    tell("d", row | says, {"path": str(folder)}, settings)
    told = capsys.readouterr().out
    assert f"draftsmith serve target={folders / 'target'} drafter={folder} policy=\n" in told
    assert "saved: K=5 tree=eagle-25" in told and '"num_speculative_tokens": 2' in told
    assert "--speculative-num-steps 2" in told
    again = load(settings, {"d": str(folder)}, "float32")
    assert again.decoding["d"].plan == parse_tree("eagle-25", None)
    assert unsaid(str(folder), None, "chain", "cost") == {"K": 5, "tree": "chain", "policy": "cost"}


def test_nothing_is_saved_where_drafting_does_not_pay(
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    costly = Costs((1, 2, 4, 8, 16), (1.0,) * 5, (9.0,) * 5)
    monkeypatch.setattr(advice, "measured_costs", lambda *_: costly)
    monkeypatch.setattr(advice.speed, "speedup", lambda *_: 0.1)

    def isolated(*given: Any) -> np.ndarray:  # whatever the clock says
        return np.array([costly.of(how.plan) for how in given[5]])

    monkeypatch.setattr(advice, "rounds_of", isolated)
    draft = folders / "draft"
    main(arguments(folders, tmp_path, f"drafter={draft}", "advice=true", "save=true"))
    told = capsys.readouterr().out
    assert told.lstrip().startswith("draft: drafting doesn't pay here (K=8 policy=auto: 0.10")
    assert "drafting one token costs too much" in told
    assert "nothing saved" in told and read_meta(draft)["defaults"]["K"] == 3


def test_auto_is_advised_from_a_fixed_chain_beside_it(folders: Path, tmp_path: Path) -> None:
    """Nothing said: `auto` is measured and proven, and its advice is a fixed chain's, with a row of
    what `auto` itself gave.
    """
    asked = arguments(folders, tmp_path, f"drafter={folders / 'itself'}", "advice=true")
    main([*asked, "dtype=float32"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert not schema_problems(report)
    assert report["policy"] == "auto" and report["identical"]["same"] == 6
    found = report["advice"]
    own = [row for row in found["depths"] if row["policy"] == "auto"]
    assert [(row["K"], row["tau"]) for row in own] == [(8, report["tau"])]
    assert own[0]["measured"] == own[0]["speedup"] == report["speedup"]
    (counted,) = (row for row in found["depths"] if (row["K"], row["policy"]) == (3, "fixed"))
    assert counted["measured"] is not None and counted["tau"] == 4.0  # the folder's K
    assert found["acceptance_by_position"] == [1.0, 1.0, 1.0]
    always = report["drafting"]
    # Each answer's last round is cut.
    assert (always["K"], always["tau"], always["tau_interval"]) == (3, 3.75, [3.75, 3.75])
    assert always["speedup"] == counted["measured"]
    own, beside = rows_of("itself", report)
    assert (own["tau"], beside["tau"], beside["what"]) == (report["tau"], 3.75, "itself, K=3")


def test_who_says_k_or_a_tree_gets_it_in_every_round(folders: Path) -> None:
    policies = {
        ("", None, ""): "auto",
        ("", 2, ""): "fixed",
        ("eagle-25", None, ""): "fixed",
        ("", 2, "auto"): "auto",
    }
    for (tree, K, policy), wanted in policies.items():
        assert unsaid(str(folders / "draft"), K, tree, policy)["policy"] == wanted
    assert unsaid("ngram", None, "", "")["policy"] == "auto"
    shapes = Evaluation(target="t", drafter="d", baseline="same-shape")
    assert shapes.policy == "fixed"


def test_what_is_saved_is_what_is_decoded_with(tmp_path: Path) -> None:
    """A tree that was cut keeps its depth; a tree of the folder's own moves with it."""
    kept = {"K": 2, "tree": "eagle-25", "policy": "fixed"}
    (tmp_path / META).write_text(json.dumps({"defaults": kept}))
    assert unsaid(str(tmp_path), None, "", "") == kept
    assert unsaid(str(tmp_path), 3, "", "")["K"] == 3
    assert unsaid(str(tmp_path), None, "medusa-63", "")["K"] is None
    (tmp_path / META).write_text(json.dumps({"defaults": kept | {"tree": "tree.json"}}))
    (tmp_path / "tree.json").write_text("[[0]]")
    assert unsaid(str(tmp_path), None, "", "")["tree"] == str(tmp_path / "tree.json")
    (tmp_path / META).write_text(json.dumps({"defaults": kept | {"policy": "acceptance:0.7,1"}}))
    assert unsaid(str(tmp_path), None, "", "")["policy"] == "acceptance:0.7,1"
    # What is copied beside it isn't known to its acceptance head.
    assert unsaid(f"suffix+{tmp_path}", None, "", "")["policy"] == "fixed"
