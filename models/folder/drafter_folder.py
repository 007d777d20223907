"""The drafter folder: what every recipe writes and the decoder loads.

`config.json` and `model.safetensors` with the tokenizer's files are a plain transformers folder, or
a head; `draftsmith.json` beside them says which kind of drafter this is, which target it was made
for, and where it comes from. A folder is replaced only by a whole one, and read only when it is
whole.
"""

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftsmith.models.disk.hub import local_folder
from draftsmith.models.disk.read_lm import (
    check_header,
    check_tensors,
    load_config,
    read_json,
    refuse_faults,
    write_json,
)
from draftsmith.models.disk.store import previous, whole_folder, write_atomically
from draftsmith.models.draft_lm import load_draft
from draftsmith.models.fingerprint import differences
from draftsmith.models.folder.imports import Foreign, recognise
from draftsmith.models.folder.tensors import FILES, Checkpoint
from draftsmith.models.heads.head import Head, assembled, heads, outlined
from draftsmith.models.tokenizer import (
    TOKENIZER_FILES,
    check_logit_width,
    check_same_tokenizer,
    load_tokenizer,
)
from draftsmith.models.vocab import DraftVocab, read_vocab

SCHEMA = 1
META = "draftsmith.json"
# How to decode; served_K: of servers, which draft chains alone, None where that is K.
DEFAULTS = {"K": 4, "policy": "auto", "rule": "coupled", "tree": None, "served_K": None}
DEFAULTS |= {"preview": None}  # the rank of what foretells its LM head's logits


def save_drafter(
    folder: str | Path,
    *,
    kind: str,
    model: PreTrainedModel | Head,
    tokenizer: PreTrainedTokenizerBase,
    target_fingerprint: dict[str, Any],
    provenance: dict[str, Any],
    defaults: dict[str, Any],
    vocab: DraftVocab | None = None,
) -> None:
    """Write a drafter folder, whole and checked or not at all.

    kind: "lm", or of `heads()`; model: saved in the dtype it has; target_fingerprint: of the target
    it was trained for; provenance: see `provenance.provenance`; defaults: how to decode with it,
    keys of `DEFAULTS`; vocab: the tokens that it drafts (None: all, or those that a head says), its
    weights stay whole. ValueError for an unknown kind or default, weights that aren't finite, a
    folder that holds something else; OSError where the disk is full: it says what is still there.
    """
    folder = Path(os.path.abspath(folder))
    _known_kind(kind, folder)
    unknown = sorted(defaults.keys() - DEFAULTS.keys())
    if unknown:
        raise ValueError(
            f"got defaults {unknown}; expected keys of {sorted(DEFAULTS)}; correct them"
        )
    if folder.exists() and not (folder / META).exists() and any(folder.iterdir()):
        raise ValueError(
            f"got {folder}, which exists and isn't a drafter folder; expected a new one, or a "
            "drafter folder to replace; choose another"
        )
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise ValueError(
            f"got weights that aren't finite ({', '.join(broken[:4])}); expected numbers; "
            f"nothing was written to {folder}: go back to an earlier state"
        )
    vocab = vocab or (model.drafts if isinstance(model, Head) else None)
    drafts = vocab or (model.vocab if isinstance(model, Head) else None)
    drafts = None if drafts is None or drafts.is_full else drafts
    meta = {
        "schema": SCHEMA,
        "kind": kind,
        "target": target_fingerprint,
        "taps": list(model.taps) if isinstance(model, Head) else None,
        "vocabulary_map": drafts and {"draft": len(drafts.ids_D), "target": drafts.size},
        "defaults": DEFAULTS | defaults,
        "provenance": provenance,
    }
    try:
        with whole_folder(folder) as new:
            model.save_pretrained(new, max_shard_size="1000GB")  # one file
            tokenizer.save_pretrained(new)
            write_json(new / META, meta)
            if vocab is not None:
                vocab.save(new, target_fingerprint["tokenizer"])
            _check_weights(new, kind)
    except (OSError, SafetensorError) as error:
        kept = "what was saved there before is unchanged" if folder.exists() else "nothing is there"
        raise OSError(f"could not save the drafter to {folder}: {error}; {kept}") from error


