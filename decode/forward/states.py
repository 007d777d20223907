"""The states of all rows and recurrent layers, beside a pool of keys and values; and a pass that
goes by them. A prompt is read as chains of at most CHUNK tokens.

Shapes: as in `recurrent.py`; R rows just admitted, H hidden.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from draftsmith.decode.forward.mixers import Mixer
from draftsmith.decode.forward.recurrent import Fresh, Tree, folded, tree_scan, windows

CHUNK = 64


class StatePool:
    """Of each row and layer the convolution's last inputs and the state, after the committed tokens
    alone; fresh: of the last pass, by layer, until `commit`. Changed in place.
    """

    def __init__(self, mixers: Mapping[int, Mixer], rows: int, device: torch.device) -> None:
        self.mixers, self.fresh = mixers, dict[int, Fresh]()
        self.conv = {
            layer: torch.zeros(rows, *mixer.conv_shape, dtype=mixer.dtype, device=device)
            for layer, mixer in mixers.items()
        }
        self.state = {
            layer: torch.zeros(rows, *mixer.state_shape, dtype=mixer.wide, device=device)
            for layer, mixer in mixers.items()
        }

    def part(self, first: int, last: int) -> Self:
        """The same memory, rows first..last-1 of it."""
        part = copy.copy(self)
        part.fresh = {}
        part.conv = {layer: conv[first:last] for layer, conv in self.conv.items()}
        part.state = {layer: state[first:last] for layer, state in self.state.items()}
        return part

    def clear(self, rows_R: Tensor) -> None:
        """Rows that begin anew."""
        for held in (*self.conv.values(), *self.state.values()):
            held.index_fill_(0, rows_R, 0)

    def prefill(self, rows_R: Tensor, lens_R: Tensor, layer: int, hidden_RNH: Tensor) -> Tensor:
        """The layer's output for prompts, right-padded to N, whose states become those of rows R:
        what lies beyond a prompt's length is never folded in.
        """
        mixer = self.mixers[layer]
        before, state = self.conv[layer][rows_R].zero_(), self.state[layer][rows_R].zero_()
        entered, rates, gate = mixer.enter(hidden_RNH)
        reads = []
        for first in range(0, entered.shape[1], CHUNK):
            part = slice(first, first + CHUNK)
            conv_RNC = entered[:, part]
            length = conv_RNC.shape[1]
            tree = Tree.chain(length, 1 + before.shape[1], lens_R.device)
            read, fresh = scanned(mixer, conv_RNC, rates[:, part], before, state, tree)
            reads.append(read)
            before, state = folded(before, state, fresh, (lens_R - first).clamp(0, length))
        self.conv[layer].index_copy_(0, rows_R, before)
        self.state[layer].index_copy_(0, rows_R, state)
        return mixer.leave(torch.cat(reads, 1), gate)

    def tree(self, block: Tensor | None, tokens_BN: Tensor) -> Tree:
        """How new tokens hang together, from the block of a `Seen`."""
        width = 1 + next(iter(self.mixers.values())).conv_shape[0]
        if block is None:
            return Tree.chain(tokens_BN.shape[1], width, tokens_BN.device)
        return Tree.of(block, width)

    def verify(self, tree: Tree, layer: int, hidden_BNH: Tensor) -> Tensor:
        """The layer's output for new tokens of all rows; states stay as they are."""
        mixer = self.mixers[layer]
        entered, rates, gate = mixer.enter(hidden_BNH)
        held = self.conv[layer], self.state[layer]
        read, self.fresh[layer] = scanned(mixer, entered, rates, *held, tree)
        return mixer.leave(read, gate)

    def commit(self, path_BL: Tensor, n_B: Tensor) -> None:
        """Fold in the first n_B tokens of each row's path, nodes of the last pass."""
        row_B1 = torch.arange(len(path_BL), device=path_BL.device)[:, None]
        for layer, fresh in self.fresh.items():
            path = Fresh(*(x[row_B1, path_BL] for x in fresh))
            before, state = folded(self.conv[layer], self.state[layer], path, n_B)
            self.conv[layer].copy_(before)
            self.state[layer].copy_(state)
        self.fresh.clear()


def scanned(
    mixer: Mixer,
    entered_BNC: Tensor,
    rates_BNX: Tensor,
    before_BPC: Tensor,
    state_BJKE: Tensor,
    tree: Tree,
) -> tuple[Tensor, Fresh]:
    """What nodes read of the states and of the nodes above them, [B, N, J, E], and what they keep
    for a commit.
    """
    convolved = mixer.convolved(windows(before_BPC, entered_BNC, tree))
    tokens = mixer.tokens(convolved, rates_BNX)
    read, written = tree_scan(tokens, tree.ancestors, state_BJKE)
    if tokens.skip_BNJE is not None:
        read = read + tokens.skip_BNJE
    return read, Fresh(entered_BNC, tokens.key_BNJK, written, tokens.decay_BNJ)


@contextmanager
def mixing(
    mixers: Mapping[int, Mixer], mix: Callable[[int, Tensor], Tensor] | None
) -> Iterator[None]:
    """While it lasts a model's recurrent layers are (number, input) -> output; else their own."""
    modules = {layer: mixer.module for layer, mixer in mixers.items()}
    held: dict[int, Any] = {layer: vars(m).get("forward") for layer, m in modules.items()}
    for layer, module in modules.items():
        assert mix is not None, "layers that keep a state need a pool with states"
        module.forward = partial(_instead, mix, layer)
    try:
        yield
    finally:
        for layer, module in modules.items():
            del module.forward
            if held[layer] is not None:  # a hook's, put there by others
                module.forward = held[layer]


def _instead(
    mix: Callable[[int, Tensor], Tensor], layer: int, hidden_states: Tensor, **others: Any
) -> Tensor:
    return mix(layer, hidden_states)
