"""Heads: small modules that draft from a frozen target's states, and the folder they are kept in.

A family of heads is a file in this folder; its class says all that others ask of it: how its folder
reads, which servers take it, whether it can learn online. A head holds what is trained; the token
embeddings and the LM head of the target it borrows, by `bind`, without owning them: they are
neither trained, moved nor saved with it.

Shapes: V rows of the target's LM head, H hidden size.
"""

import copy
import importlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.models.disk.read_lm import DTYPES, save_tensors, write_json
from draftsmith.models.layers.layer import Rotary, layer_json, read_layer
from draftsmith.models.layouts.exported import Exported
from draftsmith.models.taps import Tap, check_taps
from draftsmith.models.target import head_weight
from draftsmith.models.vocab import DraftVocab

ANY_DEPTH = 1 << 30  # of tokens ahead, or positions, where nothing bounds them
TAKES, CONVERTED = "takes it, by its documentation", "reads it, converted"


class Reads(NamedTuple):
    """How a server or toolkit takes a kind of head. method: its own name for it; ours: whether it
    reads the folder that training writes, else `export`'s; says: what it does with its layout;
    misread: of a config.json that it reads without a word, why it would draft wrongly, or None.
    """

    method: str = ""
    ours: bool = False
    says: str = "reads it"
    misread: Callable[[dict[str, Any]], str | None] = lambda config: None


@dataclass(frozen=True)
class Kind:
    """What is known of a kind before one is loaded. title: in sentences; stacks: who reads it, by
    the names of `server_facts.STACKS`; learns: whether from served requests.
    """

    title: str
    stacks: dict[str, Reads] = field(default_factory=dict)
    learns: bool = False


