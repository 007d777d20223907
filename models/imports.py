"""Heads that other toolkits wrote, read as ours: official EAGLE-1 and EAGLE-3 folders, those of
`speculators`, Medusa and Hydra.

Nothing is copied on disk. A `Foreign` is the config.json that our folder would have, and which of
their tensors is which of ours; the values are the same, bit for bit.

Shapes: H hidden, V rows of the target's LM head, D draft vocabulary.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from draftsmith.models.checkpoint import read_json, refuse_faults
from draftsmith.models.eagle import EAGLE3_NAMES, FLAGS, LAYER_FIELDS, tap_fields
from draftsmith.models.head import Head, assembled, tensor_faults
from draftsmith.models.taps import default_taps
from draftsmith.models.tensors import Checkpoint
from draftsmith.models.vocab import DraftVocab

# Tensors that heads carry and that ours don't need: the target's embeddings, and what follows from
# the config.
SPARE = re.compile(
    r"(.*\.)?(embed_tokens\.weight|input_embed_fn\.weight|rotary_emb\..*|verifier_.*)"
)


class TargetNeeded(ValueError):
    """A head that leaves something to its target, and no target was given."""


@dataclass(frozen=True)
class Foreign:
    """A head in another layout. layout: whose; kind: ours; config: our config.json; names: our name
    of a tensor -> theirs; made: tensors that follow from the others; notes: what a user should
    know.
    """

    layout: str
    kind: str
    config: dict[str, Any]
    names: dict[str, str]
    made: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def faults(self, cls: type[Head], checkpoint: Checkpoint) -> dict[str, list[str]]:
        """How its tensors differ from those of the head that the config describes."""
        found = {ours: tuple(checkpoint.meta[name].shape) for ours, name in self.names.items()}
        found |= {name: tuple(tensor.shape) for name, tensor in self.made.items()}
        return tensor_faults(cls, self.config, found)

    def head(self, cls: type[Head], checkpoint: Checkpoint, dtype: str = "auto") -> Head:
        """The head, in eval mode, in the dtype it is stored in unless another is named."""
        refuse_faults(checkpoint.path, self.faults(cls, checkpoint))
        values = checkpoint.read(self.names.values())
        # Cloned: two names may share one tensor, and a file that is mapped stays open.
        tensors = {ours: values[name].clone() for ours, name in self.names.items()}
        return assembled(cls, self.config, tensors | self.made, dtype)


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
    read = _reader(config, checkpoint)
    if read is None:
        return None
    return read(config, checkpoint, target and target.get_text_config()), checkpoint


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


def _reader(config: dict[str, Any], checkpoint: Checkpoint) -> "Reader | None":
    layout = layout_of(config, set(checkpoint.file_of), checkpoint.file)
    return READERS[layout] if layout else None


# ---- EAGLE ----------------------------------------------------------------------------------


def _eagle1(
    config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None
) -> Foreign:
    names = plain_names(checkpoint)
    names.pop("lm_head.weight", None)  # the target's
    shape = checkpoint.meta[names["fc.weight"]].shape
    made = layer_config(config, "llama", vocab=_rows(config, checkpoint, target))
    made |= {"architectures": ["LlamaForCausalLM"], "bias": "fc.bias" in names}
    _want("fc.weight", tuple(shape), (made["hidden_size"], 2 * made["hidden_size"]), checkpoint)
    return Foreign("EAGLE-1", "eagle1", made, names)


def _eagle3(
    config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None
) -> Foreign:
    nested = config.get("eagle_config") or {}
    config = {name: nested[name] for name in FLAGS if name in nested} | config
    names, meta = plain_names(checkpoint), checkpoint.meta
    for name in ("fc.weight", "lm_head.weight"):
        if name not in names:
            raise _unfit(checkpoint, f"has no {name}", "a whole EAGLE-3 head")
    kind = "qwen3" if any("q_norm" in name for name in names) else "llama"
    made = layer_config(config, kind, vocab=_rows(config, checkpoint, target))
    hidden = made["hidden_size"]
    if config.get("target_hidden_size") not in (None, hidden):
        raise _unfit(
            checkpoint,
            f"is {hidden} wide for a target of {config['target_hidden_size']}",
            "heads as wide as their target: no other are known here",
        )
    taps, notes = _taps(config, checkpoint, target)
    width = meta[names["fc.weight"]].shape[1]
    if width != len(taps) * hidden:
        raise _unfit(
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
        names = {_first(name, "layers.0.", "midlayer."): theirs for name, theirs in names.items()}
    return Foreign("EAGLE-3", "eagle3", made, names, maps, notes)


def _speculators(
    config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None
) -> Foreign:
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise _unfit(checkpoint, f"holds a speculator of type {kind!r}", "eagle3")
    layer = dict(config.get("transformer_layer_config") or {})
    windows = layer.get("layer_types") or []
    notes: tuple[str, ...] = ()
    if "sliding_attention" in windows:
        notes = (
            f"its layer was trained to see {layer.get('sliding_window')} tokens back; here it sees "
            "all, so beyond that acceptance may fall",
        )
    outer = {name: value for name, value in config.items() if name != "transformer_layer_config"}
    read = _eagle3(layer | outer, checkpoint, target)
    return Foreign("speculators", "eagle3", read.config, read.names, read.made, read.notes + notes)


def plain_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Our name of each EAGLE tensor -> the file's. Without a prefix `model.`, `layers.0.` for the
    first layer, `fc_norm.i` for the norms on the taps; spare ones left out.
    """
    made = {}
    for theirs in checkpoint.file_of:
        name = _first(theirs.removeprefix("model."), "midlayer.", "layers.0.")
        for index, old in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
            name = _first(name, f"{old}.", f"fc_norm.{index}.")
        # SGLang calls the norm before a further layer's attention as it does that of the first.
        further = re.fullmatch(r"layers\.([1-9]\d*)\.hidden_norm\.weight", name)
        name = f"layers.{further[1]}.input_layernorm.weight" if further else name
        if not SPARE.fullmatch(name):
            made[name] = theirs
    return made


