"""The commands that serve a target with a drafter, ready to copy.

For vLLM 0.33 and SGLang 0.5.14, by their loaders' source. K is the folder's default number of
drafted tokens.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.models.disk.read_lm import load_config, read_json


def _lm(folder: Path, meta: dict[str, Any], target: str) -> list[str]:
    K = meta["defaults"]["K"]
    lines = [
        vllm_line(folder, target, "lm", K),
        sglang_line(folder, target, "lm", K),
        f"target.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained("
        f"{str(folder)!r}))  # transformers",
    ]
    drafted = meta.get("vocabulary_map")
    if drafted is not None:
        lines.append(
            f"# servers know no draft vocabulary of a draft LM: there it drafts all "
            f"{drafted['target']:,} tokens, by python -m draftsmith {drafted['draft']:,}"
        )
    rows = load_config(folder).get_text_config().vocab_size
    wanted = (meta["target"] or {}).get("logit_rows", rows)
    if rows != wanted:
        lines.append(
            f"# vLLM and transformers want equal vocab_size: the draft has {rows}, the target "
            f"{wanted}; train it with vocab_size={wanted}"
        )
    return lines


def _eagle3(folder: Path, meta: dict[str, Any], target: str) -> list[str]:
    K = meta["defaults"]["K"]
    lines = [vllm_line(folder, target, "eagle3", K)]
    reason = unread_by_sglang(read_json(folder / "config.json"))
    if reason:
        return [*lines, f"# SGLang would draft wrongly with it: {reason}"]
    return [*lines, sglang_line(folder, target, "eagle3", K)]


def _eagle1(folder: Path, meta: dict[str, Any], target: str) -> list[str]:
    K = meta["defaults"]["K"]
    quoted = shlex.quote(target)
    export = f"python -m draftsmith export drafter={shlex.quote(str(folder))} target={quoted}"
    out = {to: folder.with_name(f"{folder.name}-{to}") for to in ("vllm", "sglang")}
    return [
        f"{export} to=sglang out={shlex.quote(str(out['sglang']))} && "
        + sglang_line(out["sglang"], target, "eagle1", K),
        f"{export} to=vllm out={shlex.quote(str(out['vllm']))} && "
        + vllm_line(out["vllm"], target, "eagle1", K),
    ]


def _medusa(folder: Path, meta: dict[str, Any], target: str) -> list[str]:
    out = shlex.quote(str(folder.with_name(f"{folder.name}-tgi")))
    return [
        f"python -m draftsmith export drafter={shlex.quote(str(folder))} "
        f"target={shlex.quote(target)} to=tgi out={out} && "
        f"text-generation-launcher --model-id {out}",
        "# vLLM 0.33 and SGLang 0.5.14 load no Medusa heads",
    ]


def _hydra(folder: Path, meta: dict[str, Any], target: str) -> list[str]:
    return [
        "# no server loads Hydra heads; decode here: python -m draftsmith evaluate "
        f"target={shlex.quote(target)} drafter={shlex.quote(str(folder))}"
    ]


def unread_by_sglang(config: dict[str, Any], *, layers: int | None = None) -> str | None:
    """Why SGLang, which reads any EAGLE-3 folder without a word, would draft wrongly with the head
    that this config.json describes; None where it would not.

    layers: of the target, where known.
    """
    ids = config.get("eagle_aux_hidden_state_layer_ids") or []
    reasons = (
        ("it has no norm before fc (norm_before_fc)", config.get("norm_before_fc")),
        ("its residual is never normed (norm_before_residual)", config.get("norm_before_residual")),
        ("it skips the norms on queries and keys (qwen3)", config.get("model_type") == "qwen3"),
        ("it skips the biases of the attention", config.get("attention_bias")),
        ("it takes a single tap for what fc made of it", len(ids) == 1),
        ("it can't tap the embeddings (0)", 0 in ids),
        (f"it can't tap the last layer ({layers})", layers is not None and layers in ids),
        ("it names further layers' norms otherwise", config.get("num_hidden_layers", 1) > 1),
    )
    return next((reason for reason, holds in reasons if holds), None)


def vllm_line(folder: Path, target: str, kind: str, K: int) -> str:
    """For a folder that vLLM reads. The method is named: vLLM would guess it from the path."""
    method = {"lm": "draft_model", "eagle1": "eagle", "eagle3": "eagle3"}[kind]
    options = {"method": method, "model": str(folder), "num_speculative_tokens": K}
    text = shlex.quote(json.dumps(options))
    return f"vllm serve {shlex.quote(target)} --speculative-config {text}"


def sglang_line(folder: Path, target: str, kind: str, K: int) -> str:
    """For a folder that SGLang reads."""
    algorithm = {"lm": "STANDALONE", "eagle1": "EAGLE", "eagle3": "EAGLE3"}[kind]
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} "
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path "
        f"{shlex.quote(str(folder))} --speculative-num-steps {K} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {K + 1}"
    )


SERVE_LINES: dict[str, Callable[[Path, dict[str, Any], str], list[str]]] = {
    "lm": _lm,
    "eagle1": _eagle1,
    "eagle3": _eagle3,
    "medusa": _medusa,
    "hydra": _hydra,
}
