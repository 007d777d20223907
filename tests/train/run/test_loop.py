"""The loop's arithmetic and its behaviour when things go wrong, in one process.

Two-process runs are in test_distributed.py, kills and resumes in test_resume.py.
"""

import copy
import dataclasses
import itertools
import json
import math
import os
import resource
import signal
from pathlib import Path

import forked
import pytest
import torch
from bigram import Bigram, Sequences, settings
from torch import nn

from draftsmith.train.objectives.distillation import NextToken
from draftsmith.train.run import loop
from draftsmith.train.run.checkpoint import Position
from draftsmith.train.run.folder import Run
from draftsmith.train.run.launch import start
from draftsmith.train.run.loop import Counting, Objective, Result, StepOutput, fit, step_seed
from draftsmith.train.run.optim import learning_rate, optimizers
from draftsmith.train.run.settings import Settings
from draftsmith.train.text.batches import Batch


def train(
    config: Settings, objective: Objective | None = None, batches: Sequences | None = None, **more
) -> tuple[Result, Objective, list[dict]]:
    objective = objective or Bigram()
    run = Run(config.out, json.dumps({"steps": config.steps}), main=True)
    try:
        result = fit(start(config), objective, batches or Sequences(), config, run, **more)
    finally:
        run.close()
    return result, objective, records(config)


