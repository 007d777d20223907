"""Faults of drafter folders, one each, and what the doctor must say of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
IDS = "eagle_aux_hidden_state_layer_ids"


def nan(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"][3] = float("nan")


def rename(old: str, new: str) -> Change:
    def by(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return by


def say(**fields: Any) -> Change:
    return lambda config, tensors: config.update(fields)


def drop(name: str) -> Change:
    return lambda config, tensors: (config.pop(name, None), tensors.pop(name, None))


def as_ids(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def shift(name: str, by: int, at: slice) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name][at] += by

    return change


def nested(ids: list[int]) -> Change:
    return say(eagle_config={IDS: ids})


def top(ids: list[int]) -> Change:
    return lambda config, tensors: config.update(
        {IDS: ids, "eagle_config": {IDS: [i - 1 for i in ids]}}
    )


def float32(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors |= {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    config["torch_dtype"] = "float32"


def input_norm(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["input_norm.weight"] = torch.ones(96, dtype=torch.bfloat16)


def other_t2d(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["t2d"] = tensors["t2d"].roll(1)


def low_ids(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Tokens 0 to 159: as offsets they stay inside the vocabulary, and t2d knows better."""
    tensors["d2t"], tensors["t2d"] = torch.arange(160), torch.arange(320) < 160


