"""Runs that are spread over processes equal one process, and what can't be is refused.

A launch takes 10 s or more on two quiet cores, so each mode has one, in which a run is cut short
and goes on; DDP's own, and ZeRO-2 after a kill, are in test_distributed.py.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import sharding_job
import torch
from accelerate.state import AcceleratorState
from bigram import settings
from tiny_heads import llama

from draftsmith.models.target import TargetSpec
from draftsmith.train.distill import DistillConfig
from draftsmith.train.heads import HeadsConfig, HeadSizes
from draftsmith.train.objectives.medusa import JointTraining
from draftsmith.train.run import launch
from draftsmith.train.run.checkpoint import Position, resized
from draftsmith.train.run.frozen_target import check_shards
from draftsmith.train.run.sharding import FSDP2_ASKED, check_mode, decoder_layers, mode, whole_state
from draftsmith.train.scoring.joint import JointHead
from draftsmith.train.text.on_policy import OnPolicyText

ROOT = Path(__file__).resolve().parents[3]
JOB = str(ROOT / "tests/tools/sharding_job.py")
STEPS = {"steps": 4, "eval_every": 2, "save_every": 2, "schedule": "constant", "clip_norm": 0.5}
RUNS: dict[str, dict] = {
    # SGD: the scale of a gradient shows, which Adam would hide. Clipped at every step.
    "sgd": {"optimizer": "sgd", "momentum": 0.0, "cut_at": 3, **STEPS},
    "adamw": {"lr": 0.01, "tied": False, "gradient_checkpointing": True, "cut_at": 3, **STEPS},
    # With several processes the target lies in parts, too.
    "parts": {"lr": 0.01, "tied": False, "parts": True, "cut_at": 3, **STEPS}
    | {"gradient_checkpointing": True},
}
WHOLE, PARTS = {"batch_size": 8}, {"batch_size": 2, "accumulation": 2}


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps one precision for a whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    os.environ.pop(FSDP2_ASKED, None)


def divided(share: dict[str, int], names: Iterable[str]) -> str:
    return json.dumps({name: RUNS[name] | share for name in names})


def launched(mode: str, folder: Path, runs: str, *flags: str) -> str:
    config = ["--config_file", str(ROOT / f"recipes/accelerate/{mode}.yaml")]
    done = forked.launched(*config, *flags, JOB, str(folder), runs)
    assert done.returncode == 0, done.told
    return done.out


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(one: Path, other: Path) -> None:
    for a, b in zip(records(one), records(other), strict=True):
        for name in a.keys() - {"seconds"}:
            assert a[name] == pytest.approx(b[name], rel=1e-5), (name, a, b)
    weights = torch.load(other / "weights.pt")
    for name, weight in torch.load(one / "weights.pt").items():
        torch.testing.assert_close(weight, weights.pop(name), rtol=1e-5, atol=1e-6)
    assert not weights


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a run lies that one process has made: 8 sequences a step in one batch."""
    folder = tmp_path_factory.mktemp("one")

    @cache
    def made(name: str) -> Path:
        AcceleratorState._reset_state(reset_partial_state=True)
        sharding_job.main([str(folder), divided(WHOLE, [name])])
        return folder / name

    return made


SLOW = [pytest.param(m, RUNS, marks=pytest.mark.slow) for m in ("zero1", "zero2", "zero3")]


@pytest.mark.parametrize(
    ("mode", "names"), [("fsdp2", ["sgd", "parts"]), ("zero2", ["sgd"]), *SLOW]
)
def test_two_processes_equal_one(
    mode: str, names: Iterable[str], tmp_path: Path, one_process: Callable[[str], Path]
) -> None:
    """Loss, gradient norm, held-out figures, those of a full copy, and the weights; with a resume
    after step 2; on 2 processes of 2 micro-batches of 2 sequences.
    """
    if mode != "fsdp2":
        pytest.importorskip("deepspeed", reason="needs pip install 'draftsmith[distributed]'")
    output = launched(mode, tmp_path, divided(PARTS, names))
    assert output.count("resumed after step 2") == len(list(names))
    for name in names:
        assert (tmp_path / name / "mode.txt").read_text() == mode
        assert_same_run(one_process(name), tmp_path / name)


def test_ddp_with_a_target_in_parts(tmp_path: Path, one_process: Callable[[str], Path]) -> None:
    """The job looks at what each process holds; fingerprint, cache, answers, tau are one's, too."""
    processes = forked.ranks([JOB, str(tmp_path), json.dumps({"parts": RUNS["parts"] | PARTS})])
    assert [one.returncode for one in processes] == [0, 0], processes[0].told
    assert [one.out.count("resumed after step 2") for one in processes] == [1, 0]
    assert (tmp_path / "parts" / "mode.txt").read_text() == "replicated"
    assert_same_run(one_process("parts"), tmp_path / "parts")


@pytest.mark.parametrize(
    ("kind", "changes", "processes", "message"),
    [
        (HeadsConfig, {}, 1, "shard_target=true and one process"),
        (
            HeadsConfig,
            {"joint": JointTraining(enabled=True)},
            2,
            "joint=true, which trains the target too",
        ),
        (
            DistillConfig,
            {"head": JointHead(weight=0.5)},
            2,
            "head.weight=0.5, whose head is calibrated by",
        ),
    ],
)
def test_what_a_target_in_parts_cannot_do(
    kind: type, changes: dict, processes: int, message: str
) -> None:
    plain = {"out": "run", "steps": 1, "target": TargetSpec(path="target"), "shard_target": True}
    plain |= {"head": HeadSizes(kind="medusa")} if kind is HeadsConfig else {}
    with pytest.raises(ValueError, match=message):
        check_shards(kind(**plain | changes), processes)
    check_shards(kind(**plain | changes | {"shard_target": False}), processes)
    check_shards(kind(**plain), 2)


