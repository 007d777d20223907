"""What a round may come to, and the chains that would be drafted then: one round ahead, by
enumeration, while the target is still at work.

A chain of K tokens ends after one of its K + 1 nodes. Which token follows there is guessed by the
draft's scores: under shared noise its best one that wasn't drafted is as likely right as a drafted
one. Behind each of F guesses K more tokens are drafted, all of them side by side.

Shapes: B rows, N = K + 1 nodes, F guesses after each, M = N F branches, X = K + 1 tokens of a
branch, L tokens of a kept path, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.drafting.base import Kept, Round
from draftsmith.decode.sampling import likeliest

# (tokens [B, n], their slots and depths [n] beyond the committed ones, `block` and `depth` of
# `Seen`) -> raw logits [B, n, V]
Ask = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def foresee(request: Round, lens_B: Tensor, tokens_BN: Tensor, guesses: int, ask: Ask) -> Tensor:
    """The branches [B, M, X] of a chain, guesses first, in the order of its nodes. lens_B: as the
    request's when the round set off. The chain is fed once more, so that keys and values of all of
    it are in place whatever is kept; those of the branches lie beyond, and are never moved.
    """
    nodes = tokens_BN.shape[1]
    node_N = torch.arange(nodes, device=lens_B.device)
    race_BDV = None
    if request.race is not None:
        step_D = torch.arange(1, 2 * nodes, device=lens_B.device)
        race_BDV = request.race(lens_B[:, None] + step_D)

    def scores(logits_BnV: Tensor, depth_n: Tensor) -> Tensor:
        logits_BnV = request.params.transform(logits_BnV)
        return logits_BnV if race_BDV is None else logits_BnV - race_BDV[:, depth_n]

    seen_NN = node_N <= node_N[:, None]
    scores_BNV = scores(ask(tokens_BN, node_N, node_N, seen_NN, node_N), node_N)
    # After its drafted child a node isn't the last one kept.
    drafted_BK1 = tokens_BN[:, 1:, None]
    own_BNV = scores_BNV[:, :-1].scatter(2, drafted_BK1, -torch.inf)
    guess_BNF = likeliest(torch.cat([own_BNV, scores_BNV[:, -1:]], 1), guesses)[1]
    branches, tokens_BM = [guess_BNF.flatten(1)], guess_BNF.flatten(1)
    depth_M = node_N.repeat_interleave(guesses) + 1
    count, depths = len(depth_M), node_N
    block, eye_MM = node_N < depth_M[:, None], torch.eye(len(depth_M), device=lens_B.device).bool()
    slot_M = nodes + torch.arange(count, device=lens_B.device)
    for _ in range(nodes - 1):
        block, depths = torch.cat([block, eye_MM], 1), torch.cat([depths, depth_M])
        logits_BMV = ask(tokens_BM, slot_M, depth_M, block, depths)
        tokens_BM = scores(logits_BMV, depth_M).argmax(-1)
        branches.append(tokens_BM)
        depth_M, slot_M = depth_M + 1, slot_M + count
    return torch.stack(branches, -1)


class Foreseen(NamedTuple):
    """What is ready to be proposed. lens_B: committed tokens of the rows that it is for, -1 where
    no guess was right; tokens_BX: the pending one and those drafted behind it.
    """

    lens_B: Tensor
    tokens_BX: Tensor


def came_true(branches_BMX: Tensor, kept: Kept) -> Foreseen:
    """The branch of each row that a round came to."""
    rows, _, nodes = branches_BMX.shape
    last_B1 = (kept.n_new_B[:, None] - 1).clamp(min=0)
    row_B = torch.arange(rows, device=last_B1.device)
    guess_BF = branches_BMX[..., 0].view(rows, nodes, -1)[row_B, last_B1[:, 0]]
    right_BF = guess_BF == kept.tokens_BL.gather(1, last_B1)
    right_B = right_BF.any(1) & (kept.n_new_B > 0)
    branch_B = last_B1[:, 0] * guess_BF.shape[1] + right_BF.int().argmax(1)
    lens_B = torch.where(right_B, kept.lens_B + kept.n_new_B, -1)
    return Foreseen(lens_B, branches_BMX[row_B, branch_B])
