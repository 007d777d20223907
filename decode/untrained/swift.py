"""The target drafts without some halves of its layers, and goes on choosing which while it decodes
(SWIFT, Xia et al., arXiv 2410.06916).

    swift           45 % of the halves between its first and last layer
    swift:SHARE     another share, above 0 and below 1; always as many

Between two rounds a challenger is tried: the last WINDOW tokens of every row are fed once to the
halves that draft and once to the challenger's, into slots beyond the committed ones. They attend
to the text before the window and to themselves, never to the committed keys and values of their
own tokens, and both are asked for the token after each. The challenger takes the place if more of
the answers' tokens are its choices too, weighed by the bytes it reads (`worth`).

Where we differ from the paper and its code:
1. Nothing is cloned, neither for drafts nor for trials.
2. Both sides are scored on the same, latest tokens. There, the best score is kept over prompts, so
   one easy prompt locks the set. A challenger wins once it leads over PROOF tokens, each counted
   once, and fails once it trails over half as many; the score of what drafts never falls on the
   tokens that decided.
3. Challengers swap one half for another, or are random; no Bayesian optimisation.
4. Trials never end; they become rare as they fail.
5. At temperature above 0 a choice is made with the noise that the answer's token was chosen with.

A trial reads the device: a CUDA round behind it can't set off while the last one runs.

Shapes: B rows, M tokens of the window, C = 2 M columns of its block of slots, V vocabulary.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Kept, Race, Round
from draftsmith.decode.forward.attention import Seen
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.lean import Half
from draftsmith.decode.forward.runner import Runner, round_up
from draftsmith.decode.sampling import choose
from draftsmith.decode.untrained.own_layers import (
    OwnLayersDrafter,
    part_bytes,
    skip_name,
    units_of,
    worth,
)

WINDOW = 64  # a pass over them reads hardly more than one over a single token
PROOF = 64  # tokens that a challenger must lead over
PATIENCE = 4  # failed trials after which the rounds between trials are one more
RANDOM = 0.2  # share of the challengers that are no neighbours
SHARE = 0.45


class SwiftDrafter(OwnLayersDrafter):
    """Trees and chains, as any other part of the target drafts them."""

    scratch = WINDOW
    held = ("pool", "text_BS", "answer_B", "first_B")

    def __init__(self, target: PreTrainedModel, vocab_size: int, share: float) -> None:
        depth = target.config.get_text_config().num_hidden_layers
        super().__init__("swift", target, vocab_size, depth, set())
        self.all_bytes = self.parameter_bytes
        self.units = units_of(self.whole, range(1, depth - 1))
        count = max(1, int(len(self.units) * share))
        self.rng, self.wait, self.failed = random.Random(0), 1, 0
        if len(self.units) == 1:  # nothing to choose
            self.scratch = 0
        self.adopt(frozenset(i * len(self.units) // count for i in range(count)))

    @classmethod
    def named(
        cls, kind: str, says: str, target: PreTrainedModel, vocab_size: int
    ) -> "SwiftDrafter":
        """swift or swift:SHARE; ValueError for anything else, and a target without a middle."""
        share = float(says) if says.replace(".", "", 1).isdecimal() else SHARE * (not says)
        if not 0 < share < 1:
            raise ValueError(
                f"drafter: got swift:{says}, expected swift:SHARE with the share of halves to "
                f"leave out, above 0 and below 1, or swift alone for {SHARE:g}"
            )
        depth = target.config.get_text_config().num_hidden_layers
        if depth < 3:
            raise ValueError(
                f"drafter swift: got a target of {depth} layers, expected at least 3, of which the "
                "first and the last stay; use drafter=exit:1"
            )
        return cls(target, vocab_size, share)

    def without_of(self, chosen: frozenset[int]) -> frozenset[Half]:
        """The halves that these units are."""
        return frozenset(half for i in chosen for half in self.units[i])

    def adopt(self, chosen: frozenset[int]) -> None:
        """Draft without these units from now on."""
        self.chosen, self.without = chosen, self.without_of(chosen)
        self.runner = self.whole.part(self.last, self.without)
        self.form = skip_name(self.without)
        self.challenge()

    def challenge(self) -> None:
        """Take up another challenger, of as many units; what it and the set that drafts match is
        counted from nothing.
        """
        others = [i for i in range(len(self.units)) if i not in self.chosen]
        self.found, self.challenger = [0, 0, 0], self.chosen
        if self.rng.random() < RANDOM:
            drawn = self.rng.sample(range(len(self.units)), len(self.chosen))
            self.challenger = frozenset(drawn)
        if others and self.challenger == self.chosen:
            left = self.rng.choice(sorted(self.chosen))
            self.challenger = self.chosen - {left} | {self.rng.choice(others)}

    def share(self, pool: KVPool) -> None:
        super().share(pool)
        shape, device = (pool.rows, pool.slots), pool.kv_2LBSHE.device
        self.text_BS = torch.zeros(shape, dtype=torch.int64, device=device)
        self.answer_B, self.first_B = torch.zeros(2, pool.rows, dtype=torch.int64, device=device)

    def prefill(self, admitted: Admitted) -> None:
        rows_R, tokens_RN, lens_R = admitted.rows_R, admitted.tokens_RN, admitted.lens_R
        self.text_BS[rows_R, : tokens_RN.shape[1]] = tokens_RN
        self.text_BS[rows_R, lens_R] = admitted.pending_R
        self.answer_B[rows_R] = self.first_B[rows_R] = lens_R

    def extend(self, kept: Kept) -> None:
        step_L = torch.arange(1, kept.tokens_BL.shape[1] + 1, device=kept.lens_B.device)
        at_BL = kept.lens_B[:, None] + step_L
        # What wasn't kept, or of a row that rests, lies beyond its text.
        self.text_BS.scatter_(1, at_BL.clamp(max=self.text_BS.shape[1] - 1), kept.tokens_BL)

    def between(self, request: Round, race: Race) -> bool:
        self.wait -= 1
        if self.wait > 0:
            return False
        rows, K = len(request.lens_B), request.plan.levels
        without = self.without_of(self.challenger)
        runners = self.runner, self.whole.part(self.last, without)
        matches = self.window(request, race)
        news_3 = torch.stack([*map(matches, runners), matches(None)])
        self.found = [a + b for a, b in zip(self.found, news_3.tolist(), strict=True)]
        now, new, counted = self.found
        costs = [
            part_bytes(self.whole.model, self.last, halves) / self.all_bytes
            for halves in (self.without, without)
        ]
        shares = now / max(1, counted), new / max(1, counted)
        held, offered = (worth(a, K, c) for a, c in zip(shares, costs, strict=True))
        if counted < (PROOF if offered > held else PROOF // 2):
            self.first_B[:rows] = request.lens_B + 1
            self.wait = 1 + (PROOF - counted) // (rows * (K + 1))  # sooner there can't be enough
            return False
        self.wait = 1 + self.failed // PATIENCE
        if won := offered > held:
            self.failed = 0
            self.adopt(self.challenger)
        else:
            self.failed += 1
            self.challenge()
        self.first_B.copy_(self.answer_B)
        return won

    def window(self, request: Round, race: Race) -> Callable[[Runner | None], Tensor]:
        """How many of the last tokens of all rows, of those not counted yet, a runner's choices
        match; without a runner how many there are. It writes slots beyond the committed ones.
        """
        rows, lens_B1 = len(request.lens_B), request.lens_B[:, None]
        step_M = torch.arange(WINDOW, device=lens_B1.device)
        begin_B1 = (lens_B1 - WINDOW).clamp(min=0)
        at_BM = begin_B1 + step_M
        text_BS, next_BM = self.text_BS[:rows], at_BM + 1
        counts_BM = (next_BM >= self.first_B[:rows, None]) & (next_BM <= lens_B1)
        counts_BM = counts_BM & request.active_B[:, None]
        # The block: committed slots of the window, which nobody sees, then its own.
        column_C = torch.arange(2 * WINDOW, device=lens_B1.device)
        own_BC = column_C - (lens_B1 - begin_B1)
        block_BMC = (own_BC[:, None] >= 0) & (own_BC[:, None] <= step_M[:, None])
        depth_BC = torch.where(own_BC >= 0, own_BC, column_C)
        width = min(round_up(request.top + WINDOW), self.pool.slots)
        seen = Seen(begin_B1[:, 0], width, block_BMC, depth_BC)
        pool, race_BMV = self.pool.first(rows), race(next_BM)

        def matches(runner: Runner | None) -> Tensor:
            if runner is None:
                return counts_BM.sum()
            fed = text_BS.gather(1, at_BM), at_BM, lens_B1 + step_M
            states_BMH, _ = runner.verify(pool, *fed, seen)
            logits_BMV = request.params.transform(runner.logits(states_BMH))
            chosen_BM = choose(logits_BMV, race_BMV)
            return ((chosen_BM == text_BS.gather(1, next_BM)) & counts_BM).sum()

        return matches