def zero_map(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = torch.zeros(320, dtype=torch.long)


def moving_map(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = torch.arange(320).flip(0) - torch.arange(320)


def window(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    layer = config.get("transformer_layer_config", config)
    layer |= {"layer_types": ["sliding_attention"], "sliding_window": 2048}


def another_layer(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["transformer_layer_config"]["model_type"] = "mistral"


def few_positions(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["prefix"]["max_position_embeddings"] = 64


def twice(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.hidden_norm.weight"] = torch.ones(32)


def attention_bias(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(32).bfloat16()


def trained_bias(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["fc.bias"], config["bias"] = torch.ones(32).bfloat16(), True


# (what, folder, one change, check, verdict, words, server -> its words)
Trap = tuple[str, str, Change, str, str, str, dict[str, str]]
# fmt: off
TRAPS: list[Trap] = [
    ("unknown name", "eagle3", rename("midlayer.mlp.up", "midlayer.mlp.upper"),
     "tensors", "fault", "without a place: midlayer.mlp.upper",
     {"SGLang 0.5.23": "skips them", "vLLM 0.33": "refuses"}),
    ("missing tensor", "eagle3", drop("midlayer.self_attn.o_proj.weight"),
     "tensors", "fault", "1 missing: midlayer.self_attn.o_proj",
     {"SGLang 0.5.23": "random, without a word"}),
    ("wrong sizes", "eagle3", say(intermediate_size=64),
     "tensors", "fault", r"up_proj.weight \(file \[48, 32\], config \[64, 32\]\)",
     {"vLLM 0.33": "refuses"}),
    ("midlayer in speculators", "eagle3-speculators", rename("layers.0.", "midlayer."),
     "tensors", "fault", "whose name is layers.0",
     {"speculators 0.9": "random"}),
    ("not a number", "eagle3", nan,
     "finite numbers", "fault", "norm.weight",
     {"vLLM 0.33": "accepts nothing"}),
    ("nested ids only", "eagle3", drop(IDS),
     "layer ids", "fault", r"only the nested ids, \[0, 2, 4\]",
     {"vLLM 0.33": "next to nothing"}),
    ("top ids only", "eagle3", drop("eagle_config"),
     "layer ids", "fault", r"only the top-level ids, \[1, 3, 5\]",
     {"SGLang 0.5.23": "next to nothing"}),
    ("ids that differ", "eagle3", nested([1, 3, 5]),
     "layer ids", "fault", r"nested \[1, 3, 5\]: the second",
     {"SGLang 0.5.23": "taps [2, 4, 6]"}),
    ("ids that descend", "eagle3", top([5, 3, 1]),
     "layer ids", "fault", "don't ascend",
     {"SGLang 0.5.23": "order of the layers"}),
    ("ids of another target", "eagle3", top([1, 3, 15]),
     "layer ids", "fault", r"ids \[15\] of a target of 6",
     {"vLLM 0.33": "fewer taps"}),
    ("too few ids", "eagle3", top([1, 3]),
     "fc", "fault", "reads 96 numbers, 2 taps of 32 are 64",
     {"vLLM 0.33": "refuses"}),
    ("no draft_vocab_size", "eagle3", drop("draft_vocab_size"),
     "draft vocabulary", "fault", "no draft_vocab_size",
     {"SGLang 0.5.23": "fails"}),
    ("another draft_vocab_size", "eagle3", say(draft_vocab_size=320),
     "draft vocabulary", "fault", "is 320, lm_head.weight has 160 rows",
     {"vLLM 0.33": "refuses"}),
    ("no d2t", "eagle3", drop("d2t"),
     "draft vocabulary", "fault", "no d2t, though it drafts 160 of 320",
     {"SGLang 0.5.23": "takes draft ids"}),
    ("d2t of ids", "eagle3", as_ids,
     "draft vocabulary", "fault", "holds ids, not offsets",
     {"vLLM 0.33": "other tokens"}),
    ("d2t outside", "eagle3", shift("d2t", 1000, slice(3, 4)),
     "draft vocabulary", "fault", "leads 1 times outside the 320",
     {"draftsmith": "refuses"}),
    ("t2d of other tokens", "eagle3", other_t2d,
     "draft vocabulary", "fault", "name different tokens",
     {"speculators 0.9": "wrong rows"}),
    ("no t2d", "eagle3", drop("t2d"),
     "draft vocabulary", "warning", "no t2d",
     {"speculators 0.9": "needs it"}),
    ("no t2d in speculators", "eagle3-speculators", drop("t2d"),
     "draft vocabulary", "fault", "no t2d",
     {"speculators 0.9": "fails to load it"}),
    ("d2t of ids in speculators", "eagle3-speculators", as_ids,
     "draft vocabulary", "fault", "holds ids, not offsets",
     {"speculators 0.9": "wrong map", "draftsmith": "refuses"}),
    ("norms without a flag", "eagle3-norms", say(fc_norm=False),
     "norm flags", "fault", r"fc_norm.\* in the file",
     {"SGLang 0.5.23": "skips the norm"}),
    ("a flag without norms", "eagle3", say(fc_norm=True),
     "norm flags", "fault", r"there is no fc_norm.\*",
     {"vLLM 0.33": "as they are born"}),
    ("another norm without a flag", "eagle3", input_norm,
     "norm flags", "fault", r"input_norm.\* in the file",
     {"vLLM 0.33": "refuses"}),
    ("flag unwritten", "eagle3-speculators", drop("norm_before_residual"),
     "norm flags", "fault", "isn't written",
     {"vLLM 0.33": "takes it for true"}),
    ("d2t of ids that stay inside", "eagle3", low_ids,
     "draft vocabulary", "fault", "holds ids, not offsets",
     {"draftsmith": "refuses"}),
    ("a map for all tokens", "eagle3-all", zero_map,
     "draft vocabulary", "fault", "a d2t for a whole vocabulary",
     {"vLLM 0.33": "refuses"}),
    ("a map that moves all tokens", "eagle3-all", moving_map,
     "draft vocabulary", "fault", "a d2t that moves tokens",
     {"SGLang 0.5.23": "proposes other tokens", "draftsmith": "refuses"}),
    ("a window", "eagle3", window,
     "one server alone", "warning", "sees 2048 tokens back",
     {"SGLang 0.5.23": "speculative-draft-window-size"}),
    ("a window in speculators", "eagle3-speculators", window,
     "one server alone", "warning", "sees 2048 tokens back",
     {"draftsmith": "sees all"}),
    ("a window of EAGLE-1", "eagle-1", window,
     "one server alone", "warning", "sees 2048 tokens back",
     {"draftsmith": "sees all"}),
    ("no verifier", "eagle3-speculators", say(speculators_config={}),
     "one server alone", "fault", "name_or_path isn't written",
     {"speculators 0.9": "fails"}),
    ("another layer", "eagle3-speculators", another_layer,
     "one server alone", "fault", "model_type 'mistral'",
     {"vLLM 0.33": "refuses", "draftsmith": "refuses"}),
    ("biases without the flag", "eagle3", attention_bias,
     "biases", "fault", "attention_bias isn't set",
     {"vLLM 0.33": "refuses", "SGLang 0.5.23": "skips them"}),
    ("the flag without biases", "eagle3", say(attention_bias=True),
     "biases", "fault", "no such biases",
     {"vLLM 0.33": "nothing fills"}),
    ("few positions of Hydra++", "hydra", few_positions,
     "positions", "warning", "64, the target's 512",
     {"draftsmith": "ends decoding at 64"}),
    ("a flag SGLang ignores", "eagle3", say(norm_before_residual=True),
     "one server alone", "warning", "for SGLang 0.5.23: .*norm_before_residual",
     {"SGLang 0.5.23": "drafts wrongly"}),
    ("a flag llama.cpp ignores", "eagle3", say(norm_output=True),
     "one server alone", "warning", "for llama.cpp: .*norm_output",
     {"llama.cpp": "drafts wrongly"}),
    ("a flag llama.cpp ignores, in speculators", "eagle3-speculators", say(norm_output=True),
     "one server alone", "warning", "for llama.cpp: .*norm_output",
     {"llama.cpp": "drafts wrongly"}),
    ("qwen layers by Llama's name", "eagle3-qwen", say(architectures=["LlamaForCausalLMEagle3"]),
     "one server alone", "fault", "norms on queries and keys, under the name",
     {"vLLM 0.33": "refuses"}),
    ("SGLang's name of a norm", "eagle3-two", rename("1.input_layernorm", "1.hidden_norm"),
     "one server alone", "warning", "SGLang's name",
     {"vLLM 0.33": "as it is born"}),
    ("tied", "eagle3", say(tie_word_embeddings=True),
     "own LM head", "fault", "is true",
     {"SGLang 0.5.23": "takes the embeddings"}),
    ("few positions", "eagle3", say(max_position_embeddings=64),
     "positions", "warning", "64, the target's 512",
     {"draftsmith": "ends decoding at 64"}),
    ("new rotary fields alone", "eagle3", drop("rope_theta"),
     "rotary fields", "warning", "only rope_parameters",
     {"vLLM 0.33": "turns by 10,000"}),
    ("old rotary fields alone", "eagle3", drop("rope_parameters"),
     "rotary fields", "warning", "only the rotary fields of before",
     {}),
    ("rotary fields that differ", "eagle3", say(rope_theta=7.0),
     "rotary fields", "fault", "rope_theta 7.0 .* beside",
     {"SGLang 0.5.23": "reads rope_parameters"}),
    ("bias of the attention", "eagle3", say(bias=True),
     "biases", "fault", "bias is true",
     {"vLLM 0.33": "nothing fills"}),
    ("a trained bias", "eagle-1", trained_bias,
     "biases", "warning", "fc.bias isn't zero",
     {"vLLM 0.33": "doesn't add it"}),
    ("float32", "eagle3", float32,
     "dtype", "warning", "weights in float32",
     {}),
    ("another dtype said", "eagle3", say(torch_dtype="float16"),
     "dtype", "warning", "torch_dtype float16, weights in bfloat16",
     {}),
    ("hidden size", "eagle3", say(hidden_size=16, target_hidden_size=16),
     "target", "fault", "hidden size 16, the target's 32",
     {"draftsmith": "refuses"}),
    ("vocabulary", "eagle3", say(vocab_size=384),
     "target", "fault", "vocab_size 384, the target's 320",
     {"draftsmith": "refuses"}),
]
# fmt: on
