"""train/eagle.py: the head that a recipe describes, and short runs of both versions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from head_folders import made
from official_eagle import official_eagle1, official_eagle3
from official_mtp import official
from safetensors.torch import load_file

from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import open_drafter
from draftsmith.models.layers.gated import GatedFusion
from draftsmith.models.servers.export import export
from draftsmith.models.taps import NORM
from draftsmith.train import eagle
from draftsmith.train.drafts.start import EagleSource, counted, open_head
from draftsmith.train.heldout import head_run as expectations
from draftsmith.train.objectives.eagle import EagleObjective, Unroll
from draftsmith.train.teachers.states import OnlineTaps, TapCache
from draftsmith.train.text.batches import Batches, Examples

ROWS = 320


@pytest.fixture
def counts_V() -> torch.Tensor:
    """Token i is counted i times."""
    return torch.arange(ROWS)


def test_counts_are_those_of_trained_tokens() -> None:
    examples = Examples.collect([([1, 2, 2, 5], [False, True, True, True]), ([5, 1], [True] * 2)])
    assert counted(examples, 7).tolist() == [0, 1, 2, 0, 0, 2, 0]


def test_a_fresh_head_is_like_the_targets_layers(tiny_target, tiny_tokenizer, counts_V) -> None:
    head = open_head(EagleSource(), tiny_target, tiny_tokenizer, counts_V, 0)
    layer = head.config.layer
    for name in ("hidden_size", "intermediate_size", "head_dim", "num_key_value_heads"):
        assert getattr(layer, name) == getattr(tiny_target.config, name), name
    assert layer.max_position_embeddings == 512 and head.taps == (1, 2)
    assert head.kind == "eagle3" and head.vocab.is_full and not hasattr(head, "d2t")
    assert torch.equal(head.lm_head.weight, tiny_target.lm_head.weight)
    again = open_head(EagleSource(), tiny_target, tiny_tokenizer, counts_V, 0)
    other = open_head(EagleSource(), tiny_target, tiny_tokenizer, counts_V, 1)
    assert torch.equal(again.fc.weight, head.fc.weight)
    assert not torch.equal(other.fc.weight, head.fc.weight)


def test_its_activation_is_one_that_servers_know(
    tiny_target, tiny_tokenizer, counts_V, monkeypatch
) -> None:
    monkeypatch.setattr(tiny_target.config, "hidden_act", "gelu")
    head = open_head(EagleSource(), tiny_target, tiny_tokenizer, counts_V, 0)
    assert head.to_json()["hidden_act"] == "silu"
    x = torch.linspace(-3, 3, 9)
    assert torch.allclose(head.layers[0].mlp.act_fn(x), torch.nn.functional.silu(x))


def test_sizes_taps_and_vocabulary_of_the_recipe(tiny_target, tiny_tokenizer, counts_V) -> None:
    sizes = {"layer": "qwen3", "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16}
    text = {"taps": [3, 0], "draft_vocab": 310, "intermediate": 24}
    source = EagleSource(**sizes, **text, fc_norm=True, norm_output=True)
    head = open_head(source, tiny_target, tiny_tokenizer, counts_V, 0)
    assert head.taps == (3, 0) and head.config.fc_norm and head.config.norm_output
    assert [len(layer.mlp.up_proj.weight) for layer in head.layers] == [24, 24]
    assert head.layers[0].self_attn.q_proj.weight.shape == (32, 64)
    assert hasattr(head.layers[0].self_attn, "q_norm")
    assert head.vocab.ids_D.tolist() == list(range(10, ROWS))
    assert torch.equal(head.lm_head.weight, tiny_target.lm_head.weight[10:])
    assert head.lm_head.weight.requires_grad and head.fc.weight.requires_grad


def test_a_head_may_begin_at_random(tiny_target, tiny_tokenizer, counts_V) -> None:
    head = open_head(EagleSource(init_head="random"), tiny_target, tiny_tokenizer, counts_V, 0)
    assert not torch.allclose(head.lm_head.weight, tiny_target.lm_head.weight, atol=0.1)


@pytest.mark.parametrize("settings", [{}, {"version": 1}, {"kind": "mixture"}])
def test_layers_may_begin_as_the_targets(
    tiny_target, tiny_tokenizer, counts_V, settings: dict[str, Any]
) -> None:
    """Its last ones, the last to the last, what is alike; else they don't."""
    begun, random = (
        open_head(EagleSource(**settings, init=init), tiny_target, tiny_tokenizer, counts_V, 0)
        for init in ("target", "random")
    )
    theirs = tiny_target.model.layers[-len(begun.layers) :]
    assert len(begun.layers) == 1 + (begun.kind == "mixture")
    for own, other, layer in zip(begun.layers, random.layers, theirs, strict=True):
        assert torch.equal(own.mlp.up_proj.weight, layer.mlp.up_proj.weight)
        assert not torch.equal(other.mlp.up_proj.weight, layer.mlp.up_proj.weight)


