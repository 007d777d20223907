"""Faults of block drafters' folders, one each, and what the doctor must say of them."""

from typing import Any

import torch
from doctor_traps import Change, Trap, drop
from torch import Tensor

VLLM, SGLANG, OURS = "vLLM 0.33", "SGLang 0.5.23", "draftsmith"
BOTH = ("block_size", "mask_token_id", "target_layer_ids")


def say(**fields: Any) -> Change:
    """Nested too, where a field is there."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config |= fields
        if "dflash_config" in config:
            config["dflash_config"] |= {n: v for n, v in fields.items() if n in BOTH}

    return change


def layer(**fields: Any) -> Change:
    return lambda config, tensors: config["transformer_layer_config"].update(fields)


def nested(**fields: Any) -> Change:
    return lambda config, tensors: config["dflash_config"].update(fields)


def asked(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 5


def no_norms(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "q_norm" in name or "k_norm" in name]:
        del tensors[name]


def gated(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["markov_head_type"] = config["dflash_config"]["markov_head_type"] = "gated"
    tensors["markov_head.gate_proj.weight"] = torch.ones(6, 38, dtype=torch.bfloat16)
    tensors["markov_head.gate_proj.bias"] = torch.ones(6, dtype=torch.bfloat16)


def own_table(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.ones(320, 32, dtype=torch.bfloat16)


# fmt: off
BLOCK_TRAPS: list[Trap] = [
    ("no context norm", "dflash-official", drop("hidden_norm.weight"),
     "tensors", "fault", "1 missing: hidden_norm.weight",
     {SGLANG: "random", OURS: "refuses"}),
    ("a layer too many said", "dflash-official", say(num_hidden_layers=2),
     "tensors", "fault", "11 missing: layers.1",
     {SGLANG: "random", OURS: "refuses"}),
    ("a layer too few said", "dflash-speculators", layer(num_hidden_layers=0),
     "tensors", "fault", "11 without a place: layers.0",
     {SGLANG: "skips them", OURS: "refuses"}),
    ("no norms", "dflash-official", no_norms,
     "attention", "fault", "no norms on queries and keys",
     {VLLM: "as they are born"}),
    ("no fc", "dflash-official", drop("fc.weight"),
     "layer ids", "fault", "no fc.weight",
     {}),
    ("no layers", "dflash-official", say(target_layer_ids=[]),
     "layer ids", "fault", "no layers named",
     {SGLANG: "as many as the draft has layers"}),
    ("fewer layers", "dflash-speculators", say(aux_hidden_state_layer_ids=[2, 3]),
     "layer ids", "fault", "reads 96 numbers, 2 layers of 32 are 64",
     {OURS: "refuses"}),
    ("beyond the target", "dflash-official", say(target_layer_ids=[1, 2, 5]),
     "layer ids", "fault", r"layers \[5\] of a target of 6, counted from 0",
     {SGLANG: "refuses"}),
    ("its embeddings", "dflash-speculators", say(aux_hidden_state_layer_ids=[0, 2, 3]),
     "layer ids", "fault", r"layers \[0\] of a target of 6, counted from 1",
     {}),
    ("counted as speculators does", "dflash-official", say(target_layer_ids=[2, 3, 4]),
     "layer ids", "warning", r"\[2, 3, 4\] are the usual ones as speculators counts",
     {VLLM: "a layer off"}),
    ("counted as z-lab does", "dflash-speculators", say(aux_hidden_state_layer_ids=[1, 2, 3]),
     "layer ids", "warning", r"\[1, 2, 3\] are the usual ones as z-lab counts",
     {OURS: "a layer off"}),
    ("no MASK", "dflash-official", say(mask_token_id=None),
     "MASK", "fault", "no mask_token_id",
     {SGLANG: "looks for <|MASK|>", OURS: "refuses"}),
    ("MASK beyond the table", "dspark-official", say(mask_token_id=320),
     "MASK", "fault", "mask_token_id 320 of 320 tokens",
     {VLLM: "past the target's table"}),
    ("no size", "dflash-official", say(block_size=None),
     "block", "fault", "no block_size",
     {SGLANG: "takes 16"}),
    ("two sizes", "dflash-official", nested(block_size=8),
     "block", "fault", "block_size 5 at the top level, 8 in dflash_config",
     {SGLANG: "takes the second"}),
    ("DSpark's labels", "dflash-speculators", say(sample_from_anchor=True),
     "block", "fault", r"labels of DSpark \(sample_from_anchor True\)",
     {VLLM: "a token off"}),
    ("DFlash's labels", "dspark-official", say(sample_from_anchor=False),
     "block", "fault", "labels of DFlash",
     {VLLM: "a token off"}),
    ("another length", "dflash-speculators", asked,
     "block", "warning", "speculative_tokens 5, a block of 5 rows drafts 4",
     {VLLM: "another block"}),
    ("a word about no window", "dflash-speculators", say(sliding_window_non_causal=False),
     "block", "warning", "in a head without windows",
     {VLLM: "causal"}),
    ("a gated head", "dspark-official", gated,
     "block", "warning", "a Markov head of type gated",
     {VLLM: "vanilla one alone"}),
    ("a window", "dflash-official", say(layer_types=["sliding_attention"], sliding_window=64),
     "attention", "warning", "sees? 64 tokens back",
     {OURS: "sees all"}),
    ("a table of its own", "dflash-official", own_table,
     "target", "warning", "embeddings of its own",
     {OURS: "takes the target's"}),
]
# fmt: on
