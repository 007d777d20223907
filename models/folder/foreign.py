"""What reading another toolkit's head comes to, and what its readers share.

Shapes: H hidden.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.models.disk.read_lm import refuse_faults
from draftsmith.models.folder.tensors import Checkpoint
from draftsmith.models.heads.head import Head, assembled, head_faults, heads
from draftsmith.models.heads.layer import LAYER_FIELDS

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
    **dict.fromkeys(("rope_parameters", "rope_scaling", "prefix"), dict),
    **dict.fromkeys(("eagle_aux_hidden_state_layer_ids",), list),
}
SAYS = {int: "a whole number", dict: "an object", list: "a list"}


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

    def faults(self, checkpoint: Checkpoint) -> dict[str, list[str]]:
        """How its tensors differ from those of the head that the config describes."""
        found = {ours: tuple(checkpoint.meta[name].shape) for ours, name in self.names.items()}
        found |= {name: tuple(tensor.shape) for name, tensor in self.made.items()}
        return head_faults(heads()[self.kind], self.config, found)

    def head(self, checkpoint: Checkpoint, dtype: str = "auto") -> Head:
        """The head, in eval mode, in the dtype it is stored in unless another is named."""
        refuse_faults(checkpoint.path, self.faults(checkpoint))
        values = checkpoint.read(self.names.values())
        broken = [name for name, value in values.items() if not is_finite(value)]
        if broken:
            raise unfit(
                checkpoint,
                f"has {len(broken)} tensors that aren't finite ({', '.join(broken[:3])})",
                "numbers: take an earlier state of it",
            )
        # Cloned: two names may share one tensor, and a file that is mapped stays open.
        tensors = {ours: values[name].clone() for ours, name in self.names.items()}
        return assembled(heads()[self.kind], self.config, tensors | self.made, dtype)


def plain_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Our name of each EAGLE tensor -> the file's. Without a prefix `model.`, `layers.0.` for the
    first layer, `fc_norm.i` for the norms on the taps; spare ones left out.
    """

    def ours(theirs: str) -> str:
        name = with_prefix(theirs.removeprefix("model."), "midlayer.", "layers.0.")
        for index, old in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
            name = with_prefix(name, f"{old}.", f"fc_norm.{index}.")
        # SGLang calls the norm before a further layer's attention as it does that of the first.
        further = re.fullmatch(r"layers\.([1-9]\d*)\.hidden_norm\.weight", name)
        return f"layers.{further[1]}.input_layernorm.weight" if further else name

    return by_our_names(checkpoint, ours)


def by_our_names(checkpoint: Checkpoint, ours: Callable[[str], str]) -> dict[str, str]:
    """Our name of each tensor that isn't spare -> the file's; ValueError where two have one."""
    made: dict[str, str] = {}
    for theirs in checkpoint.file_of:
        name = ours(theirs)
        if SPARE.fullmatch(name):
            continue
        if name in made:
            raise unfit(
                checkpoint, f"holds one tensor twice, as {made[name]} and {theirs}", "it once"
            )
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


def check_types(config: dict[str, Any]) -> None:
    """ValueError for a field of a head's config that holds another type than it should."""
    for name, kind in KINDS.items():
        value = config.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ValueError(
                f"config.json: got {name}={value!r}, expected {SAYS[kind]}; restore the file as it "
                "was published"
            )
        if isinstance(value, dict):
            check_types(value)
        if isinstance(value, list) and not all(isinstance(i, int) for i in value):
            raise ValueError(f"config.json: got {name}={value!r}, expected numbers of layers")


def is_finite(value: Tensor) -> bool:
    """Whether a tensor holds numbers alone; whole numbers always do."""
    return not value.is_floating_point() or bool(torch.isfinite(value.float()).all())


def with_prefix(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def needs(checkpoint: Checkpoint, what: str) -> TargetNeeded:
    return TargetNeeded(
        f"got {checkpoint.path}, which leaves to its target {what}; give the target"
    )


def unfit(checkpoint: Checkpoint, got: str, expected: str) -> ValueError:
    return ValueError(
        f"got {checkpoint.path}, which {got}; expected {expected}; `python -m draftsmith doctor "
        f"{checkpoint.path}` says more"
    )
