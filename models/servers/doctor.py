"""What is wrong with a drafter folder, ours or a downloaded one, and what each server would do.

Most of these faults are silent: the server loads the folder, drafts with a random layer, the wrong
states or other tokens, and stays lossless. It is just slow.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.models.disk.read_lm import load_config, read_json
from draftsmith.models.fingerprint import differences
from draftsmith.models.folder.drafter_folder import META, open_drafter
from draftsmith.models.folder.foreign import TargetNeeded, check_types, is_finite
from draftsmith.models.folder.imports import layout_of
from draftsmith.models.folder.tensors import Checkpoint, outline
from draftsmith.models.heads.head import heads
from draftsmith.models.server_facts import SGLANG_POSITIONS, STACKS
from draftsmith.models.servers.doctor_block import BLOCK
from draftsmith.models.servers.doctor_eagle import EAGLE1, EAGLE3
from draftsmith.models.servers.doctor_gguf import llama_cpp
from draftsmith.models.servers.export import about
from draftsmith.models.servers.findings import (
    BLOCK_LAYOUTS,
    EAGLES,
    SERVERS,
    Case,
    Check,
    Finding,
    fault,
    warning,
)
from draftsmith.models.tokenizer import TOKENIZER_FILES, check_same_tokenizer, load_tokenizer

OURS = STACKS["draftsmith"].name


def examine(folder: str, target: str | None = None) -> tuple[str, list[Finding]]:
    """(layout, findings) of a folder, for a target if given; ValueError where one can't be read."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"got {folder}, which is no folder; expected a drafter folder")
    try:
        raw, checkpoint = read_json(path / "config.json"), Checkpoint(path)
        own = read_json(path / META).get("kind") if (path / META).exists() else None
        layout = str(own) if own in heads() else None
        layout = layout or layout_of(raw, set(checkpoint.meta), checkpoint.file) or "lm"
        case = Case(path, layout, raw, checkpoint)
        if layout in EAGLES:
            case.names.keys()  # no name stands twice
    except ValueError as error:
        unread = dict.fromkeys(SERVERS, "doesn't load it")
        return "unknown", [Finding("files", "fault", str(error), unread, "copy the folder again")]
    if target is not None:
        with warnings.catch_warnings(action="ignore"):
            model, tokenizer = outline(target), load_tokenizer(target)
        case = replace(case, target=model, tokenizer=tokenizer, target_path=target)
    findings = [Finding("files", "ok")]
    if layout == "speculators" and raw["speculators_model_type"] != "eagle3":
        says = f"a speculator of type {raw['speculators_model_type']}, not EAGLE-3"
        return layout, [*findings, Finding("kind", "fault", says, {OURS: "doesn't read it"})]
    try:
        if layout != "lm":
            check_types(raw)
        if lacks := [n for n in SIZES if layout in THEIRS and not case.config.get(n)]:
            raise ValueError(f"lacks {', '.join(lacks)}")
    except ValueError as error:
        return layout, [Finding("config.json", "fault", str(error), {}, "restore it")]
    checks = dict(CHECKS.get(layout, EVERY))
    if target is None:
        checks.pop("target", None)
    for name, check in checks.items():
        findings += [replace(one, check=name) for one in check(case)] or [Finding(name, "ok")]
    if not any(finding.verdict == "fault" for finding in findings):
        findings += opened(case)
    return layout, findings


def outlook(layout: str, findings: list[Finding]) -> dict[str, str]:
    """What each server does with the folder: how it reads the layout, then what spoils that."""
    reading = {STACKS[name].name: reads.says for name, reads in about(layout).stacks.items()}
    reading |= {} if layout == "unknown" else {OURS: "reads it"}
    if any(f.check == "opened here" and f.verdict == "fault" for f in findings):
        reading = dict.fromkeys(SERVERS, "not judged: the head in it isn't known")
    said = {}
    for server in SERVERS:
        spoilt = [f for f in findings if server in f.servers]
        broken = any(f.verdict == "fault" for f in spoilt)
        reads = [] if broken else [reading.get(server, "doesn't read it")]
        said[server] = "; ".join([*reads, *(f"{f.check}: {f.servers[server]}" for f in spoilt)])
    return said