@dataclass(frozen=True)
class DrafterFolder:
    """A drafter folder that was found whole: where it is, its kind, its draftsmith.json; of another
    toolkit's head, how to read it; the tokens that it drafts, where its weights don't say (None:
    all).
    """

    path: Path
    kind: str
    meta: dict[str, Any]
    foreign: tuple[Foreign, Checkpoint] | None = None
    vocab: DraftVocab | None = None

    def model(self, dtype: str = "auto") -> PreTrainedModel:
        """The draft LM in eval mode, in the saved dtype unless another is named."""
        assert self.kind == "lm", f"{self.path} is a {self.kind} head"
        return load_draft(self.path, dtype)

    def head(self, dtype: str = "auto") -> Head:
        """The head in eval mode, in the saved dtype unless another is named; whatever it is to
        draft, which is the decoder's matter, it knows all tokens.
        """
        if self.foreign is None:
            config = read_json(self.path / "config.json")
            tensors = load_file(self.path / "model.safetensors")
            return assembled(heads()[self.kind], config, tensors, dtype)
        return self.foreign[0].head(self.foreign[1], dtype)


def open_drafter(
    folder: str | Path,
    target_fingerprint: dict[str, Any] | None,
    *,
    allow_target_mismatch: bool = False,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    target_config: PretrainedConfig | None = None,
) -> DrafterFolder:
    """Check a drafter folder, or that of a hub name, without reading its weights yet.

    Without `draftsmith.json` a plain causal LM opens as kind "lm", and another toolkit's head (see
    `imports`) as what it is, both with a warning: of these only a tokenizer can be checked.

    target_fingerprint: of the target it is to draft for, None skips that check;
    allow_target_mismatch: accept another target (not another tokenizer); target_tokenizer: given, a
    draft with other tokens is refused by the ids that differ; target_config: for what other
    toolkits' heads leave to the target. ValueError for a file that is missing, cut or foreign; a
    tensor that is missing, unknown or of another shape; another schema, kind, target or tokenizer.
    """
    before = previous(Path(os.path.abspath(folder)))  # the name of `.` too
    folder = Path(folder) if before.exists() else local_folder(folder)
    if not folder.is_dir():
        hint = "check the path"
        if before.exists():
            hint = f"a save was cut between two renames: mv {before} {folder} restores the last one"
        raise ValueError(f"got {folder}, which is no folder; expected a drafter folder; {hint}")
    foreign = _open_foreign(folder, target_config, target_tokenizer)
    if foreign is not None:
        return foreign
    meta = read_meta(folder)
    _check_weights(folder, meta["kind"])
    config = read_json(folder / "config.json")
    rows = int(config.get("vocab_size") or 0)
    if meta["kind"] == "lm":
        rows = load_config(folder).get_text_config().vocab_size
    # EAGLE-3 heads have their map among their weights.
    own = meta["kind"] != "lm" and "draft_vocab_size" in config
    vocab = None if own else read_vocab(folder, meta, rows)
    drafter = DrafterFolder(folder, meta["kind"], meta, vocab=vocab)
    tokenizer = load_tokenizer(folder)
    check_logit_width(rows, tokenizer, f"the draft {folder}")
    if target_tokenizer is not None:
        check_same_tokenizer(target_tokenizer, tokenizer)
    if target_fingerprint is None or meta["target"] is None or allow_target_mismatch:
        return drafter
    differ = differences(meta["target"], target_fingerprint)
    if differ:
        raise ValueError(
            f"got a target that {folder} was not made for ({'; '.join(differ)}); expected the "
            "target it was trained on; give that; `evaluate` and the "
            "decoder take allow_target_mismatch=true to insist (decoding stays lossless, "
            "acceptance may be low)"
        )
    bodies = {mark["body"] for mark in (meta["target"], target_fingerprint) if "body" in mark}
    if len(bodies) > 1:
        warnings.warn(
            f"{folder} was made for this model with other weights in its layers (tuned, merged or "
            "quantised since): decoding stays lossless, acceptance may be lower",
            stacklevel=2,
        )
    return drafter


