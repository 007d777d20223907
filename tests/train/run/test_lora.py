"""LoRA on a draft or a target: what trains, what is kept, and what the run leaves behind."""

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from tiny_llama import build_llama
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from draftsmith.models.fingerprint import differences, fingerprint
from draftsmith.models.target import check_split
from draftsmith.train import distill, pretrain
from draftsmith.train.objectives.distillation import NextToken
from draftsmith.train.run.lora import Lora, with_lora
from draftsmith.train.run.optim import optimizers
from draftsmith.train.run.settings import Settings
from draftsmith.train.text.batches import Batch
from draftsmith.train.text.on_policy import Snapshot

peft = pytest.importorskip("peft")
Argv = list[str]
QUESTIONS = 320  # 300 of them are held out


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """The folders target/ and draft/, a task, and run/: the draft distilled by adapters."""
    folder = tmp_path_factory.mktemp("pair")
    target = copy.deepcopy(tiny_target)
    target.generation_config.update(temperature=0.7, do_sample=True)
    target.save_pretrained(folder / "target")
    build_llama(len(tiny_tokenizer), layers=1, hidden=32, seed=1).save_pretrained(folder / "draft")
    for name in ("target", "draft"):
        tiny_tokenizer.save_pretrained(folder / name)
    rows = [{"question": f"{i} and {i}?", "answer": f"#### {2 * i}"} for i in range(QUESTIONS)]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    AcceleratorState._reset_state(reset_partial_state=True)
    distill.main(distilling(folder))
    return folder


def distilling(pair: Path, *others: str) -> Argv:
    """Arguments of a short run; others: those to put in place of, or beside, the usual ones."""
    short = [
        "steps=4",
        "eval_every=2",
        "save_every=2",
        "batch_size=4",
        "text.max_length=40",
        "lr=0.02",
    ]
    heldout = ["heldout.limit=2", "heldout.max_new_tokens=6", "heldout.prompt_tokens=8"]
    kind = ["dtype=float32", "save_dtype=float32", "lora.rank=4", "lora.dropout=0.1"]
    kind += ["lora.targets=[q_proj,down_proj]"]
    paths = [f"target.path={pair}/target", f"draft={pair}/draft", f"data={pair}/task.jsonl"]
    return replaced([*short, *heldout, *kind, *paths, f"out={pair}/run"], others)


def tuning(pair: Path, *others: str) -> Argv:
    short = ["steps=3", "eval_every=3", "batch_size=8", "text.max_length=40", "heldout_sequences=8"]
    kind = ["dtype=float32", "lr=0.02", "save_dtype=float32"]
    paths = [f"model={pair}/target", f"data={pair}/task.jsonl"]
    return replaced([*short, *kind, *paths], others)


def replaced(arguments: Argv, others: tuple[str, ...]) -> Argv:
    names = {other.split("=")[0] for other in others}
    return [*(arg for arg in arguments if arg.split("=")[0] not in names), *others]


def small() -> PreTrainedModel:
    return build_llama(64, layers=2, hidden=16, seed=3)


def adapted() -> PreTrainedModel:
    """`small` with adapters that do something."""
    model = with_lora(small(), Lora(rank=4), given=True, seed=0)
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.5)
    return model


def a_batch() -> Batch:
    ids_BT = torch.arange(36).view(3, 12) % 64
    return Batch(ids_BT, torch.arange(12).expand(3, -1), ids_BT % 3 > 0, None, (0, 1, 2))


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).eval()(torch.arange(4, 40)[None]).logits


def test_new_adapters_change_nothing_and_only_they_train() -> None:
    plain = small()
    ids_BT, before = a_batch().input_ids, copy.deepcopy(plain.state_dict())
    wanted = plain(ids_BT).logits
    state = torch.get_rng_state()
    model = with_lora(plain, Lora(rank=4), given=True, seed=7)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(model(ids_BT).logits, wanted)
    check_split(model)
    objective = NextToken(model)
    [adamw] = optimizers(objective, Settings(out="", steps=1))
    held = [p for group in adamw.param_groups for p in group["params"]]
    assert len(held) == 2 * 7 * 2 == len(model.state_dict())  # A and B, 7 maps, 2 layers
    objective(a_batch()).loss.backward()
    for group in adamw.param_groups:
        group["lr"] = 0.1
    adamw.step()
    assert (model(ids_BT).logits - wanted).abs().max() > 1e-2
    for name, weight in before.items():
        inner = name.replace("_proj.", "_proj.base_layer.")
        assert torch.equal(plain.get_parameter(inner), weight), name


def test_muon_takes_adapters() -> None:
    objective = NextToken(adapted())
    [muon] = optimizers(objective, Settings(out="", steps=9, optimizer="muon", lr=0.05))
    losses = []
    for _ in range(9):
        losses.append(objective(a_batch()).loss)
        losses[-1].backward()
        muon.step()
        muon.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


