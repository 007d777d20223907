"""Rounds of drafters that nobody has trained: which they are, and that what is timed is theirs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MixtralConfig, PretrainedConfig

from draftsmith.decode.draft_lms.pard import PardDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.predict import predict, timed_rounds
from draftsmith.decode.predict.draft_sizes import random_model
from draftsmith.decode.predict.load_grid import Grid, whole_rounds
from draftsmith.decode.predict.machines import Machine, Pass
from draftsmith.decode.predict.predict import Drafting, best, speedup
from draftsmith.decode.predict.timed_rounds import HEADS, LEVELS, untrained
from draftsmith.models.tokenizer import numbered
from draftsmith.train import compare

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
CPU = torch.device("cpu")


def shaped(hidden: int, **about: Any) -> PretrainedConfig:
    return LlamaConfig(vocab_size=96, hidden_size=hidden, intermediate_size=96, **SIZES, **about)


DRAFTS = {"draft": shaped(32), "pard": shaped(32, pard_token=0)}


def test_every_trained_kind_of_compare_can_be_timed() -> None:
    """Of the kind that its recipe makes, bound to the target, in its type."""
    assert {*HEADS, *compare.BEFORE} == {*compare.RECIPES}
    target, tokenizer = random_model(shaped(64), CPU), numbered(96)
    for kind in (*HEADS, "exit:1", "ngram"):
        drafter = untrained(kind, target, tokenizer, {})
        assert drafter.kind in kind and drafter.levels >= timed_rounds.BLOCK  # hydra++: a hydra
        assert (drafter.size is not None) == (kind != "ngram")
    for kind, config in DRAFTS.items():
        drafter = untrained(kind, target, tokenizer, DRAFTS)
        assert drafter.size is not None and isinstance(drafter, PardDrafter) == (kind == "pard")
        assert config.hidden_size == 32


@pytest.mark.parametrize("kind", ["ngram", "medusa", "draft", "pard"])
def test_rounds_of_every_depth_are_timed(kind: str) -> None:
    """As many as were asked for, at each number of rows; the target's answer never ends."""
    [(named, grid)] = timed_rounds.timed_rounds(shaped(64), [kind], [1, 2], DRAFTS)
    assert (
        named == kind
        and grid is not None
        and [*grid.nodes] == [1, 2, 3, 5, LEVELS + 1]
        and [*grid.rows] == [1, 2]
    )
    assert grid.verify_RN.shape == (2, 5) and np.isfinite(grid.verify_RN).all()
    assert (grid.verify_RN > 0).all() and not grid.beside_RN.any()


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (GPT2Config(vocab_size=96, n_embd=64, n_layer=3, n_head=2), "exit:1"),
        (shaped(64, max_position_embeddings=64), "ngram"),
        (MixtralConfig(vocab_size=96, num_local_experts=4, hidden_size=64, **SIZES), "medusa"),
        (shaped(64), "exit:9"),
    ],
    ids=["no such part", "short context", "experts", "no such layer"],
)
def test_what_cannot_be_timed_is_left_out(config: PretrainedConfig, kind: str) -> None:
    """And what comes after it isn't."""
    found = dict(timed_rounds.timed_rounds(config, [kind, "medusa"], [1], {}))
    assert found[kind] is None and (found["medusa"] is None) == (kind in ("medusa", "ngram"))


def test_a_decoder_that_is_refused_stays_as_it_was() -> None:
    target = random_model(shaped(64, max_position_embeddings=12), CPU)
    decoder = Decoder(target, numbered(96), policy="cost")
    before = decoder.policy
    with pytest.raises(ValueError, match="got a context of 12 tokens, expected"):
        whole_rounds(decoder, [[0] * 8], [1])
    assert decoder.policy is before


def test_the_target_says_one_token() -> None:
    """Whatever its weights: that is what lookups find."""
    model = timed_rounds.one_token(shaped(64), CPU)
    assert not model(torch.arange(9)[None]).logits.any()


def test_what_was_timed_stands_for_the_model_of_time() -> None:
    """By hand: K = 2 costs half a plain step more, K = 4 as much again; more context, both."""
    grid = Grid([1], [1, 3, 5], np.array([[2.0, 3.0, 4.0]]), np.zeros((1, 3)))
    machine, target = Machine(0, 1.0, bandwidth=1.0), predict.shape_of(shaped(64))
    pair = machine, target, Drafting(trees=False, timed=grid)
    assert speedup(pair, (2, 0, 1.8), 1, 1) == pytest.approx(1.8 * 2 / 3)
    assert speedup(pair, (3, 0, 2.0), 1, 1) == pytest.approx(2 * 2 / 3.5)
    way = best(pair, np.array([0.9]), 1, 1)
    assert way.K <= 4 and not way.nodes
    further = machine.moving(target.kv * 1000)
    told = 1.8 * (2 + further) / (3 + further)
    assert speedup(pair, (2, 0, 1.8), 1, timed_rounds.PROMPT + 1000) == pytest.approx(told)
    # What draft calls read of it is theirs.
    reads = Drafting(each=Pass(1, 0, kv=target.kv / 4), timed=grid)
    told = 1.8 * (2 + further) / (3 + 1.5 * further)
    found = speedup((machine, target, reads), (2, 0, 1.8), 1, timed_rounds.PROMPT + 1000)
    assert found == pytest.approx(told)


@pytest.mark.skipif(torch.cuda.is_available(), reason="timed on CPUs alone")
def test_predict_measures_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chains, at the rows asked for and at one; where the target leaves no room, by the model of
    time, as on a machine that isn't here.
    """
    shaped(64).save_pretrained(tmp_path)
    argv = [f"target={tmp_path}", "measure=true", "batch_size=2", f"out={tmp_path / 'out.json'}"]
    few = "acceptance=medusa:0.7,ngram:0.5"
    small = dict.fromkeys(("medusa", "ngram"), Drafting(trees=True))
    monkeypatch.setattr(predict, "kinds_of", lambda *_: small)
    monkeypatch.setattr(predict, "LEAST", 1)
    predict.main([*argv, few])
    told = json.loads((tmp_path / "out.json").read_text())
    assert {row["kind"] for row in told["rows"]} == {*small}
    assert all(row["best"]["2"]["nodes"] == 0 for row in told["rows"])
    assert all(1 <= row["best"]["2"]["K"] <= LEVELS for row in told["rows"])
    assert "timed here, of random weights: medusa, ngram" in capsys.readouterr().out
    monkeypatch.setattr(timed_rounds, "available", lambda _: 1 << 10)
    predict.main([*argv, few])
    assert "timed here" not in capsys.readouterr().out
