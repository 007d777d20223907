"""A drafter in the layout of another stack (SGLang, vLLM, `speculators`, TGI), and the commands
that serve a target with it, ready to copy; K: drafted tokens by default.

Our EAGLE-3 folders are what vLLM and SGLang read, and our draft LMs are plain transformers folders;
export then writes them without our own file, and refuses what a server would load and draft wrongly
with. How a head is written is its class's matter (`Head.exported`); every tensor is the drafter's,
bit for bit.
"""

import json
import os
import shlex
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.models.disk.read_lm import load_config, read_json, save_tensors, write_json
from draftsmith.models.draft_lm import mask_token
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import META, open_drafter, read_meta
from draftsmith.models.folder.tensors import outline
from draftsmith.models.heads.head import CONVERTED, TAKES, Kind, Reads, heads
from draftsmith.models.server_facts import FIRST, NO_OVERLAP, SERVES, STACKS
from draftsmith.models.servers.gguf_file import to_gguf
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.models.vocab import FILE

LAYOUTS = ("sglang", "vllm", "speculators", "tgi", "gguf")
LM = {"vllm": "draft_model", "sglang": "STANDALONE", "transformers": "", "gguf": "draft-simple"}
LM |= {"tensorrt": "DraftTarget", "mlx": "", "lmstudio": ""}
PASSES = {"vllm": "draft_model", "tensorrt": "PARD"}  # draft LMs with a MASK, by their names for it
READS = {"gguf": CONVERTED, "mlx": CONVERTED, "tensorrt": TAKES}
# Layouts that are no kind of head of ours.
OTHERS = {
    "lm": Kind(
        "a draft LM",
        {to: Reads(name, True, READS.get(to, "reads it")) for to, name in LM.items()},
    ),
    "speculators-block": Kind(
        "a block drafter in speculators' format", {"vllm": Reads(), "speculators": Reads()}
    ),
    "official-block": Kind(
        "a block drafter in the official layout",
        {to: Reads() for to in ("vllm", "sglang", "gguf", "tensorrt")},
    ),
    "speculators": Kind(
        "EAGLE-3 in speculators' format",
        {"vllm": Reads(), "sglang": Reads(says="after export to=sglang"), "speculators": Reads()}
        | {"gguf": Reads(says=CONVERTED)},
    ),
    "unknown": Kind("a folder that can't be read"),
}


def about(layout: str) -> Kind:
    """What is known of a layout, or of a drafter's kind."""
    return OTHERS.get(layout) or heads()[layout].kinds[layout]


def export(drafter: str, target: str, to: str, out: str, converter: str = "") -> str:
    """Write the drafter in `drafter` as stack `to`, one of `LAYOUTS`, reads it, into the new
    folder `out`; returns the command that serves it there. gguf: a draft LM, into the new file
    `out`, by llama.cpp's `converter`.

    Of the target its config, tokenizer, embeddings, LM head and final norm are read, whatever files
    they stand in. The drafter may be another toolkit's, see `imports`.
    ValueError: an unknown stack, one that doesn't load such drafters or would draft wrongly with
    this one, a drafter made for another target, an `out` that holds something.
    """
    if to not in LAYOUTS:
        raise ValueError(f"to: got {to!r}, expected one of {', '.join(LAYOUTS)}")
    folder = Path(os.path.abspath(out))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "file" if to == "gguf" else "folder"
        raise ValueError(f"out: got {folder}, which holds something; expected a new {what}")
    if Path(target).is_dir():
        target = os.path.abspath(target)  # some layouts name it
    model, tokenizer = outline(target), load_tokenizer(target)
    given: Any = {"target_tokenizer": tokenizer, "target_config": model.config}
    opened = open_drafter(drafter, fingerprint(model, tokenizer, target), **given)
    kind, K = opened.kind, served_K(opened.meta)
    stacks = about(kind).stacks
    if to == "gguf" and to in stacks and kind != "lm":
        raise ValueError(
            f"to=gguf: got a drafter of kind {kind}, expected a draft LM; llama.cpp's converter "
            "takes it by the line that is printed after training"
        )
    if to not in stacks:
        config, known = read_json(opened.path / "config.json"), LAYOUTS[:-1]
        able = [name for name in known if name in stacks and not stacks[name].misread(config)]
        others = f"these do: {', '.join(able)}" if able else "no server does: decode with it here"
        raise ValueError(
            f"to={to}: got a drafter of kind {kind}, which {to} doesn't load; {others}"
        )
    if to == "gguf":
        to_gguf(opened.path, target, {"target": model, "tokenizer": tokenizer}, converter, folder)
    elif kind == "lm":
        rows = load_config(opened.path).get_text_config().vocab_size
        wanted = model.config.get_text_config().vocab_size
        if rows != wanted:
            warnings.warn(
                f"the draft has {rows} logits and the target {wanted}: servers want as many; train "
                f"it with vocab_size={wanted}",
                stacklevel=2,
            )
        # A plain transformers folder already: all but our own files. Servers draft all its tokens.
        ours = shutil.ignore_patterns(META, FILE)
        shutil.copytree(opened.path, folder, ignore=ours, dirs_exist_ok=True)
    else:
        head = opened.head().bind(model)
        head.drafts = opened.vocab
        made = head.exported(to, model, K)
        K = made.K or K
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", made.config)
        save_tensors(folder / made.file, made.tensors)
        for file, content in made.beside.items():
            torch.save(content, folder / file)
    config = read_json(opened.path / "config.json") if kind == "lm" else {}
    return launch(to, stacks[to].method, folder, target, K, mask=mask_token(config))


