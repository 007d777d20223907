"""The benchmark against TRL's GKDTrainer: what it claims to be fair about, and its rows."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.bench.speed import gkd
from draftsmith.bench.speed import gkd_arms as arms
from draftsmith.train.losses.chunked import chunked_divergence
from draftsmith.train.losses.pure import forward_kl

ROOT = Path(__file__).resolve().parents[2]


def trl_trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's GKDTrainer, installed or in the folder DRAFTSMITH_TRL; skips without."""
    if folder := os.environ.get("DRAFTSMITH_TRL"):
        monkeypatch.setattr(sys, "path", [*sys.path, folder])
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl isn't importable; DRAFTSMITH_TRL names a folder that has it")
    return importlib.import_module("trl.experimental.gkd").GKDTrainer


@pytest.mark.filterwarnings("ignore")
def test_both_minimise_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradient of our forward KL and of theirs at beta=0, on one set of logits."""
    theirs = trl_trainer(monkeypatch).generalized_jsd_loss
    torch.manual_seed(0)
    q_hidden, q_head = torch.randn(12, 8, requires_grad=True), torch.randn(97, 8)
    p_hidden, p_head = torch.randn(12, 6), torch.randn(97, 6)
    labels = torch.where(torch.arange(12) % 3 == 0, -100, 1)
    weight = (labels != -100).float()
    total = chunked_divergence(forward_kl, q_hidden, q_head, p_hidden, p_head, weight).total
    (mine,) = torch.autograd.grad(total / weight.sum(), q_hidden)
    logits = q_hidden @ q_head.T, p_hidden @ p_head.T
    loss = theirs(*(x[None] for x in logits), labels=labels[None], beta=0)
    (other,) = torch.autograd.grad(loss, q_hidden)
    assert torch.allclose(total / weight.sum(), loss, atol=1e-5)
    assert torch.allclose(mine, other, atol=1e-6)


def test_their_rows_are_our_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gsm8k_path: Path
) -> None:
    """Same tokens in the same order; trained where ours are, on-policy after the same prompts."""
    for on_policy in (0.0, 1.0):
        case = gkd.replace(gkd.CASES["cpu"]["on-policy"], **gkd.TINY, on_policy=on_policy)
        x = arms.Inputs(case, arms.Bench(dtype="float32"), str(tmp_path))
        assert len(x.tokenizer) == case.target[-1] == x.draft.get_output_embeddings().out_features
        rows = list(arms.their_rows(x.batches, x.config, 3))
        for step in range(3):
            batch = x.batches.batch(step, 0, 0, accumulation=1, world=1)
            for at, row in enumerate(rows[2 * step : 2 * step + 2]):
                assert row["input_ids"] == batch.input_ids[at, : len(row["input_ids"])].tolist()
                trained = batch.loss_mask[at].nonzero().flatten() + 1
                assert torch.equal(torch.tensor(row["completion_mask"]).nonzero()[:, 0], trained)
        longest = max(row["completion_mask"].index(1) for row in rows)
        assert longest + case.answer <= case.length, "ours would write fewer tokens"


def test_weights_are_those_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (2, 64, 96, 4, 2, 301)
    model = arms.random_lm(shape, "cpu", torch.float32, 0)
    linears = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert gkd.weights(shape) == sum(linears)
    # Llama-3.1-8B, embeddings left out, and the 1B.
    big = gkd.CASES["cuda"]["8B <- 1B"]
    assert round(gkd.weights(big.target) / 1e9, 2) == 7.5
    assert round(gkd.weights(big.draft) / 1e9, 2) == 1.24


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = gkd.WIDE

    def turns(seconds: float, tokens: float, peak: float) -> list[dict[str, float]]:
        one = {"seconds": seconds, "steps": 2, "tokens": tokens, "peak": peak, "loss": 1.0}
        return [one, one | {"seconds": 2 * seconds}]

    runs = {gkd.PEER: turns(4.0, 100, 900), gkd.IDENTICAL: turns(2.0, 100, 300)}
    runs[gkd.PACKED] = turns(2.0, 150, 300)
    found = {(r["unit"], gkd.PACKED in r["what"]): r for r in gkd.compare(case, runs, "a pair")}
    assert found.keys() == {(u, False) for u in ("tokens/s", "steps/s", "MiB")} | {
        ("tokens/s", True)
    }
    assert [r["ratio"] for r in found.values()] == [2.0, 2.0, 3.0, 3.0]
    assert found["tokens/s", False]["goal"] == 1.5 and found["MiB", False]["goal"] == 3.0
    assert found["steps/s", False]["ours"] == (1.0 + 0.5) / 2


def test_an_arm_waits_for_its_turns(tmp_path: Path) -> None:
    """One process: a line on stdin for each turn, and a line about it on stdout."""
    arm = ["tiny=true", "case=vocabulary 4k", "arm=identical batches", "dtype=float32"]
    done = subprocess.run(
        [sys.executable, "bench/speed/gkd.py", *arm, f"out={tmp_path}"],
        cwd=ROOT,
        input="go\ngo\n",
        capture_output=True,
        text=True,
        timeout=1800,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ready, *told = done.stdout.splitlines()
    first, second = map(json.loads, told)
    assert ready == "ready" and first["steps"] == second["steps"] == 2
    assert first["loss"] == second["loss"] > 0 and first["tokens"] > 0 < first["seconds"]
    assert not any(tmp_path.iterdir())
