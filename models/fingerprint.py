"""What identifies a target, so that a drafter is not run with another one unnoticed."""

import hashlib
import json
import weakref
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.target import is_quantised
from draftsmith.models.tokenizer import vocab_size

SAMPLED_ROWS = 64
SAMPLED_WEIGHTS = 64  # of each parameter of the body
# Parts of a fingerprint that inform and don't identify: one model may be padded in two ways, and
# its layers quantised, or tuned a little further.
NOT_COMPARED = ("name", "logit_rows", "body")
_remembered: "weakref.WeakKeyDictionary[nn.Module, dict[str, str]]" = weakref.WeakKeyDictionary()


def fingerprint(
    target_model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    name: str | None = None,
) -> dict[str, Any]:
    """What identifies a target, in flat JSON: its shapes, tokenizer, sampled rows of its LM head,
    its final norm; and, to warn by, sampled weights of its body, where they are loaded.

    Weights are rounded to bf16 first, so that a checkpoint read in bf16 and in fp32 has one. A
    target behind an endpoint (`target_model` None) is known by its tokenizer and `name` alone.
    """
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    marks: dict[str, Any] = {
        "name": name,
        "tokens": vocab_size(tokenizer),
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest(),
    }
    if target_model is None:
        return marks
    config = target_model.config.get_text_config()
    head = target_model.get_output_embeddings()
    # Rows of real tokens: the padding after them may differ between copies of one model.
    rows = torch.arange(SAMPLED_ROWS) * vocab_size(tokenizer) // SAMPLED_ROWS
    norms = [p for norm in final_norm(target_model) for p in norm.parameters()]
    return marks | {
        "family": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "logit_rows": head.weight.shape[0],
        "head": _digest([head.weight[rows.to(head.weight.device)]]),
        "final_norm": _digest(norms),
        **_body(target_model),
    }


def final_norm(model: PreTrainedModel) -> list[nn.Module]:
    """The norm before the LM head, in a list; an empty one where it can't be told."""
    children = model.base_model.named_children()
    return [module for name, module in children if "norm" in name or name == "ln_f"][-1:]


def differences(made_for: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """The parts that two fingerprints both have and that differ, worded."""
    return [
        f"{part}: made for {str(made_for[part])[:12]}, given {str(given[part])[:12]}"
        for part in made_for
        if part in given and part not in NOT_COMPARED and made_for[part] != given[part]
    ]


def remember_body(model: PreTrainedModel) -> None:
    """Take a body's marks before its weights are shared out: no process can read them all then."""
    _remembered[model.base_model] = _body(model)


def _body(model: PreTrainedModel) -> dict[str, str]:
    if model.base_model in _remembered:
        return _remembered[model.base_model]
    weights = list(model.base_model.parameters())
    if any(weight.is_meta for weight in weights):
        return {}
    plain = (weight.dequantize() if is_quantised(weight) else weight for weight in weights)
    flat = (weight.detach().flatten() for weight in plain)
    sampled = [x[:: max(1, len(x) // SAMPLED_WEIGHTS)][:SAMPLED_WEIGHTS] for x in flat]
    return {"body": _digest(sampled)}


def _digest(tensors: list[torch.Tensor] | list[nn.Parameter]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        rounded = tensor.detach().to("cpu", torch.bfloat16).float().contiguous()
        digest.update(rounded.numpy().tobytes())
    return digest.hexdigest()