def test_the_state_of_a_model_is_its_adapters_and_comes_back() -> None:
    model, ids_BT = adapted(), a_batch().input_ids
    snapshot = Snapshot(model, torch.float32)
    state = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    assert all(".lora_" in name for name in state)
    other = NextToken(with_lora(small(), Lora(rank=4), given=True, seed=1))
    other.load_state_dict(state)
    assert torch.equal(other.model(ids_BT).logits, model(ids_BT).logits)
    with pytest.raises(RuntimeError, match=r"lora_A"):
        other.load_state_dict(dict(list(state.items())[1:]))
    for parameter in model.parameters():
        parameter.data += parameter.requires_grad
    assert torch.equal(snapshot.take()(ids_BT).logits, model(ids_BT).logits)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for asked in (False, True):
        objective = NextToken(adapted()).train()
        if asked:
            objective.model.gradient_checkpointing_enable({"use_reentrant": False})
        objective(a_batch()).loss.backward()
        gradients.append([p.grad for p in objective.parameters() if p.requires_grad])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    assert all(gradient.any() for gradient in gradients[0])


def test_a_run_leaves_a_merged_draft_and_its_adapters(pair: Path) -> None:
    done = json.loads((pair / "run/done.json").read_text())
    assert done["best_step"] > 0, "else nothing has been learnt"
    before, after = (load_file(pair / f / "model.safetensors") for f in ("draft", "run/drafter"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed == {n for n in before if "q_proj" in n or "down_proj" in n}
    best = load_file(pair / "run/best/weights.safetensors")
    kept = load_file(pair / "run/checkpoints/step-000004/model.safetensors")
    assert best.keys() == kept.keys()
    assert len([name for name in best if ".lora_" in name]) == 4
    assert {name for name in best if ".lora_" not in name} == {"mean_alpha", "steps_done"}
    draft = AutoModelForCausalLM.from_pretrained(pair / "draft")
    live = peft.PeftModel.from_pretrained(draft, pair / "run/adapter")
    wanted = live(torch.arange(4, 40)[None]).logits
    torch.testing.assert_close(logits(pair / "run/drafter"), wanted, rtol=1e-4, atol=1e-4)
    assert (wanted - logits(pair / "draft")).abs().max() > 1e-2


def test_resuming_is_bitwise(pair: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(pair / "run", again)
    for name in ("drafter", "adapter", "checkpoints/step-000004"):
        shutil.rmtree(again / name)
    (again / "done.json").unlink()
    distill.main(distilling(pair, f"out={again}"))
    for name in ("drafter/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (again / name).read_bytes() == (pair / "run" / name).read_bytes(), name


def check_tuned(tuned: Path, target: Path) -> list[str]:
    """All that makes it a target is kept; returns the parts of its fingerprint that differ."""
    for name in ("generation_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (tuned / name).read_text() == (target / name).read_text(), name
    assert (logits(tuned) - logits(target)).abs().max() > 1e-2
    tokenizer = AutoTokenizer.from_pretrained(target)
    models = map(AutoModelForCausalLM.from_pretrained, (tuned, target))
    found = differences(*(fingerprint(model, tokenizer) for model in models))
    return [part.split(":")[0] for part in found]


def test_a_target_is_tuned_on_answers(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all its weights: it is another target then, and refuses drafts for the old one."""
    seen: list[Batch] = []
    forward = NextToken.forward
    monkeypatch.setattr(NextToken, "forward", lambda self, b: seen.append(b) or forward(self, b))
    pretrain.main(tuning(pair, f"out={tmp_path}"))
    assert check_tuned(tmp_path / "model", pair / "target") == ["head", "final_norm"]
    assert not (tmp_path / "adapter").exists()
    following = seen[-1].input_ids.roll(-1, 1)[seen[-1].loss_mask]
    text = AutoTokenizer.from_pretrained(pair / "target").decode(following)
    assert "####" in text and "<|end|>" in text and "and" not in text


def test_a_target_tuned_by_adapters_is_distilled(pair: Path, tmp_path: Path) -> None:
    """They leave the head and the norm alone, by which a target is known: a draft for the untuned
    one is taken, with a warning.
    """
    pretrain.main(tuning(pair, "lora.rank=4", f"out={tmp_path}"))
    assert check_tuned(tmp_path / "model", pair / "target") == []
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
    tuned = [f"target.path={tmp_path}/model", f"draft={pair}/run/drafter", f"out={tmp_path}/run"]
    with pytest.warns(UserWarning, match="with other weights in its layers"):
        distill.main(distilling(pair, *tuned, "lora.rank=0", "steps=1"))
    assert (tmp_path / "run/drafter/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["query_key"]}, "query_key names no .*expected some of down_proj, gate"),
        ({"targets": ["q_proj", "lm_head"]}, "of which lm_head names no"),
        ({"targets": ["embed_tokens"]}, "of which embed_tokens names no"),
        ({"rank": -1}, "lora.rank=-1"),
        ({"dropout": 1.0}, r"lora.dropout=1\.0"),
    ],
)
def test_what_cannot_be_adapted(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_lora(small(), Lora(**{"rank": 2} | options), given=True, seed=0)


def test_a_fresh_draft_has_nothing_to_adapt(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to adapt"):
        distill.main(distilling(pair, "draft=", "lora.targets=[]", f"out={tmp_path}"))


def test_a_fresh_model_or_no_peft(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"out={tmp_path}"
    with pytest.raises(ValueError, match="nothing to adapt"):
        pretrain.main(tuning(pair, "model=", f"tokenizer={pair}/draft", "lora.rank=4", out))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"needs peft: pip install 'draftsmith\[lora\]'"):
        pretrain.main(tuning(pair, "lora.rank=4", out))
