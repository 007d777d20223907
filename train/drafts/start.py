"""What a run starts from: a draft LM of given sizes, an EAGLE head like its target's layers, or an
earlier result; and tiny drafts of every kind, to try a recipe without weights.

Shapes: V rows of the target's LM head, D of the draft's.
"""

import warnings
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import check_least, check_one_of
from draftsmith.models.draft_init import head_size, start_from_target
from draftsmith.models.draft_lm import draft_from_config, load_draft, recast
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import DrafterFolder, open_drafter, save_drafter
from draftsmith.models.heads.eagle import Eagle, EagleConfig
from draftsmith.models.heads.mixture import Mixture
from draftsmith.models.heads.peagle import PEagle, PEagleConfig
from draftsmith.models.layers.layer import (
    LAYER_CONFIGS,
    begin_as_last,
    layer_json,
    layer_like,
    read_layer,
)
from draftsmith.models.layouts.eagle_layouts import FLAGS
from draftsmith.models.taps import decoder_layers, default_taps
from draftsmith.models.tokenizer import check_same_tokenizer, load_tokenizer, vocab_size
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.run.lora import Lora, with_lora
from draftsmith.train.text.batches import Examples

Module = TypeVar("Module", bound=nn.Module)
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(kw_only=True)
class ModelStart:
    """The group `draft` or `model` of a recipe."""

    path: str = ""  # what to go on from: a folder or a hub's name; empty: a fresh one of the sizes
    layers: int = 1
    hidden: int = 96
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    head_dim: int = 0  # 0: hidden / heads
    context: int = 2048  # positions it is configured for
    init: str = "random"  # random | target: a part of the target (models/draft_init.py)
    init_layers: list[int] = field(default_factory=list)  # which of its layers; none: spread evenly


# What target.shrink=true makes of any recipe's sizes.
TINY = ModelStart(layers=1, hidden=32, heads=2, kv_heads=1, intermediate=64)


