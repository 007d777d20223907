"""The doctor's checks of block drafters, in the official layout or speculators'.

Each yields the problems it finds. What servers do is read from their loaders.
"""

from collections.abc import Iterator
from typing import Any

from draftsmith.models.layouts.block_layouts import MARKOV_HEAD, MASK_FILE
from draftsmith.models.servers.doctor_eagle import TWO_HEADS, tensors
from draftsmith.models.servers.findings import Case, Check, Finding, fault, warning

NESTED = "dflash_config"
FIELDS = ("block_size", "mask_token_id", "target_layer_ids")


def said(case: Case, name: str) -> Any:
    """A field, nested or above it."""
    return (case.raw.get(NESTED) or {}).get(name, case.config.get(name))


def counted_from_0(case: Case) -> bool:
    """Whether the layers named are those whose output is read; else those that have run."""
    return case.layout == "official-block"


def ids_of(case: Case) -> list[int]:
    name = "target_layer_ids" if counted_from_0(case) else "aux_hidden_state_layer_ids"
    return said(case, name) or []


def layer_ids(case: Case) -> Iterator[Finding]:
    """Which layers of the target are tapped, and whether fc reads as many."""
    ids, layers, start = ids_of(case), case.target_layers, int(counted_from_0(case))
    taps = [i + start for i in ids]
    fc, wide = case.checkpoint.meta.get("fc.weight"), int(case.config["hidden_size"])
    apart = case.config.get("target_hidden_size") or wide
    if fc is None or not ids:
        says = "no fc.weight" if fc is None else "no layers named"
        does = "vllm: taps three of its own choice; sglang: as many as the draft has layers"
        yield fault(says, "restore it", does if fc is not None else "")
        return
    if fc.shape[1] != len(ids) * apart:
        says = f"fc.weight reads {fc.shape[1]} numbers, {len(ids)} layers of {apart} are "
        does = "vllm, sglang, draftsmith: refuses it"
        yield fault(f"{says}{len(ids) * apart}", TWO_HEADS, does)
    if layers is None:
        return
    if outside := [i for i, tap in zip(ids, taps, strict=True) if not 0 < tap < layers]:
        says = f"layers {outside} of a target of {layers}, counted from {1 - start}"
        mend = "find out how they were counted in training; other readers count otherwise"
        yield fault(says, mend, "vllm: sees fewer taps than fc reads; sglang: refuses it")
    # DFlash's usual ones, as its layers are counted, and as the other layout counts.
    usual = [round(1 + i * (layers - 4) / max(1, len(ids) - 1)) for i in range(len(ids))]
    other = usual if not start else [i + 1 for i in usual]
    if len(ids) > 1 and ids == other:
        says = f"layers {ids} are the usual ones as {'speculators' if start else 'z-lab'} counts"
        mend = f"right if they were meant; else write {[i + 1 - 2 * start for i in ids]}"
        yield warning(says, mend, "vllm, sglang, draftsmith: reads states a layer off, if not")


def mask_token(case: Case) -> Iterator[Finding]:
    """What the rows that draft are fed with."""
    token, rows = said(case, "mask_token_id"), case.config.get("vocab_size")
    if token is None:
        does = "vllm, draftsmith: refuses it; sglang: looks for <|MASK|> in the tokenizer"
        yield fault("no mask_token_id", "write the one that it was trained with", does)
    elif rows is not None and not 0 <= token < rows:
        does = "vllm, sglang: reads past the target's table; draftsmith: refuses it"
        yield fault(f"mask_token_id {token} of {rows} tokens", "write the one of training", does)
    if (case.folder / MASK_FILE).exists():
        says, mend = f"a MASK of its own in {MASK_FILE}", "serve it with vLLM"
        does = "takes the target's embedding of mask_token_id"
        yield warning(says, mend, f"sglang, speculators: {does}")


def block(case: Case) -> Iterator[Finding]:
    """How many rows a block has, and which of them draft what."""
    size, nested = said(case, "block_size"), case.raw.get(NESTED) or {}
    if size is None:
        does = "sglang: takes 16; draftsmith: refuses it"
        yield fault("no block_size", "write the one that it was trained with", does)
        return
    for name in FIELDS:
        if None not in (own := (case.raw.get(name), nested.get(name))) and own[0] != own[1]:
            says = f"{name} {own[0]} at the top level, {own[1]} in {NESTED}"
            yield fault(says, "find out which it was trained with", "sglang: takes the second")
    kind = case.raw.get("speculators_model_type")
    spark = any(name.startswith(MARKOV_HEAD) for name in case.checkpoint.file_of)
    anchor = said(case, "sample_from_anchor")
    anchor = bool(spark if anchor is None else anchor)
    if anchor != spark:
        says = f"labels of {'DSpark' if anchor else 'DFlash'} (sample_from_anchor {anchor})"
        does = "vllm: drafts by the other's, a token off, and accepts next to nothing"
        yield fault(f"{says} in a head of the other kind", "train it with its own labels", does)
    levels = size - (not anchor)
    asked = (case.raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafted = asked[0].get("speculative_tokens", levels)
    if drafted != levels:
        says = f"speculative_tokens {drafted}, a block of {size} rows drafts {levels}"
        yield warning(says, f"write {levels}", "vllm: feeds another block than it was trained on")
    types = set(case.config.get("layer_types") or ["full_attention"])
    if kind and types == {"full_attention"} and case.raw.get("sliding_window_non_causal") is False:
        says = "sliding_window_non_causal is false, in a head without windows"
        yield warning(says, "write true", "vllm: may take its blocks for causal")
    head_type = said(case, "markov_head_type")
    if spark and head_type not in (None, "vanilla"):
        does = "vllm: knows the vanilla one alone"
        yield warning(f"a Markov head of type {head_type}", "serve it with SGLang", does)


def attention(case: Case) -> Iterator[Finding]:
    """Windows, and layers without norms on queries and keys."""
    types = set(case.config.get("layer_types") or ["full_attention"])
    if "sliding_attention" in types:
        says = f"its layers see {case.config.get('sliding_window')} tokens back"
        does = "refuses it" if len(types) > 1 else "sees all, so beyond that it may accept less"
        yield warning(says, "serve it with vLLM or SGLang", f"draftsmith: {does}")
    if not any("q_norm" in name for name in case.checkpoint.file_of):
        says, mend = "no norms on queries and keys", "train it with layers of Qwen3's kind"
        yield fault(
            says, mend, "vllm, sglang: leaves them as they are born; draftsmith: refuses it"
        )


BLOCK: dict[str, Check] = {
    "tensors": tensors,
    "layer ids": layer_ids,
    "MASK": mask_token,
    "block": block,
    "attention": attention,
}
