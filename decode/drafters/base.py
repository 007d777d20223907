"""What the engine asks of a drafter, whatever its kind.

Shapes: B rows, D levels, L = D + 1, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.token_tree import TokenTree


@dataclass(frozen=True)
class Round:
    """One round's request. levels: how deep to draft (K); lens_B: committed tokens of each row;
    pending_B: the token sampled but not yet in the target's KV; top: the largest of lens_B, a plain
    int; law: how to draw; race_BDV: log E for the token of each level, None when greedy.
    """

    levels: int
    lens_B: Tensor
    pending_B: Tensor
    top: int
    params: SamplingParams
    law: str
    race_BDV: Tensor | None


class Drafter(Protocol):
    """A source of proposals. It owns its state; rows are addressed as the engine's rows are."""

    kind: str
    context: int  # tokens that it can follow; beyond, decoding with it ends

    def nodes(self, levels: int) -> int:
        """The most nodes, root included, that a tree of so many levels will have."""

    def reset(self, rows: int, slots: int) -> None:
        """Make room for `rows` rows of at most `slots` tokens; forget everything."""

    def prefill(self, rows_R: Tensor, tokens_RN: Tensor, lens_R: Tensor, pending_R: Tensor) -> None:
        """Take in the prompts (right-padded) of the rows named, and their first sampled token."""

    def propose(self, request: Round) -> TokenTree:
        """A tree of at most `request.levels` levels whose root is the pending token."""

    def extend(self, tokens_BL: Tensor, n_new_B: Tensor) -> None:
        """Take in the first n_new tokens of each row, just emitted; 0 changes nothing."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes read by one draft call; 0 where there is no model."""
