"""What reading another toolkit's head comes to, and what its readers share.

Shapes: H hidden.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from draftsmith.models.disk.read_lm import tensor_faults
from draftsmith.models.folder.tensors import Checkpoint
from draftsmith.models.heads.head import Head, assembled, heads, outlined
from draftsmith.models.layers.layer import LAYER_FIELDS
from draftsmith.models.vocab import DraftVocab

# Tensors that heads carry and that ours don't need: the target's embeddings, and what follows from
# the config.
SPARE = re.compile(
    r"(.*\.)?(embed_tokens\.weight|input_embed_fn\.weight|rotary_emb\..*|verifier_.*)"
)
KINDS: dict[str, type] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"), int),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "vocab_size"), int),
    **dict.fromkeys(("draft_vocab_size", "target_hidden_size", "max_position_embeddings"), int),
    **dict.fromkeys(("medusa_num_heads", "hydra_num_heads"), int),
    **dict.fromkeys(("eagle_config", "transformer_layer_config", "speculators_config"), dict),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "prefix", "dflash_config"), dict),
    **dict.fromkeys(("block_size", "mask_token_id", "markov_rank"), int),
    **dict.fromkeys(("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"), list),
    "target_layer_ids": list,
}
SAYS = {int: "a whole number", dict: "an object", list: "a list of numbers of layers"}
# What a toolkit calls a tensor -> what we do, one change after the other.
Changes = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]
EAGLE: Changes = (
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    # SGLang calls the norm before a further layer's attention as it does that of the first.
    (r"^(layers\.[1-9]\d*)\.hidden_norm\.weight$", r"\1.input_layernorm.weight"),
)


class TargetNeeded(ValueError):
    """A head that leaves something to its target, and no target was given."""


@dataclass(frozen=True)
class Foreign:
    """A head in another layout. layout: whose; kind: ours; config: our config.json; names: our name
    of a tensor -> theirs; made: tensors that follow from the others; notes: for the user; vocab:
    the tokens that it drafts, where the head doesn't hold that (None: all).
    """

    layout: str
    kind: str
    config: dict[str, Any]
    names: dict[str, str]
    made: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    vocab: DraftVocab | None = None

    def faults(self, checkpoint: Checkpoint) -> dict[str, list[str]]:
        """How its tensors differ from those of the head that the config describes."""
        found = {ours: checkpoint.meta[theirs] for ours, theirs in self.names.items()} | self.made
        return tensor_faults(found, outlined(heads()[self.kind], self.config), "config")

    def head(self, checkpoint: Checkpoint, dtype: str = "auto") -> Head:
        """The head, in eval mode, in the dtype it is stored in unless another is named."""
        values = checkpoint.read(self.names.values())
        broken = [name for name, value in values.items() if not is_finite(value)]
        if broken:
            got = f"has {len(broken)} tensors that aren't finite ({', '.join(broken[:3])})"
            raise unfit(checkpoint, got, "numbers: take an earlier state of it")
        # Cloned: two names may share one tensor, and a file that is mapped stays open.
        tensors = {ours: values[name].clone() for ours, name in self.names.items()}
        return assembled(heads()[self.kind], self.config, tensors | self.made, dtype)


def our_names(checkpoint: Checkpoint, changes: Changes) -> dict[str, str]:
    """Our name of each tensor that isn't spare -> the file's; ValueError where two have one."""
    made: dict[str, str] = {}
    for theirs in checkpoint.file_of:
        name = theirs
        for pattern, new in changes:
            name = re.sub(pattern, new, name)
        if SPARE.fullmatch(name):
            continue
        if name in made:
            got = f"holds one tensor twice, as {made[name]} and {theirs}"
            raise unfit(checkpoint, got, "it once")
        made[name] = theirs
    return made


def layer_config(config: dict[str, Any], kind: str, *, vocab: int) -> dict[str, Any]:
    """The fields of a decoder layer, and its rotary embedding by the names of today."""
    made = {name: config[name] for name in LAYER_FIELDS if config.get(name) is not None}
    for name in ("hidden_size", "num_attention_heads"):
        if name not in made:
            raise ValueError(f"config.json: got no {name}, expected the layer's sizes; restore it")
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


def check_types(config: dict[str, Any]) -> None:
    """ValueError for a field of a head's config that holds another type than it should."""
    for name, kind in KINDS.items():
        value = config.get(name)
        right = value is None or (isinstance(value, kind) and not isinstance(value, bool))
        if not right or (kind is list and not all(isinstance(i, int) for i in value or ())):
            raise ValueError(
                f"config.json: got {name}={value!r}, expected {SAYS[kind]}; restore the file as it "
                "was published"
            )
        if isinstance(value, dict):
            check_types(value)


