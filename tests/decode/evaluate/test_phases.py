"""The speed phase stands before the proof, and without it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluated import arguments

from draftsmith.decode.__main__ import main
from draftsmith.decode.evaluate import evaluate as evaluation
from draftsmith.decode.evaluate.arms import Arms, Evaluation, Loaded, converse, load
from draftsmith.decode.prompts.prompts import Prompt
from draftsmith.decode.report.schema import schema_problems


def report_of(root: Path, out: Path, *more: str) -> dict[str, Any]:
    main(arguments(root, out, *more))
    report = json.loads((out / "report.json").read_text())
    assert not schema_problems(report)
    return report


def test_without_identity_nothing_is_loaded_in_float32(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def watched(settings: Evaluation, drafters: dict[str, str], dtype: str) -> Loaded:
        loaded.append(dtype)
        return load(settings, drafters, dtype)

    monkeypatch.setattr(evaluation, "load", watched)
    with pytest.warns(UserWarning, match=r"2 prompts are few: .* interval is \["):
        report = report_of(
            *(folders, tmp_path, f"drafter={folders / 'draft'}", "limit=2", "identity=false"),
            *("baseline=same-shape", "temperature=1"),
        )
    assert loaded == ["bfloat16"] and report["identical"] is None and 0 < report["alpha"] < 1
    assert report["identical_same_shape"]["total"] == 2
    # Nor where its weights have no room.
    monkeypatch.setattr(evaluation, "available", lambda device: 0)
    with pytest.warns(UserWarning, match="identity: not proven"):
        report = report_of(folders, tmp_path, f"drafter={folders / 'draft'}", "limit=2")
    assert loaded == ["bfloat16"] * 2 and report["identical"] is None


def test_the_report_of_the_speed_phase_is_written_first(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And identity is proven on as many prompts as there is time for."""
    prove, early = evaluation.prove, {}

    def proven(settings: Evaluation, pair: Loaded, prompts: list[Prompt], tick: Any) -> Any:
        early.update(json.loads((tmp_path / "report.json").read_text()))
        return prove(settings, pair, prompts, tick)

    monkeypatch.setattr(evaluation, "prove", proven)
    monkeypatch.setattr("draftsmith.decode.evaluate.arms.GROUP", 2)
    asked = f"drafter={folders / 'draft'}", "proof_minutes=0", "temperature=1"
    report = report_of(folders, tmp_path, *asked)
    assert not schema_problems(early) and early["speedup"] == report["speedup"]
    assert early["identical"] is None and early["alpha"] is None
    assert report["identical"]["total"] == 2 < report["n_prompts"] == 6
    assert len(report["alpha_by_prompt"]) == 2 and report["alpha"] > 0


def test_of_several_repeats_the_fastest_of_each_group_counts(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a drafter that remembers has forgotten the answers that it would copy the second time."""
    runs: list[Arms] = []

    def kept(*given: Any) -> Arms:
        runs.append(converse(*given))
        return runs[-1]

    monkeypatch.setattr("draftsmith.decode.evaluate.arms.converse", kept)
    asked = "drafter=suffix", "identity=false", "policy=fixed", "repeats=3", "limit=4"
    report = report_of(folders, tmp_path, *asked)
    alone = report_of(folders, tmp_path / "alone", *asked[:-2], "limit=4")
    assert (report["repeats"], alone["repeats"]) == (3, 1) and len(runs) == 3 + 1
    assert report["tau"] == alone["tau"]
    (spec,) = (arm for arm in runs[0] if arm is not None)
    for arm, side in ((None, "plain"), (spec, "speculative")):
        least = np.min([run[arm].seconds for run in runs[:3]], axis=0)
        assert len(least) == 4
        tokens = sum(runs[0][arm].tokens)
        assert report["tokens_per_s"][side] == pytest.approx(tokens / least.sum())