WRONG = [
    ({"version": 2}, "expected version 1 or 3"),
    ({"init": "zeros"}, "head.init: got .zeros., expected one of target, random"),
    ({"init_head": "zeros"}, "expected one of target, random"),
    ({"layer": "gpt2"}, "head.layer: got .gpt2., expected one of llama, qwen3"),
    ({"taps": [4]}, r"taps: got \[4\] for a target of 3 layers"),
    ({"version": 1, "taps": [1]}, "eagle 1: got taps"),
    ({"version": 1, "fc_norm": True}, "eagle 1: got .* a norm of EAGLE-3.1"),
    ({"version": 1, "draft_vocab": 9, "parallel": 4}, "got draft_vocab and parallel, expected"),
    ({"version": 1, "init_head": "random"}, "eagle 1: got init_head, expected none of draft_vocab"),
    ({"draft_vocab": ROWS + 1}, "draft_vocab=321, expected 1 to the target's 320"),
    ({"version": 1, "parallel": 4}, "eagle 1: got parallel, expected none of draft_vocab"),
    ({"parallel": -1}, "parallel"),
    ({"fusion": "gated"}, "fusion='gated' of version 3, .* expected concat, or gated of version 1"),
    ({"version": 1, "fusion": "glued"}, "fusion='glued'"),
    ({"version": 1, "kind": "mtp", "fusion": "gated"}, "fusion='gated' .* mtp=True"),
    ({"version": 1, "kind": "mixture", "fusion": "gated"}, "mixture: got fusion"),
    ({"parallel": 4, "norm_output": True}, "peagle: got .* no output is fed back"),
]


@pytest.mark.parametrize(("options", "told"), WRONG)
def test_wrong_heads_are_refused(options, told, tiny_target, tiny_tokenizer, counts_V) -> None:
    with pytest.raises(ValueError, match=told):
        open_head(EagleSource(**options), tiny_target, tiny_tokenizer, counts_V, 0)


@pytest.mark.parametrize("version", [1, 3])
def test_cached_training_has_the_loss_of_online_training(
    version: int, tmp_path: Path, tiny_target, tiny_tokenizer
) -> None:
    """Stored in fp32: to rounding, with the gradient. In bf16: to bf16's, since f is rounded."""
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(4, ROWS, (n,), generator=draw).tolist() for n in (30, 17, 40, 9, 24)]
    examples = Examples.collect((ids, [False] * 3 + [True] * (len(ids) - 3)) for ids in texts)
    batches = Batches(examples, batch_size=2, max_length=32, seed=0, packing=True, pad_id=1)
    head = open_head(
        EagleSource(version=version), tiny_target, tiny_tokenizer, counted(examples, ROWS), 0
    )
    unroll = Unroll(steps=3, noise=0.0)

    def trained(states) -> tuple[torch.Tensor, torch.Tensor]:
        objective = EagleObjective(unroll, head, tiny_target, tiny_tokenizer, states)
        batch = batches.batch(0, 0, 0, accumulation=1, world=1)
        loss = objective(batch).loss
        (gradient,) = torch.autograd.grad(loss, [head.fc.weight])
        return loss.detach(), gradient

    loss, gradient = trained(OnlineTaps(tiny_target, head.taps))
    for stored, error in (("float32", 1e-5), ("bfloat16", 2**-7)):
        folder = tmp_path / stored
        cache = TapCache(folder, tiny_target, tiny_tokenizer, batches, head.taps, stored)
        cache.claim()
        cache.write()
        cached_loss, cached_gradient = trained(cache)
        assert cached_loss.item() == pytest.approx(loss.item(), rel=error)
        assert (cached_gradient - gradient).norm() <= error * gradient.norm()
    assert cached_loss != loss