def opened(case: Case) -> list[Finding]:
    """Whether our own loader takes it, which compares every tensor with its config."""
    name = "opened here"
    given: Any = {"target_tokenizer": case.tokenizer, "target_config": case.target_config}
    try:
        with warnings.catch_warnings(action="ignore"):
            found = open_drafter(case.folder, case.mark, **given)
            if found.kind != "lm" and case.target is not None:
                found.head().bind(case.target)
    except TargetNeeded as error:
        return [Finding(name, "warning", str(error), {}, "doctor FOLDER target=TARGET")]
    except ValueError as error:
        return [Finding(name, "fault", str(error), {OURS: "refuses it"}, "see the message")]
    findings = [Finding(name, "ok")]
    if found.vocab is not None and found.foreign is None:  # known to our decoder alone
        says = f"{len(found.vocab.ids_D)} of {found.vocab.size} tokens"
        whole = about(found.kind).stacks
        servers = {STACKS[stack].name: "drafts with its whole LM head" for stack in whole}
        findings.append(Finding("draft vocabulary", "ok", says, servers))
    return findings


# ---- checks of every layout ---------------------------------------------------------------------


def finite(case: Case) -> Iterator[Finding]:
    """Numbers that are none."""
    checkpoint = case.checkpoint
    broken = [n for n in checkpoint.file_of if not is_finite(checkpoint.read([n])[n])]
    if broken:
        says = f"{len(broken)} tensors aren't finite: {', '.join(broken[:3])}"
        does = "vllm, sglang, draftsmith: loads it, and accepts nothing"
        yield fault(says, "take an earlier checkpoint", does)


def dtype(case: Case) -> Iterator[Finding]:
    """The type that the weights are served in."""
    kinds = {str(t.dtype).removeprefix("torch.") for t in case.checkpoint.meta.values()}
    stored = sorted(kinds & {"float64", "float32", "float16", "bfloat16"})
    said = case.config.get("torch_dtype") or case.config.get("dtype")
    if "float32" in stored or "float64" in stored:
        mend = "save in bfloat16 (save_dtype: bfloat16): drafting is bound by the bytes it reads"
        yield warning(f"weights in {' and '.join(stored)}", mend)
    elif said and stored and said not in stored:
        yield warning(f"torch_dtype {said}, weights in {stored[0]}", f"write {stored[0]}")


def positions(case: Case) -> Iterator[Finding]:
    """How far the head's positions reach."""
    # Of Hydra++ its layer's; another toolkit's is of the target's sizes.
    config = case.config.get("prefix") if case.layout == "hydra" else case.config
    if not config:
        return
    limit = config.get("max_position_embeddings")
    wanted = getattr(case.target_config, "max_position_embeddings", None)
    if limit is None:
        does = f"sglang: takes {SGLANG_POSITIONS}"
        yield warning("no max_position_embeddings", "write the target's", does)
    elif wanted is not None and limit < wanted:
        says = f"max_position_embeddings {limit}, the target's {wanted}"
        does = f"sglang: may read past its table; draftsmith: ends decoding at {limit} tokens"
        mend = f"write {wanted}; `python -m draftsmith export` does"
        yield warning(says, mend, f"vllm: raises it; {does}")


