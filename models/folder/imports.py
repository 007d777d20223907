"""Heads that other toolkits wrote, read as ours: official EAGLE-1 and EAGLE-3 folders, those of
`speculators`, block drafters, Medusa and Hydra; MTP modules are in `mtp`.

Nothing is copied on disk, and the values are the same, bit for bit: see `Foreign`.

Shapes: H hidden, V rows of the target's LM head, D draft vocabulary.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from draftsmith.models.disk.read_lm import read_json
from draftsmith.models.folder.block_imports import BLOCKS, official_block, speculators_block
from draftsmith.models.folder.foreign import (
    EAGLE,
    Changes,
    Foreign,
    check_types,
    foreign_vocab,
    layer_config,
    needs,
    our_names,
    rows_of,
    unfit,
)
from draftsmith.models.folder.mtp import holds_mtp, read_mtp
from draftsmith.models.folder.tensors import Checkpoint
from draftsmith.models.heads.eagle import EAGLE3_NAMES, FLAGS, IDS, tap_fields
from draftsmith.models.taps import default_taps

Config = dict[str, Any]
Target = PretrainedConfig | None


def recognise(folder: str | Path, target: Target = None) -> tuple[Foreign, Checkpoint] | None:
    """The head in a folder of another toolkit; None for a plain causal LM. target: its config, for
    what such folders leave out. ValueError for a head that can't be read, with the reason.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    checkpoint = Checkpoint(folder)
    target = target and target.get_text_config()
    layout = layout_of(config, set(checkpoint.file_of), checkpoint.file, target)
    if layout is None:
        return None
    check_types(config)
    return READERS[layout](config, checkpoint, target), checkpoint


def layout_of(config: Config, names: set[str], file: str, target: Target = None) -> str | None:
    """Which toolkit's head a folder holds, a key of `READERS`; None for none."""
    if holds_mtp(config, names, target):
        return "mtp"
    if "speculators_model_type" in config:
        block = config["speculators_model_type"] in BLOCKS
        return "speculators-block" if block else "speculators"
    if "dflash_config" in config or "target_layer_ids" in config:
        return "official-block"
    if file.startswith("medusa") or "medusa_num_heads" in config:
        return "medusa"
    if file.startswith("hydra") or "hydra_num_heads" in config:
        return "hydra"
    if not any(name.removeprefix("model.") == "fc.weight" for name in names):
        return None
    return "eagle3" if any("hidden_norm" in name for name in names) else "eagle1"


# ---- EAGLE ----------------------------------------------------------------------------------


def _eagle1(config: Config, checkpoint: Checkpoint, target: Target) -> Foreign:
    names = our_names(checkpoint, EAGLE)
    names.pop("lm_head.weight", None)  # the target's
    made = layer_config(config, "llama", vocab=rows_of(config, checkpoint, target))
    made |= {"architectures": ["LlamaForCausalLM"], "bias": "fc.bias" in names}
    shape = list(checkpoint.meta[names["fc.weight"]].shape)
    wanted = [made["hidden_size"], 2 * made["hidden_size"]]
    if shape != wanted:
        raise unfit(checkpoint, f"has fc.weight of {shape}", str(wanted))
    return Foreign("EAGLE-1", "eagle1", made, names)


def _eagle3(config: Config, checkpoint: Checkpoint, target: Target) -> Foreign:
    nested = config.get("eagle_config") or {}
    config = {name: nested[name] for name in FLAGS if name in nested} | config
    names = our_names(checkpoint, EAGLE)
    for name in ("fc.weight", "lm_head.weight"):
        if name not in names:
            raise unfit(checkpoint, f"has no {name}", "a whole EAGLE-3 head")
    kind = "qwen3" if any("q_norm" in name for name in names) else "llama"
    made = layer_config(config, kind, vocab=rows_of(config, checkpoint, target))
    hidden, wide = made["hidden_size"], config.get("target_hidden_size")
    if wide not in (None, hidden):
        got = f"is {hidden} wide for a target of {wide}"
        raise unfit(checkpoint, got, "heads as wide as their target: no other are known here")
    taps, notes = _taps(config, checkpoint, target)
    width = checkpoint.meta[names["fc.weight"]].shape[1]
    if width != len(taps) * hidden:
        got = f"has an fc.weight that reads {width} numbers and taps {list(taps)}"
        wanted = f"{len(taps)} x {hidden} of them; its layer ids are of another head"
        raise unfit(checkpoint, got, wanted)
    draft = checkpoint.meta[names["lm_head.weight"]].shape[0]
    made |= {"architectures": [EAGLE3_NAMES[kind]], **tap_fields(taps)}
    made |= {name: bool(config.get(name, False)) for name in FLAGS}
    made |= {"fc_norm": any("fc_norm." in n for n in names)}
    made |= {"norm_before_fc": "input_norm.weight" in names}
    made |= {"draft_vocab_size": draft, "target_hidden_size": hidden}
    vocab = foreign_vocab(draft, made["vocab_size"], names, checkpoint)
    maps = {"d2t": vocab.d2t_D.long(), "t2d": vocab.t2d_V} if vocab is not None else {}
    if made["num_hidden_layers"] == 1:
        names = {re.sub(r"^layers\.0\.", "midlayer.", name): old for name, old in names.items()}
    if "sliding_attention" in (config.get("layer_types") or []):
        notes += (
            f"its layer was trained to see {config.get('sliding_window')} tokens back; here it "
            "sees all, so beyond that acceptance may fall",
        )
    if config.get("embed_requires_grad") and any("embed_tokens" in n for n in checkpoint.file_of):
        notes += (
            "its embeddings were trained with it, and the target's are taken in their place: "
            "acceptance may fall",
        )
    return Foreign("EAGLE-3", "eagle3", made, names, maps, notes)