@pytest.fixture
def arguments(tmp_path: Path, tiny_target, tiny_tokenizer) -> list[str]:
    tiny_target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    text = tmp_path / "text.jsonl"
    lines = (f"row {row} " + " ".join(str(row * i) for i in range(40)) for row in range(60))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    settings = ["dtype=float32", "steps=3", "batch_size=2", "text.max_length=40", "unroll=2"]
    settings += ["heldout={limit: 2, prompt_tokens: 8, max_new_tokens: 8}", "eval_every=1"]
    return [*settings, f"target.path={tmp_path / 'target'}", f"data={text}", "save_dtype=float32"]


def run(folder: Path, arguments: list[str]) -> list[dict[str, float]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    eagle.main([*arguments, f"out={folder}"])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("version", [1, 3])
def test_a_run_leaves_a_folder_that_opens(
    version: int, tmp_path: Path, arguments, tiny_target, tiny_tokenizer, capsys
) -> None:
    size = "head.draft_vocab=0" if version == 1 else "head.draft_vocab=300"
    log = run(tmp_path / "run", [*arguments, f"head.version={version}", size])
    assert all(0 <= log[-1][f"eval_{name}"] <= 1 for name in ("alpha_0", "top1_0", "alpha_1"))
    drafter = tmp_path / "run/drafter"
    folder = open_drafter(drafter, fingerprint(tiny_target, tiny_tokenizer))
    assert folder.kind == f"eagle{version}"
    provenance = folder.meta["provenance"]
    assert provenance["tau"] == max(record["eval_tau"] for record in log)
    assert 0.95 < provenance["coverage"] <= 1 and len(provenance["acceptance_by_depth"]) == 2
    told = capsys.readouterr().out
    assert f"{provenance['coverage']:.2%} of text" in told and "vllm serve" in told
    best = load_file(tmp_path / "run/best/weights.safetensors")
    saved = load_file(drafter / "model.safetensors")
    assert torch.equal(saved["fc.weight"], best["head.fc.weight"])


def test_a_run_of_a_head_that_drafts_in_one_pass(tmp_path: Path, arguments) -> None:
    """As deep as the head, whatever `unroll.steps`; another goes on from it."""
    more = [*arguments, "head={parallel: 3, layers: 2, draft_vocab: 300}", "K=3", "lr=1e-2"]
    first = run(tmp_path / "first", more)
    assert {f"eval_alpha_{depth}" in first[-1] for depth in range(3)} == {True}
    assert "eval_alpha_3" not in first[-1]
    head = open_drafter(tmp_path / "first/drafter", None).head()
    assert (head.kind, head.levels, len(head.layers)) == ("peagle", 3, 2)
    best = max(first, key=lambda record: record["eval_tau"])
    path = f"head.path={tmp_path}/first/drafter"
    second = run(tmp_path / "second", [*arguments, "K=3", path, "head.parallel=3"])
    assert second[0]["eval_loss"] == pytest.approx(best["eval_loss"], rel=1e-5)
    with pytest.raises(ValueError, match="kind peagle, expected eagle3; set head"):
        run(tmp_path / "third", [*arguments, path])


def test_a_run_goes_on_from_an_earlier_head(tmp_path: Path, arguments) -> None:
    """Where the first one ended the second begins, whatever sizes its recipe says."""
    first = run(tmp_path / "first", [*arguments, "head.draft_vocab=300", "lr=1e-2"])
    best = max(first, key=lambda record: record["eval_tau"])
    more = [*arguments, f"head={tmp_path}/first/drafter", "head.layers=2"]
    second = run(tmp_path / "second", more)
    for name in ("eval_loss", "eval_alpha_0", "eval_tau"):
        assert second[0][name] == pytest.approx(best[name], rel=1e-5)
    with pytest.raises(ValueError, match=r"kind eagle3, expected eagle1; set head"):
        run(tmp_path / "third", [*more, "head.version=1"])


@pytest.mark.parametrize(
    ("kind", "write"), [("eagle1", official_eagle1), ("eagle3", official_eagle3)]
)
def test_a_run_goes_on_from_an_official_head(
    kind, write, tmp_path: Path, arguments, tiny_target, capsys
) -> None:
    """Whose folder leaves the layers that it reads to the target. Its tokens are what they are."""
    head = made(kind, tiny_target)
    folder = write(tmp_path / "theirs", head, tiny_target)
    more = [f"head={folder}", f"head.version={kind[-1]}", "lr=1e-9"]
    with pytest.warns(UserWarning) as told:
        run(tmp_path / "run", [*arguments, *more])
    assert any("not known to be made for this target" in str(w.message) for w in told)
    thin = [w for w in told if "expected at least 95%" in str(w.message)]
    assert len(thin) == (kind == "eagle3")
    saved = open_drafter(tmp_path / "run/drafter", None).head()
    assert saved.taps == ((NORM,) if kind == "eagle1" else (1, 2))
    assert torch.allclose(saved.fc.weight, head.fc.weight, atol=1e-6)


def test_an_mtp_module_from_a_fresh_one_and_from_the_targets_own(
    tmp_path: Path, arguments, tiny_target, tiny_tokenizer
) -> None:
    """The second stands in the checkpoint of the target; where the first ended a third begins."""
    more = [*arguments, "head.kind=mtp", "unroll.step_decay=0.6"]
    first = run(tmp_path / "first", [*more, "lr=1e-2"])
    folder = open_drafter(tmp_path / "first/drafter", fingerprint(tiny_target, tiny_tokenizer))
    assert folder.kind == "mtp" and len(folder.meta["provenance"]["acceptance_by_depth"]) == 2
    best = max(first, key=lambda record: record["eval_tau"])
    third = run(tmp_path / "third", [*more, f"head.path={tmp_path}/first/drafter"])
    assert third[0]["eval_loss"] == pytest.approx(best["eval_loss"], rel=1e-5)

    theirs = official("deepseek", tmp_path / "theirs", tiny_target)
    with pytest.warns(UserWarning, match="in the layout of an MTP module"):
        run(tmp_path / "second", [*more, f"head.path={tmp_path}/theirs", "lr=1e-9"])
    saved = open_drafter(tmp_path / "second/drafter", None).head()
    assert torch.allclose(saved.fc.weight, theirs.eh_proj.weight, atol=1e-6)
    with pytest.raises(ValueError, match=r"kind mtp, expected eagle3; set head"):
        run(tmp_path / "fourth", [*arguments, f"head.path={tmp_path}/first/drafter"])
    with pytest.raises(ValueError, match=r"mtp: got draft_vocab, expected none"):
        run(tmp_path / "fifth", [*more, "head.draft_vocab=20"])


def test_a_gated_head_is_trained_saved_and_given_to_no_server(
    tmp_path: Path, arguments, tiny_target, tiny_tokenizer
) -> None:
    more = [*arguments, "head.version=1", "head.fusion=gated"]
    run(tmp_path / "first", [*more, "lr=1e-2"])
    folder = open_drafter(tmp_path / "first/drafter", fingerprint(tiny_target, tiny_tokenizer))
    head = folder.head()
    assert folder.kind == "dovetail" and isinstance(head.fc, GatedFusion)
    run(tmp_path / "second", [*more, f"head.path={tmp_path}/first/drafter"])
    with pytest.raises(ValueError, match="kind dovetail, expected eagle1"):
        run(tmp_path / "third", [*more[:-1], f"head.path={tmp_path}/first/drafter"])
    for server in ("vllm", "sglang"):
        with pytest.raises(ValueError, match="kind dovetail"):
            export(f"{tmp_path}/first/drafter", f"{tmp_path}/target", server, f"{tmp_path}/out")


def test_two_runs_from_one_cache(tmp_path: Path, arguments) -> None:
    online = run(tmp_path / "online", arguments)
    more = [*arguments, f"cache={tmp_path}/states"]
    cached = run(tmp_path / "cached", more)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "states").iterdir()}
    assert len(written) == 2
    for there, here in zip(online[1:], cached[1:], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=2**-7)
    again = run(tmp_path / "again", [*more, "text.packing=false", "lr=1e-2"])
    assert again[1]["loss"] != cached[1]["loss"]
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "states").iterdir()}


