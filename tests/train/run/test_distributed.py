"""Two processes on one CPU: DDP, and DeepSpeed ZeRO-2 after a kill, give what one process gives.

The modes that cut the draft itself are in test_sharding.py.
"""

import json
from pathlib import Path

import distributed_job
import forked
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.models.draft_lm import load_draft

ROOT = Path(__file__).resolve().parents[3]
LAUNCHERS = ROOT / "recipes" / "accelerate"
# SGD: the scale of a gradient shows, which Adam would hide.
CLIP_NORM = 2.7
PLAIN = {"optimizer": "sgd", "momentum": 0.0, "schedule": "constant", "clip_norm": CLIP_NORM}


def job(folder: Path, **changes: object) -> list[str]:
    return [str(ROOT / "tests/tools/distributed_job.py"), str(folder), json.dumps(changes)]


def launch(flags: list[str], folder: Path, **changes: object) -> forked.Forked:
    return forked.launched(*flags, *job(folder, **changes))


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 sequences a step in one batch."""
    folder = tmp_path_factory.mktemp("one")
    AcceleratorState._reset_state(reset_partial_state=True)
    distributed_job.main([str(folder), json.dumps({"batch_size": 8, **PLAIN})])
    assert (folder / "kind.txt").read_text() == "NO"
    return folder


def assert_same_run(one: Path, other: Path, clip_norm: float = CLIP_NORM) -> None:
    """Loss, gradient norm (clipped in some steps, not in others) and weights."""
    norms = [record["grad_norm"] for record in records(one)[1:]]
    assert min(norms) < clip_norm < max(norms)
    for a, b in zip(records(one)[1:], records(other)[1:], strict=True):
        assert (a["step"], a["tokens"]) == (b["step"], b["tokens"])
        for name in a.keys() - {"step", "tokens", "seconds", "eval_loss"}:
            assert a[name] == pytest.approx(b[name], rel=1e-5), (name, a, b)
    weights = torch.load(other / "weights.pt")
    for name, weight in torch.load(one / "weights.pt").items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-6)


def test_ddp_and_on_with_one_process(
    tmp_path: Path, one_process: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 processes of 2 micro-batches of 2 sequences, with unequal masks; after step 4, 1 of 8."""
    shape = {"batch_size": 2, "accumulation": 2, "processes": 2, "save_every": 4}
    for one in forked.ranks(job(tmp_path, cut_at=4, **shape, **PLAIN)):
        assert one.returncode == 9, one.told
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-000004"]
    AcceleratorState._reset_state(reset_partial_state=True)
    distributed_job.main([str(tmp_path), json.dumps({"batch_size": 8, **PLAIN})])
    assert "2 x 2 x 2 became 8 x 1 x 1" in capsys.readouterr().out
    assert_same_run(one_process, tmp_path)


@pytest.mark.slow
def test_ddp_of_a_head(tmp_path: Path) -> None:
    """Hydra++ by `lk`, which weighs by the alphas of all processes in the step before."""
    plain = PLAIN | {"head": "hydra++", "lr": 0.1, "clip_norm": 0.195}
    AcceleratorState._reset_state(reset_partial_state=True)
    distributed_job.main([str(tmp_path / "one"), json.dumps({"batch_size": 8, **plain})])
    flags = ["--config_file", str(LAUNCHERS / "cpu_ddp2.yaml")]
    run = launch(flags, tmp_path / "two", batch_size=2, accumulation=2, processes=2, **plain)
    assert run.returncode == 0, run.err
    kinds = [(tmp_path / name / "kind.txt").read_text() for name in ("one", "two")]
    assert kinds == ["NO", "MULTI_CPU"]
    assert {"alpha_0", "alpha_2", "count_2"} <= records(tmp_path / "one")[1].keys()
    assert_same_run(tmp_path / "one", tmp_path / "two", clip_norm=0.195)


@pytest.mark.slow
def test_zero2_trains_saves_and_resumes(tmp_path: Path, one_process: Path) -> None:
    """Clipped in some steps, and killed; its fast twin is in test_sharding.py."""
    pytest.importorskip("deepspeed", reason="needs pip install 'draftsmith[distributed]'")
    flags = ["--config_file", str(LAUNCHERS / "zero2.yaml")]
    changes = {"batch_size": 2, "accumulation": 2, "save_every": 3, **PLAIN}
    cut = launch(flags, tmp_path, cut_at=4, **changes)
    assert cut.returncode != 0
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-000003"]
    run = launch(flags, tmp_path, **changes)
    assert run.returncode == 0, run.err
    assert "resumed after step 3" in run.out
    assert (tmp_path / "kind.txt").read_text() == "DEEPSPEED"
    assert_same_run(one_process, tmp_path)


@pytest.mark.parametrize(
    "launcher",
    [
        "cpu_ddp2",
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("zero2", "fsdp2", "zero3")),
    ],
)
def test_distillation_in_two_processes(
    tmp_path: Path,
    launcher: str,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The whole entry in bf16, with `lk` and, where it can be, on-policy text; its tied result
    loads.
    """
    if launcher.startswith("zero"):
        pytest.importorskip("deepspeed", reason="needs pip install 'draftsmith[distributed]'")
    tiny_target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    with (tmp_path / "text.jsonl").open("w") as file:
        for row in range(60):
            file.write(json.dumps({"text": f"row {row} " + " ".join(map(str, range(40)))}) + "\n")
    command = ["--config_file", str(LAUNCHERS / f"{launcher}.yaml"), str(ROOT / "train/distill.py")]
    command += [f"target.path={tmp_path}/target", f"data={tmp_path}/text.jsonl", "loss=lk"]
    command += ["draft={hidden: 16, heads: 2, kv_heads: 1, intermediate: 32}", "text.max_length=48"]
    share = 0.5 if launcher in ("cpu_ddp2", "zero2") else 0.0
    command += [f"on_policy={{share: {share}, prompt_tokens: 8, max_new_tokens: 8}}"]
    command += ["heldout={limit: 4, prompt_tokens: 8, max_new_tokens: 8}"]
    command += ["steps=3", "batch_size=2", "accumulation=2", "processes=2", f"out={tmp_path}/run"]
    run = forked.launched(*command)
    assert run.returncode == 0, run.told
    log = records(tmp_path / "run")
    assert [record["step"] for record in log] == list(range(4))
    assert all(0 < record["alpha"] < 1 for record in log[1:])
    assert run.out.count("vllm serve") == 1
    draft = load_draft(tmp_path / "run/drafter")
    assert draft.lm_head.weight is draft.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        # The launcher starts one process here and says nothing.
        (["--cpu", "--num_processes", "2"], {}, "asked for several processes but started one"),
        # Their twins in one process, of the variables that a launcher sets, are in test_loop.py.
        pytest.param(
            *(["--use_deepspeed"], {"ACCELERATE_USE_CPU": "true"}, "becomes plain DDP"),
            marks=pytest.mark.slow,
        ),
        pytest.param(*(["--use_fsdp"], {}, "got FSDP with fsdp_version=1"), marks=pytest.mark.slow),
    ],
)
def test_launches_that_fail_in_silence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    variables: dict[str, str],
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    base = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    if "--cpu" not in flags:
        base += ["--num_processes", "2", "--main_process_port", "0"]
    run = launch([*flags, *base], tmp_path)
    assert run.returncode != 0
    assert message in run.err, run.err
    assert not (tmp_path / "metrics.jsonl").exists()
