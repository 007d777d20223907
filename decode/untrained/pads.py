"""Placeholders behind the pending token: what the target chooses after them is drafted, and the
next round verifies it. For targets that know what a placeholder stands for.

    pads:K      K placeholders, the token that the target's config names as padding, for targets
                tuned so (train/tuning/units.py)
    ppd:M       M prompts, tokens beyond the tokenizer's, of which the embeddings alone were trained
                (PPD, arXiv 2405.18628; train/tuning/prompts.py)

`pads` goes by two rounds in turn: one asks, whose placeholders are never kept, one verifies; so K
tokens cost two passes at best, (K + 2) / 2 a pass. `ppd` asks behind every guess that it verifies:
M + 1 tokens a pass at best, of (M + 1)^2 nodes. A prompt is never kept, since no target chooses it;
rules that keep what isn't chosen are refused.

Shapes: B rows, R of them just admitted, K guesses, P prompts of a tree, N nodes.
"""

from functools import cache
from math import isqrt
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Kept, Round
from draftsmith.decode.token_tree import DETERMINISTIC, TokenTree, Topology
from draftsmith.decode.untrained.jacobi import JacobiDrafter


class PadsDrafter(JacobiDrafter):
    """Guesses are placeholders, or the choices after these."""

    kind = "pads"
    pad: int

    @classmethod
    def named(cls, kind: str, says: str, target: PreTrainedModel, vocab_size: int) -> Self:
        """pads:K; ValueError for anything else, and for a target without a padding token."""
        pad = target.config.get_text_config().pad_token_id
        if not says.isdecimal() or not 0 < int(says) < 512 or pad is None:
            raise ValueError(
                f"drafter: got pads:{says} for a target whose pad_token_id is {pad}, expected "
                "pads:K, of 1 to 511 of them, and a token"
            )
        made = cls(int(says), target.device)
        made.pad = pad
        return made

    def prefill(self, admitted: Admitted) -> None:
        self.guess_BK[admitted.rows_R] = self.pad

    def extend(self, kept: Kept) -> None:
        asked_B1 = (self.guess_BK == self.pad).all(1, keepdim=True) | (kept.n_new_B == 0)[:, None]
        super().extend(kept)
        self.guess_BK.copy_(torch.where(asked_B1, self.guess_BK, self.pad))


class PromptsDrafter(JacobiDrafter):
    """A plan's nodes are guesses, the target's choices after the last kept token's prompts, and
    behind each, the pending token too, as many prompts. shape: how many of both there were.
    """

    kind = "ppd"
    asks = True
    shape = 0, 0
    prompt_K: Tensor

    @classmethod
    def named(cls, kind: str, says: str, target: PreTrainedModel, vocab_size: int) -> Self:
        """ppd:M; ValueError for anything else, and where the embeddings have no such rows."""
        table: Any = target.get_input_embeddings().weight
        rows = len(table)
        if not says.isdecimal() or not 0 < int(says) <= rows - vocab_size:
            raise ValueError(
                f"drafter: got ppd:{says} for a target with {rows - vocab_size} embeddings beyond "
                "its tokenizer's, expected ppd:M, of at most as many prompts; train them: "
                "draftsmith train tune recipe=ppd/gsm8k"
            )
        made = cls((int(says) + 1) ** 2 - 1, target.device)
        made.prompt_K = vocab_size + torch.arange(int(says), device=target.device)
        return made

    def reset(self, rows: int, slots: int) -> None:
        self.guess_BK = self.prompt_K.repeat(rows, 1)

    def prefill(self, admitted: Admitted) -> None:
        self.guess_BK[admitted.rows_R] = self.prompt_K

    def propose(self, request: Round) -> TokenTree:
        most, nodes, rows = len(self.prompt_K), request.plan.nodes, len(request.pending_B)
        guesses = min(most, isqrt(nodes) - 1)
        self.shape = guesses, few = guesses, max(1, guesses)
        prompt_BP = self.prompt_K[:few].repeat(1 + guesses).expand(rows, -1)
        parts_BN = request.pending_B[:, None], self.guess_BK[:, :guesses], prompt_BP
        topology = _behind_each(guesses, few, self.device)
        return TokenTree(torch.cat(parts_BN, 1), topology, DETERMINISTIC)

    def extend(self, kept: Kept) -> None:
        """After a round that asked nothing it knows nothing."""
        assert kept.chosen_BN is not None, "the engine tells who asks by `chooses`"
        (guesses, few), went_B1 = self.shape, kept.n_new_B[:, None] > 0
        said_BK = self.prompt_K.expand_as(self.guess_BK).clone()
        if kept.chosen_BN.shape[1] > 1:
            leaf_B1 = (kept.n_new_B - 1).clamp(0, guesses)[:, None]
            at_BK = 1 + guesses + leaf_B1 * few + torch.arange(few, device=self.device)
            said_BK[:, :few] = kept.chosen_BN.gather(1, at_BK)
        self.guess_BK.copy_(torch.where(went_B1, said_BK, self.guess_BK))


@cache  # recordings of rounds read these tensors
def _behind_each(guesses: int, few: int, device: torch.device) -> Topology:
    """A chain, and behind each of its nodes a chain of so many more."""
    parents = [*range(-1, guesses)]
    for node in range(1 + guesses):
        first = len(parents)
        parents += [node, *range(first, first + few - 1)][:few]
    return Topology.from_parents(parents, device)
