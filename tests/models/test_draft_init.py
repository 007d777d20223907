"""A draft that starts from its target: what is kept is where it should be, and nothing else is."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from draftsmith.models.draft_init import kept_indices, spread_layers, start_from_target
from draftsmith.models.draft_lm import draft_from_config
from draftsmith.train.drafts.start import ModelStart, open_draft
from draftsmith.train.run.lora import Lora

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(
        **SHAPE, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    # Biases of queries, keys and values; norms of queries and keys, heads wider than the stream.
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=False, head_dim=6),
}
FULL = {"layers": 5, "hidden": 32, "heads": 8, "kv_heads": 4, "intermediate": 48}
PART = {"layers": 3, "hidden": 16, "heads": 4, "kv_heads": 2, "intermediate": 20}


def made(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Every parameter random, also those that are born as ones or zeros."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data)
    return model.eval()


def draft_for(config: PretrainedConfig, sizes: dict[str, int], **changes: Any) -> PreTrainedModel:
    heads = {"head_dim": getattr(config, "head_dim", None) or 4}
    fields = {} if config.model_type == "qwen2" else heads
    return draft_from_config(config, **sizes, seed=1, vocab_size=96, **fields, **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_draft_is_the_target(family: str) -> None:
    config = FAMILIES[family]
    target, draft = made(config), draft_for(config, FULL).eval()
    ids = torch.arange(12)[None]
    assert not torch.equal(draft(ids).logits, target(ids).logits)
    start_from_target(draft, target)
    assert torch.equal(draft(ids).logits, target(ids).logits)


def expected(name: str, value: Tensor, kept: dict[str, list[int]], size: int) -> Tensor:
    """By hand: each axis of a parameter cut to the kept entries, one loop an axis."""
    hidden, neurons, tables = kept["hidden"], kept["inner"], range(96)
    heads, kv = ([h * size + i for h in kept[n] for i in range(size)] for n in ("heads", "kv"))
    every: dict[str, list[Any]] = {
        "embed_tokens": [tables, hidden],
        "lm_head": [tables, hidden],
        "q_proj": [heads, hidden],
        "k_proj": [kv, hidden],
        "v_proj": [kv, hidden],
        "o_proj": [hidden, heads],
        "gate_proj": [neurons, hidden],
        "up_proj": [neurons, hidden],
        "down_proj": [hidden, neurons],
        "q_norm": [range(size)],
        "k_norm": [range(size)],
        "norm": [hidden],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    axes = every[name.split(".")[-2]]
    for axis in range(value.ndim):
        value = torch.stack([value.select(axis, int(i)) for i in axes[axis]], axis)
    return value


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_where_it_should_be(family: str) -> None:
    config = FAMILIES[family]
    target, draft = made(config), draft_for(config, PART)
    if family == "qwen2":  # heads of 4 on both sides
        assert draft.config.hidden_size // draft.config.num_attention_heads == 4
    layers = [4, 0, 2]
    start_from_target(draft, target, layers)
    weights = dict(target.named_parameters(remove_duplicate=False))
    size = getattr(config, "head_dim", None) or 4
    kept = kept_indices(weights, draft.config, config, layers)
    ours = dict(draft.named_parameters(remove_duplicate=False))
    assert len({tuple(kept[at]["inner"].tolist()) for at in range(3)}) == 3  # chosen by layer
    for name, parameter in ours.items():
        at = int(name.split("layers.")[1][0]) if "layers." in name else 0
        whole = {axis: sorted({int(i) // size for i in kept[at][axis]}) for axis in ("heads", "kv")}
        whole |= {axis: kept[at][axis].tolist() for axis in ("hidden", "inner")}
        source = name.replace(f"layers.{at}.", f"layers.{layers[at]}.")
        assert torch.equal(parameter, expected(name, weights[source], whole, size)), name
    # Query heads stay with the key-value head that they attend by: two a group, in its order.
    for at in range(3):
        heads = sorted({int(i) // size for i in kept[at]["heads"]})
        groups = sorted({int(i) // size for i in kept[at]["kv"]})
        assert len(heads) == 4 and [head // 2 for head in heads] == [
            g for g in groups for _ in "ab"
        ]


def test_the_loudest_are_kept() -> None:
    """Ten dimensions, a group and neurons are made ten times as large as the others."""
    config = FAMILIES["llama-tied"]
    target = made(config)
    weights = dict(target.named_parameters(remove_duplicate=False))
    loud = torch.randperm(32, generator=torch.Generator().manual_seed(0))[:16].sort().values
    with torch.no_grad():
        weights["model.embed_tokens.weight"][:, loud] *= 10
        for layer in range(5):
            weights[f"model.layers.{layer}.mlp.down_proj.weight"][:, 7:27] *= 10
            weights[f"model.layers.{layer}.self_attn.v_proj.weight"][2 * 4 : 4 * 4] *= 10
            weights[f"model.layers.{layer}.self_attn.o_proj.weight"][:, 5 * 4 : 6 * 4] *= 10
    draft = draft_for(config, {**PART, "heads": 2})
    kept = kept_indices(weights, draft.config, config, [0, 2, 4])
    assert torch.equal(kept[None]["hidden"], loud)
    for at in range(3):
        assert kept[at]["inner"].tolist() == list(range(7, 27))
        assert kept[at]["kv"].tolist() == list(range(8, 16))  # groups 2 and 3
        assert kept[at]["heads"][:4].tolist() == list(range(20, 24))  # head 5 of group 2


def test_layers_are_spread_from_the_first_to_the_last() -> None:
    assert spread_layers(8, 1) == [0]
    assert spread_layers(8, 2) == [0, 7]
    assert spread_layers(8, 4) == [0, 2, 5, 7]
    assert spread_layers(8, 8) == list(range(8))


@pytest.mark.parametrize(
    ("sizes", "changes", "words"),
    [
        ({"hidden": 64, "heads": 16}, {}, "hidden=64, expected at most the target's 32"),
        ({"layers": 6}, {}, "layers=6, expected at most the target's 5"),
        (
            {"kv_heads": 1},
            {},
            "4 heads for each key-value head.*at most the target's 2.*kv_heads=2",
        ),
        ({"heads": 2}, {"head_dim": 8}, "heads of 8, expected.*4.*head_dim=4"),
        ({}, {"tie_word_embeddings": True}, "one table.*expected two.*tie_word_embeddings=False"),
        ({}, {"vocab_size": 80}, "80 rows in its tables, expected the target's 96"),
    ],
)
def test_refusals(sizes: dict[str, int], changes: dict[str, Any], words: str) -> None:
    config = FAMILIES["llama"]
    fields = {"head_dim": 4, "vocab_size": 96, **changes}
    draft = draft_from_config(config, **{**PART, **sizes}, seed=0, **fields)
    with pytest.raises(ValueError, match=words):
        start_from_target(draft, made(config))


def test_other_families_and_layers_are_refused() -> None:
    neox = made(GPTNeoXConfig(**{k: v for k, v in SHAPE.items() if "key_value" not in k}))
    draft = draft_from_config(neox.config, **{**PART, "kv_heads": 4}, seed=0, vocab_size=96)
    with pytest.raises(ValueError, match=r"gpt_neox family, expected.*llama.*say init=random"):
        start_from_target(draft, neox)
    target = made(FAMILIES["llama"])
    for layers in ([0, 1], [0, 1, 5], [-1, 0, 1]):
        with pytest.raises(ValueError, match="for a draft of 3, expected 3 numbers from 0 to 4"):
            start_from_target(draft_for(target.config, PART), target, layers)


def test_a_recipe_starts_a_draft_from_its_target(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    sizes: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1}
    source = ModelStart(**sizes, intermediate=32, init="target", init_layers=[2])
    draft = open_draft(source, Lora(), False, tiny_target, tiny_tokenizer, seed=0)
    assert not draft.config.tie_word_embeddings  # as the target's tables
    theirs = tiny_target.model.layers[2].mlp.up_proj.weight
    ours = draft.model.layers[0].mlp.up_proj.weight
    assert all(entry in set(theirs.flatten().tolist()) for entry in ours.flatten().tolist())
    assert all(parameter.requires_grad for parameter in draft.parameters())
    for changes, words in (
        ({"init": "zeros"}, "init: got 'zeros', expected one of random, target"),
        ({"path": "somewhere"}, r"got draft\.init=target and draft\.path=somewhere"),
    ):
        wrong = ModelStart(**{**vars(source), **changes})
        with pytest.raises(ValueError, match=words):
            open_draft(wrong, Lora(), False, tiny_target, tiny_tokenizer, seed=0)
