"""train/blocks.py as a user meets it: the drafter that a recipe describes, short runs, what is
refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from head_folders import made as head_made
from head_folders import ours
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.heads.block import KINDS
from draftsmith.models.taps import block_taps
from draftsmith.train import blocks
from draftsmith.train.drafts.blocks import BlockSource, open_block
from draftsmith.train.objectives.block import BlockObjective
from draftsmith.train.plan.table import plan

Argv = list[str]


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_a_recipe_says_what_its_drafter_is(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, kind: str
) -> None:
    source = BlockSource(kind=kind, levels=3, layers=1, rank=8)
    head = open_block(source, tiny_target, tiny_tokenizer, 0)
    assert head.kind == (kind or "block")
    wanted = KINDS.get(kind, {"light": "markov", "labels": "shifted", "mask": "causal"})
    assert all(getattr(head.config, name) == value for name, value in wanted.items())
    assert head.levels == 3 and head.taps == (1, 2) and len(head.layers) == 1
    again, other = (open_block(source, tiny_target, tiny_tokenizer, seed) for seed in (0, 1))
    assert torch.equal(again.fc.weight, head.fc.weight)
    assert not torch.equal(other.fc.weight, head.fc.weight)
    last = tiny_target.model.layers[-1].mlp.up_proj.weight
    assert torch.equal(head.layers[0].mlp.up_proj.weight, last)
    source.init = "random"
    bare = open_block(source, tiny_target, tiny_tokenizer, 0)
    assert not torch.equal(bare.layers[0].mlp.up_proj.weight, last)


def test_taps_are_spread_over_deep_targets() -> None:
    assert block_taps(36) == (2, 10, 18, 26, 34)
    assert block_taps(28) == (2, 8, 14, 20, 26)
    assert all(max(block_taps(layers)) <= layers for layers in range(2, 60))


@pytest.fixture
def training(
    tmp_path: Path, tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> Argv:
    tiny_target.save_pretrained(tmp_path / "of")
    tiny_tokenizer.save_pretrained(tmp_path / "of")
    lines = (f"row {row} " + " ".join(str(row * i) for i in range(30)) for row in range(60))
    corpus = tmp_path / "text.jsonl"
    corpus.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    paths = [f"target.path={tmp_path / 'of'}", f"data={corpus}"]
    text = ["text.max_length=40", "heldout={limit: 2, prompt_tokens: 8, max_new_tokens: 8}"]
    sizes = ["head={levels: 3, layers: 1, rank: 8}", "K=3", "steps=4", "batch_size=2"]
    return [*paths, *text, *sizes, "dtype=float32", "save_dtype=float32", "anchors.count=8"]


def run(folder: Path, arguments: Argv) -> list[dict[str, float]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    blocks.main([*arguments, f"out={folder}"])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_a_folder_that_decodes(training: Argv, tmp_path: Path) -> None:
    """And from it the next run goes on, whatever sizes its recipe says."""
    noisy = [*training, "head.noise=true", "lr=1e-2", "eval_every=2"]
    log = run(tmp_path / "run", noisy)
    best = max((r for r in log if "eval_tau" in r), key=lambda record: record["eval_tau"])
    made = json.loads((tmp_path / "run/drafter/draftsmith.json").read_text())
    assert made["kind"] == "block" and made["defaults"]["K"] == 3
    assert made["provenance"]["tau"] == best["eval_tau"]
    params, given = SamplingParams(1.0, max_new_tokens=12), {"dtype": "float32"}
    prompts, target = ["row 3 0 3 6", "row 20 0 20"], str(tmp_path / "of")
    plain = Decoder.from_pretrained(target, **given).generate(prompts, params)  # type: ignore[arg-type]
    decoder = Decoder.from_pretrained(target, str(tmp_path / "run/drafter"), **given)  # type: ignore[arg-type]
    assert [a.tokens for a in decoder.generate(prompts, params)] == [a.tokens for a in plain]
    second = run(tmp_path / "two", [*training, f"head={{path: {tmp_path}/run/drafter, levels: 2}}"])
    for name in ("eval_alpha_0", "eval_tau"):
        assert second[0][name] == pytest.approx(best[name], rel=1e-5)


def test_a_run_that_was_killed_goes_on(
    training: Argv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anchors, noise and the base's share as if it hadn't been, to the last bit."""
    training = [*training, "head.noise=true", "save_every=2", "eval_every=4", "lr=1e-2"]
    training += ["anchors={count: 4, base: 0.5, base_ends: 4}"]
    whole = run(tmp_path / "whole", training)

    def dying(self: BlockObjective, means: dict[str, float]) -> None:
        observe(self, means)
        if self.steps_done == 3:
            raise InterruptedError

    observe = BlockObjective.observe
    monkeypatch.setattr(BlockObjective, "observe", dying)
    with pytest.raises(InterruptedError):
        run(tmp_path / "parts", training)
    monkeypatch.setattr(BlockObjective, "observe", observe)
    parts = run(tmp_path / "parts", training)
    for name in ("loss", "grad_norm", "eval_loss", "eval_tau"):
        assert parts[-1][name] == whole[-1][name], name
    files = [tmp_path / f"{name}/best/weights.safetensors" for name in ("parts", "whole")]
    found = [load_file(file) for file in files]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][key], value) for key, value in found[0].items())


