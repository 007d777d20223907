"""Jacobi decoding: what the target chose last time, guessed again. No draft call at all.

    jacobi:K    windows of K guesses

A window of K tokens is verified as a chain. What the target chooses after each of them is right up
to the first wrong one, and a better guess beyond it: the choices after the kept part are the next
window. The fixed point is plain decoding (Santilli et al., arXiv 2305.10427; consistency models,
2403.00835, are trained to reach it sooner). Published code iterates one window until it stands;
this one rolls on. With noise fixed by position, choices at temperature above 0 are deterministic.

Shapes: B rows, R of them just admitted, K guesses, N nodes.
"""

from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Drafter, Kept, Round
from draftsmith.decode.token_tree import DETERMINISTIC, TokenTree, chain


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
        """jacobi:K; ValueError for anything else."""
        if not says.isdecimal() or not 0 < int(says) < 512:
            raise ValueError(f"drafter: got jacobi:{says}, expected jacobi:K, of 1 to 511 guesses")
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
