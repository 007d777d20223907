"""Jacobi decoding: what the target chose last time, guessed again. No draft call at all.

    jacobi:K       windows of K guesses
    lookahead:K    the same beside a tree of what such guesses said before

A window of K tokens is verified as a chain. What the target chooses after each of them is right up
to the first wrong one, and a better guess beyond it: the choices after the kept part are the next
window. The fixed point is plain decoding (Santilli et al., arXiv 2305.10427; consistency models,
2403.00835, are trained to reach it sooner). Published code iterates one window until it stands;
this one rolls on. With noise fixed by position, choices at temperature above 0 are deterministic.

Lookahead (Fu et al., arXiv 2402.02057) keeps what the target says of guesses in a pool of n-grams,
and verifies the pool's beside the window. Our differences: the pool is STAND's table of the
target's laws, which every verified node of window and tree teaches, and the tree is grown from it;
the window is one chain under the pending token, where published code advances W columns of N - 1
levels in the same pass, which takes nodes that are never kept.

Shapes: B rows, R of them just admitted, K guesses, N nodes of a first tree, M of a second one.
"""

from dataclasses import replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Drafter, Kept, Round
from draftsmith.decode.token_tree import DETERMINISTIC, TokenTree, Topology, chain
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.decode.untrained.tables import TableDrafter


class JacobiDrafter(Drafter):
    """Chains of the target's own last choices; new places are filled with the pending token."""

    kind = "jacobi"
    trees = samples = False
    chooses = True
    held: tuple[str, ...] = ("guess_BK",)

    def __init__(self, levels: int, device: torch.device) -> None:
        self.levels, self.device = levels, device

    @classmethod
    def named(cls, kind: str, says: str, target: PreTrainedModel, vocab_size: int) -> Self:
        """KIND:K; ValueError for anything else."""
        if not says.isdecimal() or not 0 < int(says) < 512:
            raise ValueError(f"drafter: got {kind}:{says}, expected {kind}:K, of 1 to 511 guesses")
        return cls(int(says), target.device)

    def reset(self, rows: int, slots: int) -> None:
        self.guess_BK = torch.zeros(rows, self.levels, dtype=torch.int64, device=self.device)

    def prefill(self, admitted: Admitted) -> None:
        self.guess_BK[admitted.rows_R] = admitted.pending_R[:, None]

    def propose(self, request: Round) -> TokenTree:
        levels = request.plan.levels
        tokens_BN = torch.cat([request.pending_B[:, None], self.guess_BK[:, :levels]], 1)
        return TokenTree(tokens_BN, chain(levels, self.device), DETERMINISTIC)

    def extend(self, kept: Kept) -> None:
        assert kept.chosen_BN is not None, "the engine tells who asks by `chooses`"
        nodes = kept.chosen_BN.shape[1]
        step_K = torch.arange(self.levels, device=self.device)
        # What was emitted ends with the choice after node n_new - 1: guesses are those after it.
        at_BK = kept.n_new_B[:, None] + step_K
        last_B1 = (kept.n_new_B - 1).clamp(min=0)[:, None]
        pending_B1 = kept.tokens_BL.gather(1, last_B1)
        ahead_BK: Tensor = kept.chosen_BN.gather(1, at_BK.clamp(max=nodes - 1))
        guess_BK = torch.where(at_BK < nodes, ahead_BK, pending_B1)
        self.guess_BK.copy_(torch.where(kept.n_new_B[:, None] > 0, guess_BK, self.guess_BK))


class LookaheadDrafter(TableDrafter):
    """At most half of a tree's nodes are the window's, the last ones. made: how many were."""

    samples, chooses = False, True
    held = ("text_BS", "lens_B", "window")

    def __init__(self, window: JacobiDrafter, vocab_size: int) -> None:
        super().__init__("stand", window.device, vocab_size)
        self.kind, self.window, self.made = "lookahead", window, 0

    @classmethod
    def named(cls, kind: str, says: str, target: PreTrainedModel, vocab_size: int) -> Self:
        return cls(JacobiDrafter.named(kind, says, target, vocab_size), vocab_size)

    def reset(self, rows: int, slots: int) -> None:
        super().reset(rows, slots)
        self.window.reset(rows, slots)

    def prefill(self, admitted: Admitted) -> None:
        super().prefill(admitted)
        self.window.prefill(admitted)

    def propose(self, request: Round) -> TokenTree:
        plan = request.plan
        self.made = min(self.window.levels, plan.levels, (plan.nodes - 1) // 2)
        looked = super().propose(replace(request, plan=plan.within(plan.nodes - self.made)))
        if not self.made:
            return looked
        guessed = self.window.propose(replace(request, plan=chain_plan(self.made)))
        return joined(looked, guessed)

    def extend(self, kept: Kept) -> None:
        super().extend(kept)
        chosen_BN = kept.chosen_BN
        assert chosen_BN is not None, "the engine tells who asks by `chooses`"
        first = max(1, chosen_BN.shape[1] - self.made)
        window_BN = torch.cat([chosen_BN[:, :1], chosen_BN[:, first:]], 1)
        self.window.extend(kept._replace(chosen_BN=window_BN))

    def __copy__(self) -> "LookaheadDrafter":
        """With rows of its own, as other drafters have after `reset`; the table is one."""
        made = LookaheadDrafter(JacobiDrafter(self.window.levels, self.device), self.vocab_size)
        made.__dict__ |= self.__dict__ | {"window": made.window}
        return made


def joined(first: TokenTree, second: TokenTree) -> TokenTree:
    """Two trees under one root. A path that both have stands there twice, which the coupled rule
    doesn't mind.
    """
    one, two, more = first.topology, second.topology, second.topology.nodes - 1
    rows, nodes = first.tokens_BN.shape
    parent_M = torch.where(two.parent > 0, two.parent + nodes - 1, 0)[1:]
    parent_BN = torch.cat([one.parent.expand(rows, -1), parent_M.expand(rows, -1)], 1)
    depth_BN = torch.cat([one.depth.expand(rows, -1), two.depth[1:].expand(rows, -1)], 1)
    ancestors_BNN = F.pad(one.ancestors.expand(rows, -1, -1), (0, more, 0, more))
    ancestors_BNN[:, nodes:, nodes:] = two.ancestors[1:, 1:]
    ancestors_BNN[:, nodes:, 0] = True
    topology = Topology(parent_BN, depth_BN, ancestors_BNN, max(one.levels, two.levels))
    tokens_BN = torch.cat([first.tokens_BN, second.tokens_BN[:, 1:]], 1)
    return TokenTree(tokens_BN, topology, first.law)
