"""The target drafts without some halves of its layers, and goes on choosing which while it decodes
(SWIFT, Xia et al., arXiv 2410.06916).

    swift           45 % of the halves between its first and last layer
    swift:SHARE     another share, above 0 and below 1; always as many

Between rounds the last WINDOW tokens of every row are fed again, once without the halves that are
left out and once without a challenger's, into slots beyond the committed ones; they see the text
before the window, and each other. The challenger takes the place once more of the answers' tokens
are its choices, weighed by the bytes that it reads (`worth`).

Our differences: 1. Nothing is cloned. 2. Both sides are scored on the same, latest tokens; there
the best score is kept over prompts, so that one easy prompt locks the set. 3. Who is ahead by less
than chance is asked again over the next tokens. 4. Challengers are one swap away, or random: no
Bayesian optimisation. 5. Trials never end, but grow rare as they fail. 6. Above temperature 0
choices are made by the noise that the answer's were. A trial waits for the device.

Shapes: B rows, M tokens of the window, C = 2 M slots of its block, V vocabulary.
"""

import random
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Kept, Race, Round
from draftsmith.decode.forward.attention import Seen
from draftsmith.decode.forward.kv import KVPool, round_up
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.sampling import choose
from draftsmith.decode.untrained.own_layers import (
    OwnLayersDrafter,
    Unit,
    joined,
    part_bytes,
    skip_name,
    units_of,
    worth,
)

SHARE = 0.45
WINDOW = 64  # a pass over them reads hardly more than one over a single token
LEAST, MOST = 32, 256  # tokens on which a challenger wins or fails
PATIENCE = 8  # failed trials after which the rounds between trials are one more
RANDOM = 0.2  # share of the challengers that are no neighbours


