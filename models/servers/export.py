"""A drafter in the layout of another stack: SGLang, vLLM, `speculators`, TGI.

Our EAGLE-3 folders are what vLLM and SGLang read, and our draft LMs are plain transformers folders;
export then writes them without our own file, and refuses what a server would load and draft wrongly
with. How a head is written is its class's matter (`Head.exported`); every tensor is the drafter's,
bit for bit.
"""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from draftsmith.models.disk.read_lm import load_config, write_json
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import META, open_drafter
from draftsmith.models.folder.tensors import outline
from draftsmith.models.servers.serve_lines import about, launch
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.models.vocab import FILE

LAYOUTS = ("sglang", "vllm", "speculators", "tgi")


def export(drafter: str, target: str, to: str, out: str) -> str:
    """Write the drafter in `drafter` as stack `to`, one of `LAYOUTS`, reads it, into the new
    folder `out`; returns the command that serves it there.

    Of the target its config, tokenizer, embeddings, LM head and final norm are read, whatever files
    they stand in. The drafter may be another toolkit's, see `imports`.
    ValueError: an unknown stack, one that doesn't load such drafters or would draft wrongly with
    this one, a drafter made for another target, an `out` that holds something.
    """
    if to not in LAYOUTS:
        raise ValueError(f"to: got {to!r}, expected one of {', '.join(LAYOUTS)}")
    folder = Path(os.path.abspath(out))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out: got {folder}, which holds something; expected a new folder")
    if Path(target).is_dir():
        target = os.path.abspath(target)  # some layouts name it
    model, tokenizer = outline(target), load_tokenizer(target)
    given: Any = {"target_tokenizer": tokenizer, "target_config": model.config}
    opened = open_drafter(drafter, fingerprint(model, tokenizer, target), **given)
    kind, K = opened.kind, opened.meta["defaults"]["K"]
    stacks = about(kind).stacks
    if to not in stacks:
        able = [name for name in LAYOUTS if name in stacks]
        others = f"these do: {', '.join(able)}" if able else "no server does: decode with it here"
        raise ValueError(
            f"to={to}: got a drafter of kind {kind}, which {to} doesn't load; {others}"
        )
    if kind == "lm":
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
        made = opened.head().bind(model).exported(to, model, K)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", made.config)
        tensors = {name: tensor.detach().contiguous() for name, tensor in made.tensors.items()}
        save_file(tensors, folder / made.file, metadata={"format": "pt"})
    return launch(to, kind, folder, target, K)