@pytest.mark.slow
def test_fsdp2_goes_on_with_one_process(tmp_path: Path, one_process: Callable[[str], Path]) -> None:
    launched("fsdp2", tmp_path, json.dumps({"adamw": RUNS["adamw"] | PARTS}))
    folder = tmp_path / "adamw"
    [last] = folder.glob("checkpoints/*4")
    last.rename(tmp_path / "gone")
    run = {"adamw": RUNS["adamw"] | WHOLE | {"cut_at": -1}}
    output = launched("fsdp2", tmp_path, json.dumps(run), "--num_processes", "1")
    assert "2 x 2 x 2 became 8 x 1 x 1" in output
    assert_same_run(one_process("adamw"), folder)


@pytest.mark.slow
def test_compiled_layers_give_the_same_loss(
    tmp_path: Path, one_process: Callable[[str], Path]
) -> None:
    run = {"sgd": RUNS["sgd"] | WHOLE | {"compile": True, "cut_at": -1}}
    sharding_job.main([str(tmp_path), json.dumps(run)])
    assert_same_run(one_process("sgd"), tmp_path / "sgd")


def position(batch_size: int, accumulation: int, world: int, mode: str = "fsdp2") -> Position:
    return Position(world, mode, batch_size, accumulation)


def test_another_division_is_exact_or_asked_for() -> None:
    then = position(2, 2, 2)
    said = resized(then, position(8, 1, 1), [], allow=False)
    assert "2 x 2 x 2 became 8 x 1 x 1" in said and "the same run up to rounding" in said
    with pytest.raises(ValueError, match=r"other sequences than before.*allow_resize=true"):
        resized(then, position(2, 2, 1), [], allow=False)
    with pytest.raises(ValueError, match="with on_policy a step depends on how it is divided"):
        resized(then, position(8, 1, 1), ["on_policy"], allow=False)
    assert "NOT the same run" in resized(then, position(8, 1, 1), ["on_policy"], allow=True)
    with pytest.raises(ValueError, match="cut into as many parts"):
        resized(position(2, 2, 2, "zero2"), position(4, 2, 1, "zero2"), [], allow=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_policy": OnPolicyText(share=0.5)}, "on_policy.share=0.5 under fsdp2, expected 0"),
        (
            {"zero": 3, "on_policy": OnPolicyText(share=0.5)},
            "on_policy.share=0.5 under zero3, expected 0",
        ),
        ({"zero": 1, "optimizer": "muon"}, "optimizer=muon under zero1"),
        ({"zero": 3, "compile": True}, "compile=true under zero3"),
    ],
)
def test_what_a_mode_cannot_do(
    changes: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = changes.pop("zero", None)
    plugin = SimpleNamespace(zero_stage=zero)
    accelerator = SimpleNamespace(
        distributed_type="DEEPSPEED" if zero else "MULTI_CPU",
        state=SimpleNamespace(deepspeed_plugin=plugin),
    )
    if not zero:
        monkeypatch.setenv(FSDP2_ASKED, "1")
    asked = {"optimizer": "adamw", "compile": False} | changes
    with pytest.raises(ValueError, match=message):
        check_mode(mode(accelerator), SimpleNamespace(**asked))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "variables", "changes", "message"),
    [
        (
            {"gradient_accumulation_steps": 4},
            {},
            {},
            "gradient_accumulation_steps=4.*accumulation=1",
        ),
        (
            {"gradient_clipping": 0.3},
            {},
            {},
            "gradient_clipping=0.3, the recipe says clip_norm=1.0",
        ),
        ({"fp16": {"enabled": True}}, {}, {}, "fp16.enabled=True, the recipe says dtype=float32"),
        (
            {"bf16": {"enabled": False}},
            {},
            {"dtype": "bfloat16"},
            "bf16.enabled=F.*=bfloat16",
        ),
        (None, {"ACCELERATE_GRADIENT_CLIPPING": "2.0"}, {}, "gradient_clipping=2.0.*clip_norm=1.0"),
        (None, {"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, "mixed_precision=fp16.*dtype=float32"),
        ({"gradient_accumulation_steps": "auto", "gradient_clipping": 1}, {}, {}, ""),
    ],
)
def test_deepspeed_must_not_contradict_the_recipe(
    given: dict | None,
    variables: dict[str, str],
    changes: dict,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if given is not None:
        path = tmp_path / "deepspeed.json"
        path.write_text(json.dumps(given | {"zero_optimization": {"stage": 2}}))
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    config = settings(tmp_path, **changes)
    if not message:
        launch.check_deepspeed(config)
        return
    with pytest.raises(ValueError, match=message):
        launch.check_deepspeed(config)


def test_layers_and_states_of_a_plain_model() -> None:
    model = llama()
    assert decoder_layers(model) == list(model.model.layers)
    state = whole_state(model)
    assert all(
        value is not None and torch.equal(value, state[k])
        for k, value in model.state_dict().items()
    )
