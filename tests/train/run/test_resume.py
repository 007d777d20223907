"""A run that is killed, interrupted and resumed ends in the very bytes of one that was not.

Each run here is a process of its own, of the same command every time.
"""

import json
import signal
import time
from pathlib import Path

import pytest
from forked import Forked
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.train.run.folder import Run

ROOT = Path(__file__).resolve().parents[3]
FOLLOW = "repeat the same command to resume"


def start_entry(entry: str, arguments: list[str]) -> Forked:
    return Forked([str(ROOT / "train" / f"{entry}.py"), *arguments])


def run_entry(entry: str, arguments: list[str]) -> tuple[int, str]:
    process = start_entry(entry, arguments)
    return process.wait(), process.told


def stop_after(process: Forked, metrics: Path, lines: int, number: int) -> str:
    """Send the signal once so many records are written, and return the process's output."""
    deadline = time.monotonic() + 1800
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        assert process.poll() is None, process.told
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.002)
    process.send_signal(number)
    process.wait()
    return process.told


def records(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def test_the_millionth_step_comes_after_the_one_before(tmp_path: Path) -> None:
    run = Run(tmp_path, "lr: 0.1", main=True)
    for step in (999_800, 999_900, 1_000_000, 1_000_100):
        run.staging(step).mkdir()
        run.commit(step)
        latest = run.latest()
        assert latest is not None and latest.name == f"step-{step}"
    assert len([*run.checkpoints.iterdir()]) == 2
    run.close()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    with path.open("w") as file:
        for row in range(80):
            words = " ".join(f"{(row * 7 + i * i) % 23} plus {i % 5}" for i in range(60))
            file.write(json.dumps({"text": f"row {row}: {words}"}) + "\n")
    return path


@pytest.mark.slow
def test_pretraining_survives_ctrl_c_and_kill_9(tmp_path: Path, corpus: Path) -> None:
    """muon has two optimizers and state in both; the evaluation and best weights resume too; the
    corpus is streamed, in several windows an epoch.
    """
    arguments = [
        f"data={corpus}",
        f"corpus=[{corpus}]",
        "corpus.shuffle=24",
        "tokenizer_size=280",
        "model.layers=2",
        "model.hidden=32",
        "model.heads=2",
    ]
    arguments += [
        "model.kv_heads=1",
        "model.intermediate=64",
        "text.max_length=64",
        "batch_size=2",
        "steps=90",
    ]
    arguments += ["accumulation=2", "optimizer=muon", "save_every=5", "eval_every=45", "warmup=9"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    code, output = run_entry("pretrain", [*arguments, f"out={straight}"])
    assert code == 0, output
    again = [*arguments, f"out={broken}"]

    process = start_entry("pretrain", again)
    output = stop_after(process, broken / "metrics.jsonl", 20, signal.SIGINT)
    assert process.returncode == 130, output
    assert FOLLOW in output
    assert "Traceback" not in output
    done = len(records(broken)) - 1
    assert (broken / f"checkpoints/step-{done:06d}").is_dir(), "the last finished step is saved"

    process = start_entry("pretrain", again)
    stop_after(process, broken / "metrics.jsonl", done + 13, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (broken / "model").exists()

    code, output = run_entry("pretrain", again)
    assert code == 0, output
    assert "resumed after step" in output
    for name in ("model/model.safetensors", "best/weights.safetensors"):
        assert (straight / name).read_bytes() == (broken / name).read_bytes(), name
    assert records(straight) == records(broken)
    assert [r["step"] for r in records(broken)] == list(range(91))

    code, output = run_entry("pretrain", again)
    assert (code, "nothing to do" in output) == (0, True)
    code, output = run_entry("pretrain", [*again, "lr=0.5"])
    assert code == 2
    assert "lr: 0.001 there, 0.5 now" in output
    assert "Traceback" not in output


def test_distillation_survives_kill_9(
    tmp_path: Path,
    corpus: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """`lk` carries the last step's alpha, the draft writes half of the text: both resume."""
    tiny_target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    arguments = [f"target.path={tmp_path / 'target'}", f"data={corpus}", "loss=lk", "on_policy=0.5"]
    arguments += [
        "draft={hidden: 16, heads: 2, kv_heads: 1, intermediate: 32}",
        "text.max_length=48",
    ]
    arguments += ["heldout={limit: 4, prompt_tokens: 8, max_new_tokens: 8}", "batch_size=2"]
    arguments += ["on_policy.prompt_tokens=8", "on_policy.max_new_tokens=8"]
    arguments += ["steps=12", "save_every=3", "eval_every=6", "lr=0.02"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    code, output = run_entry("distill", [*arguments, f"out={straight}"])
    assert code == 0, output
    again = [*arguments, f"out={broken}"]
    process = start_entry("distill", again)
    stop_after(process, broken / "metrics.jsonl", 6, signal.SIGKILL)
    code, output = run_entry("distill", again)
    assert code == 0, output
    assert "resumed after step" in output
    name = "drafter/model.safetensors"
    assert (straight / name).read_bytes() == (broken / name).read_bytes()
    assert records(straight) == records(broken)


HEADS = {
    "eagle": ["head.draft_vocab=300", "unroll=3", "optimizer=muon", "cache={folder}/states"],
    "heads": ["head={kind: hydra, prefix: true, layers: 2, dropout: 0.2}", "noise=1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("entry", HEADS)
def test_heads_survive_kill_9(
    entry: str,
    tmp_path: Path,
    corpus: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """EAGLE-3 from states that both runs read in one folder, and Hydra++ with all that it draws;
    `lk` carries the alphas of the last step.
    """
    tiny_target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    arguments = [f"target.path={tmp_path / 'target'}", f"data={corpus}", "loss=lk"]
    arguments += ["text.max_length=48", "heldout={limit: 4, prompt_tokens: 8, max_new_tokens: 8}"]
    arguments += ["batch_size=2", "steps=40", "save_every=4", "eval_every=20", "lr=0.01"]
    arguments += [option.replace("{folder}", str(tmp_path)) for option in HEADS[entry]]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    code, output = run_entry(entry, [*arguments, f"out={straight}"])
    assert code == 0, output
    again = [*arguments, f"out={broken}"]
    process = start_entry(entry, again)
    stop_after(process, broken / "metrics.jsonl", 15, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    code, output = run_entry(entry, again)
    assert code == 0, output
    assert "resumed after step" in output
    for name in ("drafter/model.safetensors", "best/weights.safetensors"):
        assert (straight / name).read_bytes() == (broken / name).read_bytes(), name
    assert records(straight) == records(broken)
