"""A drafter in the layout of another stack: SGLang, vLLM, `speculators`, TGI.

Our EAGLE-3 folders are what vLLM and SGLang read, and our draft LMs are plain transformers folders;
export then writes them without our own file, and refuses what a server would load and draft wrongly
with. Every tensor that is written is the drafter's, bit for bit.

What the layouts are is read from the loaders' source: SGLang 0.5.14, vLLM, speculators 0.9,
text-generation-inference.

Shapes: V rows of the target's LM head, H hidden.
"""

import os
import shlex
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.disk.read_lm import load_config, write_json
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import META, DrafterFolder, open_drafter
from draftsmith.models.folder.serve_lines import sglang_line, unread_by_sglang, vllm_line
from draftsmith.models.folder.tensors import outline
from draftsmith.models.heads.eagle import FLAGS
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.models.vocab import FILE

SPECULATORS = "0.9.0"  # the version whose folders these are
WEIGHTS = "model.safetensors"


def export(drafter: str, target: str, to: str, out: str) -> str:
    """Write the drafter in `drafter` as stack `to`, a key of `LAYOUTS`, reads it, into the new
    folder `out`; returns the command that serves it there.

    Of the target its config, tokenizer, embeddings, LM head and final norm are read, whatever files
    they stand in. The drafter may be another toolkit's, see `imports`.

    Raises:
        ValueError: an unknown stack, one that doesn't load such drafters or would draft wrongly
            with this one, a drafter made for another target, an `out` that holds something.
    """
    if to not in LAYOUTS:
        raise ValueError(f"to: got {to!r}, expected one of {', '.join(LAYOUTS)}")
    folder = Path(os.path.abspath(out))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out: got {folder}, which holds something; expected a new folder")
    if Path(target).is_dir():
        target = os.path.abspath(target)  # some layouts name it
    model, tokenizer = outline(target), load_tokenizer(target)
    opened = open_drafter(
        drafter,
        fingerprint(model, tokenizer, target),
        target_tokenizer=tokenizer,
        target_config=model.config,
    )
    kind, K = opened.kind, opened.meta["defaults"]["K"]
    if kind not in LAYOUTS[to]:
        able = [name for name, kinds in LAYOUTS.items() if kind in kinds]
        others = f"these do: {', '.join(able)}" if able else "no server does: decode with it here"
        raise ValueError(
            f"to={to}: got a drafter of kind {kind}, which {to} doesn't load; {others}"
        )
    LAYOUTS[to][kind](opened, model, folder)
    if to == "sglang":
        return sglang_line(folder, target, kind, K)
    lines = {"speculators": "vllm serve", "tgi": "text-generation-launcher --model-id"}
    return f"{lines[to]} {shlex.quote(out)}" if to in lines else vllm_line(folder, target, kind, K)


def _lm(opened: DrafterFolder, target: PreTrainedModel, folder: Path) -> None:
    """A plain transformers folder already: all but our own files. Servers draft all its tokens."""
    rows = load_config(opened.path).get_text_config().vocab_size
    wanted = target.config.get_text_config().vocab_size
    if rows != wanted:
        warnings.warn(
            f"the draft has {rows} logits and the target {wanted}: servers want as many; train it "
            f"with vocab_size={wanted}",
            stacklevel=3,
        )
    ours = shutil.ignore_patterns(META, FILE)
    shutil.copytree(opened.path, folder, ignore=ours, dirs_exist_ok=True)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / file, metadata={"format": "pt"})


# ---- EAGLE ------------------------------------------------------------------------------------


def _eagle3_sglang(opened: DrafterFolder, target: PreTrainedModel, folder: Path) -> None:
    config, tensors = _flat(opened, target)
    layers = target.config.get_text_config().num_hidden_layers
    reason = unread_by_sglang(config | {"num_hidden_layers": 1}, layers=layers)
    if reason:
        raise ValueError(
            f"to=sglang: got a head with which SGLang would draft wrongly, without a word: "
            f"{reason}; vLLM reads it: to=vllm, or train one without"
        )
    # The norm before a further layer's attention has the first layer's name there.
    for index in range(1, config["num_hidden_layers"]):
        norm = tensors.pop(f"layers.{index}.input_layernorm.weight")
        tensors[f"layers.{index}.hidden_norm.weight"] = norm
    _write(folder, config, tensors, WEIGHTS)


def _eagle3_vllm(opened: DrafterFolder, target: PreTrainedModel, folder: Path) -> None:
    _write(folder, *_flat(opened, target), WEIGHTS)