def fits(case: Case) -> Iterator[Finding]:
    """Whether it was made for the target: sizes, tokenizer, weights, embeddings of its own."""
    assert case.target is not None and case.tokenizer is not None and case.mark is not None
    config, wanted = case.config, case.target_config
    width = config.get("target_hidden_size") or config.get("hidden_size")
    rows = config.get("vocab_size")
    pairs = ("hidden size", width, wanted.hidden_size), ("vocab_size", rows, wanted.vocab_size)
    wrong = [f"{n} {got}, the target's {due}" for n, got, due in pairs if got not in (None, due)]
    if (case.folder / META).exists():
        made_for = read_json(case.folder / META).get("target") or {}
        parts = differences(made_for, case.mark)
        wrong += [part for part in parts if not part.startswith("hidden:")]
    if any(file.name.startswith(TOKENIZER_FILES) for file in case.folder.iterdir()):
        try:
            check_same_tokenizer(case.tokenizer, load_tokenizer(case.folder))
        except ValueError as error:
            wrong.append(str(error).split(";")[0])
    if wrong:
        yield fault(
            f"made for another target: {'; '.join(wrong)}",
            "give the target that it was trained on",
            "vllm, sglang: fails, or accepts next to nothing; draftsmith: refuses it",
        )
    embeds = [n for n in case.checkpoint.file_of if n.endswith("embed_tokens.weight")]
    if not embeds or case.layout not in THEIRS:
        return
    own = case.checkpoint.read(embeds[:1])[embeds[0]]
    table = case.target.get_input_embeddings().weight
    assert isinstance(table, torch.Tensor)
    if own.shape == table.shape and not torch.equal(own, table.to(own.dtype)):
        far = (own.float() - table.float()).abs().max().item()
        says = f"embeddings of its own, up to {far:.2g} from the target's"
        does = "sglang, draftsmith: takes the target's"
        yield warning(says, "serve it with vLLM, which keeps them", does)


# ---- checks of Medusa, Hydra and draft LMs ------------------------------------------------------


def medusa_file(case: Case) -> Iterator[Finding]:
    """TGI looks for one file, and a field."""
    file, wanted = case.checkpoint.file, "medusa_lm_head.safetensors"
    if file != wanted:
        mend = "`python -m draftsmith export to=tgi`"
        yield warning(f"the weights are in {file}", mend, f"tgi: looks for {wanted}")
    elif not case.raw.get("base_model_name_or_path"):
        does = "tgi: doesn't know the target"
        yield warning("no base_model_name_or_path", "write the target's", does)
    heads = {name.split(".")[0] for name in case.checkpoint.file_of if name[0].isdigit()}
    said = case.raw.get("medusa_num_heads")
    if heads and said != len(heads):
        yield warning(f"medusa_num_heads {said}, the file has {len(heads)}", f"write {len(heads)}")


def draft_lm(case: Case) -> Iterator[Finding]:
    """The logits that a server compares with the target's."""
    if case.target is None:
        return
    rows = load_config(case.folder).get_text_config().vocab_size
    wanted = case.target_config.vocab_size
    if rows != wanted:
        says, mend = f"{rows} logits, the target has {wanted}", f"train it with vocab_size={wanted}"
        does = "vllm: refuses it, unless use_heterogeneous_vocab"
        yield warning(says, mend, f"{does}; transformers: refuses it as an assistant")


THEIRS = (*EAGLES, *BLOCK_LAYOUTS)
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads")
EVERY: dict[str, Check] = {"finite numbers": finite, "dtype": dtype, "target": fits}
CHECKS: dict[str, dict[str, Check]] = {
    "eagle1": EAGLE1 | {"positions": positions} | EVERY,
    **dict.fromkeys(("eagle3", "speculators"), EAGLE3 | {"positions": positions} | EVERY),
    **dict.fromkeys(BLOCK_LAYOUTS, BLOCK | {"positions": positions} | EVERY),
    "mtp": {"positions": positions} | EVERY,
    "medusa": {"heads and file": medusa_file} | EVERY,
    "hydra": {"positions": positions} | EVERY,
    "lm": {"logits": draft_lm, "vocabulary": llama_cpp}
    | {name: EVERY[name] for name in ("finite numbers", "dtype")},
}
