"""What is wrong with a drafter folder, ours or a downloaded one, and what each server would do.

Most of these faults are silent: the server loads the folder, drafts with a random layer, the wrong
states or other tokens, and stays lossless. It is just slow.

Shapes: V rows of the target's LM head, H hidden.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from draftsmith.models.disk.read_lm import load_config, read_json
from draftsmith.models.fingerprint import differences, fingerprint
from draftsmith.models.folder.drafter_folder import META, open_drafter
from draftsmith.models.folder.foreign import TargetNeeded, check_types, is_finite
from draftsmith.models.folder.imports import layout_of
from draftsmith.models.folder.tensors import Checkpoint, outline
from draftsmith.models.heads.head import heads
from draftsmith.models.server_facts import SGLANG_POSITIONS, STACKS
from draftsmith.models.servers.doctor_eagle import EAGLE1, EAGLE3
from draftsmith.models.servers.findings import (
    DRAFTSMITH,
    EAGLES,
    SERVERS,
    SGLANG,
    TRANSFORMERS,
    VLLM,
    Case,
    Check,
    Finding,
    fault,
    warning,
)
from draftsmith.models.servers.serve_lines import about
from draftsmith.models.tokenizer import TOKENIZER_FILES, check_same_tokenizer, load_tokenizer


def examine(folder: str, target: str | None = None) -> tuple[str, list[Finding]]:
    """(layout, findings) of a drafter folder; with a target, also whether it fits that.

    Raises ValueError for no folder, or a target that can't be read.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"got {folder}, which is no folder; expected a drafter folder")
    try:
        raw, checkpoint = read_json(path / "config.json"), Checkpoint(path)
        layout = layout_of(raw, set(checkpoint.meta), checkpoint.file) or _own_kind(path)
        case = Case(path, layout, raw, checkpoint)
        if layout in EAGLES:
            case.names.keys()  # no name stands twice
    except ValueError as error:
        unread = {server: "doesn't load it" for server in SERVERS}
        return "unknown", [Finding("files", "fault", str(error), unread, "copy the folder again")]
    if target is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, tokenizer = outline(target), load_tokenizer(target)
        case = Case(path, layout, raw, checkpoint, model, tokenizer, target)
    findings = [Finding("files", "ok")]
    if layout == "speculators" and raw["speculators_model_type"] != "eagle3":
        says = f"a speculator of type {raw['speculators_model_type']}, not EAGLE-3"
        return layout, [*findings, Finding("kind", "fault", says, {DRAFTSMITH: "doesn't read it"})]
    wrong = _misread(case)
    if wrong:
        return layout, [Finding("config.json", "fault", wrong, {}, "restore it")]
    for name, check in CHECKS.get(layout, EVERY).items():
        if check is fits and target is None:
            continue
        findings += [replace(one, check=name) for one in check(case)] or [Finding(name, "ok")]
    if not any(finding.verdict == "fault" for finding in findings):
        findings += opened(case)
    return layout, findings


def _own_kind(folder: Path) -> str:
    """The kind that our own file names, "lm" without one that is known."""
    kind = read_json(folder / META).get("kind") if (folder / META).exists() else "lm"
    return str(kind) if kind in heads() else "lm"


def _misread(case: Case) -> str:
    """What a config lacks, or holds in another type; "" where it is in order."""
    try:
        if case.layout != "lm":
            check_types(case.raw)
    except ValueError as error:
        return str(error)
    lacks = [n for n in SIZES if case.layout in EAGLES and not case.config.get(n)]
    return f"lacks {', '.join(lacks)}" if lacks else ""


def outlook(layout: str, findings: list[Finding]) -> dict[str, str]:
    """What each server does with the folder: how it reads the layout, then what spoils that."""
    reading = {STACKS[name].name: reads.says for name, reads in about(layout).stacks.items()}
    reading |= {} if layout == "unknown" else {DRAFTSMITH: "reads it"}
    said = {}
    judged = not any(f.check == "opened here" and f.verdict == "fault" for f in findings)
    for server in SERVERS:
        spoilt = [f for f in findings if server in f.servers]
        reads = [reading.get(server, "doesn't read it")]
        reads = reads if judged else ["not judged: the head in it isn't known"]
        reads = [] if any(f.verdict == "fault" for f in spoilt) else reads
        said[server] = "; ".join([*reads, *(f"{f.check}: {f.servers[server]}" for f in spoilt)])
    return said