def rows_of(config: dict[str, Any], checkpoint: Checkpoint, target: PretrainedConfig | None) -> int:
    """V: of what covers the target's tokens in the file, else the config's, else the target's."""
    for name, tensor in checkpoint.meta.items():
        if name.endswith(("t2d", "embed_tokens.weight")):
            return tensor.shape[0]
    rows = config.get("vocab_size") or (target and target.vocab_size)
    if not rows:
        raise needs(checkpoint, "how many tokens there are")
    return int(rows)


def is_finite(value: Tensor) -> bool:
    """Whether a tensor holds numbers alone; whole numbers always do."""
    return not value.is_floating_point() or bool(torch.isfinite(value.float()).all())


def needs(checkpoint: Checkpoint, what: str) -> TargetNeeded:
    return TargetNeeded(
        f"got {checkpoint.path}, which leaves to its target {what}; give the target"
    )


def unfit(checkpoint: Checkpoint, got: str, expected: str) -> ValueError:
    return ValueError(
        f"got {checkpoint.path}, which {got}; expected {expected}; `python -m draftsmith doctor "
        f"{checkpoint.path}` says more"
    )


def foreign_vocab(
    draft: int, rows: int, names: dict[str, str], checkpoint: Checkpoint
) -> DraftVocab | None:
    """The part of the vocabulary that a head drafts, None where it is whole, by its d2t and t2d,
    which leave `names`.
    """
    stored = {name: names.pop(name) for name in ("d2t", "t2d") if name in names}
    values = checkpoint.read(stored.values())
    d2t_D, t2d_V = (values.get(stored.get(name, "")) for name in ("d2t", "t2d"))
    if draft == rows:
        if d2t_D is not None and d2t_D.any():
            raise unfit(checkpoint, "moves tokens of a whole vocabulary (d2t)", "no d2t, or zeros")
        return None
    if d2t_D is not None:
        if holds_ids(d2t_D, t2d_V, rows):
            raise unfit(checkpoint, "holds ids in d2t", "offsets, id - position")
        vocab = DraftVocab.from_offsets(d2t_D, rows)
    elif t2d_V is not None:
        vocab = DraftVocab(t2d_V.nonzero().flatten(), rows)
    else:
        got = f"drafts {draft} of {rows} tokens and has neither d2t nor t2d"
        raise unfit(checkpoint, got, "the map that says which tokens it drafts")
    if len(vocab.ids_D) != draft:
        raise unfit(checkpoint, f"maps {len(vocab.ids_D)} tokens and drafts {draft}", "as many")
    return vocab


def holds_ids(d2t_D: Tensor, t2d_V: Tensor | None, rows: int) -> bool:
    """Whether d2t holds the tokens themselves in place of offsets: t2d says so, or, without one,
    they ascend within the vocabulary and lead out of it as offsets.
    """
    given = d2t_D.tolist()
    if t2d_V is not None:
        own = t2d_V.nonzero().flatten().tolist()
        return given == own != [offset + i for i, offset in enumerate(given)]
    ascend = bool(given) and given[0] >= 0 and given == sorted(set(given))
    return ascend and given[-1] < rows <= given[-1] + len(given) - 1