def _open_foreign(
    folder: Path,
    target_config: PretrainedConfig | None,
    target_tokenizer: PreTrainedTokenizerBase | None,
) -> DrafterFolder | None:
    """The head of another toolkit in a folder, with a warning; None where there is none."""
    files = {file.name for file in folder.iterdir()}
    if META in files or "config.json" not in files or not files.intersection(FILES):
        return None
    found = recognise(folder, target_config)
    if found is None:
        return None
    foreign, checkpoint = found
    refuse_faults(folder, foreign.faults(checkpoint))
    note = f"{folder} holds a head in the layout of {foreign.layout}, "
    note += "not known to be made for this target"
    warnings.warn("; ".join((note, *foreign.notes)), stacklevel=3)
    if target_tokenizer is not None:
        check_logit_width(foreign.config["vocab_size"], target_tokenizer, f"the draft {folder}")
        if any(name.startswith(TOKENIZER_FILES) for name in files):
            check_same_tokenizer(target_tokenizer, load_tokenizer(folder))
    meta = _without_meta(foreign.kind, note)
    return DrafterFolder(folder, foreign.kind, meta, found, foreign.vocab)


def kind_of(folder: str, target: str) -> str:
    """The kind of a drafter for a target; no model is loaded, and what would be warned of it isn't
    said yet.
    """
    with warnings.catch_warnings(action="ignore"):
        return open_drafter(folder, None, target_config=load_config(target)).kind


def save_defaults(folder: Path, **defaults: Any) -> None:
    """Change some of DEFAULTS in a folder's draftsmith.json; ValueError without one."""
    if not (folder / META).is_file():
        raise ValueError(f"got {folder} without {META}; expected a drafter folder that we wrote")
    meta = read_json(folder / META)
    meta["defaults"] = DEFAULTS | meta.get("defaults", {}) | defaults
    write_atomically(folder / META, json.dumps(meta, indent=2).encode() + b"\n")


def read_meta(folder: Path) -> dict[str, Any]:
    """A folder's draftsmith.json, or what stands in for one; ValueError as in `open_drafter`."""
    files = sorted(file.name for file in folder.iterdir())
    missing = [name for name in ("config.json", "model.safetensors") if name not in files]
    if missing:
        raise ValueError(
            f"got {folder} without {' and '.join(missing)} (it holds {', '.join(files[:8])}); "
            f"expected config.json, model.safetensors, {META} and a tokenizer; point to the folder "
            "that training wrote, or restore the names of its files"
        )
    if META not in files:
        note = f"{folder} has no {META}: a plain causal LM, not known to be made for this target"
        warnings.warn(note, stacklevel=3)
        return _without_meta("lm", note)
    meta = read_json(folder / META)
    if meta.get("schema") != SCHEMA:
        raise ValueError(
            f"got {folder / META} of schema {meta.get('schema')!r}; expected {SCHEMA}; use the "
            "version of draftsmith that wrote it, or train again with this one"
        )
    objects = ("target", "defaults", "provenance")
    wrong = ", ".join(name for name in objects if not isinstance(meta.get(name), dict))
    if wrong:
        raise ValueError(
            f"got {folder / META} without an object {wrong}; restore it as it was saved"
        )
    _known_kind(str(meta.get("kind")), folder)
    return meta | {"defaults": DEFAULTS | meta["defaults"]}


def _without_meta(kind: str, note: str) -> dict[str, Any]:
    """What stands in for a draftsmith.json."""
    meta = {"schema": SCHEMA, "kind": kind, "target": None, "taps": None, "note": note}
    return meta | {"defaults": DEFAULTS, "provenance": None}


def _check_weights(folder: Path, kind: str) -> None:
    """Compare the weights' header with what config.json describes."""
    if kind != "lm":
        expected = outlined(heads()[kind], read_json(folder / "config.json"))
        check_header(folder, expected, "config")
        return
    config = load_config(folder)
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if config.architectures != [known]:
        # An EAGLE folder also says model_type llama, and would load with a random layer.
        raise ValueError(
            f"got {folder} of architecture {config.architectures} (model_type "
            f"{config.model_type}); expected {known or 'a causal LM'} of transformers: "
            "it was made for another loader"
        )
    check_tensors(folder, config)


def _known_kind(kind: str, folder: Path) -> None:
    known = sorted(("lm", *heads()))
    if kind not in known:
        raise ValueError(
            f"got drafter kind {kind!r} for {folder}; expected one of {', '.join(known)}; "
            "correct it, or use a version of draftsmith that knows it"
        )
