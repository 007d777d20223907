"""A run goes on with its steps divided otherwise: it is the same run, or it says why it isn't."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from bigram import settings
from distilled import distilled
from tiny_eagle import eagle
from tiny_heads import TOKENS, fresh, llama, objective_of, text, words

from draftsmith.models.heads.block import Block, BlockConfig
from draftsmith.models.heads.hydra import Hydra
from draftsmith.models.layers.layer import layer_like
from draftsmith.train.live.batches import Buffered
from draftsmith.train.objectives.block import Anchors, BlockObjective
from draftsmith.train.objectives.eagle import EagleObjective, Unroll
from draftsmith.train.run.folder import Run
from draftsmith.train.run.launch import start
from draftsmith.train.run.loop import Objective, StepBatches, fit
from draftsmith.train.run.settings import Settings
from draftsmith.train.teachers.states import OnlineTaps
from draftsmith.train.text.batches import Batches
from draftsmith.train.text.on_policy import OnPolicy
from draftsmith.train.text.stream import CorpusStream


def of_eagle(version: int, *, mtp: bool = False, **options: float) -> Objective:
    target = llama()
    head = eagle(target, version=version, mtp=mtp)
    states = OnlineTaps(target, head.taps)
    return EagleObjective(Unroll(steps=2, **options), head, target, words(TOKENS), states)


def of_heads(kind: str, dropout: float = 0.0, **options: object) -> Objective:
    target = llama()
    head = fresh(kind, target)
    if dropout:
        head = Hydra(replace(head.config, dropout=dropout)).init_from(target)
    return objective_of(head, target, **options)


def of_block(count: int) -> Objective:
    target = llama()
    sizes: Any = {"levels": 3, "rank": 8, "layer": layer_like(target)}
    head = Block(BlockConfig(taps=(1, 2), **sizes)).init_from(target)
    torch.nn.init.normal_(head.light.after.weight, generator=torch.Generator().manual_seed(0))
    given = Anchors(count=count, base=0.5), head, target, words(TOKENS)
    return BlockObjective(*given, OnlineTaps(target, head.taps))


class Drawn(Batches):
    """Text that is drawn for each micro-batch, as a draft's own answers are."""

    chooses = "on_policy"


def drawn(batch_size: int) -> StepBatches:
    batches = text(batch_size=batch_size)
    batches.__class__ = Drawn
    return batches


EXACT: dict[str, Callable[[], Objective]] = {
    "distillation": distilled,
    "by_depth": lambda: distilled(by_depth=3),
    "adapters": lambda: distilled(dropout=0.0),
    "medusa": lambda: of_heads("medusa"),
    "hydra": lambda: of_heads("hydra"),
    "eagle3": lambda: of_eagle(3),
    "mtp": lambda: of_eagle(1, mtp=True),
    "eagle1 without noise": lambda: of_eagle(1, noise=0.0),
    "all of a block's anchors": lambda: of_block(99),
}

DEPENDING: dict[str, Callable[[], Objective]] = {
    "select": lambda: distilled(select="random"),
    "adapters' dropout": lambda: distilled(dropout=0.5),
    "hydra's dropout": lambda: of_heads("hydra", dropout=0.5),
    "hydra's noise": lambda: of_heads("hydra", noise=5.0),
    "eagle1's noise": lambda: of_eagle(1),
    "some of a block's anchors": lambda: of_block(2),
}


@pytest.fixture(autouse=True)
def fresh_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


def train(
    folder: Path,
    objective: Objective,
    shape: tuple[int, int],
    batches: Callable[..., StepBatches] = text,
    **changes: object,
) -> list[dict[str, float]]:
    """Records of a run, by SGD, which shows the scale of a gradient."""
    plain = {"optimizer": "sgd", "momentum": 0.0, "schedule": "constant", "clip_norm": 0.0}
    division = dict(zip(("batch_size", "accumulation"), shape, strict=True))
    config: Settings = settings(folder, **{**plain, **division, "steps": 2, **changes})
    vars(config).update(noise=0.2)  # which these objectives don't read
    run = Run(folder, "{}", main=True)
    try:
        fit(start(config), objective, batches(batch_size=shape[0]), config, run)
    finally:
        run.close()
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.mark.parametrize("name", EXACT)
def test_a_step_is_the_same_however_it_is_divided(name: str, tmp_path: Path, capsys) -> None:
    """One batch of 8, and four of 2 that go on with one of 8: losses, norms, weights."""
    whole, parts = EXACT[name](), EXACT[name]()
    expected = train(tmp_path / "whole", whole, (8, 1))
    train(tmp_path / "parts", parts, (2, 4), steps=1)
    got = train(tmp_path / "parts", parts, (8, 1))
    assert "the same run up to rounding" in capsys.readouterr().out
    straight = train(tmp_path / "straight", EXACT[name](), (2, 4))
    for a, b, c in zip(expected, got, straight, strict=True):
        for value in ("loss", "grad_norm", "tokens"):
            assert a[value] == pytest.approx(b[value], rel=1e-5), value
            assert a[value] == pytest.approx(c[value], rel=1e-5), value
    for mine, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", DEPENDING)
def test_what_depends_on_the_division_says_so(name: str, tmp_path: Path, capsys) -> None:
    why = "select" if name == "select" else "random draws"
    train(tmp_path, DEPENDING[name](), (2, 4), steps=1)
    train(tmp_path, DEPENDING[name](), (2, 4), steps=1)  # as it was: nothing to say
    with pytest.raises(ValueError, match=rf"with .*{why}.* a step depends on how it is divided"):
        train(tmp_path, DEPENDING[name](), (8, 1))
    train(tmp_path, DEPENDING[name](), (8, 1), allow_resize=True)
    assert "NOT the same run" in capsys.readouterr().out


def test_text_that_is_drawn_by_micro_batch_says_so(tmp_path: Path) -> None:
    train(tmp_path, of_heads("medusa"), (2, 4), drawn, steps=1)
    with pytest.raises(ValueError, match="with on_policy a step depends on how it is divided"):
        train(tmp_path, of_heads("medusa"), (8, 1), drawn)
    assert [source.chooses for source in (OnPolicy, CorpusStream, Buffered)] == [
        "on_policy",
        "corpus",
        "requests from a buffer",
    ]
