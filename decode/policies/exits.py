"""DEL (Entezari Zarch et al., arXiv 2504.05598): how many of the target's layers draft, and how
many tokens, chosen before each round from what each exit would have had kept in the rounds so far.

    alpha_e       = M_e / (M_e + F_e)             would have been kept, would have been missed
    tokens / cost = (1 + a + ... + a^d) / (whole + d * read_e),   a = alpha_e
    stop          after a token whose chance is below (mean chance of the kept + of the missed) / 2

whole: bytes that a pass of the target reads; read_e: that a draft call of exit e does, the LM head
included. Counts fall by `MEMORY` a round; they begin as half a token kept and half missed, which
fades with them.

Where this differs from the paper and its code: the LM head's cost counts; the d chosen bounds the
draft (theirs runs to 18 unless a token is improbable), and where 0 is best nothing is drafted, but
counted all the same. A side without tokens has the other's mean (theirs divides 0 by 0, and never
stops). Above temperature 0 a match is one under the round's noise, which is acceptance itself, and
chances are of the token that is drafted. All rows count together, through requests; prompts aren't
counted, whose choices the target never makes.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from draftsmith.decode.drafting.base import Call
from draftsmith.decode.policies.policy import ALONE, Load, Outcome, Policy
from draftsmith.decode.tree_shapes import Plan


class ExitPolicy(Policy):
    """Chains. scale: of the stopping chance; 0 never stops a draft, so that nothing is read in the
    middle of rounds, and they can be recorded.
    """

    MEMORY, reads_drawn = 0.95, True

    def __init__(self, plan: Plan, scale: float = 1.0) -> None:
        if not plan.is_chain or scale < 0:
            raise ValueError(
                f"policy exits: got {'a chain' if plan.is_chain else 'a tree'} and {scale:g} times "
                "the stopping chance, expected tree=chain, and a number from 0"
            )
        super().__init__(plan)
        self.scale, self.exit = scale, 0
        self.enough = self._enough if scale else None

    def choose_among(self, reads: Mapping[int, int], whole: int) -> None:
        """Exits by the bytes that a draft call reads; whole: the target's. ValueError for none."""
        if len(reads) < 2:
            raise ValueError(
                "policy exits: got a drafter with one exit at most, expected several to choose "
                "among: drafter=exits:2+4+6"
            )
        chain, self.reads, self.whole = self.plans[-1], dict(reads), whole
        self.plans = tuple(
            replace(chain.cut(d), by=e) for d in range(1, chain.levels + 1) for e in reads
        )
        # Of each exit: kept, their chances, missed, theirs.
        self.sums = {e: np.zeros(4) for e in reads}
        self.seed = 1.0

    def next_plan(self, load: Load = ALONE) -> Plan | None:
        longest = self.plans[-1]
        found = {
            e: best_length(self.alpha(e), read, self.whole, longest.levels)
            for e, read in self.reads.items()
        }
        self.exit = max(found, key=lambda e: found[e][0])
        length = found[self.exit][1]
        return replace(longest.cut(length), by=self.exit) if length else None

    def alpha(self, exit: int) -> float:
        """The share of its tokens that are kept."""
        kept, _, missed, _ = self.sums[exit]
        return float((kept + self.seed / 2) / (kept + missed + self.seed))

    def threshold(self, exit: int) -> float:
        """The chance below which a token ends the draft; 0 as long as nothing is known."""
        kept, of_kept, missed, of_missed = self.sums[exit]
        sides = [total / n for n, total in ((kept, of_kept), (missed, of_missed)) if n > 1e-9]
        return self.scale * float(np.mean(sides)) if sides else 0.0

    def observe(self, outcome: Outcome) -> None:
        if outcome.news is None or not len(outcome.news):
            return
        new = outcome.news.sum(0).view(-1, 4).numpy()
        for exit, found in zip(self.sums, new, strict=True):
            self.sums[exit] = self.MEMORY * self.sums[exit] + found
        self.seed *= self.MEMORY

    def _enough(self, call: Call) -> Tensor:
        return call.log_q_BC.amax(1).exp() < self.threshold(self.exit)


def best_length(alpha: float, read: float, whole: float, most: int) -> tuple[float, int]:
    """(tokens a byte, d) of the best chain of d tokens, at most `most`, each kept with this chance:
    the rate rises up to its only peak.
    """
    rate, tokens, chance, length = 1 / whole, 1.0, 1.0, 0
    while length < most:
        chance *= alpha
        longer = (tokens + chance) / (whole + (length + 1) * read)
        if longer <= rate:
            break
        rate, tokens, length = longer, tokens + chance, length + 1
    return rate, length
