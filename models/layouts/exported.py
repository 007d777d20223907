"""What a head is in another layout."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor


class Exported(NamedTuple):
    """A head in another layout: its config.json, its tensors, the file that they go into; what else
    is pickled beside it, by file; the tokens that it drafts a round, where that isn't free.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = "model.safetensors"
    beside: Mapping[str, Any] = MappingProxyType({})
    K: int = 0
