"""Layers that keep a state in the place of keys and values, over trees of tokens: the convolution,
Mamba-2 and the gated delta rule; and the states of all rows.

A head's state S is [K, E]. Token by token, with log-decay g, query q, key k and a value u written,

    S <- e^g S + k u^T,    o = q S;    the delta rule writes  u = beta (v - k e^g S), Mamba-2 dt x

A tree's node goes on from its parent's state. With a(n, m): m is n or above it, G_n: the sum of g
from the root to n, D(n, m) = e^(G_n - G_m) where a(n, m), else 0, and S the state before the root:

    o_n = e^(G_n) q_n S + sum_m D(n, m) (q_n . k_m) u_m
    u_n = beta_n (v_n - e^(G_n) k_n S - sum_(m above n) D(n, m) (k_n . k_m) u_m)
    leaf l of a path is committed by  S <- e^(G_l) S + sum_m D(l, m) k_m u_m^T

The first is STree's (arXiv 2505.14969, for Mamba-2); u solves a triangular system, as parents come
before children. The convolution of node n reads the last W of what came before the root and the
path to n. A chain is the case of all earlier nodes; a prompt is chains of at most CHUNK tokens.

Shapes: B rows, R of them just admitted, N nodes or tokens, M nodes above, L tokens of a path, J
heads, K key width, E value width, C channels of a convolution of width W.
"""

import copy
from collections.abc import Mapping
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

CHUNK = 64  # tokens of a prompt at a time


class Tokens(NamedTuple):
    """What a layer makes of new tokens. beta: of the delta rule; None: values are written as they
    are. skip: added to what is read, None where nothing is.
    """

    query_BNJK: Tensor
    key_BNJK: Tensor
    value_BNJE: Tensor
    decay_BNJ: Tensor
    beta_BNJ: Tensor | None = None
    skip_BNJE: Tensor | None = None


class Fresh(NamedTuple):
    """What is kept of new tokens until it is known which of them stay: the convolution's inputs,
    and what each writes to the state.
    """

    conv_BNC: Tensor
    key_BNJK: Tensor
    written_BNJE: Tensor
    decay_BNJ: Tensor


class Tree(NamedTuple):
    """How new tokens hang together: ancestors [N, N] or [B, N, N], as of a `Topology`; window: what
    each convolution reads, [N, W] or [B, N, W], numbers among the W - 1 inputs before the root,
    then the nodes.
    """

    ancestors: Tensor
    window: Tensor

    @classmethod
    def of(cls, ancestors: Tensor, width: int) -> "Tree":
        depth_N = ancestors.sum(-1) - 1
        wanted_NW = depth_N[..., None] - torch.arange(width - 1, -1, -1, device=ancestors.device)
        at_NWM = depth_N[..., None, None, :] == wanted_NW[..., None]
        node_NW = (ancestors[..., None, :] & at_NWM).int().argmax(-1)
        return cls(ancestors, width - 1 + torch.where(wanted_NW < 0, wanted_NW, node_NW))

    @classmethod
    def chain(cls, length: int, width: int, device: torch.device) -> "Tree":
        ones_NN = torch.ones(length, length, dtype=torch.bool, device=device)
        return cls.of(ones_NN.tril(), width)


class Mixer(Protocol):
    """One layer's maps around its convolution and recurrence (`mixers.py`)."""

    module: nn.Module
    dtype: torch.dtype  # of the convolution's inputs
    wide: torch.dtype  # of the state
    conv_shape: tuple[int, int]  # (W - 1, C)
    state_shape: tuple[int, int, int]  # (J, K, E)
    row_bytes: int  # of the pool, for each row
    node_bytes: int  # of what is kept for each node until a commit

    def enter(self, hidden_BNH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The convolution's inputs [B, N, C]; what rates are made of, and the gate [B, N, ..]."""

    def convolved(self, window_BNWC: Tensor) -> Tensor:
        """[B, N, C]."""

    def tokens(self, conv_BNC: Tensor, rates_BNX: Tensor) -> Tokens:
        """From what was convolved."""

    def leave(self, read_BNJE: Tensor, gate_BNX: Tensor) -> Tensor:
        """The layer's output [B, N, H]."""


def tree_scan(tokens: Tokens, ancestors: Tensor, state_BJKE: Tensor) -> tuple[Tensor, Tensor]:
    """What each node reads, and what it writes, [B, N, J, E] each."""
    total_BNJ = ancestors.to(tokens.decay_BNJ.dtype) @ tokens.decay_BNJ
    total_BJN = total_BNJ.transpose(1, 2)
    gap_BJNM = total_BJN[..., :, None] - total_BJN[..., None, :]
    reach_BJNM = gap_BJNM.masked_fill(~ancestors.unsqueeze(-3), -torch.inf).exp()
    carried_BJN1 = total_BJN.exp()[..., None]
    query, key, written = (x.transpose(1, 2) for x in tokens[:3])
    if tokens.beta_BNJ is not None:
        beta_BJN1 = tokens.beta_BNJ.transpose(1, 2)[..., None]
        missing = beta_BJN1 * (written - carried_BJN1 * (key @ state_BJKE))
        # The diagonal is taken for ones.
        above_BJNM = beta_BJN1 * reach_BJNM * (key @ key.transpose(-1, -2))
        solve = torch.linalg.solve_triangular
        written = solve(above_BJNM, missing, upper=False, unitriangular=True)
    read = carried_BJN1 * (query @ state_BJKE)
    read = read + (reach_BJNM * (query @ key.transpose(-1, -2))) @ written
    return read.transpose(1, 2), written.transpose(1, 2)


def windows(before_BPC: Tensor, fresh_BNC: Tensor, tree: Tree) -> Tensor:
    """What each node's convolution reads, [B, N, W, C]."""
    joined = torch.cat([before_BPC, fresh_BNC], 1)
    window_BNW = tree.window.expand(len(joined), -1, -1)
    at_BXC = window_BNW.flatten(1)[..., None].expand(-1, -1, joined.shape[2])
    return joined.gather(1, at_BXC).unflatten(1, window_BNW.shape[1:])


def folded(
    before_BPC: Tensor, state_BJKE: Tensor, path: Fresh, n_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The convolution's inputs and the state after the first n_B tokens of each row's path; none:
    as they were.
    """
    step_L = torch.arange(path.decay_BNJ.shape[1], device=n_B.device)
    stays_BL1 = (step_L < n_B[:, None])[..., None]
    total_BLJ = path.decay_BNJ.masked_fill(~stays_BL1, 0).cumsum(1)
    last_B1J = total_BLJ[:, -1:]
    share_BLJ1 = ((last_B1J - total_BLJ).exp() * stays_BL1)[..., None]
    key_BJKL = (path.key_BNJK * share_BLJ1).permute(0, 2, 3, 1)
    added_BJKE = key_BJKL @ path.written_BNJE.transpose(1, 2)
    state_BJKE = last_B1J.transpose(1, 2)[..., None].exp() * state_BJKE + added_BJKE
    at_BP = n_B[:, None] + torch.arange(before_BPC.shape[1], device=n_B.device)
    at_BPC = at_BP[..., None].expand_as(before_BPC)
    return torch.cat([before_BPC, path.conv_BNC], 1).gather(1, at_BPC), state_BJKE


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