def _eagle1_sglang(opened: DrafterFolder, target: PreTrainedModel, folder: Path) -> None:
    """With fc's bias, zero where the head has none: SGLang's would be random."""
    config, tensors = _flat(opened, target)
    bias = torch.zeros(tensors["fc.weight"].shape[0], dtype=tensors["fc.weight"].dtype)
    tensors.setdefault("fc.bias", bias)
    # `bias` would be read as biases of the attention, and leave them unset.
    config |= {"architectures": ["LlamaForCausalLMEagle"], "bias": False}
    _write(folder, config, tensors, WEIGHTS)


def _eagle1_vllm(opened: DrafterFolder, target: PreTrainedModel, folder: Path) -> None:
    config, tensors = _flat(opened, target)
    bias = tensors.pop("fc.bias", torch.zeros(1))
    if bias.any():
        raise ValueError(
            "to=vllm: got an EAGLE-1 head whose fc has a bias, which vLLM doesn't add: it would "
            "draft with other numbers; expected a head trained without (fc_bias: false); SGLang "
            "has the bias: to=sglang"
        )
    _write(folder, config | {"bias": False}, tensors, WEIGHTS)


def _speculators(opened: DrafterFolder, target: PreTrainedModel, folder: Path) -> None:
    """The unified format of speculators 0.9, which vLLM reads too."""
    flat, tensors = _flat(opened, target)
    kept = {name: value for name, value in flat.items() if name in LAYER_KEYS}
    # The target's embeddings are always in the file there.
    tensors = {n.replace("midlayer.", "layers.0.", 1): t for n, t in tensors.items()}
    table = target.get_input_embeddings().weight
    assert isinstance(table, Tensor)
    tensors["embed_tokens.weight"] = table.to(tensors["fc.weight"].dtype)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": opened.meta["defaults"]["K"],
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": flat["draft_vocab_size"],
        "dtype": flat["torch_dtype"],
        "eagle_aux_hidden_state_layer_ids": flat["eagle_aux_hidden_state_layer_ids"],
        "embed_requires_grad": False,
        # Each flag is written: readers differ in what they take for a missing one.
        **{name: flat[name] for name in FLAGS},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "architectures": target.config.architectures or [type(target).__name__],
                "name_or_path": target.name_or_path,
            },
        },
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": kept,
    }
    _write(folder, config, tensors, WEIGHTS)


def _flat(
    opened: DrafterFolder, target: PreTrainedModel
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Our own layout of an EAGLE head, with the target's position limit where it is larger."""
    head = opened.head().bind(target)
    config = head.to_json()
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", 0)
    # A dynamic rotary embedding changes with this number.
    if config["rope_parameters"].get("rope_type") != "dynamic":
        limit = max(limit, config["max_position_embeddings"])
        config["max_position_embeddings"] = limit
    return config, dict(head.on_disk())


# ---- Medusa -----------------------------------------------------------------------------------


def _medusa_tgi(opened: DrafterFolder, target: PreTrainedModel, folder: Path) -> None:
    """FasterDecoding's layout, which TGI reads; without LM heads of their own, its second form."""
    head = opened.head().bind(target)
    config, tensors = head.to_json(), head.on_disk()
    shared = config["original_lm_head"]
    if shared and config["medusa_num_layers"] != 1:
        raise ValueError(
            f"to=tgi: got heads of {config['medusa_num_layers']} layers that share the target's LM "
            "head, expected one layer, or LM heads of their own: TGI reads no others"
        )
    written = {
        "medusa_num_heads": config["medusa_num_heads"],
        "medusa_num_layers": config["medusa_num_layers"],
        "base_model_name_or_path": target.name_or_path,
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
    }
    written |= {"version": "2"} if shared else {}
    _write(folder, written, tensors, "medusa_lm_head.safetensors")


LAYER_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("max_position_embeddings", "initializer_range", "attention_bias", "attention_dropout"),
    *("mlp_bias", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("tie_word_embeddings", "use_cache"),
)
LAYOUTS: dict[str, dict[str, Callable[[DrafterFolder, PreTrainedModel, Path], None]]] = {
    "sglang": {"lm": _lm, "eagle1": _eagle1_sglang, "eagle3": _eagle3_sglang},
    "vllm": {"lm": _lm, "eagle1": _eagle1_vllm, "eagle3": _eagle3_vllm},
    "speculators": {"eagle3": _speculators},
    "tgi": {"medusa": _medusa_tgi},
}
