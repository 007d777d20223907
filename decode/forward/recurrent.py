"""Layers that keep a state in the place of keys and values, over trees of tokens: the convolution,
Mamba-2 and the gated delta rule.

A head's state S is [K, E]. Token by token, with log-decay g, query q, key k and a value u written,

    S <- e^g S + k u^T,    o = q S;    the delta rule writes  u = beta (v - k e^g S), Mamba-2 dt x

A tree's node goes on from its parent's state. With a(n, m): m is n or above it, G_n: the sum of g
from the root to n, D(n, m) = e^(G_n - G_m) where a(n, m), else 0, and S the state before the root:

    o_n = e^(G_n) q_n S + sum_m D(n, m) (q_n . k_m) u_m
    u_n = beta_n (v_n - e^(G_n) k_n S - sum_(m above n) D(n, m) (k_n . k_m) u_m)
    leaf l of a path is committed by  S <- e^(G_l) S + sum_m D(l, m) k_m u_m^T

The first is STree's (arXiv 2505.14969, for Mamba-2); u solves a triangular system, as parents come
before children. The convolution of node n reads the last W of what came before the root and the
path to n. A chain is the case of all earlier nodes.

Shapes: B rows, N nodes or tokens, M nodes above, L tokens of a path, J
heads, K key width, E value width, C channels of a convolution of width W.
"""

from typing import NamedTuple

import torch
from torch import Tensor


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