def fresh_draft(
    sizes: ModelStart, target: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """A draft of the target's family with as many logits, padding included (vLLM wants it so), in
    fp32 on the CPU: random, with one table for embedding and output head, or as `init` says a part
    of the target, which then also decides that. Without a target, a random Llama for the tokenizer.
    ValueError: another `init`, and what `start_from_target` refuses.
    """
    check_one_of("init", sizes.init, ("random", "target"))
    family: PretrainedConfig = LlamaConfig()
    rows, tied = vocab_size(tokenizer), True
    if target is not None:
        family, rows = target.config, len(target.get_output_embeddings().weight)
        tied = sizes.init == "random" or target.config.tie_word_embeddings
    elif sizes.init == "target":
        raise ValueError("got model.init=target without a target, expected target.path=...")
    names = ["layers", "hidden", "heads", "kv_heads", "intermediate"]
    fields: dict[str, Any] = {name: getattr(sizes, name) for name in names}
    if width := sizes.head_dim or (sizes.init == "target" and head_size(family)):
        fields["head_dim"] = width
    fields |= {name: getattr(tokenizer, name) for name in SPECIAL}
    fields |= {"tie_word_embeddings": tied, "max_position_embeddings": sizes.context}
    draft = draft_from_config(family, seed=seed, vocab_size=rows, **fields)
    if target is not None and sizes.init == "target":
        start_from_target(draft, target, sizes.init_layers)
    return draft


def open_draft(
    source: ModelStart,
    lora: Lora,
    mismatch: bool,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> PreTrainedModel:
    """The draft of `source` for `target`, in fp32 and where that is, with adapters if asked for;
    mismatch: also one that was made for another target. ValueError: a folder that isn't whole, is
    made for another target, or has other tokens; what `with_lora` refuses.
    """
    if source.path and source.init == "target":
        raise ValueError(
            f"got draft.init=target and draft.path={source.path}, expected one of them"
        )
    if source.path:
        draft = given_draft(source.path, target, tokenizer, allow_target_mismatch=mismatch)
    else:
        draft = fresh_draft(source, target, tokenizer, seed)
    draft = with_lora(draft, lora, given=bool(source.path), seed=seed)
    return place(draft, target.device)


def given_draft(
    path: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    allow_target_mismatch: bool = False,
) -> PreTrainedModel:
    """The draft LM in a drafter folder or at a hub name, in fp32, checked against its target.
    ValueError as for `open_draft`, and for a folder of no LM.
    """
    if not Path(path).is_dir():
        check_same_tokenizer(tokenizer, load_tokenizer(path))
        return load_draft(path)
    folder = open_drafter(
        path,
        fingerprint(target, tokenizer),
        allow_target_mismatch=allow_target_mismatch,
        target_tokenizer=tokenizer,
    )
    if folder.kind != "lm":
        raise ValueError(
            f"got draft={path}, a head of kind {folder.kind}, expected a draft LM; train/heads.py "
            "and train/eagle.py train heads, train/scorers.py an acceptance head for one"
        )
    warn_of_trimmed(folder)
    return folder.model("float32")


def warn_of_trimmed(folder: DrafterFolder) -> None:
    """Where it drafts some tokens alone, that what is trained from it drafts them all."""
    if folder.vocab is not None:
        warnings.warn(
            f"{folder.path} drafts {len(folder.vocab.ids_D):,} of {folder.vocab.size:,} tokens; "
            "here it has them all again, and so has what is trained from it: `python -m draftsmith "
            "trim` needs no training and comes last",
            stacklevel=3,
        )


def open_reference(
    path: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | None:
    """The frozen reference draft at `path`, if any, in the target's type and place."""
    if not path:
        return None
    reference = given_draft(path, target, tokenizer).requires_grad_(False)
    recast(reference, target.dtype)
    return place(reference, target.device)


def place(model: Module, device: torch.device) -> Module:
    """The model, moved to a device, if it isn't there."""
    if any(part.device != device for part in (*model.parameters(), *model.buffers())):
        model.to(device)
    return model


@dataclass(kw_only=True)
class EagleSource:
    """The group `head` of an EAGLE recipe."""

    path: str = ""  # a drafter folder to go on from: all else is then as it is there
    version: int = 3  # 1 | 3
    fusion: str = "concat"  # of EAGLE-1; gated: Dovetail's
    kind: str = ""  # mtp: an MTP module | mixture: Mixture of Attentions; empty: EAGLE
    layer: str = "llama"  # llama | qwen3, which SGLang doesn't load
    layers: int = 1
    heads: int = 0  # 0, as in the next three: as many as the target's layers have
    kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    # Of EAGLE-3, empty: `default_taps`; of mixture, empty: after every layer.
    taps: list[int] = field(default_factory=list)
    draft_vocab: int = 0  # of EAGLE-3: the tokens that the text has most; 0: all
    init: str = "random"  # of its layers; target: as its last ones, where their parts are alike
    init_head: str = "target"  # of EAGLE-3: target (its LM head's rows) | random
    parallel: int = 0  # P-EAGLE: tokens that one pass drafts; 0: one, and on from there
    own_masks: bool = False  # of P-EAGLE: a MASK for each depth, as ParallelSpec has
    fc_norm: bool = False  # these four: EAGLE-3.1's, see models/heads/eagle.py
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False

    @property
    def makes(self) -> str:
        named = "dovetail" if self.fusion == "gated" else f"eagle{self.version}"
        return self.kind or ("peagle" if self.parallel else named)


def counted(examples: Examples, rows: int) -> Tensor:
    """How often each of the target's tokens is trained on, [V]."""
    return torch.bincount(examples.ids[examples.trained].long(), minlength=rows)


def open_head(
    source: EagleSource,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    counts_V: Tensor,
    seed: int,
) -> Eagle | Mixture:
    """The head of `source` in fp32, bound to `target` and on its device. ValueError: sizes, taps or
    flags that a head can't have, or an earlier head of another kind or target.
    """
    if source.kind not in ("", "mixture", "mtp"):
        raise ValueError(
            f"got head.kind={source.kind!r}, expected mixture or mtp, or none for EAGLE's"
        )
    kind = source.kind or f"eagle {source.version}"
    of_3 = {"draft_vocab": 0, "init_head": "target", "parallel": 0}
    own = {"layers": 1, "fusion": "concat", **dict.fromkeys(FLAGS, False)}
    of_3 |= own if source.kind == "mixture" else {}
    if source.kind == "mtp":
        source = replace(source, version=1, layer=layer_like(target).model_type)
    set_too = [name for name, unset in of_3.items() if getattr(source, name) != unset]
    if (source.version == 1 or source.kind) and set_too:
        raise ValueError(
            f"{kind}: got {' and '.join(set_too)}, expected none of {', '.join(of_3)}: it drafts "
            "by the target's own LM head; leave them out, or set head.version=3"
        )
    if source.path:
        what = (
            f"{source.makes}; set head.kind, head.version and head.parallel, or give another folder"
        )
        return earlier_head(source.path, target, tokenizer, (source.makes,), what)
    head = _fresh(source, target, seed)
    place(head, target.device).bind(target)
    if source.init == "target":
        begin_as_last(head.layers, decoder_layers(target))
    if not isinstance(head, Eagle) or source.version == 1:
        return head
    vocab = DraftVocab.most_frequent(counts_V, head.config.draft_vocab)
    if not vocab.is_full:
        head.set_vocab(vocab)
        place(head, target.device).bind(target)
    if source.init_head == "target":
        rows_DH = head.target_head_VH[vocab.ids_D.to(target.device)]
        head.lm_head.weight.data.copy_(rows_DH)
    return head


def earlier_head(
    path: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kinds: Collection[str],
    expected: str,
) -> Any:
    """The head in a folder in fp32, bound to this target and on its device; ValueError for one of
    none of these kinds. expected: what the error says of them, and what to do.
    """
    given: Any = {"target_tokenizer": tokenizer, "target_config": target.config.get_text_config()}
    folder = open_drafter(path, fingerprint(target, tokenizer), **given)
    if folder.kind not in kinds:
        raise ValueError(f"head.path: got {path} of kind {folder.kind}, expected {expected}")
    warn_of_trimmed(folder)
    head: Any = place(folder.head("float32"), target.device)
    return head.bind(target)


def _fresh(source: EagleSource, target: PreTrainedModel, seed: int) -> Eagle | Mixture:
    check_one_of("head.init", source.init, ("target", "random"))
    check_one_of("head.init_head", source.init_head, ("target", "random"))
    check_one_of("head.layer", source.layer, LAYER_CONFIGS)
    rows = target.get_output_embeddings().weight.shape[0]
    three: dict[str, Any] = {name: getattr(source, name) for name in (*FLAGS, "fusion")}
    count = target.config.get_text_config().num_hidden_layers
    if source.version == 3:
        three |= {"taps": tuple(source.taps or default_taps(count))}
        three |= {"draft_vocab": source.draft_vocab or rows}
    elif source.taps:
        three |= {"taps": tuple(source.taps)}  # refused there
    named = {
        "num_attention_heads": source.heads,
        "num_key_value_heads": source.kv_heads,
        "head_dim": source.head_dim,
        "intermediate_size": source.intermediate,
    }
    sizes = layer_json(layer_like(target, source.layers)) | {k: v for k, v in named.items() if v}
    check_least(source, layers=1, heads=0, kv_heads=0, head_dim=0, intermediate=0, parallel=0)
    try:
        layer = read_layer(sizes | {"model_type": source.layer})
    except StrictDataclassError as error:
        why = str(error).splitlines()[-1].strip()
        raise ValueError(
            f"head: got sizes that don't fit ({why}); expected ones that do"
        ) from error
    mtp, parallel = source.kind == "mtp", source.parallel
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        if source.kind == "mixture":
            return Mixture(layer, tuple(source.taps or range(1, count + 1)))
        if parallel:
            own: Any = {"parallel": parallel, "own_masks": source.own_masks}
            return PEagle(PEagleConfig(layer, source.version, **three, **own))
        return Eagle(EagleConfig(layer, source.version, mtp=mtp, **three))


def tiny_draft(
    kind: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | Eagle | Mixture:
    """A random draft for a random target: tries a recipe without its weights."""
    if kind == "lm":
        return fresh_draft(TINY, target, tokenizer, seed=0)
    counts_V = torch.ones(target.get_output_embeddings().weight.shape[0])
    source = EagleSource(version=3 if kind == "eagle3" else 1, kind="mtp" if kind == "mtp" else "")
    return open_head(source, target, tokenizer, counts_V, seed=0)


def tiny_drafter(
    path: str | Path,
    kind: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    mark: dict[str, Any],
) -> None:
    """Save `tiny_draft` as a drafter folder; mark: the target's fingerprint."""
    save_drafter(
        path,
        kind=kind,
        model=tiny_draft(kind, target, tokenizer),
        tokenizer=tokenizer,
        target_fingerprint=mark,
        provenance={},
        defaults={},
    )
