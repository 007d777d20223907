"""train/tune.py as a user meets it, in one process on a tiny target."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_llama import build_llama
from transformers import PreTrainedTokenizerFast

from draftsmith.command import parse, spelled
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.arms import Evaluation
from draftsmith.decode.sampling import SamplingParams
from draftsmith.train import tune
from draftsmith.train.plan.memory import sizes_of
from draftsmith.train.plan.models import staged
from draftsmith.train.plan.table import plan

Argv = list[str]
PROMPTS = ["row 3 0 3 6", "row 20 0 20"]
# Methods that stop and go on by the same code as exits.
LIKE_EXITS = [pytest.param(name, marks=pytest.mark.slow) for name in ("consistency", "units")]


@pytest.fixture
def tuning(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Argv:
    """A target of four layers, and sixty short texts for it."""
    build_llama(len(tiny_tokenizer), layers=4, hidden=32, seed=0).save_pretrained(tmp_path / "of")
    tiny_tokenizer.save_pretrained(tmp_path / "of")
    rows = (" ".join(str(row * i) for i in range(30)) for row in range(60))
    lines = [{"text": f"row {row} {numbers}"} for row, numbers in enumerate(rows)]
    corpus = tmp_path / "text.jsonl"
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = [f"target={tmp_path / 'of'}", f"data={corpus}", f"out={tmp_path / 'run'}"]
    text = ["text.max_length=48", "heldout={limit: 4, prompt_tokens: 8, max_new_tokens: 16}"]
    return [*paths, *text, "steps=3", "batch_size=4", "dtype=float32", "save_dtype=float32"]


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluations(folder: Path) -> list[dict[str, float]]:
    return [record for record in records(folder) if "eval_tau" in record]


def decodes_as_plainly(folder: Path, drafter: str, K: int = 3) -> None:
    """The tuned target with this drafter says what it says without."""
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature, max_new_tokens=12)
        fp32: dict[str, Any] = {"dtype": "float32"}
        plain = Decoder.from_pretrained(str(folder), **fp32).generate(PROMPTS, params)
        drafting = Decoder.from_pretrained(str(folder), drafter, **fp32, K=K)
        assert [a.tokens for a in drafting.generate(PROMPTS, params)] == [a.tokens for a in plain]


def test_exits_learn_what_the_last_layer_says(
    tuning: Argv, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a run of the last layer's loss alone, whose loss on held-out text is the measure of
    what the exits cost: a tenth of a nat at most.
    """
    how = ["method=exits", "steps=60", "lr=0.01", "eval_every=30", "temperature=0", "K=3"]
    tune.main([*tuning, *how, "exits.every=2", "data=" + str(tmp_path / "text.jsonl")])
    said = capsys.readouterr().out
    first, *_, last = evaluations(tmp_path / "run")
    tune.main([*tuning, *how, "exits={scale: 0, dropout: 0}", f"out={tmp_path / 'plain'}"])
    plain = evaluations(tmp_path / "plain")[-1]
    assert last["eval_agreement"] > max(first["eval_agreement"], plain["eval_agreement"]) + 0.2
    assert last["eval_tau"] > max(first["eval_tau"], plain["eval_tau"]) + 0.2
    text = [records(tmp_path / name)[-1]["last"] for name in ("run", "plain")]
    assert text[0] < text[1] + 0.1
    best = max(evaluations(tmp_path / "run"), key=lambda record: record["eval_tau"])
    assert f"held-out tau: {first['eval_tau']:.3f} before, {best['eval_tau']:.3f} after" in said
    assert f"held-out loss: {first['eval_loss']:.3f} before, {best['eval_loss']:.3f} after" in said
    [line] = [line for line in said.splitlines() if "draftsmith evaluate" in line]
    decoding = parse(Evaluation, spelled(line.split()[4:]))
    assert decoding.target == str(tmp_path / "run/target") and decoding.drafter == "exit:2"
    decodes_as_plainly(tmp_path / "run/target", "exit:2")


def test_adapters_and_checkpointed_layers(tuning: Argv, tmp_path: Path) -> None:
    """Adapters are merged into a plain folder; layers that run again change nothing."""
    pytest.importorskip("peft")
    for name, options in (("run", []), ("again", ["gradient_checkpointing=true"])):
        out = [f"out={tmp_path / name}", "lora.rank=4", "best_metric=loss", "best_mode=max"]
        tune.main([*tuning, "method=exits", "lr=0.1", *out, *options])
    for a, b in zip(records(tmp_path / "run"), records(tmp_path / "again"), strict=True):
        for name in a.keys() - {"seconds"}:
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("of", "run/target"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("proj.weight")}
    decodes_as_plainly(tmp_path / "run/target", "exit:2")


def test_a_model_that_writes_what_it_guessed(tuning: Argv, tmp_path: Path) -> None:
    """The folder decodes as it says; the loss is measured on text alone."""
    sizes = "consistency={window: 8, passes: 2, ar: 1}"
    tune.main([*tuning, "method=consistency", sizes, "temperature=0", "K=4", "lr=0.01"])
    log = records(tmp_path / "run")
    assert all(r["loss"] == pytest.approx(r["consistency"] + r["ar"], rel=1e-5) for r in log[1:])
    assert log[-1]["ar"] < log[1]["ar"] and log[0].keys() >= {"eval_loss", "eval_tau"}
    decodes_as_plainly(tmp_path / "run/target", "jacobi:4", K=4)


