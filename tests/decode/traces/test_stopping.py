"""`draftsmith stopping`: rules tuned on one trace and reported on another, thresholds kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_traces import DEPTHS, HIDDEN, ROUNDS, write_trace
from torch import Tensor

from draftsmith.command import guarded
from draftsmith.decode.traces import simulate_stops as replay
from draftsmith.decode.traces.tune_stops import (
    Stopping,
    by_head,
    compare,
    compared,
    main,
    rounds,
    rules,
)
from draftsmith.models.scorers import (
    ABOUT,
    FOLDER,
    Scorer,
    ScorerConfig,
    load_acceptance,
    save_scorer,
    weights_mark,
)

WEIGHTS = b"\x08" + bytes(7) + bytes(range(256)) * 40


def everywhere(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `same_shape` records: a round begins at every position."""
    columns["position"] = 10 + columns["round"] + columns["depth"].int()
    columns["entropy"] = torch.full_like(columns["log_q"], 0.5)
    return columns


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A drafter folder whose head knows the law of made-up traces."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    config = ScorerConfig(
        "acceptance", HIDDEN, blocks=0, width=1, scalars=("lead",), state="parent"
    )
    scorer = Scorer(config)
    with torch.no_grad():
        assert scorer.enter is not None
        scorer.enter.weight.copy_(torch.tensor([[2.0, *[0.0] * (HIDDEN - 1), 1.0]]))
        scorer.enter.bias.fill_(-3.0)
        scorer.out.weight.fill_(1.0)
        scorer.out.bias.fill_(0.0)
    about = {"made_for": weights_mark(folder), "threshold": 0.37, "calibrated": True}
    save_scorer(folder / FOLDER, scorer, {**about, "figures": {}, "provenance": {}})
    return folder


def trace(folder: Path, drafter: Path, prompts: int) -> str:
    about = {"kind": "decoder", "target": {}, "drafter": {"mark": weights_mark(drafter)}}
    return write_trace(folder, about, everywhere, prompts)


def test_the_rule_that_knows_most_wins_and_no_rule_beats_the_oracle(
    tmp_path: Path, drafter: Path
) -> None:
    settings = Stopping(
        tune=trace(tmp_path / "tune", drafter, 30),
        report=trace(tmp_path / "report", drafter, 60),
        drafter=str(drafter),
    )
    found = {row["what"]: row for row in compare(settings, 0.1, 1.0)}
    assert set(found) == {*rules(1), "head", "head-costs", "oracle", "oracle-after"}
    assert found["head-costs"]["setting"] == f"h 0.9, K {DEPTHS}"
    assert found["fixed-k"]["over_fixed"] == 1 and found["oracle"]["share_of_oracle"] == 1
    assert found["head"]["over_fixed_interval"][0] > 1  # q says nothing here, the state does
    for row in found.values():
        assert row["speedup"] <= found["oracle"]["speedup"]
        low, high = row["speedup_interval"]
        assert low <= row["speedup"] <= high


def test_settings_are_chosen_on_the_tune_trace_alone(tmp_path: Path, drafter: Path) -> None:
    head = load_acceptance(drafter)
    assert head is not None
    settings = Stopping(tune="", drafter=str(drafter))
    parts = [
        rounds(settings, trace(tmp_path / name, drafter, count), head)
        for name, count in (("one", 4), ("two", 40))
    ]
    options = by_head("parent", DEPTHS)
    fixed, entropy = rules(DEPTHS)["fixed-k"], rules(DEPTHS)["entropy"]
    arms: dict[str, Any] = {"fixed-k": (fixed, *parts), "entropy": (entropy, *parts)}
    rows, counters = compared({**arms, "head": (options, *parts)}, 0.2)
    best, speed = replay.tune(options, parts[0], 0.2)
    [row] = [row for row in rows if row["what"] == "head"]
    assert row["setting"] == best
    assert row["speedup"] == replay.speedup(replay.replay(options[best], parts[1]), 0.2) != speed
    assert len(counters["head"]) == 40
    assert sum(one.emitted for one in counters["head"]) == 40 * ROUNDS


def test_the_command_prints_the_rules_and_keeps_the_threshold(
    tmp_path: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = trace(tmp_path / "tune", drafter, 20)
    main([f"tune={tune}", f"drafter={drafter}", "c=0.05", "save=true"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "oracle-after" in shown and "give report=" in shown
    about = json.loads((drafter / FOLDER / ABOUT).read_text())
    assert about["tuned"] == {"c": 0.05, "v": 1.0, "trace": tune}
    found = load_acceptance(drafter)
    assert found is not None and found.threshold == about["threshold"] != 0.37


def test_bad_inputs(tmp_path: Path, drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune = trace(tmp_path / "tune", drafter, 3)
    about = {"kind": "decoder", "target": {}, "drafter": {"mark": weights_mark(drafter)}}
    at = {"settings": {"temperature": 0.5}}
    cold = write_trace(tmp_path / "cold", about | at, everywhere, 3)
    mixed = write_trace(tmp_path / "mixed", about | {"kind": "mixed"}, everywhere, 3)
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(WEIGHTS[::-1])
    for argv, message in (
        ([f"tune={tune}"], "c: got none"),
        ([f"tune={tune}", "c=-1"], "expected numbers above 0"),
        ([f"tune={tune}", "c=0.1", "save=true"], "got no acceptance head"),
        ([f"tune={tune}", f"drafter={other}", "c=0.1"], "got a trace of a drafter of mark"),
        ([f"tune={tmp_path}/nothing", "c=0.1"], "nothing"),
        ([f"tune={tune}", f"report={cold}", "c=0.1"], "temperature: None and 0.5"),
        ([f"tune={mixed}", "c=0.1"], "a trace of kind 'mixed', expected 'decoder'"),
    ):
        assert guarded(main, argv) == 2, argv
        assert message in capsys.readouterr().err, argv