WRONG: list[tuple[Argv, str]] = [
    (["anchors.count=0"], "anchors: got count=0.*expected at least 1"),
    (["anchors.base=2"], "anchors.base: got 2.0, expected a share"),
    (["head.kind=flash"], "head.kind: got 'flash', expected one of block, dflash"),
    (["head.init=zeros"], "head.init: got 'zeros'"),
    (["head.light=lamp"], "got light='lamp', expected one of none"),
    (["head.labels=late"], "got labels='late', expected one of shifted, same"),
    (["head.mask=half"], "got mask='half', expected one of full, causal"),
    (["head.noise=true", "head.mask=full"], "got noise with labels=shifted, mask=full"),
    (["head.kind=dflash", "head.noise=true"], "got noise with labels=same, mask=full"),
    (["head.levels=0"], "levels.*0"),
    (["head.rank=0"], "rank.*0"),
    (["head.taps=[9]"], r"taps: got \[9\]"),
    (["loss=soft"], "got 'soft', expected"),
    (["K=4"], "K"),
    (["text.max_length=600"], "max_length: got 600.*the 512 positions"),
    (["gradient_checkpointing=true"], "a block is small"),
]


@pytest.mark.parametrize(("options", "told"), WRONG, ids=[" ".join(given) for given, _ in WRONG])
def test_what_cannot_be_is_said_in_a_line(
    training: Argv, tmp_path: Path, options: Argv, told: str
) -> None:
    with pytest.raises(ValueError, match=told) as raised:
        run(tmp_path / "run", [*training, *options])
    assert "\n" not in str(raised.value)


def test_a_folder_of_another_kind_is_refused(
    training: Argv,
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    head = head_made("eagle3", tiny_target)
    folder = ours(tmp_path / "eagle", head, tiny_target, tiny_tokenizer)
    for path, told in (
        (folder, "of kind eagle3, expected a block drafter"),
        ("nowhere", "nowhere"),
    ):
        with pytest.raises(ValueError, match=told) as raised:
            run(tmp_path / "run", [*training, f"head.path={path}"])
        assert "\n" not in str(raised.value)


def test_the_planner_knows_the_entry(training: Argv, tmp_path: Path) -> None:
    """Without data or weights; its trained weights are the drafter's."""
    sizes: Any = ["entry=blocks", "out=x", "gpu=h100", *training]
    outline = plan(sizes)
    log = run(tmp_path / "run", training)
    made = load_file(tmp_path / "run/drafter/model.safetensors")
    assert log and outline.sizes.learned == sum(tensor.numel() for tensor in made.values())
    with pytest.raises(ValueError, match="got light='lamp'"):
        plan([*sizes, "head.light=lamp"])
