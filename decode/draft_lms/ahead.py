"""A draft LM that drafts while the target verifies.

    ahead:F+FOLDER      the LM in FOLDER, behind F guesses of each token that a round may end with

Shapes as in lm.py, n nodes fed at once.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafting.base import Admitted, Drafter, Kept, Round
from draftsmith.decode.drafting.foreseen import Foreseen, came_true, foresee
from draftsmith.decode.drafting.grow_tree import plain
from draftsmith.decode.drafting.in_rounds import InRounds
from draftsmith.decode.forward.kv import round_up
from draftsmith.decode.forward.runner import Seen, in_parts
from draftsmith.decode.token_tree import TokenTree, chain


class AheadDrafter(LMDrafter):
    """One that drafts the next round's chain while the target verifies this one's, in a thread of
    its own: behind every token that the round may come to (`foreseen.py`). Where all rows come to
    one that was guessed, their chains are there already; else it drafts as it otherwise would.

    Its slots beyond a row's length, `levels + 1` chains, aren't in the memory plan.
    """

    kind = "ahead"
    levels = 8
    trees = False
    host = True  # what was foreseen is compared with what came

    def __init__(self, whole: LMDrafter, guesses: int) -> None:
        if whole.runner.leader is not None:
            raise in_parts("the target itself, ahead")
        vars(self).update(vars(whole))
        self.guesses = guesses
        self.ready: Foreseen | None = None
        # Shared by its copies for a part of the rows.
        self.worker = ThreadPoolExecutor(1, "ahead")
        self.jobs: list[Future[Tensor]] = []

    @classmethod
    def over(
        cls, says: str, own: Drafter | None, target: PreTrainedModel, vocab_size: int
    ) -> "LMDrafter":
        """Of a name's number of guesses and the LM of its folder; ValueError for others."""
        if type(own) is not LMDrafter or not says.isdecimal() or not 1 <= int(says) <= 8:
            raise ValueError(
                f"drafter: got ahead:{says} with a drafter of kind {getattr(own, 'kind', None)}, "
                "expected ahead:F+FOLDER, 1 to 8 guesses of each next token and a draft LM"
            )
        return cls(own, int(says))

    def reset(self, rows: int, slots: int) -> None:
        self._drop()
        super().reset(rows, slots + (self.levels + 1) * (1 + self.levels * self.guesses))

    def prefill(self, admitted: Admitted) -> None:
        self._drop()
        super().prefill(admitted)

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        return None

    def propose(self, request: Round) -> TokenTree:
        ready = self._drop()
        tree = None if ready is None else self._came(ready, request)
        if tree is None:
            tree = super().propose(request)
        if plain(request):
            # The engine's rows move on while this is at work.
            self.jobs.append(
                self.worker.submit(self._foresee, request, request.lens_B.clone(), tree)
            )
        return tree

    def extend(self, kept: Kept) -> None:
        super().extend(kept)
        self.ready = came_true(self.jobs.pop().result(), kept) if self.jobs else None

    def catch_up(self, kept: Kept) -> None:
        self._drop()
        super().catch_up(kept)

    def _drop(self) -> Foreseen | None:
        """What was ready, which is so once; no thread is at work from here on."""
        while self.jobs:
            self.jobs.pop().result()
        ready, self.ready = self.ready, None
        return ready

    def _came(self, ready: Foreseen, request: Round) -> TokenTree | None:
        """The chain asked for, if it is ready for every row."""
        tokens_BN, levels = ready.tokens_BX, request.plan.levels
        if len(tokens_BN) != len(request.lens_B) or tokens_BN.shape[1] <= levels:
            return None
        same_B = (ready.lens_B == request.lens_B) & (tokens_BN[:, 0] == request.pending_B)
        if not plain(request) or not bool((same_B | ~request.active_B).all()):
            return None
        # A row that has ended may hold anything, but begins with its pending token.
        tokens_BN = torch.cat([request.pending_B[:, None], tokens_BN[:, 1 : levels + 1]], 1)
        return TokenTree(tokens_BN, chain(levels, tokens_BN.device), request.law)

    @torch.inference_mode()
    def _foresee(self, request: Round, lens_B: Tensor, tree: TokenTree) -> Tensor:
        lens_B1, nodes = lens_B[:, None], tree.topology.nodes
        slots = request.top + nodes * (1 + (nodes - 1) * self.guesses)
        width = min(round_up(slots), self.pool.slots)

        def ask(
            tokens_Bn: Tensor, slot_n: Tensor, depth_n: Tensor, block: Tensor, depth_M: Tensor
        ) -> Tensor:
            at = lens_B1 + depth_n, lens_B1 + slot_n, Seen(lens_B, width, block, depth_M)
            return self.runner.logits(self.runner.verify(self.pool, tokens_Bn, *at)[0])

        return foresee(request, lens_B, tree.tokens_BN, self.guesses, ask)