def records(config: Settings) -> list[dict]:
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_one_batch_of_eight_equals_four_of_two(tmp_path: Path, clip: float) -> None:
    common = {"optimizer": "sgd", "momentum": 0.0, "clip_norm": clip, "schedule": "constant"}
    whole = settings(tmp_path / "whole", batch_size=8, **common)
    split = settings(tmp_path / "split", batch_size=2, accumulation=4, **common)
    _, whole_model, whole_records = train(whole)
    _, split_model, split_records = train(split)
    for a, b in zip(whole_records, split_records, strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    for a, b in zip(whole_model.parameters(), split_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_loss_and_norm_are_those_of_plain_torch(tmp_path: Path) -> None:
    """Written out by hand: mean over all trained tokens, one SGD step, norm before clipping."""
    config = settings(tmp_path, steps=1, optimizer="sgd", momentum=0.0, accumulation=2, clip_norm=0)
    config.batch_size = 4
    reference = Bigram()
    batch = Sequences().batch(0, 0, 0, accumulation=1, world=1)
    loss = reference(batch).loss / batch.loss_mask.sum()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    _, trained, [record] = train(config)
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for a, b in zip(trained.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_five_steps_equal_three_a_stop_and_a_resume(tmp_path: Path) -> None:
    """The weights of dropout and AdamW, bit by bit; the objective sees each step once."""
    straight = settings(tmp_path / "straight", accumulation=2)
    broken = settings(tmp_path / "broken", accumulation=2, save_every=3)
    _, expected, expected_records = train(straight, Bigram(dropout=0.5))

    class Cut(Sequences):
        def batch(self, step: int, *place: int, **shape: int) -> Batch:
            if step == 4:
                raise RuntimeError("cut")
            return super().batch(step, *place, **shape)

    with pytest.raises(RuntimeError, match="cut"):
        train(broken, Bigram(dropout=0.5), Cut())
    assert [r["step"] for r in records(broken)] == [1, 2, 3, 4]
    torch.manual_seed(99)  # global randomness must not matter
    result, resumed, resumed_records = train(broken, Bigram(dropout=0.5))
    assert result.steps == 5
    assert same_weights(expected, resumed)
    assert len(resumed.seen) == 2, "steps 4 and 5"
    for a, b in zip(expected_records, resumed_records, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }


def test_bf16_autocasts_and_keeps_fp32_weights(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    class Watching(Bigram):
        def forward(self, batch: Batch) -> StepOutput:
            seen.append(self.mix(self.norm(self.table(batch.input_ids))).dtype)
            return super().forward(batch)

    _, objective, _ = train(settings(tmp_path / "a", steps=1, dtype="bfloat16"), Watching())
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in objective.parameters()} == {torch.float32}


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_nan_stops_names_the_rows_and_keeps_the_state(tmp_path: Path, poison: str) -> None:
    same = {"schedule": "constant", "batch_size": 4, "accumulation": 2}
    good = settings(tmp_path / "good", steps=2, **same)
    bad = settings(tmp_path / "bad", **same)
    _, expected, _ = train(good)
    objective = Bigram()
    objective.poison_at, objective.poison = 5, poison  # step 3, second micro-batch
    named = r"\[4, 5, 6, 7\]" if poison == "loss" else r"\[0, 1, 2, 3, 4, 5, 6, 7\]"
    with pytest.raises(ValueError, match=f"step 3: .*nan.* examples of the batch are {named}"):
        train(bad, objective)
    assert same_weights(expected, objective)
    position = Position(
        **json.loads((tmp_path / "bad/checkpoints/step-000002/position.json").read_text())
    )
    assert position.step == 2
    assert [r["step"] for r in records(bad)] == [1, 2]


def test_a_step_without_trained_tokens_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step 1 has no trained token in examples"):
        train(settings(tmp_path), batches=Sequences(trained=False))


def test_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """A file-size limit makes the kernel refuse writes just as a full disk does."""
    config = settings(tmp_path, save_every=2, eval_every=3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    calls: list[int] = []

    def evaluate() -> dict[str, float]:
        calls.append(len(calls))
        if len(calls) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
        return {"loss": 1.0}

    try:
        with pytest.raises(OSError, match=r"step 4.*step-000002 is intact"):
            train(config, evaluate=evaluate)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    straight = settings(tmp_path / "straight")
    _, expected, _ = train(straight)
    result, resumed, _ = train(config, evaluate=lambda: {"loss": 1.0})
    assert result.steps == 5
    assert same_weights(expected, resumed)


def test_another_number_of_processes_needs_as_many_sequences(tmp_path: Path) -> None:
    train(settings(tmp_path, steps=1))
    position = tmp_path / "checkpoints/step-000001/position.json"
    position.write_text(json.dumps(json.loads(position.read_text()) | {"world": 2}))
    with pytest.raises(ValueError, match=r"8 x 1 x 2 became 8 x 1 x 1 .* can't go on exactly"):
        train(settings(tmp_path, steps=1))
    result, *_ = train(settings(tmp_path, steps=1, allow_resize=True))
    assert result.steps == 1
    position.write_text(json.dumps(json.loads(position.read_text()) | {"mode": "zero2"}))
    with pytest.raises(ValueError, match="is of a zero2 run, this launch is replicated"):
        train(settings(tmp_path, steps=1))


def test_best_weights_and_patience(tmp_path: Path) -> None:
    values = iter([0.1, 0.3, 0.5, 0.4, 0.45, 0.2])
    kept: list[nn.Module] = []
    objective = Bigram()

    def evaluate() -> dict[str, float]:
        assert not objective.training
        assert not torch.is_grad_enabled()
        kept.append(copy.deepcopy(objective))
        return {"alpha": next(values), "loss": 3.0}

    config = settings(
        tmp_path, steps=20, eval_every=2, patience=2, best_metric="alpha", best_mode="max"
    )
    result, _, log = train(config, objective, evaluate=evaluate)
    assert result == Result(steps=8, best=0.5, best_step=4)
    best = Bigram()
    run = Run(tmp_path, json.dumps({"steps": 20}), main=False)
    assert run.load_best(best) == 4
    assert same_weights(best, kept[2])
    evaluated = {r["step"]: r["eval_alpha"] for r in log if "eval_alpha" in r}
    assert evaluated == {0: 0.1, 2: 0.3, 4: 0.5, 6: 0.4, 8: 0.45}


class Counted(Counting, Bigram):
    """One that goes by how far its run is; notes where each step finds it."""

    def forward(self, batch: Batch) -> StepOutput:
        self.found = [*getattr(self, "found", []), int(self.steps_done)]
        return super().forward(batch)


def test_a_run_of_so_many_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends by the clock, wherever `steps` is, and all schedules stretch over the seconds; after
    a stop it goes on with what is left of them.
    """
    clock = itertools.count()
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(clock) / 2)  # 0.5 s a step
    config = settings(tmp_path, seconds=2.6, steps=100, warmup=0, eval_every=0)
    asked = Counted()
    result, _, found = train(config, asked, evaluate=lambda: {"loss": 1.0})
    assert result.steps == 6 and asked.found == [0, 19, 38, 57, 76, 96]
    rates = [learning_rate(config, 100 * done / 2.6) for done in (0, 0.5, 1, 1.5, 2, 2.5)]
    assert [record["lr"] for record in found[1:]] == pytest.approx(rates)
    assert found[-1]["eval_loss"] == 1.0  # and so at the end, though it isn't a step of `steps`

    other = dataclasses.replace(config, out=str(tmp_path / "stopped"), save_every=1)
    stopped = Sequences()
    given = stopped.batch

    def batch(step: int, *at: int, **how: int) -> Batch:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return given(step, *at, **how)

    monkeypatch.setattr(stopped, "batch", batch)
    with pytest.raises(SystemExit):
        train(other, Counted(), stopped)
    asked = Counted()
    assert train(other, asked)[0].steps == 6 and asked.found == [38, 57, 76, 96]


def test_evaluation_must_give_the_metric(tmp_path: Path) -> None:
    config = settings(tmp_path, best_metric="alpha", best_mode="max")
    with pytest.raises(ValueError, match="expected a finite alpha"):
        train(config, evaluate=lambda: {"loss": 1.0})


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, "lr: 0.1\n", main=True)
    code = (
        f"from draftsmith.train.run.folder import Run; Run({str(tmp_path)!r}, 'lr: 0.1', main=True)"
    )
    other = forked.run(["-c", code])
    assert f"is being written by process {os.getpid()}" in other.err
    run.close()
    assert forked.run(["-c", code]).returncode == 0


def test_only_two_whole_checkpoints_stay(tmp_path: Path) -> None:
    train(settings(tmp_path, save_every=1))
    run = Run(tmp_path, json.dumps({"steps": 5}), main=True)
    half = run.staging(9)
    half.mkdir()
    run.close()
    run = Run(tmp_path, json.dumps({"steps": 5}), main=True)
    assert not half.exists()
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-000004", "step-000005"]
    run.close()


def test_matrices_decay_and_embeddings_norms_and_biases_do_not(tmp_path: Path) -> None:
    objective = Bigram()
    [adamw] = optimizers(objective, settings(tmp_path, optimizer="adamw", weight_decay=0.3))
    decay = {id(p): g["weight_decay"] for g in adamw.param_groups for p in g["params"]}
    assert len(decay) == len(list(objective.parameters()))
    assert decay[id(objective.mix.weight)] == 0.3
    rest = (objective.table.weight, objective.norm.weight, objective.norm.bias, objective.mix.bias)
    assert [decay[id(p)] for p in rest] == [0.0] * 4
    muon, adamw = optimizers(objective, settings(tmp_path, optimizer="muon"))
    assert [id(p) for g in muon.param_groups for p in g["params"]] == [id(objective.mix.weight)]
    assert len(adamw.param_groups[0]["params"]) == 4


def test_learning_rate(tmp_path: Path) -> None:
    base = settings(tmp_path, steps=10, warmup=4, lr=1.0, lr_floor=0.1)
    rates = [learning_rate(base, step) for step in range(10)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.1 + 0.9 * 0.5)
    base.schedule = "linear"
    assert learning_rate(base, 7) == pytest.approx(0.1 + 0.9 * 0.5)
    assert learning_rate(base, 6) == pytest.approx(0.1 + 0.9 * 2 / 3)
    base.schedule = "constant"
    assert learning_rate(base, 9) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adam"}, "optimizer: got 'adam'"),
        ({"schedule": "step"}, "schedule: got 'step'"),
        ({"dtype": "float16"}, "dtype: got .float16."),
        ({"steps": 0}, "steps: got 0"),
        ({"accumulation": 0}, "accumulation: got 0"),
        ({"lr": 0.0}, "lr: got 0.0"),
        ({"track": "notes"}, "track: got 'notes', expected one of none, .*wandb"),
        ({"processes": 2}, "1 processes, but processes= 2"),
    ],
)
def test_settings_out_of_range(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(settings(tmp_path, **changes))


def test_no_setting_is_without_end(tmp_path: Path) -> None:
    for name in ("seconds", "lr"):
        with pytest.raises(ValueError, match=f"{name}: got inf, expected .*, and finite"):
            settings(tmp_path, **{name: math.inf})


@pytest.mark.parametrize(
    ("gpu", "native", "dtype"),
    [
        (False, True, "bfloat16"),
        (False, False, "float32"),
        (True, True, "bfloat16"),
        (True, False, "float32"),
    ],
)
def test_dtype_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, gpu: bool, native: bool, dtype: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: emulated or native)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    assert settings(tmp_path, dtype="auto").dtype == dtype


def test_launches_that_fail_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="got FSDP with fsdp_version=1"):
        start(config)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ValueError, match="becomes plain DDP"):
        start(config)


def test_seeds_are_distinct_and_stable() -> None:
    seeds = {step_seed(s, t, r) for s in range(3) for t in range(20) for r in range(4)}
    assert len(seeds) == 240
    assert step_seed(1, 2, 3) == step_seed(1, 2, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_next_token_is_the_models_own_loss(tiny_target: nn.Module) -> None:
    """Against transformers' logits, with padding, in value and gradient."""
    model = copy.deepcopy(tiny_target).requires_grad_(True)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (3, 20), generator=draw)
    mask = torch.rand(3, 20, generator=draw) < 0.5
    mask[:, -1] = False
    positions = torch.arange(20).expand(3, -1)
    output = NextToken(model)(Batch(ids, positions, mask, None, (0, 1, 2)))
    output.loss.backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logits = model(ids).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    expected = (loss * mask[:, :-1]).sum()
    expected.backward()
    assert output.tokens == mask.sum()
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-4)
    for a, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-4)
