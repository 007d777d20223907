"""From names and folders to a target to decode, and a drafter that is ready to propose."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.draft_lms.ahead import AheadDrafter
from draftsmith.decode.draft_lms.easy import EasyDrafter
from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.draft_lms.pard import lm_drafter
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.forward.product import lay_side_by_side
from draftsmith.decode.parallel.followers import lead
from draftsmith.decode.untrained.composite import CompositeDrafter
from draftsmith.decode.untrained.exits import ExitsDrafter
from draftsmith.decode.untrained.foreign import ForeignDrafter, OmniDrafter, TextwiseDrafter
from draftsmith.decode.untrained.jacobi import JacobiDrafter, LookaheadDrafter
from draftsmith.decode.untrained.ngram import NgramDrafter
from draftsmith.decode.untrained.own_layers import OwnLayersDrafter
from draftsmith.decode.untrained.pads import PadsDrafter, PromptsDrafter
from draftsmith.decode.untrained.partial_kv import PartialKVDrafter
from draftsmith.decode.untrained.suffix import SuffixDrafter
from draftsmith.decode.untrained.swift import SwiftDrafter
from draftsmith.decode.untrained.tables import TableDrafter
from draftsmith.decode.untrained.texts import LookupDrafter, StoredDrafter
from draftsmith.decode.untrained.tokenswift import TokenSwiftDrafter
from draftsmith.models.disk.hub import local_folder
from draftsmith.models.disk.read_lm import read_json
from draftsmith.models.draft_lm import recast
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import DEFAULTS, META, DrafterFolder, open_drafter
from draftsmith.models.heads.head import Head, family
from draftsmith.models.scorers import load_acceptance
from draftsmith.models.target import TargetSpec, check_split, load_target
from draftsmith.models.tokenizer import load_tokenizer, vocab_size

# Drafters named by a word before a colon, not by a folder alone.
UNTRAINED: dict[str, Any] = {
    "exit": OwnLayersDrafter,
    "exits": ExitsDrafter,
    "skip": OwnLayersDrafter,
    "jacobi": JacobiDrafter,
    "lookahead": LookaheadDrafter,
    "ngram": NgramDrafter,
    "swift": SwiftDrafter,
    "streaming": PartialKVDrafter,
    "snapkv": PartialKVDrafter,
    "pads": PadsDrafter,
    "ppd": PromptsDrafter,
    "suffix": SuffixDrafter,
    "recycling": TableDrafter,
    "stand": TableDrafter,
    "tokenswift": TokenSwiftDrafter,
    "rapid": LMDrafter,
    "easy": EasyDrafter,
    "ahead": AheadDrafter,
    "tli": ForeignDrafter,
    "slem": TextwiseDrafter,
}
LOOKED = ("suffix", "recycling", "stand")  # also before a folder: suffix+FOLDER
OMNI = "omni"  # before a folder: omni+FOLDER, omni:FILE+FOLDER
STORED = (*LOOKED, OMNI)  # may name the file of a store
OVER = ("tokenswift", "rapid", "easy", "ahead")  # of a folder after the plus
FOREIGN = ("tli", "slem")  # around a folder's draft LM, of any tokenizer
BARE = ("none", "ngram", "swift", *LOOKED)  # whole names


def has_folder(name: str) -> bool:
    """Whether a drafter's name is a folder's, and not that of one without weights of its own."""
    kind, _, says = name.partition(":")
    return name not in BARE and not (says and kind in UNTRAINED) and not composed(name)[0]


def composed(name: str) -> tuple[str, str]:
    """The parts of suffix+FOLDER, suffix:FILE+FOLDER, easy:2+FOLDER; of another name nothing, and
    it.
    """
    first, plus, folder = name.partition("+")
    of_two = plus and first.partition(":")[0] in (*STORED, *OVER)
    return (first, folder.removeprefix("+")) if of_two else ("", name)


def moved(name: str, path: Path | None) -> str:
    """The name of a drafter's later version, in another folder; None: of the first one, which goes
    on with the later ones' store.
    """
    first, folder = composed(name)
    return f"{OMNI}+{path or folder}" if first.startswith(OMNI) else str(path or name)


def kept_defaults(name: str) -> dict[str, Any]:
    """How a drafter's folder wants it decoded; without a folder no K, and the decoder's own."""
    given = has_folder(name) and local_folder(name) / META
    found = read_json(given).get("defaults", {}) if given and given.is_file() else {"K": None}
    return DEFAULTS | found


def load_decoded(
    spec: TargetSpec, device: str | torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`load_target`, in `spec.parallel` processes; its split checked, its weights laid as the
    decoder multiplies them.
    """
    model, tokenizer = (load_target if spec.parallel == 1 else lead)(spec, device)
    check_split(model)
    lay_side_by_side(model)
    return model, tokenizer


