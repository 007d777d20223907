"""What a run that can't fit is told before it loads anything."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from draftsmith.train import distill
from draftsmith.train.plan import refuse, table
from draftsmith.train.plan.fake_step import Step
from draftsmith.train.plan.refuse import _beyond
from draftsmith.train.plan.table import PlanRequest, outlined
from draftsmith.train.run.recipe import load

MIB = 1 << 20


@pytest.fixture
def recipe(tmp_path: Path) -> list[str]:
    """A distillation whose target has a config.json alone."""
    LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "target")
    given = ["steps=2", "draft.hidden=64", "text.max_length=256", "heldout.max_new_tokens=8"]
    return [f"target.path={tmp_path / 'target'}", f"out={tmp_path / 'run'}", "batch_size=8", *given]


def test_a_run_that_cannot_fit_never_loads(
    recipe: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its target has no weights, so that any attempt would fail otherwise."""
    monkeypatch.setattr(refuse, "available", lambda device: 4 * MIB)
    with pytest.raises(ValueError, match=r"memory: got a run that needs .* plan=false starts it"):
        distill.main(recipe)
    with pytest.raises(ValueError, match="cannot be read as a causal LM"):
        distill.main([*recipe, "plan=false"])


def test_on_a_gpu_the_flags_that_would_fit_are_told(
    recipe: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv, known = ["entry=distill", *recipe], dict[Any, Step]()
    monkeypatch.setattr(refuse, "outlined", partial(outlined, known=known))
    assert _beyond(argv, "cuda", 1 << 40, "ddp", 1) == ""
    choices = outlined(PlanRequest(), argv, 1 << 40, known=known).choices
    told = _beyond(argv, "cuda", min(choice.held.total for choice in choices), "ddp", 1)
    assert "step, at the fullest moment" in told and "expected at most" in told, told
    assert told.endswith("would fit") and "batch_size=1 accumulation=8" in told, told
    monkeypatch.setattr(table, "remedies", lambda config: [])
    assert _beyond(argv, "cuda", MIB, "ddp", 1).endswith("or take a larger GPU")


def test_a_plan_draws_nothing(recipe: list[str]) -> None:
    """A run with its plan and one without draw the same numbers."""
    config = load(distill.DistillConfig, recipe)
    before = torch.get_rng_state()
    refuse.refuse(config, recipe, torch.device("cpu"), "ddp", 1)
    assert torch.equal(torch.get_rng_state(), before)
