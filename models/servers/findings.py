"""What the doctor looks at, and how it says what it found."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.foreign import EAGLE, our_names
from draftsmith.models.folder.tensors import Checkpoint
from draftsmith.models.layouts.eagle_layouts import IDS
from draftsmith.models.server_facts import STACKS

SERVERS = tuple(stack.name for stack in STACKS.values())
EAGLES = ("eagle1", "eagle3", "speculators")
BLOCK_LAYOUTS = ("official-block", "speculators-block")


@dataclass(frozen=True)
class Finding:
    """One line of the report. verdict: ok, warning (some stack draws wrong conclusions, or it is
    worth a look) or fault (it drafts wrongly, or isn't read, where it should be). servers: what
    each of `SERVERS` would do, where it differs from reading the folder well.
    """

    check: str
    verdict: str
    says: str = ""
    servers: dict[str, str] = field(default_factory=dict)
    mend: str = ""


@dataclass(frozen=True)
class Case:
    """A folder that could be opened. layout: see `export.about`; raw: its config.json; target:
    outline, tokenizer and path of the target, where one was given.
    """

    folder: Path
    layout: str
    raw: dict[str, Any]
    checkpoint: Checkpoint
    target: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    target_path: str = ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The layer's sizes and the head's flags in one dict, wherever the layout keeps them."""
        layer = self.raw.get("transformer_layer_config") or {}
        return layer | {k: v for k, v in self.raw.items() if k != "transformer_layer_config"}

    @cached_property
    def ids(self) -> tuple[list[int] | None, list[int] | None]:
        """Layers tapped, counted as run before: as the top level names them, and eagle_config."""
        nested = (self.config.get("eagle_config") or {}).get(IDS)
        return self.config.get(IDS) or None, [i + 1 for i in nested] if nested else None

    @cached_property
    def names(self) -> dict[str, str]:
        """Our name of an EAGLE tensor -> the file's."""
        return our_names(self.checkpoint, EAGLE)

    def shape(self, name: str) -> list[int] | None:
        """Shape of a tensor by our name; None where there is none."""
        return list(self.checkpoint.meta[self.names[name]].shape) if name in self.names else None

    def value(self, name: str) -> Tensor:
        """A tensor by our name."""
        return self.checkpoint.read([self.names[name]])[self.names[name]]

    @cached_property
    def mark(self) -> dict[str, Any] | None:
        """The target's fingerprint."""
        if self.target is None or self.tokenizer is None:
            return None
        return fingerprint(self.target, self.tokenizer, self.target_path)

    @property
    def target_config(self) -> Any:
        """The target's text config, or None."""
        return self.target.config.get_text_config() if self.target is not None else None

    @property
    def target_layers(self) -> int | None:
        return getattr(self.target_config, "num_hidden_layers", None)


Check = Callable[[Case], Iterator[Finding]]  # without the name of the check


def _found(verdict: str, says: str, mend: str, does: str = "") -> Finding:
    """does: what servers do, as "vllm, sglang: refuses it; tgi: fails", by the names of STACKS."""
    servers: dict[str, str] = {}
    for names, _, what in (part.partition(": ") for part in does.split("; ") if part):
        servers |= {STACKS[name].name: what for name in names.split(", ")}
    return Finding("", verdict, says, servers, mend)


fault, warning = partial(_found, "fault"), partial(_found, "warning")
