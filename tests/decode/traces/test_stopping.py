"""`draftsmith stopping`: rules tuned on one trace and reported on another, thresholds kept."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_traces import DEPTHS, HIDDEN, ROUNDS, write_trace
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import guarded
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.traces import simulate_stops as replay
from draftsmith.decode.traces import tune_stops
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


Stopped = Callable[..., tuple[str, str]]


@pytest.fixture
def stopping(
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Stopped:
    """The command on one trace: (what it says of the costs, its table's title). Each measurement
    finds another c, as on a real machine.
    """
    for name, model in (("target", tiny_target), ("draft", tiny_draft)):
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    trace(tmp_path / "tune", tmp_path / "draft", 3)
    made: list[float] = []

    def measured(decoder: Decoder) -> tuple[float, float]:
        made.append(0.1 * (len(made) + 1))
        return made[-1], 1.25

    monkeypatch.setattr(tune_stops, "measured", measured)

    def stop(*others: str) -> tuple[str, str]:
        pair = [f"{key}={tmp_path / key}" for key in ("tune", "target")]
        main([*pair, f"drafter={tmp_path / 'draft'}", "device=cpu", *others])
        shown = capsys.readouterr().out
        says = " ".join(line for line in shown.splitlines() if line.startswith("costs: "))
        [title] = [line.strip() for line in shown.splitlines() if "stopping rules" in line]
        return says, title

    return stop


def test_costs_are_measured_once_and_kept(stopping: Stopped, tmp_path: Path) -> None:
    assert stopping() == (
        "costs: measured now: none were kept",
        "stopping rules at c = 0.1, v = 1.25",
    )
    kept = json.loads((tmp_path / "tune" / "costs.json").read_text())
    assert (kept["c"], kept["v"], kept["with"]["threads"]) == (0.1, 1.25, torch.get_num_threads())
    for _ in range(4):
        says, title = stopping()
        assert says.startswith(f"costs: {tmp_path / 'tune' / 'costs.json'}, measured 20")
        assert f"commit {kept['commit']}" in says and title.startswith("stopping rules at c = 0.1,")
    # Where models lie doesn't matter, what is said goes first, and what is new replaces.
    (tmp_path / "draft").rename(tmp_path / "moved")
    (tmp_path / "draft").symlink_to(tmp_path / "moved")
    assert "measured 20" in stopping()[0]
    assert stopping("c=0.7") == ("costs: as given", "stopping rules at c = 0.7, v = 1")
    assert "c = 0.1," in stopping()[1]
    assert stopping("costs=new")[0] == "costs: measured now: costs=new"
    assert "c = 0.2," in stopping()[1]


def test_other_costs_are_measured_anew_and_said_why(
    stopping: Stopped, tmp_path: Path, tiny_target: PreTrainedModel
) -> None:
    stopping()
    threads = torch.get_num_threads()
    file = tmp_path / "tune" / "costs.json"
    begins = f"costs: measured now: {file} was measured with others ("
    try:
        torch.set_num_threads(threads + 1)
        assert stopping()[0] == f"{begins}threads: {threads} there, {threads + 1} now)"
        assert "measured 20" in stopping()[0]
    finally:
        torch.set_num_threads(threads)
    says, title = stopping("dtype=float32")
    assert "threads: " in says and "dtype: torch.bfloat16 there, torch.float32 now" in says
    assert "c = 0.3," in title
    assert "dtype: torch.float32 there, torch.bfloat16 now" in stopping()[0]

    kept = json.loads(file.read_text())
    for name, value in (("drafter", "a mark"), ("machine", "8 cores of a Z80"), ("device", "H100")):
        file.write_text(json.dumps(kept | {"with": kept["with"] | {name: value}}))
        says, _ = stopping()
        assert says.startswith(f"{begins}{name}: {value} there, ") and says.count(" there, ") == 1
        assert json.loads(file.read_text())["with"] == kept["with"]

    other = copy.deepcopy(tiny_target)
    with torch.no_grad():
        next(other.base_model.parameters()).add_(1)
    other.save_pretrained(tmp_path / "target")
    assert stopping()[0].startswith(f"{begins}target.")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"c": 0.', "cannot be read"),
        ("[]", "holding a list"),
        ("{}", "without c and v above 0"),
        ('{"c": -1.0, "v": 1.0}', "without c and v above 0"),
        ('{"c": 0.5, "v": "1"}', "without c and v above 0"),
        ('{"c": 0.5, "v": 1.0}', "was measured with others"),
    ],
)
def test_broken_costs_are_measured_anew(
    stopping: Stopped, tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "tune" / "costs.json"
    file.write_text(content)
    says, title = stopping()
    assert says.startswith("costs: measured now: ") and str(file) in says and message in says
    assert "c = 0.1," in title
    assert "measured 20" in stopping()[0]


def test_costs_that_cannot_be_kept_are_used(stopping: Stopped, tmp_path: Path) -> None:
    (tmp_path / "tune" / "costs.json").mkdir()
    says, title = stopping()
    assert "Is a directory" in says and "c = 0.1," in title


def test_what_is_no_trace_of_the_drafter_keeps_no_costs(stopping: Stopped, tmp_path: Path) -> None:
    other = {"kind": "decoder", "target": {}, "drafter": {"mark": "another"}}
    write_trace(tmp_path / "of_another", other, everywhere, 3)
    with pytest.raises(ValueError, match="got a trace of a drafter of mark another"):
        stopping(f"tune={tmp_path / 'of_another'}")
    with pytest.raises(ValueError, match=r"got no trace\.json"):
        stopping(f"tune={tmp_path / 'draft'}")
    assert not list(tmp_path.rglob("costs.json"))