def load_drafter(
    name: str | None,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    allow_target_mismatch: bool = False,
) -> Drafter | None:
    """None for None or "none"; prompt lookup for "ngram"; a name of `UNTRAINED`, as `exit:4`; what
    is looked up before a folder's, as `suffix+FOLDER`, or `suffix++FOLDER`, fused; else the
    folder's drafter, on the target's device and in its dtype. ValueError for a name that says
    nothing, and as `open_drafter` for a folder that doesn't fit.
    """
    if name is None or name == "none":
        return None
    lax = {"allow_target_mismatch": allow_target_mismatch}
    looked, folder_name = composed(name)
    if looked.partition(":")[0] in LOOKED:
        first = load_drafter(looked, target, tokenizer)
        second = load_drafter(folder_name, target, tokenizer, **lax)
        if second is None or not isinstance(first, LookupDrafter):
            raise ValueError(f"drafter: got {name}, expected a drafter folder after the plus")
        levels = int(kept_defaults(folder_name)["K"] or 4)
        return CompositeDrafter(first, second, levels, fused=name.startswith(f"{looked}++"))
    if looked.partition(":")[0] == OMNI:
        omni = OmniDrafter(*foreign_lm(folder_name, name, target), tokenizer)
        return begun_with(omni, looked.partition(":")[2], tokenizer)
    if not has_folder(name):
        kind, _, says = name.partition(":")
        drafter: Drafter
        if kind in FOREIGN:
            drafter = UNTRAINED[kind](*foreign_lm(says, name, target), tokenizer)
        elif kind in OVER:
            says, _, path = says.partition("+")
            inner = load_drafter(path or None, target, tokenizer, **lax)
            drafter = UNTRAINED[kind].over(says, inner, target, vocab_size(tokenizer))
        else:
            drafter = UNTRAINED[kind].named(kind, says, target, vocab_size(tokenizer))
        if isinstance(drafter, LookupDrafter) and kind in LOOKED:
            return begun_with(drafter, says, tokenizer)
        return drafter
    whole_mark = fingerprint(target, tokenizer)
    folder = open_drafter(
        name,
        whole_mark,
        allow_target_mismatch=allow_target_mismatch,
        target_tokenizer=tokenizer,
        target_config=target.config,
    )
    drafter = drafter_in(folder, target, tokenizer)
    assert drafter.size is not None, "what is in a folder has a model"
    hidden = drafter.size.config.hidden_size
    drafter.acceptance = load_acceptance(folder.path, hidden, whole_mark)
    return drafter


def begun_with(drafter: StoredDrafter, file: str, tokenizer: PreTrainedTokenizerBase) -> Drafter:
    """With what that file of a store holds, where one is named."""
    if file:
        drafter.load(Path(file), fingerprint(None, tokenizer)["tokenizer"])
    return drafter


def foreign_lm(
    path: str, name: str, target: PreTrainedModel
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The draft LM in a folder, and its own tokenizer. name: of the drafter; ValueError for a head,
    and as `open_drafter`.
    """
    folder = open_drafter(path, None)
    if folder.kind != "lm":
        raise ValueError(
            f"drafter: got {name}, the folder of a drafter of kind {folder.kind}, expected "
            f"{name.removesuffix(path)}FOLDER with the folder of a causal LM and its tokenizer"
        )
    return draft_lm(folder, target), load_tokenizer(folder.path)


def drafter_in(
    folder: DrafterFolder, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Drafter:
    """The drafter of a folder that was opened for this target; ValueError for a preview that its
    kind has no use for.
    """
    drafter: Drafter
    if folder.kind == "lm":
        drafter = lm_drafter(draft_lm(folder, target), vocab_size(tokenizer), folder.vocab)
    else:
        head = folder.head().requires_grad_(False).to(target.device, target.dtype)
        lay_side_by_side(head)
        head.drafts = folder.vocab
        drafter = drafter_of(head, target, vocab_size(tokenizer))
    if (rank := folder.meta["defaults"]["preview"]) is not None:
        foretell(drafter, rank)
    return drafter


def foretell(drafter: Drafter, rank: int) -> None:
    """Let a preview of this rank foretell the logits that it drafts by; ValueError where its LM
    head isn't read for each node, and for ranks as `VocabHead.foretell`.
    """
    if drafter.per_node is None:
        raise ValueError(
            f"preview: got {rank} for a drafter of kind {drafter.kind}, expected one that reads an "
            "LM head for every node: a draft LM, EAGLE, MTP, Mixture of Attentions, Clover-2, or a "
            "block drafter with a light head of layer, swiglu or path; leave it out"
        )
    drafter.per_node.foretell(rank)


def draft_lm(folder: DrafterFolder, target: PreTrainedModel) -> PreTrainedModel:
    """The draft LM in a folder, frozen, where the target is and as wide."""
    model = folder.model().eval().requires_grad_(False)
    recast(model, target.dtype)
    model.to(target.device)
    check_split(model)
    lay_side_by_side(model)
    return model


def drafter_of(head: Head, target: PreTrainedModel, vocab_size: int) -> Any:
    """The drafter around a head, which is bound to the target: a class in its family's file."""
    return family(head.kind, "decode.drafters", "Drafter")(head, target, vocab_size)
