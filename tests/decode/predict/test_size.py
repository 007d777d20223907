"""Sizes that are proposed for a target: counted right, within bounds, best by the formula."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config

from draftsmith.command import guarded
from draftsmith.decode.draft_lms.lm import weights_read
from draftsmith.decode.predict import draft_sizes as sizing
from draftsmith.decode.predict.draft_sizes import (
    FASTDRAFT,
    Sizing,
    law_of,
    machine_of,
    measured,
    predicted,
    propose,
    shapes,
)
from draftsmith.decode.predict.machines import MACHINES, Machine

CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)


def options(**changes: Any) -> Sizing:
    return replace(Sizing(target=""), **changes)


def test_fastdraft_law_is_its_table() -> None:
    """The table of the paper, turned into the acceptance of a token as the law says."""

    def alpha(accepted: list[float]) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            a = (low + high) / 2
            below = (a + a**2 + a**3) / 3 < sum(accepted) / len(accepted)
            low, high = (a, high) if below else (low, a)
        return low

    small, large = alpha([0.311, 0.277, 0.245]), alpha([0.366, 0.327, 0.281])
    slope = (large - small) / math.log10(120 / 50)
    assert FASTDRAFT.slope == pytest.approx(slope, abs=1e-3)
    phi, llama = alpha([0.369, 0.306, 0.370, 0.562]), alpha([0.307, 0.266, 0.334, 0.649])
    levels = phi - slope * math.log10(50e6), llama - slope * math.log10(150e6)
    assert FASTDRAFT.intercept == pytest.approx(sum(levels) / 2, abs=1e-3)


def test_shapes_are_counted_as_built() -> None:
    target = sizing.shape_of(CONFIG)
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    assert target.parameters == model.num_parameters()
    assert target.non_embedding == target.parameters - 2 * 4096 * 768
    assert target.weights == weights_read(model.bfloat16())
    found = shapes(CONFIG, target)
    assert {draft.hidden for draft in found} == {64, 128, 192, 256, 384, 576, 768}
    for draft in found:
        assert draft.hidden == 64 * draft.heads and draft.intermediate % 64 == 0
        assert draft.kv_heads == math.ceil(draft.heads / 3) and not draft.heads % draft.kv_heads
        assert draft.layers < 12
    draft = next(d for d in found if (d.layers, d.hidden) == (4, 192))
    sizes = {name: getattr(draft, name) for name in sizing.RECIPE}
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(sizing._config(CONFIG, sizes))
    assert draft.parameters == built.num_parameters()
    assert draft.weights == weights_read(built.bfloat16()) == 2 * draft.parameters  # one table


def test_the_best_is_proposed() -> None:
    machine = Machine(0, 1e9, bandwidth=10.0, layer=100.0, call=50.0)
    target, drafts = propose(CONFIG, options(K=3, budget=10e6, min_layers=1), FASTDRAFT, machine)
    assert target.seconds == pytest.approx(1e-6 * (50 + 12 * 100) + target.weights / 10e9)
    assert len({d.layers for d in drafts}) == len(drafts)
    assert [d.speedup for d in drafts] == sorted((d.speedup for d in drafts), reverse=True)
    best = {}
    for draft in shapes(CONFIG, target):
        if draft.parameters <= 10e6:
            seconds = 1e-6 * (50 + draft.layers * 100) + draft.weights / 10e9
            alpha = FASTDRAFT.slope * math.log10(draft.non_embedding) + FASTDRAFT.intercept
            tau = (1 - alpha**4) / (1 - alpha)
            speedup = tau * target.seconds / (target.seconds + 3 * seconds)
            best[draft.layers] = max(best.get(draft.layers, 0.0), speedup)
    assert {d.layers: d.speedup for d in drafts} == pytest.approx(best)
    one = drafts[0]
    assert one.mbsu == pytest.approx(one.tau / (1 + 3 * one.weights / target.weights))


def test_costlier_layers_ask_for_fewer_of_them() -> None:
    """With free layers depth is as good as width; dear ones make the shallowest the best."""
    at = options(min_layers=1, budget=20e6)
    free = propose(CONFIG, at, FASTDRAFT, Machine(0, 1e9, 10.0, 0.0, 50.0))[1][0]
    dear = propose(CONFIG, at, FASTDRAFT, Machine(0, 1e9, 10.0, 500.0, 50.0))[1][0]
    assert free.layers > dear.layers and dear.layers == 1 and dear.hidden > free.hidden
    # Where it is free to choose, no other K is better.
    target = propose(CONFIG, at, FASTDRAFT, MACHINES["cpu"])[0]
    chosen = predicted(free, target, FASTDRAFT, 0)
    others = [predicted(free, target, FASTDRAFT, K) for K in range(1, 13)]
    assert chosen.speedup == max(other.speedup for other in others)
    assert chosen.K == max(others, key=lambda other: other.speedup).K


def test_a_law_from_rows(tmp_path: Path) -> None:
    file = tmp_path / "scaling.json"
    rows = [
        {"what": "fkl", "parameters": 2 * n, "non_embedding": n, "tokens": d, "seed": 0}
        | {"alpha": 0.1 * math.log10(n) + (0.2 if d > 1e5 else 0.0), "tau": 1.0}
        for n in (1e4, 1e5, 1e6, 1e7)
        for d in (1e5, 1e6)
    ]
    file.write_text(json.dumps(rows))
    law = law_of(str(file))
    assert (law.slope, law.intercept) == pytest.approx((0.1, 0.2)) and not law.with_tables
    assert "off by -0.000 at 10M" in law.source or "off by +0.000 at 10M" in law.source
    assert law.alpha(10**30) == 0.99
    file.write_text(
        json.dumps([{k: v for k, v in r.items() if k != "non_embedding"} for r in rows])
    )
    assert law_of(str(file)).with_tables
    file.write_text(json.dumps(rows[:4]))
    with pytest.raises(ValueError, match="fewer than 3 sizes"):
        law_of(str(file))


def test_the_command_reads_a_config_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Qwen3Config(
        vocab_size=5000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=0,
    ).save_pretrained(tmp_path)
    for target in (tmp_path, tmp_path / "config.json"):
        sizing.main([f"target={target}", "gpu=a100", "bandwidth=100", "K=3"])
    said = capsys.readouterr().out
    assert "recipe: draft.layers=" in said and "modelled" in said and "assumed" in said
    assert "100 GB/s" in said and "FastDraft" in said
    wrong = {
        "gpu=tpu": "expected one of h100, h200",
        "K=-1": "expected K >= 0",
        "budget=1000": "which no draft",
        "results=/nowhere": "expected a JSON list",
        "bandwith=3": "did you mean",
    }
    for argument, words in wrong.items():
        assert guarded(sizing.main, [f"target={tmp_path}", argument]) == 2
        assert words in capsys.readouterr().err, argument
    assert guarded(sizing.main, [f"target={tmp_path / 'none'}"]) == 2


def test_measured_times_are_of_these_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    small = LlamaConfig(**{**CONFIG.to_dict(), "hidden_size": 128, "num_attention_heads": 2})
    small.num_key_value_heads, small.num_hidden_layers, small.intermediate_size = 1, 4, 256
    small.head_dim, small.vocab_size = 64, 512
    at = options(gpu="cpu", K=2, min_layers=1)
    target, drafts = propose(small, at, FASTDRAFT, machine_of(at))
    modelled = {draft.layers: draft.seconds for draft in drafts}
    target, timed = measured(small, target, drafts, FASTDRAFT)
    assert {draft.layers for draft in timed} == modelled.keys() == {1, 2, 3}
    for draft in timed:
        assert 0 < draft.seconds != modelled[draft.layers] and draft.speedup > 0
    monkeypatch.setattr(sizing, "available", lambda device: 1000)
    with pytest.raises(ValueError, match=r"measure: the target and 3 drafts need .* say measure="):
        measured(small, target, drafts, FASTDRAFT)