class SwiftDrafter(OwnLayersDrafter):
    """Trees and chains, as any other part of the target drafts them."""

    scratch = WINDOW
    held = ("pool", "text_BS", "answer_B", "first_B")

    def __init__(self, target: PreTrainedModel, vocab_size: int, share: float) -> None:
        depth = target.config.get_text_config().num_hidden_layers
        super().__init__("swift", target, vocab_size, depth, set())
        self.units = units_of(self.whole, range(1, depth - 1))
        count = max(1, int(len(self.units) * share))
        self.rng, self.wait, self.failed = random.Random(0), 1, 0
        self.scratch = WINDOW * (len(self.units) > 1)  # else there is nothing to choose
        self.adopt(frozenset(self.units[i * len(self.units) // count] for i in range(count)))

    @classmethod
    def named(cls, kind: str, says: str, target: PreTrainedModel, vocab_size: int) -> Self:
        """swift or swift:SHARE; ValueError for anything else, and a target without a middle."""
        share = float(says) if says.replace(".", "", 1).isdecimal() else SHARE * (not says)
        if not 0 < share < 1:
            got = f"drafter: got swift:{says}, expected swift:SHARE, the share of halves to leave"
            raise ValueError(f"{got} out, above 0 and below 1, or swift alone for {SHARE:g}")
        if (depth := target.config.get_text_config().num_hidden_layers) < 3:
            got = f"drafter swift: got a target of {depth} layers, expected at least 3, of which"
            raise ValueError(f"{got} the first and the last stay; use drafter=exit:1")
        return cls(target, vocab_size, share)

    def adopt(self, chosen: frozenset[Unit]) -> None:
        """Draft without these units from now on."""
        self.chosen, self.without = chosen, joined(chosen)
        self.runner = self.whole.part(self.last, self.without)
        self.form = skip_name(self.without)
        self.challenge()

    def challenge(self) -> None:
        """Take up another challenger, of as many units, on which nothing is known."""
        self.found, self.challenger = [0, 0, 0, 0], self.chosen
        if self.rng.random() < RANDOM:
            self.challenger = frozenset(self.rng.sample(self.units, len(self.chosen)))
        others = [unit for unit in self.units if unit not in self.chosen]
        if others and self.challenger == self.chosen:
            left = self.rng.choice([unit for unit in self.units if unit in self.chosen])
            self.challenger = self.chosen - {left} | {self.rng.choice(others)}

    def share(self, pool: KVPool) -> None:
        super().share(pool)
        sizes = (pool.rows, pool.slots), (pool.rows,), (pool.rows,)
        zeros = (torch.zeros(s, dtype=torch.int64, device=self.runner.device) for s in sizes)
        self.text_BS, self.answer_B, self.first_B = zeros

    def prefill(self, admitted: Admitted) -> None:
        admitted.write(self.text_BS)
        self.answer_B[admitted.rows_R] = self.first_B[admitted.rows_R] = admitted.lens_R

    def extend(self, kept: Kept) -> None:
        kept.write(self.text_BS)

    def between(self, request: Round, race: Race) -> bool:
        self.wait -= 1
        if self.wait > 0:
            return False
        rows, K, without = len(request.lens_B), request.plan.levels, joined(self.challenger)
        part = self.whole.part(self.last, without)
        counts_BM, now_BM, new_BM = self.matches(request, race, self.runner, part)
        told = torch.stack([counts_BM, now_BM, new_BM, now_BM ^ new_BM]).sum((1, 2)).tolist()
        self.found = [a + b for a, b in zip(self.found, told, strict=True)]
        counted, now, new, differ = self.found
        whole = part_bytes(self.whole.model, self.last, ())
        c_now, c_new = (
            part_bytes(self.whole.model, self.last, w) / whole for w in (self.without, without)
        )
        held = worth(now / max(1, counted), K, c_now)
        # Of two equal sets, each ahead on `differ` tokens at random: one deviation is the root.
        sure, seems = (worth((new - x) / max(1, counted), K, c_new) for x in (differ**0.5, 0))
        if counted < LEAST or (counted < MOST and sure <= held < seems):
            self.first_B[:rows] = request.lens_B + 1
            self.wait = 1 + LEAST // (rows * (K + 1))  # sooner there can't be many new tokens
            return False
        self.failed = 0 if sure > held else self.failed + 1
        self.wait = 1 + self.failed // PATIENCE
        self.first_B.copy_(self.answer_B)
        if sure > held:
            self.adopt(self.challenger)
        else:
            self.challenge()
        return sure > held

    def matches(self, request: Round, race: Race, *runners: Runner) -> list[Tensor]:
        """[B, M] bool: which of the last tokens count (of an answer, not counted yet, in rows that
        decode); and of each runner, which of these are its choices. It writes slots beyond the
        committed ones.
        """
        rows, lens_B1 = len(request.lens_B), request.lens_B[:, None]
        step_M = torch.arange(WINDOW, device=lens_B1.device)
        begin_B1 = (lens_B1 - WINDOW).clamp(min=0)
        at_BM = begin_B1 + step_M
        next_BM = at_BM + 1
        counts_BM = (next_BM >= self.first_B[:rows, None]) & (next_BM <= lens_B1)
        counts_BM = counts_BM & request.active_B[:, None]
        # The block: committed slots of the window, which nobody sees, then its own.
        column_C = torch.arange(2 * WINDOW, device=lens_B1.device)
        own_BC = column_C - (lens_B1 - begin_B1)
        block_BMC = (own_BC[:, None] >= 0) & (own_BC[:, None] <= step_M[:, None])
        depth_BC = torch.where(own_BC >= 0, own_BC, column_C)
        width = min(round_up(request.top + WINDOW), self.pool.slots)
        seen = Seen(begin_B1[:, 0], width, block_BMC, depth_BC)
        pool, race_BMV = self.pool.part(0, rows), race(next_BM)
        fed_BM, true_BM = (self.text_BS[:rows].gather(1, at) for at in (at_BM, next_BM))
        found = [counts_BM]
        for runner in runners:
            states_BMH, _ = runner.verify(pool, fed_BM, at_BM, lens_B1 + step_M, seen)
            chosen_BM = choose(request.params.transform(runner.logits(states_BMH)), race_BMV)
            found.append((chosen_BM == true_BM) & counts_BM)
        return found
