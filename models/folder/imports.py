"""Heads that other toolkits wrote, read as ours: official EAGLE-1 and EAGLE-3 folders, those of
`speculators`, Medusa and Hydra.

Nothing is copied on disk, and the values are the same, bit for bit: see `Foreign`.

Shapes: H hidden, V rows of the target's LM head, D draft vocabulary.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from draftsmith.models.disk.read_lm import read_json
from draftsmith.models.folder.foreign import (
    Foreign,
    by_our_names,
    check_types,
    layer_config,
    needs,
    plain_names,
    unfit,
    with_prefix,
)
from draftsmith.models.folder.tensors import Checkpoint
from draftsmith.models.heads.eagle import EAGLE3_NAMES, FLAGS, tap_fields
from draftsmith.models.taps import default_taps
from draftsmith.models.vocab import DraftVocab


def recognise(
    folder: str | Path, target: PretrainedConfig | None = None
) -> tuple[Foreign, Checkpoint] | None:
    """The head in a folder of another toolkit; None for a plain causal LM.

    target: config of the target, for what such folders leave out (the tapped layers, the sizes of
    Hydra's attention). ValueError for a head that can't be read, with the reason.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    checkpoint = Checkpoint(folder)
    layout = layout_of(config, set(checkpoint.file_of), checkpoint.file)
    if layout is None:
        return None
    check_types(config)
    return READERS[layout](config, checkpoint, target and target.get_text_config()), checkpoint


def layout_of(config: dict[str, Any], names: set[str], file: str) -> str | None:
    """Which toolkit's head a folder holds, a key of `READERS`; None for none."""
    if "speculators_model_type" in config:
        return "speculators"
    if file.startswith("medusa") or "medusa_num_heads" in config:
        return "medusa"
    if file.startswith("hydra") or "hydra_num_heads" in config:
        return "hydra"
    if not any(name.removeprefix("model.") == "fc.weight" for name in names):
        return None
    return "eagle3" if any("hidden_norm" in name for name in names) else "eagle1"


# ---- EAGLE ----------------------------------------------------------------------------------


def _eagle1(
    config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None
) -> Foreign:
    names = plain_names(checkpoint)
    names.pop("lm_head.weight", None)  # the target's
    shape = checkpoint.meta[names["fc.weight"]].shape
    made = layer_config(config, "llama", vocab=_rows(config, checkpoint, target))
    made |= {"architectures": ["LlamaForCausalLM"], "bias": "fc.bias" in names}
    wanted = [made["hidden_size"], 2 * made["hidden_size"]]
    if list(shape) != wanted:
        raise unfit(checkpoint, f"has fc.weight of {list(shape)}", str(wanted))
    return Foreign("EAGLE-1", "eagle1", made, names)


def _eagle3(
    config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None
) -> Foreign:
    nested = config.get("eagle_config") or {}
    config = {name: nested[name] for name in FLAGS if name in nested} | config
    names, meta = plain_names(checkpoint), checkpoint.meta
    for name in ("fc.weight", "lm_head.weight"):
        if name not in names:
            raise unfit(checkpoint, f"has no {name}", "a whole EAGLE-3 head")
    kind = "qwen3" if any("q_norm" in name for name in names) else "llama"
    made = layer_config(config, kind, vocab=_rows(config, checkpoint, target))
    hidden = made["hidden_size"]
    if config.get("target_hidden_size") not in (None, hidden):
        raise unfit(
            checkpoint,
            f"is {hidden} wide for a target of {config['target_hidden_size']}",
            "heads as wide as their target: no other are known here",
        )
    taps, notes = _taps(config, checkpoint, target)
    width = meta[names["fc.weight"]].shape[1]
    if width != len(taps) * hidden:
        raise unfit(
            checkpoint,
            f"has an fc.weight that reads {width} numbers and taps {list(taps)}",
            f"{len(taps)} x {hidden} of them; its layer ids are of another head",
        )
    draft = meta[names["lm_head.weight"]].shape[0]
    flags = {name: bool(config.get(name, False)) for name in FLAGS}
    flags["fc_norm"] = any(name.startswith("fc_norm.") for name in names)
    flags["norm_before_fc"] = "input_norm.weight" in names
    made |= {"architectures": [EAGLE3_NAMES[kind]], **flags, **tap_fields(taps)}
    made |= {"draft_vocab_size": draft, "target_hidden_size": hidden}
    maps = _maps(draft, made["vocab_size"], names, checkpoint)
    if made["num_hidden_layers"] == 1:
        names = {
            with_prefix(name, "layers.0.", "midlayer."): theirs for name, theirs in names.items()
        }
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


def _speculators(
    config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None
) -> Foreign:
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise unfit(checkpoint, f"holds a speculator of type {kind!r}", "eagle3")
    layer = dict(config.get("transformer_layer_config") or {})
    if layer.get("model_type") not in EAGLE3_NAMES:
        raise unfit(
            checkpoint,
            f"has a transformer_layer_config of model_type {layer.get('model_type')!r}",
            " or ".join(EAGLE3_NAMES),
        )
    outer = {name: value for name, value in config.items() if name != "transformer_layer_config"}
    read = _eagle3(layer | outer, checkpoint, target)
    return replace(read, layout="speculators")


def _rows(config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None) -> int:
    """V: of what covers the target's tokens in the file, else the config's, else the target's."""
    for name, tensor in checkpoint.meta.items():
        if name.endswith(("t2d", "embed_tokens.weight")):
            return tensor.shape[0]
    rows = config.get("vocab_size") or (target and target.vocab_size)
    if not rows:
        raise needs(checkpoint, "how many tokens there are")
    return int(rows)


def _taps(
    config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The tapped layers and what to say of where they were found: the top level counts layers that
    have run, the nested field the layer whose output it is, from 0.
    """
    top = config.get("eagle_aux_hidden_state_layer_ids")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if top:
        by_nested = [i + 1 for i in nested] if nested else top
        note = f"its two lists of layers differ: {top} is taken, not {by_nested}"
        return tuple(top), (note,) if by_nested != top else ()
    if nested:
        return tuple(i + 1 for i in nested), ()
    if target is None:
        raise needs(checkpoint, "which layers it reads (eagle_aux_hidden_state_layer_ids)")
    taps = default_taps(target.num_hidden_layers)
    return taps, (f"its config names no layers: EAGLE-3's usual ones are taken, {list(taps)}",)


def _maps(
    draft: int, rows: int, names: dict[str, str], checkpoint: Checkpoint
) -> dict[str, Tensor]:
    """d2t and t2d where the head drafts a part of the vocabulary; both leave `names`."""
    wanted = [name for name in ("d2t", "t2d") if name in names]
    found = checkpoint.read([names.pop(name) for name in wanted])
    values = dict(zip(wanted, found.values(), strict=True))
    if draft == rows:
        if "d2t" in values and values["d2t"].any():
            raise unfit(checkpoint, "moves tokens of a whole vocabulary (d2t)", "no d2t, or zeros")
        return {}
    if "d2t" in values:
        if holds_ids(values["d2t"], values.get("t2d"), rows):
            raise unfit(checkpoint, "holds ids in d2t", "offsets, id - position")
        vocab = DraftVocab.from_offsets(values["d2t"], rows)
    elif "t2d" in values:
        vocab = DraftVocab(values["t2d"].nonzero().flatten(), rows)
    else:
        raise unfit(
            checkpoint,
            f"drafts {draft} of {rows} tokens and has neither d2t nor t2d",
            "the map that says which tokens it drafts",
        )
    if len(vocab.ids_D) != draft:
        raise unfit(checkpoint, f"maps {len(vocab.ids_D)} tokens and drafts {draft}", "as many")
    return {"d2t": vocab.d2t_D.long(), "t2d": vocab.t2d_V}


def holds_ids(d2t_D: Tensor, t2d_V: Tensor | None, rows: int) -> bool:
    """Whether d2t holds the tokens themselves in place of offsets: t2d says so, or, without one,
    they ascend within the vocabulary and lead out of it as offsets.
    """
    ids_D = d2t_D.long() + torch.arange(len(d2t_D))
    if t2d_V is not None:
        own = t2d_V.nonzero().flatten()
        return torch.equal(d2t_D.long(), own) and not torch.equal(ids_D, own)
    ascend = (
        len(d2t_D) > 0
        and bool((d2t_D.diff() > 0).all())
        and int(d2t_D[0]) >= 0
        and int(d2t_D[-1]) < rows
    )
    return ascend and int(ids_D[-1]) >= rows


# ---- Medusa and Hydra -------------------------------------------------------------------------


def _medusa(
    config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None
) -> Foreign:
    names = by_our_names(
        checkpoint, lambda n: n.removeprefix("medusa_head.").removeprefix("heads.")
    )
    meta = {name: checkpoint.meta[theirs] for name, theirs in names.items()}
    places = [re.fullmatch(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)", name) for name in names]
    blocks = {(int(p[1]), int(p[2])) for p in places if p and p[3]}
    if not blocks:
        raise unfit(checkpoint, "has no tensor 0.0.linear.weight", "Medusa heads")
    heads, layers = 1 + max(head for head, _ in blocks), 1 + max(block for _, block in blocks)
    own = f"0.{layers}.weight"
    rows = meta[own].shape[0] if own in meta else target and target.vocab_size
    if rows is None:
        raise needs(checkpoint, "its LM heads")
    made = {
        "hidden_size": meta["0.0.linear.weight"].shape[0],
        "vocab_size": int(rows),
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "original_lm_head": own not in meta,
    }
    said = config.get("medusa_num_heads")
    notes: tuple[str, ...] = ()
    if said not in (None, heads):
        notes = (f"its config says {said} heads, and its file has {heads}: the file is right",)
    return Foreign("Medusa", "medusa", made, names, notes=notes)


def _hydra(
    config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None
) -> Foreign:
    arch = config.get("hydra_head_arch", "mlp")
    known = arch in ("mlp", "prefix-mlp") and config.get("grounded_heads", False)
    if not known or config.get("hidden_state_offset"):
        raise unfit(
            checkpoint,
            f"has hydra_head_arch={arch!r}, grounded_heads={config.get('grounded_heads', False)}, "
            f"hidden_state_offset={config.get('hidden_state_offset', 0)}",
            "mlp or prefix-mlp, grounded, on the last state (offset 0)",
        )
    names = by_our_names(checkpoint, lambda n: _hydra_name(n, prefixed=arch == "prefix-mlp"))
    first = checkpoint.meta.get(names.get("hydra_lm_head.0.weight", ""))
    if first is None:
        raise unfit(checkpoint, "has no LM head hydra_lm_head.0", "Hydra heads")
    rows, hidden = first.shape
    numbers = {name: re.findall(r"\d+", name) for name in names if name.startswith("hydra_mlp.")}
    made = {
        "hidden_size": hidden,
        "vocab_size": rows,
        "hydra_num_heads": 1 + max(int(found[0]) for found in numbers.values()),
        "hydra_num_layers": 1 + max(int(found[1]) for found in numbers.values()),
        "hydra_head_arch": arch,
        "lm_head_bias": "hydra_lm_head.0.bias" in names,
    }
    if arch == "prefix-mlp":
        if target is None:
            raise needs(checkpoint, "the sizes of its attention")
        # Theirs is one layer of the target's own sizes.
        made["prefix"] = layer_config(
            target.to_dict() | {"num_hidden_layers": 1, "hidden_size": hidden}, "llama", vocab=rows
        )
    return Foreign("Hydra", "hydra", made, names)


def _hydra_name(name: str, *, prefixed: bool) -> str:
    """Our name of an official Hydra tensor; Hydra++ counts a dropout before each block."""
    name = with_prefix(name, "prefix_embeding_layer.layers.0.", "prefix_layer.")
    name = with_prefix(name, "prefix_embeding_layer.norm.", "prefix_norm.")
    if prefixed:
        name = re.sub(r"^(hydra_lm_head\.\d+)\.1\.", r"\1.", name)
        name = re.sub(
            r"^(hydra_mlp\.\d+)\.(\d+)\.", lambda m: f"{m[1]}.{(int(m[2]) - 1) // 2}.", name
        )
    return name


Reader = Callable[[dict[str, Any], Checkpoint, PretrainedConfig | None], Foreign]
READERS: dict[str, Reader] = {
    "eagle1": _eagle1,
    "eagle3": _eagle3,
    "speculators": _speculators,
    "medusa": _medusa,
    "hydra": _hydra,
}
