"""A costly twin decodes what its small model decodes, with the same acceptance."""

import math
from pathlib import Path

import pytest
import torch
from head_folders import made, on_disk, ours
from tiny_llama import SHARED
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS

from draftsmith.bench.speed import twin
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.models.target import TargetSpec, load_target

TARGET = SHARED / "models/target-15m"
KINDS = (
    "eagle1",
    "eagle3",
    "peagle",
    "medusa",
    "hydra",
    "block",
    "dspark",
    "domino",
    "clover2",
    "dflash2",
    "narrow",
)
NARROW = {"light": "layer", "narrow": 16}


@pytest.fixture(scope="module")
def small(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> str:
    return on_disk(tmp_path_factory.mktemp("twin") / "small", tiny_target, tiny_tokenizer)


def widened(small: str, out: Path, *drafters: Path) -> None:
    names = ",".join(map(str, drafters))
    sizes = ["hidden=128", "layers=6", "intermediate=256"]
    twin.main([f"target={small}", f"out={out}", *sizes, f"drafter={names}"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_twin_accepts_what_its_small_pair_accepts(tmp_path: Path, small: str, kind: str) -> None:
    target, tokenizer = load_target(TargetSpec(small, dtype="float32"), "cpu")
    head = made("block", target, **NARROW) if kind == "narrow" else made(kind, target)
    folder = ours(tmp_path / kind / "drafter", head, target, tokenizer)
    widened(small, tmp_path / "twin", folder)
    large, _ = load_target(TargetSpec(str(tmp_path / "twin/target"), dtype="float32"), "cpu")
    assert large.config.hidden_size == 128 and large.config.num_hidden_layers == 6
    found = []
    for model, path in ((target, folder), (large, tmp_path / "twin" / kind)):
        drafter = load_drafter(str(path), model, tokenizer)
        decoder = Decoder(model, tokenizer, drafter, K=3, batch_size=3)
        done = [c for params in SETTINGS[:2] for c in decoder.generate(PROMPTS, params)]
        found.append([(c.tokens, c.counters.histogram) for c in done])
    assert found[0] == found[1]


def test_a_twin_that_computes_something_else_is_refused(
    tmp_path: Path, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose norms aren't scaled."""
    fill = twin.Shape.fill

    def broken(shape: twin.Shape, part: nn.Module, large: nn.Module) -> None:
        fill(shape, part, large)
        if "Norm" in type(part).__name__:
            with torch.no_grad():
                large.weight.mul_(math.sqrt(shape.H / shape.h))  # type: ignore[operator]

    monkeypatch.setattr(twin.Shape, "fill", broken)
    with pytest.raises(ValueError, match="target: got logits that differ"):
        widened(small, tmp_path / "twin")


def test_a_head_that_cannot_be_widened_is_refused(
    tmp_path: Path, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DFlash-2's convolutions have groups, whose number grows: here nobody knows of them."""
    monkeypatch.setattr(twin, "TwoTap", type(None))
    target, tokenizer = load_target(TargetSpec(small, dtype="float32"), "cpu")
    folder = ours(tmp_path / "it/drafter", made("dflash2", target), target, tokenizer)
    with pytest.raises(ValueError, match="it can't be widened"):
        widened(small, tmp_path / "twin", folder)


@pytest.mark.skipif(not TARGET.exists(), reason=f"needs {TARGET}")
def test_the_15m_target_s_twin_is_equal_to_the_last_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four times as wide, so that norms are scaled by a power of two."""
    twin.main([f"target={TARGET}", f"out={tmp_path}", "layers=8", "intermediate=1536"])
    assert "target: logits equal" in capsys.readouterr().out


def test_sizes_are_whole_multiples(tmp_path: Path, small: str) -> None:
    with pytest.raises(ValueError, match="expected whole multiples of the target's 32 and 3"):
        twin.main([f"target={small}", f"out={tmp_path}", "hidden=48", "layers=6"])
