"""train/heads.py as a user meets it, in one process on a tiny random target."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.train import heads

Argv = list[str]


@pytest.fixture
def target(
    tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    tiny_target.save_pretrained(tmp_path / "of")
    tiny_tokenizer.save_pretrained(tmp_path / "of")
    return tmp_path / "of"


@pytest.fixture
def training(tmp_path: Path, target: Path) -> Argv:
    lines = [
        {"text": f"row {row} " + " ".join(str(row * i) for i in range(30))} for row in range(60)
    ]
    corpus = tmp_path / "text.jsonl"
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = [f"target.path={target}", f"data={corpus}", f"out={tmp_path / 'run'}"]
    text = ["text.max_length=40", "heldout={limit: 4, prompt_tokens: 8, max_new_tokens: 12}"]
    return [*paths, *text, "steps=3", "batch_size=4", "dtype=float32", "save_dtype=float32"]


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "kind",
    [["medusa", "loss=fkl"], ["hydra", "loss=fkl"], ["hydra", "head.prefix=true", "loss=lk"]],
)
def test_training_helps_and_the_folder_decodes_as_measured(
    training: Argv, tmp_path: Path, target: Path, kind: Argv
) -> None:
    """Held-out acceptance grows; what is saved decodes losslessly, with the tau of the log."""
    options = [f"head.kind={kind[0]}", *kind[1:], "head.heads=3", "K=3", "temperature=0"]
    heads.main([*training, *options, "steps=40", "lr=0.01", "eval_every=20"])
    log = [r for r in records(tmp_path / "run") if "eval_tau" in r]
    assert [r["step"] for r in log] == [0, 20, 40]
    assert log[2]["eval_loss"] < 0.9 * log[0]["eval_loss"]
    assert max(r["eval_alpha_0"] for r in log[1:]) > log[0]["eval_alpha_0"] + 0.02
    best = max(log, key=lambda r: r["eval_tau"])
    made = json.loads((tmp_path / "run/drafter/draftsmith.json").read_text())
    assert made["kind"] == kind[0] and made["defaults"]["K"] == 3
    by_depth = [best[f"eval_alpha_{depth}"] for depth in range(3)]
    assert made["provenance"]["acceptance_by_depth"] == by_depth
    assert made["provenance"]["tau"] == best["eval_tau"]
    along = [best[f"eval_top1_{depth}"] for depth in range(3)]
    chain = 1 + along[0] * (1 + along[1] * (1 + along[2]))
    assert best["eval_tau_estimate"] == pytest.approx(chain)
    params = SamplingParams(temperature=0.0, max_new_tokens=12)
    prompts = ["row 3 0 3 6", "row 20 0 20"]
    fp32: dict[str, Any] = {"dtype": "float32"}
    plain = Decoder.from_pretrained(str(target), **fp32).generate(prompts, params)
    decoder = Decoder.from_pretrained(str(target), str(tmp_path / "run/drafter"), **fp32, K=3)
    assert [a.tokens for a in decoder.generate(prompts, params)] == [a.tokens for a in plain]


def test_cached_states_train_as_computed_ones_do(training: Argv, tmp_path: Path) -> None:
    heads.main([*training, "head.kind=hydra", "head.prefix=true"])
    heads.main(
        [
            *training,
            "head.kind=hydra",
            "head.prefix=true",
            f"cache={tmp_path / 'states'}",
            f"out={tmp_path / 'two'}",
        ]
    )
    for a, b in zip(records(tmp_path / "run"), records(tmp_path / "two"), strict=True):
        assert a.keys() == b.keys()
        # The cache holds bf16, with 8 bits.
        for name in a.keys() & {"loss", "grad_norm", "eval_loss"}:
            assert a[name] == pytest.approx(b[name], rel=2**-8), name


def test_a_joint_run_leaves_a_target_and_its_drafter(
    training: Argv, tmp_path: Path, target: Path
) -> None:
    pytest.importorskip("peft")
    joint = [
        "head.kind=medusa",
        "joint=true",
        "head.heads=2",
        "K=2",
        "lr=3e-3",
        "joint.head_weight=0.5",
    ]
    heads.main([*training, *joint, "steps=6", "eval_every=3", "gradient_checkpointing=true"])
    log = records(tmp_path / "run")
    assert log[1]["base_kl"] == pytest.approx(0.0, abs=1e-4) and log[-1]["base_kl"] > 1e-3
    before, after = (load_file(f / "model.safetensors") for f in (target, tmp_path / "run/target"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    best = json.loads((tmp_path / "run/done.json").read_text())["best_step"]
    layers = {n for n in before if n.endswith("proj.weight")}
    assert changed == (layers if best else set())
    made = json.loads((tmp_path / "run/drafter/draftsmith.json").read_text())
    assert made["target"]["name"] == str(tmp_path / "run/target")
    params, prompts = SamplingParams(max_new_tokens=12), ["row 3 0 3 6", "row 20 0 20"]
    ours = str(tmp_path / "run/target"), str(tmp_path / "run/drafter")
    plain = Decoder.from_pretrained(ours[0], dtype="float32").generate(prompts, params)
    decoder = Decoder.from_pretrained(*ours, dtype="float32", K=2)
    assert [a.tokens for a in decoder.generate(prompts, params)] == [a.tokens for a in plain]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["head.kind=medusas"], "head.kind='medusas'.*expected chimera or "),
        (["head.kind=medusa", "head.prefix=true"], "got head.prefix with head.kind=medusa"),
        (["head.kind=hydra", "joint=true"], "got joint.enabled with head.kind=hydra"),
        (["head.kind=hydra", "head.own_heads=false"], "got head.own_heads with head.kind=hydra"),
        (["head.kind=medusa", "noise=1"], "got noise with head.kind=medusa"),
        (["head.kind=medusa", "joint=true", "cache=states"], "needs no cache"),
        (["head.kind=medusa", "gradient_checkpointing=true"], "only it has layers to checkpoint"),
        (["head.kind=medusa", "loss=soft"], "got 'soft', expected one of fkl"),
        (["head.kind=hydra", "head.dropout=1.5"], "dropout=1.5"),
        (["head.kind=hydra", "head.heads=0"], "hydra: got .*heads=0"),
        (
            ["head.kind=hydra", "head.prefix=true", "text.max_length=600"],
            "max_length: got 600.*the 512 positions",
        ),
        (["head.kind=medusa", "head.heads=0"], "medusa: got .*heads=0"),
        (["head.kind=medusa", "head.heads=2"], "K"),
    ],
)
def test_options_that_do_not_go_together(training: Argv, options: Argv, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        heads.main([*training, *options])
