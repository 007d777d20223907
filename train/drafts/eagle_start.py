"""The EAGLE head that a run starts from: a fresh one like its target's layers, or an earlier one;
and tiny drafts of every kind, to try a recipe without weights.

Shapes: V rows of the target's LM head.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import open_drafter, save_drafter
from draftsmith.models.heads.eagle import Eagle, EagleConfig
from draftsmith.models.heads.eagle_layouts import FLAGS
from draftsmith.models.heads.layer import LAYER_CONFIGS, LAYER_FIELDS
from draftsmith.models.taps import default_taps
from draftsmith.models.target import split_head
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.drafts.draft_start import TINY, fresh_draft, place
from draftsmith.train.text.batches import Examples

LLAMA_ROTARY = ("llama", "mistral", "qwen2", "qwen3")  # the whole head, by one rope_parameters


@dataclass(kw_only=True)
class EagleSource:
    """The group `head` of an EAGLE recipe."""

    path: str = ""  # a drafter folder to go on from: all but freeze_head is then as it is there
    version: int = 3  # 1 | 3
    layer: str = "llama"  # llama | qwen3, which SGLang doesn't load
    layers: int = 1
    heads: int = 0  # 0, as in the next three: as many as the target's layers have
    kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    taps: list[int] = field(default_factory=list)  # of EAGLE-3; empty: `default_taps`
    draft_vocab: int = 0  # of EAGLE-3: the tokens that the text has most; 0: all
    init_head: str = "target"  # of EAGLE-3: target (its LM head's rows) | random
    freeze_head: bool = False  # of EAGLE-3: its LM head stays as it begins
    fc_norm: bool = False  # these four: EAGLE-3.1's, see models/heads/eagle.py
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False


def counted(examples: Examples, rows: int) -> Tensor:
    """How often each of the target's tokens is trained on, [V]."""
    return torch.bincount(examples.ids[examples.trained].long(), minlength=rows)


def open_head(
    source: EagleSource,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    counts_V: Tensor,
    seed: int,
) -> Eagle:
    """The head of `source` in fp32, bound to `target` and on its device. ValueError: sizes, taps or
    flags that a head can't have, or an earlier head of another kind or target.
    """
    of_3 = {"draft_vocab": 0, "init_head": "target", "freeze_head": False}
    set_too = [name for name, unset in of_3.items() if getattr(source, name) != unset]
    if source.version == 1 and set_too:
        raise ValueError(
            f"eagle 1: got {' and '.join(set_too)}, expected none of {', '.join(of_3)}: it drafts "
            "by the target's own LM head; leave them out, or set head.version=3"
        )
    head = _earlier(source, target, tokenizer) if source.path else _fresh(source, target, seed)
    place(head, target.device).bind(target)
    if source.version == 3 and not source.path:
        vocab = DraftVocab.most_frequent(counts_V, head.config.draft_vocab)
        if not vocab.is_full:
            head.set_vocab(vocab)
            place(head, target.device)
        if source.init_head == "target":
            rows_DH = head.target_head_VH[vocab.ids_D.to(target.device)]
            head.lm_head.weight.data.copy_(rows_DH)
    if source.version == 3:
        head.lm_head.requires_grad_(not source.freeze_head)
    return head


def _earlier(
    source: EagleSource, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Eagle:
    given: Any = {"target_tokenizer": tokenizer, "target_config": target.config.get_text_config()}
    folder = open_drafter(source.path, fingerprint(target, tokenizer), **given)
    if folder.kind != f"eagle{source.version}":
        raise ValueError(
            f"head.path: got {source.path} of kind {folder.kind}, expected eagle{source.version}; "
            "set head.version, or give another folder"
        )
    head = folder.head("float32")
    assert isinstance(head, Eagle)
    return head


def _fresh(source: EagleSource, target: PreTrainedModel, seed: int) -> Eagle:
    if source.init_head not in ("target", "random") or source.layer not in LAYER_CONFIGS:
        raise ValueError(
            f"got init_head={source.init_head!r}, layer={source.layer!r}, expected target or "
            f"random, and one of {', '.join(LAYER_CONFIGS)}"
        )
    rows = target.get_output_embeddings().weight.shape[0]
    three: dict[str, Any] = {name: getattr(source, name) for name in FLAGS}
    if source.version == 3:
        count = target.config.get_text_config().num_hidden_layers
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
    sizes = layer_like(target, source.layers).to_dict() | {k: v for k, v in named.items() if v}
    kept = {k: sizes[k] for k in (*LAYER_FIELDS, "rope_parameters") if sizes.get(k) is not None}
    config = EagleConfig(LAYER_CONFIGS[source.layer](**kept), source.version, **three)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return Eagle(config)


def layer_like(target: PreTrainedModel, layers: int = 1) -> PretrainedConfig:
    """Sizes of a head's own decoder layers: those of its target's, in Llama's form or Qwen3's.

    Positions are turned as the target's are, where its family turns them as Llama's does. Whatever
    the target's activation, theirs is silu: servers know no other in such layers.
    """
    config = target.config.get_text_config()
    names = (*LAYER_FIELDS, *(("rope_parameters",) if config.model_type in LLAMA_ROTARY else ()))
    sizes = {name: getattr(config, name, None) for name in names} | {"hidden_act": "silu"}
    sizes |= {"num_hidden_layers": layers, "vocab_size": split_head(target)[1].shape[0]}
    sizes["intermediate_size"] = sizes["intermediate_size"] or 4 * config.hidden_size
    kind = LAYER_CONFIGS.get(config.model_type, LlamaConfig)
    return kind(**{name: value for name, value in sizes.items() if value is not None})


def tiny_draft(
    kind: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | Eagle:
    """A random draft for a random target: tries a recipe without its weights."""
    if kind == "lm":
        return fresh_draft(TINY, target, tokenizer, seed=0)
    counts_V = torch.ones(target.get_output_embeddings().weight.shape[0])
    return open_head(EagleSource(version=int(kind[-1])), target, tokenizer, counts_V, seed=0)


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