def opened(case: Case) -> Iterator[Finding]:
    """Whether our own loader takes it, which compares every tensor with its config."""
    mark = None
    if case.target is not None and case.tokenizer is not None:
        mark = fingerprint(case.target, case.tokenizer, case.target_path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = open_drafter(
                case.folder, mark, target_tokenizer=case.tokenizer, target_config=case.target_config
            )
            if found.kind != "lm" and case.target is not None:
                found.head().bind(case.target)
    except TargetNeeded as error:
        yield Finding("opened here", "warning", str(error), {}, "doctor FOLDER target=TARGET")
        return
    except ValueError as error:
        refused = {DRAFTSMITH: "refuses it"}
        yield Finding("opened here", "fault", str(error), refused, "see the message")
        return
    yield Finding("opened here", "ok")
    if found.vocab is not None:  # of a draft LM: known to our decoder alone
        says = f"{len(found.vocab.ids_D)} of {found.vocab.size} tokens"
        servers = dict.fromkeys((VLLM, SGLANG, TRANSFORMERS), "drafts with its whole LM head")
        yield Finding("draft vocabulary", "ok", says, servers)


# ---- checks of every layout ---------------------------------------------------------------------


def finite(case: Case) -> Iterator[Finding]:
    """Numbers that are none."""
    broken = []
    for name in case.checkpoint.file_of:
        if not is_finite(case.checkpoint.read([name])[name]):
            broken.append(name)
    if broken:
        yield fault(
            f"{len(broken)} tensors aren't finite: {', '.join(broken[:3])}",
            "take an earlier checkpoint",
            vllm_sglang_draftsmith="loads it, and accepts nothing",
        )


def dtype(case: Case) -> Iterator[Finding]:
    """The type that the weights are served in."""
    kinds = {str(t.dtype).removeprefix("torch.") for t in case.checkpoint.meta.values()}
    stored = sorted(kinds & {"float64", "float32", "float16", "bfloat16"})
    said = case.config.get("torch_dtype") or case.config.get("dtype")
    if "float32" in stored or "float64" in stored:
        yield warning(
            f"weights in {' and '.join(stored)}",
            "save in bfloat16 (save_dtype: bfloat16): drafting is bound by the bytes it reads",
        )
    elif said and stored and said not in stored:
        yield warning(f"torch_dtype {said}, weights in {stored[0]}", f"write {stored[0]}")


def positions(case: Case) -> Iterator[Finding]:
    """How far the head's positions reach."""
    config = case.config
    if case.layout == "hydra":  # Hydra++'s layer; another toolkit's is of the target's sizes
        config = case.config.get("prefix") or {}
        if not config:
            return
    limit = config.get("max_position_embeddings")
    wanted = getattr(case.target_config, "max_position_embeddings", None)
    if limit is None:
        yield warning(
            "no max_position_embeddings", "write the target's", sglang=f"takes {SGLANG_POSITIONS}"
        )
    elif wanted is not None and limit < wanted:
        yield warning(
            f"max_position_embeddings {limit}, the target's {wanted}",
            f"write {wanted}; `python -m draftsmith export` does",
            vllm="raises it",
            sglang="may read past its table",
            draftsmith=f"ends decoding at {limit} tokens",
        )


def fits(case: Case) -> Iterator[Finding]:
    """Whether it was made for the target: sizes, tokenizer, weights."""
    if case.target is None or case.tokenizer is None:
        return
    config, wrong = case.config, []
    hidden = config.get("target_hidden_size") or config.get("hidden_size")
    wanted = {
        "hidden size": case.target_config.hidden_size,
        "vocab_size": case.target_config.vocab_size,
    }
    got = {"hidden size": hidden, "vocab_size": config.get("vocab_size")}
    heads = case.layout != "lm"
    wrong = [
        f"{name} {got[name]}, the target's {wanted[name]}"
        for name in wanted
        if got[name] not in (None, wanted[name]) and (heads or name == "vocab_size")
    ]
    meta = case.folder / META
    if meta.exists():
        mark = fingerprint(case.target, case.tokenizer, case.target_path)
        made_for = read_json(meta).get("target") or {}
        wrong += [part for part in differences(made_for, mark) if not part.startswith("hidden:")]
    if any(file.name.startswith(TOKENIZER_FILES) for file in case.folder.iterdir()):
        try:
            check_same_tokenizer(case.tokenizer, load_tokenizer(case.folder))
        except ValueError as error:
            wrong.append(str(error).split(";")[0])
    if wrong:
        yield fault(
            f"made for another target: {'; '.join(wrong)}",
            "give the target that it was trained on",
            vllm_sglang="fails, or accepts next to nothing",
            draftsmith="refuses it",
        )
    yield from _embeddings(case)


def _embeddings(case: Case) -> Iterator[Finding]:
    """Embeddings of its own that aren't the target's."""
    name = next((n for n in case.checkpoint.file_of if n.endswith("embed_tokens.weight")), None)
    if name is None or case.layout not in EAGLES:
        return
    assert case.target is not None
    own, table = case.checkpoint.read([name])[name], case.target.get_input_embeddings().weight
    assert isinstance(table, torch.Tensor)
    if own.shape == table.shape and not torch.equal(own, table.to(own.dtype)):
        far = (own.float() - table.float()).abs().max().item()
        yield warning(
            f"embeddings of its own, up to {far:.2g} from the target's",
            "serve it with vLLM, which keeps them",
            sglang_draftsmith="takes the target's",
        )


# ---- checks of Medusa, Hydra and draft LMs ------------------------------------------------------


def medusa_file(case: Case) -> Iterator[Finding]:
    """TGI looks for one file, and a field."""
    if case.checkpoint.file != "medusa_lm_head.safetensors":
        yield warning(
            f"the weights are in {case.checkpoint.file}",
            "`python -m draftsmith export to=tgi`",
            tgi="looks for medusa_lm_head.safetensors",
        )
    elif not case.raw.get("base_model_name_or_path"):
        yield warning(
            "no base_model_name_or_path", "write the target's", tgi="doesn't know the target"
        )
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
        yield warning(
            f"{rows} logits, the target has {wanted}",
            f"train it with vocab_size={wanted}",
            vllm="refuses it, unless use_heterogeneous_vocab",
            transformers="refuses it as an assistant",
        )


SIZES = ("hidden_size", "intermediate_size", "num_attention_heads")
EVERY: dict[str, Check] = {"finite numbers": finite, "dtype": dtype, "target": fits}
CHECKS: dict[str, dict[str, Check]] = {
    "eagle1": EAGLE1 | {"positions": positions} | EVERY,
    "eagle3": EAGLE3 | {"positions": positions} | EVERY,
    "speculators": EAGLE3 | {"positions": positions} | EVERY,
    "medusa": {"heads and file": medusa_file} | EVERY,
    "hydra": {"positions": positions} | EVERY,
    "lm": {"logits": draft_lm} | {name: EVERY[name] for name in ("finite numbers", "dtype")},
}