def _speculators(config: Config, checkpoint: Checkpoint, target: Target) -> Foreign:
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        known = ", ".join(("eagle3", *BLOCKS))
        raise unfit(checkpoint, f"holds a speculator of type {kind!r}", f"one of {known}")
    layer = config.get("transformer_layer_config") or {}
    if layer.get("model_type") not in EAGLE3_NAMES:
        got = f"has a transformer_layer_config of model_type {layer.get('model_type')!r}"
        raise unfit(checkpoint, got, " or ".join(EAGLE3_NAMES))
    return replace(_eagle3(layer | config, checkpoint, target), layout="speculators")


def _taps(
    config: Config, checkpoint: Checkpoint, target: Target
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The tapped layers and what to say of where they were found: the top level counts layers that
    have run, the nested field the layer whose output it is, from 0.
    """
    top = config.get(IDS)
    nested = [i + 1 for i in (config.get("eagle_config") or {}).get(IDS) or ()]
    if top and nested not in ([], top):
        return tuple(top), (f"its two lists of layers differ: {top} is taken, not {nested}",)
    if top or nested:
        return tuple(top or nested), ()
    if target is None:
        raise needs(checkpoint, f"which layers it reads ({IDS})")
    taps = default_taps(target.num_hidden_layers)
    return taps, (f"its config names no layers: EAGLE-3's usual ones are taken, {list(taps)}",)


# ---- Medusa and Hydra -------------------------------------------------------------------------


def _medusa(config: Config, checkpoint: Checkpoint, target: Target) -> Foreign:
    names = our_names(checkpoint, MEDUSA)
    shapes = {name: checkpoint.meta[theirs].shape for name, theirs in names.items()}
    found = [re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name) for name in names]
    blocks = [(int(block[1]), int(block[2])) for block in found if block]
    if not blocks:
        raise unfit(checkpoint, "has no tensor 0.0.linear.weight", "Medusa heads")
    heads, layers = (1 + max(numbers) for numbers in zip(*blocks, strict=True))
    own = f"0.{layers}.weight"
    rows = shapes[own][0] if own in shapes else target and target.vocab_size
    if rows is None:
        raise needs(checkpoint, "its LM heads")
    made = {
        "hidden_size": shapes["0.0.linear.weight"][0],
        "vocab_size": int(rows),
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "original_lm_head": own not in shapes,
    }
    said = config.get("medusa_num_heads") or heads
    note = f"its config says {said} heads, and its file has {heads}: the file is right"
    return Foreign("Medusa", "medusa", made, names, notes=() if said == heads else (note,))


def _hydra(config: Config, checkpoint: Checkpoint, target: Target) -> Foreign:
    arch, grounded = config.get("hydra_head_arch", "mlp"), config.get("grounded_heads", False)
    offset = config.get("hidden_state_offset", 0)
    if arch not in ("mlp", "prefix-mlp") or not grounded or offset:
        got = f"has hydra_head_arch={arch!r}, grounded_heads={grounded}, "
        got += f"hidden_state_offset={offset}"
        raise unfit(checkpoint, got, "mlp or prefix-mlp, grounded, on the last state (offset 0)")
    names = our_names(checkpoint, HYDRA if arch == "mlp" else HYDRA_PLUS)
    first = checkpoint.meta.get(names.get("hydra_lm_head.0.weight", ""))
    if first is None:
        raise unfit(checkpoint, "has no LM head hydra_lm_head.0", "Hydra heads")
    rows, hidden = first.shape
    found = [re.match(r"hydra_mlp\.(\d+)\.(\d+)\.", name) for name in names]
    blocks = [(int(block[1]), int(block[2])) for block in found if block]
    heads, layers = (1 + max(numbers) for numbers in zip(*blocks, strict=True))
    made = {
        "hidden_size": hidden,
        "vocab_size": rows,
        "hydra_num_heads": heads,
        "hydra_num_layers": layers,
        "hydra_head_arch": arch,
        "lm_head_bias": "hydra_lm_head.0.bias" in names,
    }
    if arch == "prefix-mlp":
        if target is None:
            raise needs(checkpoint, "the sizes of its attention")
        # Theirs is one layer of the target's own sizes.
        layer = target.to_dict() | {"num_hidden_layers": 1, "hidden_size": hidden}
        made["prefix"] = layer_config(layer, "llama", vocab=rows)
    return Foreign("Hydra", "hydra", made, names)


MEDUSA: Changes = ((r"^medusa_head\.", ""), (r"^heads\.", ""))
HYDRA: Changes = (
    (r"^prefix_embeding_layer\.layers\.0\.", "prefix_layer."),
    (r"^prefix_embeding_layer\.norm\.", "prefix_norm."),
)
# Hydra++ counts a dropout before each block and each LM head.
HYDRA_PLUS: Changes = (
    *HYDRA,
    (r"^(hydra_lm_head\.\d+)\.1\.", r"\1."),
    (r"^(hydra_mlp\.\d+)\.(\d+)\.", lambda at: f"{at[1]}.{(int(at[2]) - 1) // 2}."),
)

READERS: dict[str, Callable[[Config, Checkpoint, Target], Foreign]] = {
    "eagle1": _eagle1,
    "eagle3": _eagle3,
    "speculators": _speculators,
    "speculators-block": speculators_block,
    "official-block": official_block,
    "mtp": read_mtp,
    "medusa": _medusa,
    "hydra": _hydra,
}
