"""The training entries as a user meets them: recipes that run, and what bad input is told.

In one process on a tiny random target, but for the quickstart's chain, which is launched for real.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import forked
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.command import parse, spelled
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.arms import Evaluation
from draftsmith.decode.prompts import splits
from draftsmith.decode.prompts.rows import Row
from draftsmith.decode.prompts.sources import read_source
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.train import distill, pretrain
from draftsmith.train.run import recipe
from draftsmith.train.text.stream import Corpus, first_texts
from draftsmith.train.text.tokenise import load_examples

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "prepare": ["limit=2", "max_new_tokens=4"],
    "pretrain": ["dtype=float32"],
    "distill": ["dtype=float32"],
    "heads": ["dtype=float32"],
    "eagle": ["dtype=float32"],
    "blocks": ["dtype=float32"],
    "tune": ["dtype=float32"],
    "scorers": ["dtype=float32"],
    "online": ["dtype=float32"],
}
Argv = list[str]


@pytest.fixture
def target(
    tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    tiny_target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def distilling(tmp_path: Path, target: Path, corpus: Path) -> Argv:
    sizes = ["draft={hidden: 16, heads: 2, kv_heads: 1, intermediate: 32}", "dtype=float32"]
    text = ["text.max_length=40", "heldout={limit: 2, prompt_tokens: 8, max_new_tokens: 8}"]
    paths = [f"target.path={target}", f"data={corpus}", f"out={tmp_path / 'run'}"]
    return [*sizes, *text, *paths, "batch_size=2", "steps=3"]


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_says_what_it_trains_on_and_how_to_evaluate_it(
    distilling: Argv, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = (
        r"got 2 held-out prompts, by which tau now is from \d\.\d\d to \d\.\d\d .* wider as .* 30; "
    )
    with pytest.warns(UserWarning, match=few):
        distill.main([*distilling, "temperature=0.5", "text.packing=false"])
    told = capsys.readouterr().out
    [rows, tokens, many] = re.findall(r"([\d,]+) (?:rows|trained tokens|sequences)", told)[:3]
    data = load_examples(str(corpus), load_tokenizer(tmp_path / "target"), "train")
    pieces = [data.example(i)[1][k : k + 40] for i in range(len(data)) for k in range(0, 4000, 40)]
    trained = [int(piece[1:].sum()) for piece in pieces]
    counts = len(data), sum(trained), sum(map(bool, trained))
    assert (rows, tokens, many) == tuple(f"{n:,}" for n in counts)
    assert f"3 steps of 2 are {6 / counts[2]:.2f} epochs" in told
    [line] = [line for line in told.splitlines() if "draftsmith evaluate" in line]
    assert line.endswith(f"drafter={tmp_path}/run/drafter prompts={corpus} temperature=0.5")
    assert 0 < told.index("trained tokens") < told.index(line) < told.index("vllm serve")
    decoding = parse(Evaluation, spelled(line.split()[4:]))
    assert decoding.target == str(tmp_path / "target")


def long_or_not(name: str) -> object:
    """Recipes that differ from another in their sizes, their target or a choice of tokens alone are
    for the slow suite, the quickstart's too, which its own test runs.
    """
    group, _, rest = name.partition("/")
    like_another = rest.startswith(("llama-3.1-8b", "phi-2", "pythia")) or group == "quickstart"
    like_another |= rest in ("qwen3-8b", "quickstart") and f"{group}/gsm8k" in recipe.names()
    chosen = rest.startswith("gsm8k-") and rest not in ("gsm8k-adaspec", "gsm8k-plus")
    return pytest.param(name, marks=pytest.mark.slow) if like_another or chosen else name


@cache
def rows_of(data: str) -> list[list[Row]]:
    """Read once for all recipes."""
    return read_source(data)


@pytest.mark.parametrize("name", map(long_or_not, recipe.names()))
def test_every_recipe_runs_two_steps_on_a_tiny_target(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "read_source", lambda data: [[*rows] for rows in rows_of(data)])
    # A tokenizer of 300 tokens is found in little text.
    monkeypatch.setattr(pretrain, "BPE_LETTERS", 100_000)
    # Recipes name data beside the checkout, as seen from the root.
    monkeypatch.chdir(ROOT)
    entry, out = recipe.entry_of(name), tmp_path / "run"
    module = importlib.import_module(f"draftsmith.train.{entry}")
    arguments = [f"recipe={name}", "target.shrink=true", f"out={out}", *SHORT[str(entry)]]
    if entry == "prepare":
        prompts = tmp_path / "prompts.jsonl"
        rows = [{"prompt": f"What is {row} and {row}?"} for row in range(60)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = recipe.load(module.Prepare, arguments).prompts
        arguments += [] if (ROOT / given).exists() else [f"prompts={prompts}"]
    module.main(arguments)
    if entry != "prepare":
        assert [record["step"] for record in records(out)] == [0, 1, 2]
        done = json.loads((out / "done.json").read_text())
        assert Path(done["result"], "model.safetensors").is_file()


@pytest.mark.slow
def test_quickstart_recipes_launched_in_a_row(tmp_path: Path, corpus: Path) -> None:
    """Target, draft, distilled draft, decoding: each step takes what the one before has left."""
    small = [
        f"data={corpus}",
        "batch_size=2",
        "text.max_length=64",
        "steps=4",
        "eval_every=2",
        "warmup=1",
    ]
    sizes = ["model={hidden: 32, heads: 2, kv_heads: 1, intermediate: 64, layers: 2}"]
    target, draft = f"target.path={tmp_path}/target/model", f"{tmp_path}/draft/drafter"
    steps: list[tuple[str, str, Argv]] = [
        ("pretrain", "target", [*sizes, "tokenizer_size=300", "heldout_sequences=4"]),
        ("pretrain", "draft", [*sizes, "model.layers=1", target, "heldout_sequences=4"]),
        (
            "distill",
            "distill",
            [target, f"draft={draft}", "heldout.limit=2", "heldout.max_new_tokens=8"],
        ),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for entry, name, arguments in steps:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        command += [str(ROOT / "recipes/accelerate/cpu.yaml"), str(ROOT / f"train/{entry}.py")]
        command += [f"recipe=quickstart/{name}", f"out={tmp_path / name}", *small, *arguments]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
        assert run.returncode == 0, run.stdout + run.stderr
    assert "vllm serve" in run.stdout
    log = records(tmp_path / "distill")
    assert [record["step"] for record in log] == [0, 1, 2, 3, 4]
    assert {"eval_alpha", "eval_tau", "eval_agreement", "eval_loss"} <= log[0].keys()
    meta = json.loads((tmp_path / "distill/drafter/draftsmith.json").read_text())
    assert meta["kind"] == "lm"
    assert meta["provenance"]["recipe"] == "quickstart/distill"
    assert 0 < meta["provenance"]["acceptance"] <= 1
    decoder = Decoder.from_pretrained(
        f"{tmp_path}/target/model", f"{tmp_path}/distill/drafter", dtype="float32"
    )
    plain = Decoder.from_pretrained(f"{tmp_path}/target/model", dtype="float32")
    asked = ["import os", "def f(x):"], SamplingParams(max_new_tokens=12)
    drafted = [made.tokens for made in decoder.generate(*asked)]
    assert drafted == [made.tokens for made in plain.generate(*asked)]


def test_training_raises_held_out_acceptance(distilling: Argv, tmp_path: Path) -> None:
    """The shortest true run: a draft nears its target, and the best weights are the saved ones."""
    distill.main([*distilling, "steps=60", "lr=0.02", "eval_every=30", "draft.hidden=32"])
    log = records(tmp_path / "run")
    alphas = {r["step"]: r["eval_alpha"] for r in log if "eval_alpha" in r}
    assert set(alphas) == {0, 30, 60}
    assert max(alphas.values()) > alphas[0] + 0.02
    done = json.loads((tmp_path / "run/done.json").read_text())
    assert done["best"] == max(alphas.values()) == alphas[done["best_step"]]


def test_gradient_checkpointing_changes_nothing(
    distilling: Argv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    forward = LlamaMLP.forward

    def counted(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        calls.append(self.training)
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    distill.main(distilling)
    once = sum(calls)
    distill.main([*distilling, "gradient_checkpointing=true", f"out={tmp_path / 'second'}"])
    assert sum(calls) - once == 2 * once, "each layer runs again in the backward"
    for a, b in zip(records(tmp_path / "run"), records(tmp_path / "second"), strict=True):
        for name in a.keys() - {"seconds"}:
            assert a[name] == pytest.approx(b[name], rel=1e-6), name


def test_a_run_goes_on_from_a_drafter_folder(distilling: Argv, tmp_path: Path) -> None:
    distill.main([*distilling, "save_dtype=float32"])
    first = tmp_path / "run/drafter"
    distill.main([*distilling, f"draft={first}", f"out={tmp_path / 'second'}", "on_policy=1"])
    last_of_first = json.loads((tmp_path / "run/done.json").read_text())["best"]
    start_of_second = records(tmp_path / "second")[0]["eval_alpha"]
    assert start_of_second == pytest.approx(last_of_first, abs=1e-6)


def test_pretraining_goes_on_from_a_checkpoint(
    tmp_path: Path, corpus: Path, target: Path, tiny_target: PreTrainedModel
) -> None:
    arguments = [f"model={target}", f"data={corpus}", f"out={tmp_path / 'run'}", "steps=1"]
    shape = [
        "text.max_length=32",
        "batch_size=2",
        "dtype=float32",
        "save_dtype=float32",
        "lr=1e-9",
    ]
    pretrain.main([*arguments, *shape, "weight_decay=0"])
    decoder = Decoder.from_pretrained(str(tmp_path / "run/model"), dtype="float32")
    for a, b in zip(decoder.runner.model.parameters(), tiny_target.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert decoder.eos_ids == (0,)


def other_tokenizer(folder: Path) -> None:
    """The same vocabulary size, two tokens swapped."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    a, b = "a", "b"
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    path.write_text(json.dumps(content))


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def rename(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_tokenizer, "differ at 2 of 320 ids .id .*target 'a', draft 'b'"),
        (truncate, "expected a whole safetensors file"),
        (rename, "without model.safetensors"),
    ],
)
def test_spoiled_drafter_folders(
    distilling: Argv, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    distill.main(distilling)
    spoil(tmp_path / "run/drafter")
    with pytest.raises(ValueError, match=message):
        distill.main([*distilling, f"draft={tmp_path / 'run/drafter'}", f"out={tmp_path / 'b'}"])


def test_a_draft_for_another_target(
    distilling: Argv,
    tmp_path: Path,
    target: Path,
    tiny_target: PreTrainedModel,
) -> None:
    distill.main(distilling)
    weight = tiny_target.lm_head.weight
    kept = weight.data.clone()
    weight.data.mul_(1.5)
    tiny_target.save_pretrained(target)
    weight.data.copy_(kept)
    again = [*distilling, f"draft={tmp_path / 'run/drafter'}", f"out={tmp_path / 'b'}"]
    with pytest.raises(ValueError, match=r"was not made for .head"):
        distill.main(again)
    distill.main([*again, "allow_target_mismatch=true"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data=nothing.jsonl", "does not exist"),
        ("data={empty}", "holds no rows"),
        ("data={strange}", r"strange.jsonl:2: got the fields \['question'\]"),
        ("loss=kl", "loss: got 'kl'"),
        ("loss=jsd loss.beta=0.0", "beta: got 0.0"),
        ("temperature=-1", "temperature: got -1.0"),
        ("heldout.prompt_tokens=5000", "windows of 5000 tokens"),
        ("on_policy=2", "on_policy.share: got 2.0"),
        ("optimizer=lion", "optimizer: got 'lion'"),
        ("target.path=nowhere", "neither a folder here nor a model"),
        ("draft=nowhere", "nowhere"),
        ("draft.hidden=15", "hidden=15"),
        ("best_metric=reward", "expected a finite reward"),
    ],
)
def test_bad_input_to_distillation(
    distilling: Argv, tmp_path: Path, change: str, message: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    strange = '{"text": "a"}\n{"question": "b"}\n'
    (tmp_path / "strange.jsonl").write_text(strange)
    paths = {"empty": tmp_path / "empty.jsonl", "strange": tmp_path / "strange.jsonl"}
    with pytest.raises(ValueError, match=message):
        distill.main([*distilling, *change.format(**paths).split()])


def test_bad_input_to_pretraining(tmp_path: Path, corpus: Path, target: Path) -> None:
    arguments = [f"data={corpus}", f"out={tmp_path / 'run'}", "steps=1", "dtype=float32"]
    with pytest.raises(ValueError, match="tokenizer_size: got 100, expected at least 258"):
        pretrain.main([*arguments, "tokenizer_size=100"])
    with pytest.raises(ValueError, match="the text gives only"):
        pretrain.main([*arguments, "tokenizer_size=30000"])
    config = json.loads((target / "tokenizer_config.json").read_text())
    config["eos_token"] = None
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has no EOS token"):
        pretrain.main([*arguments, f"tokenizer={target}"])


def test_a_target_of_a_corpus_has_its_tokenizer_and_a_template(
    tmp_path: Path, corpus: Path
) -> None:
    """Of the beginnings of all sources, without what is held out; roles are tokens."""
    chats = tmp_path / "chats.jsonl"
    rows = [{"prompt": f"zebra {i}", "completion": f"walrus {i}"} for i in range(60)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = Corpus(sources=[str(chats), str(corpus)], shuffle=8)
    texts = list(first_texts(both, {"zebra 1\nwalrus 1"}, 100))
    assert texts[:2] == ["zebra 0\nwalrus 0", "zebra 2\nwalrus 2"]
    assert [text[:5] for text in texts].count("row 0") == 1 and 7 < len(texts) < 10
    model = "model={hidden: 16, heads: 2, kv_heads: 1, intermediate: 32}"
    size = ["tokenizer_size=300", "text.max_length=32", "corpus.shuffle=8", "heldout_sequences=2"]
    sources = [f"data={chats}", f"corpus.sources=[{chats},{corpus}]", "dtype=float32"]
    where = [f"out={tmp_path / 'run'}", "steps=1", "batch_size=2", "tokenizer=train-chat"]
    pretrain.main([model, *size, *sources, *where])
    tokenizer = load_tokenizer(tmp_path / "run/model")
    assert tokenizer.chat_template and tokenizer.tokenize("<|user|> row")[0] == "<|user|>"


def test_a_recipe_says_which_one_makes_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = "draftsmith train pretrain recipe=gsm8k/target"
    target = rf"target\.path: got runs/gsm8k/target/model, .*run first: {first}"
    for name in ("gsm8k/distill", "gsm8k/prepare", "online/gsm8k", "eagle3/gsm8k"):
        module = importlib.import_module(f"draftsmith.train.{recipe.entry_of(name)}")
        with pytest.raises(ValueError, match=target):
            module.main([f"recipe={name}"])
    Path("runs/gsm8k/target/model").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"data: got runs/gsm8k/answers, .* draftsmith prepare re"):
        importlib.import_module("draftsmith.train.eagle").main(["recipe=eagle3/gsm8k"])
    assert not Path("runs/eagle3").exists()


def test_prepared_answers_have_no_held_out_side(distilling: Argv, tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    folder.mkdir()
    (folder / "prepare.json").write_text(json.dumps({"schema": 1, "identity": {"requests": 1}}))
    answer = {"index": 0, "prompt_ids": [5, 6, 7], "token_ids": [8, 9, 0]}
    (folder / "answers-00000-of-00001.jsonl").write_text(json.dumps(answer) + "\n")
    with pytest.raises(ValueError, match=r"say heldout\.prompts="):
        distill.main([*distilling, f"data={folder}"])


def test_errors_are_one_message_without_a_traceback(tmp_path: Path) -> None:
    command = [str(ROOT / "train/distill.py"), "recipe=quickstart/distil"]
    done = forked.run(command, cwd=tmp_path)
    assert done.returncode == 2
    assert done.err.startswith("error: unknown recipe 'quickstart/distil': did you mean quickst")
    assert "Traceback" not in done.err