def test_a_model_that_says_what_pads_stand_for(tuning: Argv, tmp_path: Path) -> None:
    units = "units={sure: 0.01, pads: 4}"
    tune.main([*tuning, "method=units", units, "temperature=0", "K=4", "lr=0.01", "steps=6"])
    log = records(tmp_path / "run")
    assert all(r["loss"] == pytest.approx(r["units"] + r["ar"], rel=1e-5) for r in log[1:])
    assert log[-1]["units"] / log[-1]["pads"] < log[1]["units"] / log[1]["pads"]
    decodes_as_plainly(tmp_path / "run/target", "pads:4", K=4)


def test_prompts_are_all_that_is_trained_of_a_target(tuning: Argv, tmp_path: Path) -> None:
    """They begin as one, and learn what comes after the next token; what the target says stays."""
    prompts = ["method=prompts", "prompts.count=2", "weight_decay=0", "K=8", "text.packing=false"]
    tune.main([*tuning, *prompts, "lr=0.05", "steps=40", "best_metric=behind", "best_mode=min"])
    first, last = evaluations(tmp_path / "run")
    assert last["eval_behind"] < 0.96 * first["eval_behind"]
    assert last["eval_loss"] == first["eval_loss"]
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("of", "run/target"))
    table = "model.embed_tokens.weight"
    known, prompt_KH = before[table], after.pop(table)
    assert len(prompt_KH) == len(known) + 2 and torch.equal(prompt_KH[:-2], known)
    assert not torch.equal(prompt_KH[-1], prompt_KH[-2])
    assert all(
        torch.equal(rows, after[name][: len(rows)])
        for name, rows in before.items()
        if name != table
    )
    decodes_as_plainly(tmp_path / "run/target", "ppd:2", K=8)


@pytest.mark.parametrize("method", ["exits", *LIKE_EXITS])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    tuning: Argv, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [*tuning, f"method={method}", "steps=6", "save_every=2", "eval_every=3", "lr=0.01"]
    tune.main([*argv, f"out={tmp_path / 'straight'}"])
    measured = tune.figures

    def dies(*given: Any) -> Any:
        evaluate, calls = measured(*given), iter(range(2))

        def fails_at_the_second() -> dict[str, float]:
            if next(calls):
                raise KeyboardInterrupt
            return evaluate()

        return fails_at_the_second

    monkeypatch.setattr(tune, "figures", dies)
    with pytest.raises(KeyboardInterrupt):
        tune.main(argv)
    monkeypatch.setattr(tune, "figures", measured)
    tune.main(argv)
    for name in ("target/model.safetensors", "best/weights.safetensors"):
        straight, broken = (tmp_path / run / name for run in ("straight", "run"))
        assert straight.read_bytes() == broken.read_bytes(), name


@pytest.mark.usefixtures("unrehearsed")
@pytest.mark.parametrize("method", ["exits", "consistency"])
def test_a_run_is_planned(tuning: Argv, tmp_path: Path, method: str) -> None:
    """All weights in fp32 with their optimizer's states, and a copy to decode with."""
    argv = ["entry=tune", f"method={method}", "gpu=cpu", *tuning, "consistency.passes=1"]
    argv += ["text.packing=false"]
    outline = plan(argv)
    numbers = sum(t.numel() for t in load_file(tmp_path / "of/model.safetensors").values())
    sizes = outline.sizes
    assert sizes.learned == numbers and sizes.weights == sizes.target == 4 * numbers
    assert sizes.optimizer == 8 * numbers
    adapted = sizes_of(staged([*argv[:2], *argv[3:], "lora.rank=4"], "cpu"))
    assert 0 < adapted.learned < 0.2 * numbers and adapted.optimizer == 8 * adapted.learned
    assert len(outline.choices) == 2, "with gradient checkpointing, and without"


@pytest.mark.usefixtures("rehearsed_as_asked")
def test_more_exits_need_more(tuning: Argv) -> None:
    argv = ["entry=tune", "method=exits", "gpu=cpu", *tuning, "batch_size=16"]
    few, all_of_them = (
        plan([*argv, f"exits={{curriculum: {how}, layers: {layers}}}"]).choices[0].held.step
        for how, layers in (("none", [1]), ("gradual", []))
    )
    assert few < all_of_them, "of a gradual run, its last step counts"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["method=exists"], "method: got 'exists', expected one of exits, consistency"),
        (["method=exits", "exits.layers=[4]"], r"exits: got \[4\], expected exits after 1 to 3"),
        (["method=exits", "compile=true"], "got compile=true, expected false"),
        (["method=exits", "target.quantise=int8"], "target.quantise: got int8, expected nothing"),
        (["method=exits", "K=0"], "K: got 0, expected 1 to 64"),
        (["method=prompts"], "method=prompts: got weight_decay=0.1, .*expected 0 of both"),
        (["method=prompts", "weight_decay=0", "optimizer=muon"], "optimizer=muon, expected 0"),
        (["method=prompts", "prompts.decay=2"], "prompts: got count=3, decay=2.0, expected"),
        (["method=units", "units.sure=1"], "units: got sure=1.0, .*expected a share"),
        (["method=consistency", "consistency.window=1"], "consistency: got window=1, .*expected 2"),
    ],
)
def test_options_that_do_not_go(tuning: Argv, options: Argv, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune.main([*tuning, *options])