class Head(nn.Module):
    """What every family of heads is; a family overrides what it does otherwise."""

    kinds: ClassVar[dict[str, Kind]] = {}  # that its class makes
    kind: str  # which of them it is
    taps: tuple[Tap, ...]  # states of the target that it reads, side by side
    hidden: int  # of the target
    rows: int  # of the target's LM head, padding included
    context: int  # positions that it knows; ANY_DEPTH where it knows none
    levels: int  # tokens ahead that it can draft
    drafts: DraftVocab | None = None  # the tokens that its folder says it drafts; None: all
    _borrowed: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        """The head of a config.json, weights random; ValueError where that lacks something."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Its config.json."""
        raise NotImplementedError

    def on_disk(self) -> dict[str, Tensor]:
        """The tensors by their names in the folder."""
        return dict(self.state_dict())

    def from_disk(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of tensors by their names in the folder: undoes `on_disk`."""
        return tensors

    def exported(self, to: str, target: PreTrainedModel, K: int) -> Exported:
        """As stack `to`, one of its kind's, reads it; it is bound to the target. K: tokens to draft
        a round. ValueError where the stack would draft otherwise with this one.
        """
        raise NotImplementedError

    @property
    def vocab(self) -> DraftVocab:
        """The tokens that it drafts."""
        return self.drafts or DraftVocab.whole(self.rows)

    def bind(self, target: PreTrainedModel) -> Self:
        """Borrow the target's embeddings and LM head, both [V, H]; ValueError if sizes differ."""
        head_VH = head_weight(target)
        table = target.get_input_embeddings().weight
        assert isinstance(table, Tensor)
        pairs = (
            ("hidden size", self.hidden, head_VH.shape[1]),
            ("rows of the LM head", self.rows, head_VH.shape[0]),
        )
        differ = [f"{name} {ours}, got {theirs}" for name, ours, theirs in pairs if ours != theirs]
        if differ:
            raise ValueError(
                f"{self.kind} head: made for a target of {'; '.join(differ)}; expected the target "
                "it was trained on; give that target"
            )
        check_taps(self.taps, target.config.get_text_config().num_hidden_layers)
        self._borrowed = (table.detach(), head_VH.detach())
        return self

    def init_from(self, target: PreTrainedModel) -> Self:
        """Bind the target, and begin with what it knows."""
        return self.bind(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that borrows the same tensors."""
        memo |= {id(tensor): tensor for tensor in self._borrowed or ()}
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    def embed(self, tokens_X: Tensor) -> Tensor:
        """The target's embeddings [..., H] of tokens, in the head's own type."""
        dtype = next(self.parameters()).dtype
        return F.embedding(tokens_X, self.target_embedding_VH).to(dtype)

    @property
    def target_embedding_VH(self) -> Tensor:
        return self._bound[0]

    @property
    def target_head_VH(self) -> Tensor:
        return self._bound[1]

    def head_VH(self, depth: int) -> Tensor:
        """The LM head of one depth: the target's, unless a family has its own."""
        return self.target_head_VH

    @property
    def _bound(self) -> tuple[Tensor, Tensor]:
        assert self._borrowed is not None, f"{self.kind} head: bind(target) comes first"
        return self._borrowed

    def save_pretrained(self, folder: str | Path, **unused: Any) -> None:
        write_json(Path(folder) / "config.json", self.to_json())
        save_tensors(Path(folder) / "model.safetensors", self.on_disk())


class LayerHead(Head):
    """A head of decoder layers. layer: their sizes, hidden_size and vocab_size the target's. Its
    config.json has these, and what else its constructor takes: `own`, attributes by name and kind.
    """

    own: ClassVar[dict[str, type]] = {}
    architecture: ClassVar[str] = ""  # by default the name of the class
    config: Any  # of the layers; a family with more settings keeps them all here

    def __init__(self, layer: PretrainedConfig) -> None:
        super().__init__()
        self.config, self.rotary = layer, Rotary(layer)
        self.hidden, self.rows = layer.hidden_size, layer.vocab_size
        self.context = layer.max_position_embeddings

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.own}
        named = {"architectures": [self.architecture or type(self).__name__]}
        return layer_json(self.config) | own | named

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        own = (entry(config, name, kind) for name, kind in cls.own.items())
        return cls(read_layer(config), *own)


def heads() -> dict[str, type[Head]]:
    """The class of each kind, from the files of this folder."""
    found: dict[str, type[Head]] = {}
    for file in pkgutil.iter_modules(sys.modules[__package__].__path__):
        module = importlib.import_module(f"{__package__}.{file.name}")
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, Head):
                found |= dict.fromkeys(cls.kinds, cls)
    return found


def family(kind: str, room: str, what: str) -> Any:
    """A family's class in another room: EagleDrafter for "eagle3", "decode.drafters", "Drafter"."""
    cls = heads()[kind]
    module = importlib.import_module(f"draftsmith.{room}.{cls.__module__.rpartition('.')[2]}")
    return getattr(module, f"{cls.__name__}{what}")


def assembled(
    cls: type[Head], config: dict[str, Any], tensors: dict[str, Tensor], dtype: str = "auto"
) -> Head:
    """The head of a config.json and its tensors by their names on disk, in eval mode; whole numbers
    (vocabulary maps) keep their type. ValueError for a config that isn't of such a head.
    """
    head = cls.from_json(config)
    # assign: the dtype is the tensors', unless another is named.
    head.load_state_dict(head.from_disk(tensors), assign=True)
    wanted = DTYPES[dtype]
    return (head.to(wanted) if isinstance(wanted, torch.dtype) else head).eval()


def outlined(cls: type[Head], config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors on disk, without values, of the head that a config.json describes."""
    with torch.device("meta"):
        return cls.from_json(config).on_disk()


def entry(config: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """`config[name]`, of `kind`; ValueError where it is missing and has no default."""
    value = config.get(name, default)
    if value is None or not isinstance(value, kind):
        wanted = f"expected {kind.__name__}; restore the file as it was saved"
        raise ValueError(f"config.json: got {name}={value!r}, {wanted}")
    return value
