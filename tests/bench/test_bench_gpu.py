"""What `make gpu` does, in its CPU mode on toy shapes; and that simulated acceptance is as told."""

import json
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest
import torch
from forked import run

from draftsmith.bench.speed import device
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.metrics import block_efficiency
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.tokenizer import numbered

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("tau", "K"), [(2.0, 3), (3.0, 4), (4.5, 6)])
def test_simulated_acceptance_gives_the_tau_asked_for(tau: float, K: int) -> None:
    """And the answers are those of a target that counts."""
    vocab = device.TOY[-1]
    target, draft = device.counting_lm(device.TOY, "cpu"), device.counting_lm(device.TOY_LM, "cpu")
    device.set_acceptance(draft, device.acceptance_for(tau, K))
    drafter = LMDrafter(draft, vocab)
    decoder = Decoder(target, numbered(vocab), drafter, K=K, batch_size=100)
    prompts = [[last] for last in range(0, vocab, 10)]
    done = decoder.generate(prompts, SamplingParams(max_new_tokens=64, ignore_eos=True))
    for c in done:
        assert c.tokens == [(c.prompt_tokens[-1] + n) % vocab for n in range(1, 65)]
    # The ends of the answers cut rounds short: by tau - 1 tokens of 64 at most.
    assert block_efficiency([c.counters for c in done]) == pytest.approx(tau, rel=0.05)


def test_a_draft_that_is_always_right_or_wrong() -> None:
    ids = torch.arange(97)[None]
    for accept, step in ((1.0, 1), (0.0, 8)):
        draft = device.counting_lm(device.TOY_EAGLE, "cpu", accept=accept)
        assert (draft(ids).logits.argmax(-1) == (ids + step)).all()


@pytest.mark.slow
def test_cpu_mode_runs_every_part(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "bench/speed/gpu.py",
        "device=cpu",
        f"out={tmp_path}",
        "limit_s=1700",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu-cpu-mode.json").read_text())
    whats = [row["what"] for row in found]
    for part in (
        "plain, batch 1",
        "t_verify, N=64",
        "t_draft, 0.6B",
        "glue, simulated tau 3, EAGLE",
    ):
        assert any(what.startswith(part) for what in whats), part
    for part in ("target, N 1-64", "draft, context 128-8192", "fkl peak memory"):
        assert any(what.startswith(part) for what in whats), part
    assert all("simulated" in what for what in whats if "shape" in what)
    assert all(row["commit"] and row["machine"] and row["command"] for row in found)
    page = (tmp_path / "gpu-cpu-mode.md").read_text()
    assert "Failed: none." in page and "| not judged |" in page and "| met |" not in page


def test_a_short_limit_skips_and_names(tmp_path: Path) -> None:
    command = ["bench/speed/steps.py", "device=cpu", f"out={tmp_path}", "limit_s=0"]
    done = run(command, cwd=ROOT)
    assert done.returncode == 0, done.told
    assert "tau 4.5, batch 4, context 64" in (tmp_path / "steps.txt").read_text().splitlines()


def test_preview_times_each_form_of_an_lm_head(tmp_path: Path) -> None:
    sizes = ["hidden=64", "intermediate=96", "heads=2", "kv_heads=1", "layers=2", "vocab=3000"]
    few = ["context=20", "sizes=800", "ranks=32", "turns=1", f"out={tmp_path}"]
    done = run(["bench/speed/preview.py", *sizes, *few], cwd=ROOT)
    assert done.returncode == 0, done.told
    rows = json.loads((tmp_path / "preview.json").read_text())
    assert [row["what"] for row in rows] == ["whole", "800 tokens", "preview of rank 32"]
    assert rows[0]["mb"] > rows[2]["mb"] > rows[1]["mb"]
    assert all(row["c"] == pytest.approx(row["ms"] / row["plain_ms"], rel=1e-9) for row in rows)
    assert "| preview of rank 32 |" in (tmp_path / "preview.md").read_text()


def test_cost_says_how_it_grows(tmp_path: Path) -> None:
    toys = ["target=toy", "draft=toy", "repeats=1", f"out={tmp_path}"]
    done = run(["bench/speed/cost.py", *toys], cwd=ROOT)
    assert done.returncode == 0, done.told
    rows = json.loads((tmp_path / "cost.json").read_text())
    assert [row["axis"] for row in rows] == ["length", "batch", "context"] * 2
    for row in rows:
        assert len(row["times"]) == len(row["size"]) == row["pairs"] + 1
        assert row["ratio_min"] == pytest.approx(
            min(2 * a / b for a, b in zip(row["times"], row["times"][1:], strict=False))
        )
    picture = xml.dom.minidom.parse(str(tmp_path / "cost.svg")).documentElement
    assert len(picture.getElementsByTagName("title")) > 40