def serve_line(
    folder_path: str | Path, target: str, rates: Sequence[float] = (), named: str = ""
) -> str:
    """Commands that serve the target with this drafter, one a line: from its folder as it is where
    any server reads that, else from one that `export` writes.

    rates: the shares of rounds that kept at least 1, 2 ... drafted tokens. Then only those of
    servers that can make up answers at such an acceptance, with as many tokens a round: how fast
    they would be is measured so, before deployment. named: the folder in the commands, where it is
    to be another.
    """
    here, folder, quoted = Path(folder_path), Path(named or folder_path), shlex.quote(target)
    meta = read_meta(here)
    K, known = served_K(meta), about(meta["kind"])
    title, stacks = known.title, known.stacks
    if rates:
        stacks = {to: reads for to, reads in stacks.items() if STACKS[to].synthetic}
    elif not stacks:
        return (
            f"# no server loads {title}; decode here: python -m draftsmith evaluate "
            f"target={quoted} drafter={shlex.quote(str(folder))}"
        )
    lines, config = [], read_json(here / "config.json")
    K = len(rates) or config.get("levels", K)  # a block is drafted whole
    export = f"python -m draftsmith export drafter={shlex.quote(str(folder))} target={quoted}"
    as_it_is = {stack: reads for stack, reads in stacks.items() if reads.ours}
    for stack, reads in (as_it_is or stacks).items():
        if reason := reads.misread(config):
            lines.append(f"# not for {STACKS[stack].name}: {reason}")
            continue
        to = STACKS[stack].layout or stack
        out = folder if reads.ours else folder.with_name(f"{folder.name}-{to}")
        first = "" if reads.ours else f"{export} to={to} out={shlex.quote(str(out))} && "
        lines.append(first + launch(stack, reads.method, out, target, K, rates, mask_token(config)))
    if rates:
        return "\n".join(line for line in lines if not line.startswith("#"))
    if mask_token(config) is not None:
        ahead = " and ".join(STACKS[stack].name for stack in PASSES)
        lines.append(f"# {ahead} draft a round in one pass of it, the others token by token")
    without = [STACKS[stack].name for stack in ("vllm", "sglang") if stack not in stacks]
    lines += [f"# not for {' and '.join(without)}: they load no such head"] if without else []
    return "\n".join([*lines, *_notes(here, meta)])


def served_K(meta: dict[str, Any]) -> int:
    """Drafted tokens a round of a server."""
    defaults = meta["defaults"]
    return int(defaults["served_K"] or defaults["K"])


def launch(
    stack: str,
    method: str,
    folder: Path,
    target: str,
    K: int,
    rates: Sequence[float] = (),
    mask: int | None = None,
) -> str:
    """The command for a folder that the stack reads, after what makes its own file of that; vLLM
    would guess the method from the path. rates: see `serve_line`; mask: MASK of a draft LM
    that drafts a round in one pass.
    """
    about = STACKS[stack]
    options: dict[str, Any] = {"method": method, "model": str(folder), "num_speculative_tokens": K}
    if rates:
        options |= {"rejection_sample_method": "synthetic"}
        options |= {"synthetic_acceptance_rates": list(rates)}
    if mask is not None:
        options, method = options | {"parallel_drafting": True}, PASSES.get(stack, method)
    draft = {"decoding_type": method, "max_draft_len": K, "speculative_model": str(folder)}
    draft |= {} if mask is None else {"mask_token_id": mask}
    yaml: dict[str, Any] = {"speculative_config": draft}
    yaml |= {"disable_overlap_scheduler": True} if method in NO_OVERLAP else {}
    made = folder.with_name(folder.name.removesuffix(about.makes) + about.makes)
    first = "" if made == folder else FIRST.get(method, about.first)
    first, serve = (
        text.format(
            target=shlex.quote(target),
            folder=shlex.quote(str(folder)),
            made=shlex.quote(str(made)),
            literal=repr(str(folder)),
            options=shlex.quote(json.dumps(options)),
            yaml=shlex.quote(json.dumps(yaml)),
            method=method,
            K=K,
            nodes=K + 1,
        )
        for text in (first, SERVES.get(method, about.serve))
    )
    if rates:
        listed = ",".join(map(str, rates))
        serve = about.synthetic.format(serve=serve, tau=1 + sum(rates), rates=listed)
    return f"{first} && {serve}" if first else serve


def _notes(folder: Path, meta: dict[str, Any]) -> list[str]:
    """What servers make of its vocabulary."""
    lines = []
    if (folder / FILE).exists():
        drafted = meta["vocabulary_map"]
        lines.append(
            "# but for speculators' layout of block drafters servers know no such map: there "
            f"it drafts all {drafted['target']:,} tokens, here {drafted['draft']:,}"
        )
    if meta["kind"] != "lm":
        return lines
    rows = load_config(folder).get_text_config().vocab_size
    wanted = (meta["target"] or {}).get("logit_rows", rows)
    if rows != wanted:
        lines.append(
            f"# vLLM and transformers want equal vocab_size: the draft has {rows}, the target "
            f"{wanted}; train it with vocab_size={wanted}"
        )
    return lines
