"""What the doctor looks at, and how it says what it found.

Shapes: V rows of the target's LM head, H hidden.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.folder.foreign import plain_names
from draftsmith.models.folder.tensors import Checkpoint
from draftsmith.models.server_facts import STACKS

SERVERS = tuple(stack.name for stack in STACKS.values())
VLLM, SGLANG, SPECULATORS, TGI, TRANSFORMERS, DRAFTSMITH = SERVERS
RANDOM = "leaves the layer random, without a word"
REFUSES = "refuses it"
EAGLES = ("eagle1", "eagle3", "speculators")


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
    """A folder that could be opened. layout: see `serve_lines.about`; raw: its config.json; target:
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
    def names(self) -> dict[str, str]:
        """Our name of an EAGLE tensor -> the file's."""
        return plain_names(self.checkpoint)

    def meta(self, name: str) -> Tensor | None:
        """Shape and type of a tensor by our name; None where there is none."""
        return self.checkpoint.meta[self.names[name]] if name in self.names else None

    def value(self, name: str) -> Tensor:
        """A tensor by our name."""
        return self.checkpoint.read([self.names[name]])[self.names[name]]

    @property
    def target_config(self) -> Any:
        """The target's text config, or None."""
        return self.target.config.get_text_config() if self.target is not None else None

    @property
    def target_layers(self) -> int | None:
        return self.target_config.num_hidden_layers if self.target is not None else None


Check = Callable[[Case], Iterator[Finding]]  # without the name of the check


def fault(says: str, mend: str, **servers: str) -> Finding:
    """servers: what vllm, sglang, speculators, tgi, transformers, draftsmith do; names joined by _
    where they do the same.
    """
    return Finding("", "fault", says, _named(servers), mend)


def warning(says: str, mend: str, **servers: str) -> Finding:
    """As `fault`."""
    return Finding("", "warning", says, _named(servers), mend)


def _named(servers: dict[str, str]) -> dict[str, str]:
    return {STACKS[key].name: what for keys, what in servers.items() for key in keys.split("_")}