def layer_config(config: dict[str, Any], kind: str, *, vocab: int) -> dict[str, Any]:
    """The fields of a decoder layer, and its rotary embedding by the names of today."""
    made = {name: config[name] for name in LAYER_FIELDS if config.get(name) is not None}
    missing = [name for name in ("hidden_size", "num_attention_heads") if name not in made]
    if missing:
        raise ValueError(
            f"config.json: got no {missing[0]}, expected the sizes of the head's layer; restore "
            "the file as it was published"
        )
    return made | {
        "model_type": kind,
        "vocab_size": vocab,
        "num_hidden_layers": config.get("num_hidden_layers", 1),
        "rope_parameters": rope_parameters(config),
    }


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Both generations of rotary fields as transformers 5 has them."""
    given = config.get("rope_parameters")
    if not given:
        old = {name: config[name] for name in ("rope_theta", "rope_scaling") if config.get(name)}
        given = LlamaConfig(max_position_embeddings=1 << 30, **old).rope_parameters
    theta = config.get("rope_theta") or 10000.0
    return {"rope_type": "default", "rope_theta": theta} | dict(given or {})


def _rows(config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None) -> int:
    """V: of what covers the target's tokens in the file, else the config's, else the target's."""
    for name, tensor in checkpoint.meta.items():
        if name.endswith(("t2d", "embed_tokens.weight")):
            return tensor.shape[0]
    rows = config.get("vocab_size") or (target and target.vocab_size)
    if not rows:
        raise _needs(checkpoint, "how many tokens there are")
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
        raise _needs(checkpoint, "which layers it reads (eagle_aux_hidden_state_layer_ids)")
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
        return {}
    if "d2t" in values:
        vocab = DraftVocab.from_offsets(values["d2t"], rows)
    elif "t2d" in values:
        vocab = DraftVocab(values["t2d"].nonzero().flatten(), rows)
    else:
        raise _unfit(
            checkpoint,
            f"drafts {draft} of {rows} tokens and has neither d2t nor t2d",
            "the map that says which tokens it drafts",
        )
    if len(vocab.ids_D) != draft:
        raise _unfit(checkpoint, f"maps {len(vocab.ids_D)} tokens and drafts {draft}", "as many")
    return {"d2t": vocab.d2t_D.long(), "t2d": vocab.t2d_V}


