"""Drafters that know the plain answers: always right, always wrong, half right, or EOS spam; as
chains and as trees with wrong and repeated siblings.
"""

import torch

from draftsmith.decode.drafting.base import ANY_DEPTH, Admitted, Drafter, Kept, Round
from draftsmith.decode.token_tree import DETERMINISTIC, TokenTree, Topology, chain


class Scripted(Drafter):
    """truth: prompt -> the plain answer's tokens."""

    kind, parameter_bytes, trees, samples = "scripted", 0, True, False
    context, levels, taps, size = ANY_DEPTH, ANY_DEPTH, (), None
    acceptance = None
    held = ("known", "full")

    def __init__(self, mode: str, truth: dict[tuple[int, ...], list[int]], vocab: int) -> None:
        self.mode, self.truth, self.vocab = mode, truth, vocab

    def reset(self, rows: int, slots: int) -> None:
        self.known: list[list[int]] = [[] for _ in range(rows)]
        self.full: list[list[int]] = [[] for _ in range(rows)]

    def release(self) -> None:
        """Nothing that matters."""

    def prefill(self, admitted: Admitted) -> None:
        for i, row in enumerate(admitted.rows_R.tolist()):
            prompt = admitted.tokens_RN[i, : admitted.lens_R[i]].tolist()
            self.full[row] = prompt + self.truth[tuple(prompt)]
            self.known[row] = [*prompt, int(admitted.pending_R[i])]

    def _draft(self, row: int, depth: int) -> int:
        at = len(self.known[row]) + depth
        right = self.full[row][at] if at < len(self.full[row]) else 5
        wrong = (right + 1) % self.vocab
        choice = {"right": right, "wrong": wrong, "eos": 0, "half": wrong if at % 2 else right}
        return choice[self.mode]

    def propose(self, request: Round) -> TokenTree:
        levels = request.plan.levels
        drafted = [
            [self._draft(row, d) if known else 0 for d in range(levels)]
            for row, known in enumerate(self.known)
        ]
        tokens = torch.cat([request.pending_B[:, None], torch.tensor(drafted)], 1)
        return TokenTree(tokens, chain(levels, tokens.device), DETERMINISTIC)

    def extend(self, kept: Kept) -> None:
        for row, n in enumerate(kept.n_new_B.tolist()):
            self.known[row] += kept.tokens_BL[row, :n].tolist()


class Bushy(Scripted):
    """The same guesses spread over a tree with repeated and wrong siblings, whatever was asked."""

    def propose(self, request: Round) -> TokenTree:
        topology = Topology.from_parents([-1, 0, 0, 0, 2, 2, 3, 5], torch.device("cpu"))
        rows = []
        for row, known in enumerate(self.known):
            d = [self._draft(row, i) if known else 0 for i in range(3)]
            wrong = [(t + 3) % self.vocab for t in d]
            rows.append([wrong[0], d[0], d[0], wrong[1], d[1], d[1], d[2]])
        tokens = torch.cat([request.pending_B[:, None], torch.tensor(rows)], 1)
        return TokenTree(tokens, topology, DETERMINISTIC)
