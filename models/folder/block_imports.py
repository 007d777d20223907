"""Block drafters that other toolkits wrote: z-lab's DFlash, DeepSpec's DSpark, `speculators`' both.

They have the target's embeddings and LM head in common with ours, and MASK is the embedding of one
token there, unless vLLM's own file holds it. What we have no place for is refused by name.
"""

from pathlib import Path
from typing import Any

import torch

from draftsmith.models.folder.foreign import (
    Foreign,
    foreign_vocab,
    layer_config,
    needs,
    our_names,
    unfit,
)
from draftsmith.models.folder.tensors import Checkpoint
from draftsmith.models.heads.block import Block
from draftsmith.models.layouts.block_layouts import (
    AFTER,
    MARKOV,
    MARKOV_HEAD,
    MASK_FILE,
    NAMES,
    vector_of,
)

Config = dict[str, Any]
BLOCKS = ("dflash", "dspark")  # speculators' types that are block drafters
# What a tensor is of that ours don't have, by what its name holds.
STRANGE = {
    "attention_conv": "DFlash-2's convolutions, driven by one map for both ends of a sublayer",
    "candidate_selector": "DFlash-2's selector of the 16 best",
    "prefix_gru": "Domino's GRU, which leaves the first token out",
    "attention_sink": "attention sinks",
    "qkv_proj": "fused queries, keys and values",
}
# Numbers that change the draft's logits or states, and what they must be here.
NEUTRAL = {"output_multiplier": 1, "final_logit_softcapping": 0, "input_embedding_scale": 1}
NEUTRAL |= {"attention_value_scale": 1, "logit_scale": 1}
BODY = (
    (r"^model\.", ""),
    (r"^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc", "hidden_norm"),
)


def speculators_block(config: Config, checkpoint: Checkpoint, target: Any) -> Foreign:
    """Of the unified format; its layers' numbers are those that have run."""
    layer = config.get("transformer_layer_config") or {}
    ids = config.get("aux_hidden_state_layer_ids")
    spark = config["speculators_model_type"] == "dspark"
    anchor = config.get("sample_from_anchor", spark)
    made = _block(layer | config, checkpoint, target, ids, anchor=anchor)
    return Foreign("speculators", *made)


def official_block(config: Config, checkpoint: Checkpoint, target: Any) -> Foreign:
    """z-lab's or DeepSpec's; its layers' numbers are those whose output is read, from 0."""
    config = config | (config.get("dflash_config") or {})
    ids = [i + 1 for i in config.get("target_layer_ids") or ()]
    spark = int(config.get("markov_rank") or 0) > 0
    anchor = config.get("sample_from_anchor", spark)
    made = _block(config, checkpoint, target, ids, anchor=anchor)
    return Foreign("DSpark" if spark else "DFlash", *made)


def _block(
    config: Config, checkpoint: Checkpoint, target: Any, taps: list[int] | None, *, anchor: bool
) -> tuple[Any, ...]:
    """The fields of `Foreign` but its layout; anchor: the pending token's row drafts too."""
    for part, what in STRANGE.items():
        if any(part in name for name in checkpoint.file_of):
            raise unfit(checkpoint, f"has {what}", "DFlash or DSpark as they were published")
    for name, value in NEUTRAL.items():
        if (config.get(name) or value) != value:
            raise unfit(checkpoint, f"has {name}={config[name]}", f"{value}, or none")
    rows = config.get("vocab_size") or (target and target.vocab_size)
    if not rows:
        raise needs(checkpoint, "how many tokens there are")
    size, mask = config.get("block_size"), config.get("mask_token_id")
    if not taps or not isinstance(size, int) or not isinstance(mask, int):
        got = f"says layers {taps}, block_size={size}, mask_token_id={mask}"
        raise unfit(
            checkpoint, got, "all three: no reader agrees with another on what else to take"
        )
    names = our_names(checkpoint, (*BODY, *(("^" + MARKOV_HEAD + n, o) for o, n in NAMES.items())))
    notes = []
    if any(name.startswith("confidence_head.") for name in names):
        notes.append("its confidence head is left out")
    names = {n: t for n, t in names.items() if not n.startswith(("confidence_head.", "lm_head."))}
    drafted = int(config.get("draft_vocab_size") or rows)
    vocab = foreign_vocab(drafted, int(rows), names, checkpoint)
    made = layer_config(config, "qwen3", vocab=int(rows))
    reads, wanted = checkpoint.meta.get("fc.weight"), len(taps) * made["hidden_size"]
    if reads is not None and reads.shape[1] != wanted:
        got = f"has an fc.weight that reads {reads.shape[1]} numbers, and {len(taps)} layers"
        raise unfit(checkpoint, got, f"{wanted} of them: its layer ids are of another head")
    causal, window = _causal(config, checkpoint)
    notes += [window] if window else []
    head_type = config.get("markov_head_type", "vanilla") if config.get("markov_rank") else None
    lights = {theirs: ours for ours, theirs in MARKOV.items()} | {None: "none"}
    if head_type not in lights or (head_type == "rnn" and not anchor):
        raise unfit(checkpoint, f"has a head of type {head_type!r}", "vanilla, gated or rnn")
    made |= {
        "taps": taps,
        "levels": size - (not anchor),
        "light": lights[head_type],
        "rank": config.get("markov_rank") or 1,
        "labels": "shifted" if anchor else "same",
        "mask": "causal" if causal else "full",
        "convs": False,
        "noise": False,
        "mask_token": mask,
        "architectures": ["BlockDrafter"],
    }
    tensors = {}
    if vocab is not None and AFTER in names:  # ours has a row of every token
        given = checkpoint.meta[names[AFTER]].shape[0]
        if given != drafted:
            raise unfit(checkpoint, f"has {given} rows of markov_w2", f"{drafted}, its tokens")
        [after_DR] = checkpoint.read([names.pop(AFTER)]).values()
        after_VR = after_DR.new_zeros(int(rows), after_DR.shape[1])
        tensors[AFTER] = after_VR.index_copy(0, vocab.ids_D, after_DR)
    own = Path(checkpoint.path, MASK_FILE)
    if own.is_file():
        tensors["mask"] = vector_of(torch.load(own, map_location="cpu", weights_only=True))
        made["mask_token"] = -1
    with torch.device("meta"):
        kind = Block.from_json(made).kind
    return kind, made, names, tensors, tuple(notes), vocab


def _causal(config: Config, checkpoint: Checkpoint) -> tuple[bool, str]:
    """Whether its blocks are causal, and what to say of a window. Layers with one are, by default;
    z-lab's and vLLM's word is a field of its own.
    """
    types = set(config.get("layer_types") or ["full_attention"])
    if len(types) > 1:
        raise unfit(checkpoint, "has layers with a window and without", "all of one kind")
    sliding = types == {"sliding_attention"}
    found = config.get("is_causal", config.get("causal"))
    if found is None:
        found = sliding and not config.get("sliding_window_non_causal", False)
    back = config.get("sliding_window")
    note = f"its layers were trained to see {back} tokens back; here they see all, so beyond that "
    return bool(found), f"{note}acceptance may fall" if sliding else ""
