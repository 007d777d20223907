"""What the planner says is what is used: pools to the byte, a run's peak within five per cent."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peak_memory import GREEDY, LARGE, SAMPLED, config, model, peak
from transformers import (
    GptOssConfig,
    PreTrainedTokenizerBase,
)

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.memory import Work, check, plan
from draftsmith.decode.engine.settings import DecodeSettings
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.size import ModelSize, available
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import DynamicTree, Plan

NUCLEUS = SamplingParams(0.7, top_p=0.9, ignore_eos=True)


def planned_and_used(
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    *,
    vocab: int,
    prompt: int,
    rounds: int,
    whole: bool = False,
    **settings: Any,
) -> tuple[int, int]:
    """(bytes planned, bytes at the most) of some rounds of eight rows, their pools included."""
    decoder = Decoder(
        model(vocab, 3), tokenizer, LMDrafter(model(vocab, 1), vocab), batch_size=8, **settings
    )
    assert decoder.drafter is not None and isinstance(decoder.drafter, LMDrafter)
    prompts = [[7 + row] * prompt for row in range(8)]
    params = replace(params, max_new_tokens=200)

    def run() -> None:
        stream = decoder.stream(prompts, params)
        for _ in range(8 * (1 + rounds)):
            next(stream)
        stream.close()

    made = DecodeSettings(**settings)
    work = Work(8, prompt, 200, vocab, params, made.plan, made.rule)
    models = decoder.runner, decoder.drafter.runner
    if whole:
        for runner in models:
            runner.call = runner._whole
    expected = plan(work, *map(ModelSize.of, models))
    return expected.total, peak(run)


@pytest.mark.parametrize(
    ("params", "settings"),
    [
        (GREEDY, {"K": 15}),
        (SAMPLED, {"K": 15}),
        (NUCLEUS, {"K": 15}),
        (SAMPLED, {"K": 15, "rule": "block"}),
        (SAMPLED, {"tree": "eagle-25", "rule": "recursive"}),
        (SAMPLED, {"tree": "eagle-25", "rule": "k-seq"}),
        (GREEDY, {"tree": "eagle-25"}),
        (SAMPLED, {"tree": "eagle-25"}),
        (SAMPLED, {"tree": "dynamic:4,8,16"}),
    ],
)
def test_a_runs_peak_is_planned(
    params: SamplingParams,
    settings: dict[str, Any],
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight rows, 16 nodes and more, 32k tokens: the pools, and a round's logits, q, and noise as
    a GPU makes them.
    """
    monkeypatch.setattr("draftsmith.decode.sampling.library", lambda: None)
    monkeypatch.setattr("draftsmith.decode.engine.rows.library", lambda source: None)
    monkeypatch.setattr("draftsmith.decode.engine.decoder.vocab_size", lambda tokenizer: LARGE)
    planned, used = planned_and_used(
        tiny_tokenizer, params, vocab=LARGE, prompt=20, rounds=2, **settings
    )
    assert abs(planned / used - 1) < 0.05, (planned, used)


@pytest.mark.parametrize("whole", [False, True])
def test_long_prompts_are_planned(whole: bool, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """Where the prefill's states are the most of it: by the lean body, by transformers' forward."""
    planned, used = planned_and_used(
        tiny_tokenizer, GREEDY, vocab=len(tiny_tokenizer), prompt=600, rounds=1, whole=whole, K=4
    )
    assert abs(planned / used - 1) < 0.05, (planned, used)


def test_pools_are_planned_to_the_byte() -> None:
    shapes = [
        config(320, 3),
        GptOssConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, head_dim=24),
    ]
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            work = Work(5, 100, 50, 320, GREEDY, DecodeSettings(tree="medusa-63").plan)
            made = plan(work, ModelSize(shape, dtype), ModelSize(config(320, 1), dtype))
            pools = [
                KVPool(c, rows=5, slots=work.slots, dtype=dtype, device=torch.device("meta"))
                for c in (shape, config(320, 1))
            ]
            assert [made.target_kv, made.drafter_kv] == [p.kv_2LBSHE.nbytes for p in pools]