def test_an_offloaded_target_changes_nothing(tmp_path: Path, arguments, monkeypatch) -> None:
    """Its layers are elsewhere while steps run (here their weights are gone), and back in every
    evaluation: the same figures, to the last bit.
    """
    more = [*arguments, f"cache={tmp_path}/states"]
    here = run(tmp_path / "here", more)
    moved: list[str] = []
    to = torch.nn.ModuleList.to

    def away(layers: torch.nn.ModuleList, device: str | torch.device) -> torch.nn.ModuleList:
        moved.append(str(device))
        if len(moved) % 2:
            for weight in layers.parameters():
                weight.kept = weight.data  # type: ignore[attr-defined]
                weight.data = torch.empty(0)
        else:
            for weight in layers.parameters():
                weight.data = weight.kept  # type: ignore[attr-defined]
        return to(layers, device)

    monkeypatch.setattr(torch.nn.ModuleList, "to", away)
    there = run(tmp_path / "there", [*more, "cache.offload_target=true"])
    assert moved == ["cpu"] * (2 * 4 + 1)  # at first, and around each of the four evaluations
    for one, other in zip(here, there, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {
            k: v for k, v in other.items() if k != "seconds"
        }


def test_a_shrunk_run_keeps_no_states(tmp_path: Path, arguments) -> None:
    """Of its tiny target they would be other ones than the folder is for."""
    kept = [f"cache={tmp_path}/states", "cache.int8=true", "target.shrink=true"]
    run(tmp_path / "run", [*arguments, *kept])
    assert (tmp_path / "run/drafter").is_dir() and not (tmp_path / "states").exists()


def test_a_text_longer_than_the_head_knows_is_refused(tmp_path: Path, arguments) -> None:
    with pytest.raises(ValueError, match="max_length: got 600, expected at most the 512 positions"):
        run(tmp_path / "run", [*arguments, "text.max_length=600"])


def test_poor_coverage_is_warned_of(tmp_path: Path, arguments) -> None:
    with pytest.warns(
        UserWarning, match=r"drafts cover \d+\.\d% of the text, expected at least 95%"
    ):
        run(tmp_path / "run", [*arguments, "head.draft_vocab=8"])


def test_a_run_far_below_the_known_is_told(tmp_path: Path, arguments, monkeypatch, capsys) -> None:
    known = expectations.Known("eagle3", 1, first=1.0, tau=5.0, K=4)
    monkeypatch.setattr(expectations, "KNOWN", {known: "a good run"})
    run(tmp_path / "run", arguments)
    assert "warning: acceptance is far below" in capsys.readouterr().out


def test_checkpointing_one_layer_is_refused(tmp_path: Path, arguments) -> None:
    with pytest.raises(ValueError, match="gradient_checkpointing=true"):
        run(tmp_path / "run", [*arguments, "gradient_checkpointing=true"])