# ---- Medusa and Hydra -------------------------------------------------------------------------


def _medusa(
    config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None
) -> Foreign:
    names = {n.removeprefix("medusa_head.").removeprefix("heads."): n for n in checkpoint.file_of}
    meta = {name: checkpoint.meta[theirs] for name, theirs in names.items()}
    places = [re.fullmatch(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)", name) for name in names]
    blocks = {(int(p[1]), int(p[2])) for p in places if p and p[3]}
    if not blocks:
        raise _unfit(checkpoint, "has no tensor 0.0.linear.weight", "Medusa heads")
    heads, layers = 1 + max(head for head, _ in blocks), 1 + max(block for _, block in blocks)
    own = f"0.{layers}.weight"
    rows = meta[own].shape[0] if own in meta else target and target.vocab_size
    if rows is None:
        raise _needs(checkpoint, "its LM heads")
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
        raise _unfit(
            checkpoint,
            f"has hydra_head_arch={arch!r}, grounded_heads={config.get('grounded_heads', False)}, "
            f"hidden_state_offset={config.get('hidden_state_offset', 0)}",
            "mlp or prefix-mlp, grounded, on the last state (offset 0)",
        )
    names = {
        _hydra_name(name, prefixed=arch == "prefix-mlp"): name
        for name in checkpoint.file_of
        if not SPARE.fullmatch(name)
    }
    first = checkpoint.meta.get(names.get("hydra_lm_head.0.weight", ""))
    if first is None:
        raise _unfit(checkpoint, "has no LM head hydra_lm_head.0", "Hydra heads")
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
            raise _needs(checkpoint, "the sizes of its attention")
        # Theirs is one layer of the target's own sizes.
        made["prefix"] = layer_config(
            target.to_dict() | {"num_hidden_layers": 1, "hidden_size": hidden}, "llama", vocab=rows
        )
    return Foreign("Hydra", "hydra", made, names)


def _hydra_name(name: str, *, prefixed: bool) -> str:
    """Our name of an official Hydra tensor; Hydra++ counts a dropout before each block."""
    name = _first(name, "prefix_embeding_layer.layers.0.", "prefix_layer.")
    name = _first(name, "prefix_embeding_layer.norm.", "prefix_norm.")
    if prefixed:
        name = re.sub(r"^(hydra_lm_head\.\d+)\.1\.", r"\1.", name)
        name = re.sub(
            r"^(hydra_mlp\.\d+)\.(\d+)\.", lambda m: f"{m[1]}.{(int(m[2]) - 1) // 2}.", name
        )
    return name


# ---- all --------------------------------------------------------------------------------------


def _first(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _want(
    name: str, got: tuple[int, ...], expected: tuple[int, ...], checkpoint: Checkpoint
) -> None:
    if got != expected:
        raise _unfit(checkpoint, f"has {name} of {list(got)}", str(list(expected)))


def _needs(checkpoint: Checkpoint, what: str) -> TargetNeeded:
    return TargetNeeded(
        f"got {checkpoint.path}, which leaves to its target {what}; give the target"
    )


def _unfit(checkpoint: Checkpoint, got: str, expected: str) -> ValueError:
    return ValueError(
        f"got {checkpoint.path}, which {got}; expected {expected}; `python -m draftsmith doctor "
        f"{checkpoint.path}` says more"
    )


Reader = Callable[[dict[str, Any], Checkpoint, PretrainedConfig | None], Foreign]
READERS: dict[str, Reader] = {
    "eagle1": _eagle1,
    "eagle3": _eagle3,
    "speculators": _speculators,
    "medusa": _medusa,
    "hydra": _hydra,
}