WORK = Work(16, 500, 1500, 320, GREEDY, DecodeSettings(K=4).plan)

SIZES = ModelSize(config(320, 4), torch.bfloat16), ModelSize(config(320, 1), torch.bfloat16)

NAMES = ("batch_size", "max_new_tokens")


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    made = plan(WORK, *SIZES)
    assert check(made, made.total).free == made.total and check(made, None) == made
    free = made.total * 2 // 3
    with pytest.raises(ValueError, match="got batch_size=16 with rows of 2000 tokens") as refused:
        check(made, free)
    rows, new = (int(refused.value.args[0].split(f"{name}=")[-1].split()[0]) for name in NAMES)
    for name, value in (("rows", rows), ("new", new)):
        assert plan(replace(WORK, **{name: value}), *SIZES).total <= free
        # Slots come in buckets of 64, so the next answer that takes more is a bucket away.
        more = value + (1 if name == "rows" else 64)
        assert plan(replace(WORK, **{name: more}), *SIZES).total > free


def test_a_single_row_that_does_not_fit() -> None:
    made = plan(replace(WORK, rows=1, prompt=1900, new=1), *SIZES)
    lone = plan(replace(WORK, rows=1, prompt=600, new=1), *SIZES)
    with pytest.raises(ValueError, match=r"batch_size=1 with prompts of at most \d+ tokens"):
        check(made, lone.total)
    with pytest.raises(ValueError, match="not even one row of one token fits"):
        check(made, 1000)


@pytest.mark.parametrize("tree", ["chain", "medusa-63", "dynamic:6,8,60", "dynamic:6,8,60,2"])
def test_the_largest_tree_that_fits_is_offered(tree: str) -> None:
    """Nothing is offered that does not fit, and the next larger one would not."""
    asked = DecodeSettings(tree=tree, K=16 if tree == "chain" else None).plan
    params = SamplingParams(1.0, ignore_eos=True)
    wide = replace(WORK, tree=asked, vocab=LARGE, params=params)
    made = plan(wide, *SIZES)
    small = replace(asked, nodes=2) if isinstance(asked, DynamicTree) else asked.cut(1)
    least = plan(replace(wide, tree=small), *SIZES).total
    free = (made.total + least) // 2
    with pytest.raises(ValueError, match="would fit") as refused:
        check(made, free)
    offered = [w for w in refused.value.args[0].split() if w.startswith(("K=", "tree="))][-1]
    name, _, value = offered.partition("=")
    found = DecodeSettings(**{"tree": tree, name: int(value) if name == "K" else value}).plan
    assert found.levels <= asked.levels and found.nodes < asked.nodes
    assert plan(replace(wide, tree=found), *SIZES).total <= free
    if isinstance(found, DynamicTree) and isinstance(asked, DynamicTree):
        assert found.sharpness == asked.sharpness
        larger: Plan = replace(found, nodes=found.nodes + 1)
    else:
        larger = asked.cut(found.levels + 1)
    assert larger == asked or plan(replace(wide, tree=larger), *SIZES).total > free
    plain = plan(replace(wide, tree=None), *SIZES)
    with pytest.raises(ValueError) as told:
        check(plain, plain.total - 1)
    assert "tree=" not in told.value.args[0] and "K=" not in told.value.args[0]


def test_one_line_for_users() -> None:
    made = replace(plan(WORK, *SIZES), target_kv=1 << 30, drafter_kv=200 << 20, tree=300 << 20)
    made = replace(made, prefill=5 << 20)
    assert str(made) == "KV 1.2 GiB, prefill 5 MiB, tree 0.3 GiB"
    assert str(replace(made, free=8 << 30)).endswith("tree 0.3 GiB of 8.0 GiB free")


def test_memory_at_hand() -> None:
    free = available(torch.device("cpu"))
    assert free is None or 1 << 20 < free < 1 << 50
    assert available(torch.device("meta")) is None
