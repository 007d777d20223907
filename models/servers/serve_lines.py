"""The commands that serve a target with a drafter, ready to copy; K: drafted tokens by default."""

import json
import shlex
from pathlib import Path
from typing import Any

from draftsmith.models.disk.read_lm import load_config, read_json
from draftsmith.models.folder.drafter_folder import read_meta
from draftsmith.models.heads.head import Kind, Reads, heads
from draftsmith.models.server_facts import STACKS

LM = {"vllm": "draft_model", "sglang": "STANDALONE", "transformers": ""}
# Layouts that are no kind of head of ours.
OTHERS = {
    "lm": Kind("a draft LM", {stack: Reads(name, ours=True) for stack, name in LM.items()}),
    "speculators": Kind(
        "EAGLE-3 in speculators' format",
        {"vllm": Reads(), "sglang": Reads(says="after export to=sglang"), "speculators": Reads()},
    ),
    "unknown": Kind("a folder that can't be read"),
}


def about(layout: str) -> Kind:
    """What is known of a layout, or of a drafter's kind; ValueError where nothing is."""
    classes = heads()
    if layout not in OTHERS and layout not in classes:
        known = ", ".join(("lm", *classes))
        raise ValueError(f"got drafter kind {layout!r}; expected one of {known}; correct it")
    return OTHERS.get(layout) or classes[layout].kinds[layout]


def serve_line(folder_path: str | Path, kind: str, target: str) -> str:
    """Commands that serve the target with this drafter, one a line: from its folder as it is where
    any server reads that, else from one that `export` writes.
    """
    folder, known = Path(folder_path), about(kind)
    meta, quoted = read_meta(folder), shlex.quote(target)
    K, title = meta["defaults"]["K"], known.title
    if not known.stacks:
        return (
            f"# no server loads {title}; decode here: python -m draftsmith evaluate "
            f"target={quoted} drafter={shlex.quote(str(folder))}"
        )
    lines = []
    export = f"python -m draftsmith export drafter={shlex.quote(str(folder))} target={quoted}"
    as_it_is = [stack for stack, reads in known.stacks.items() if reads.ours]
    for stack in as_it_is:
        config = {} if kind == "lm" else read_json(folder / "config.json")
        reason = heads()[kind].misread(stack, config) if config else None
        server = STACKS[stack].name.split()[0]
        told = f"# {server} would draft wrongly with it: {reason}" if reason else ""
        lines.append(told or launch(stack, kind, folder, target, K))
    for stack in () if as_it_is else known.stacks:
        out = folder.with_name(f"{folder.name}-{stack}")
        to = f"to={stack} out={shlex.quote(str(out))}"
        lines.append(f"{export} {to} && {launch(stack, kind, out, target, K)}")
    without = [STACKS[stack].name for stack in ("vllm", "sglang") if stack not in known.stacks]
    lines += [f"# {' and '.join(without)} load no {title}"] if without else []
    return "\n".join([*lines, *(_notes(folder, meta) if kind == "lm" else [])])


def launch(stack: str, kind: str, folder: Path, target: str, K: int) -> str:
    """The command for a folder that the stack reads; vLLM would guess the method from the path."""
    method = about(kind).stacks[stack].method
    options = {"method": method, "model": str(folder), "num_speculative_tokens": K}
    return STACKS[stack].serve.format(
        target=shlex.quote(target),
        folder=shlex.quote(str(folder)),
        literal=repr(str(folder)),
        options=shlex.quote(json.dumps(options)),
        method=method,
        K=K,
        nodes=K + 1,
    )


def _notes(folder: Path, meta: dict[str, Any]) -> list[str]:
    """What servers make of a draft LM's vocabulary."""
    lines, drafted = [], meta.get("vocabulary_map")
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
