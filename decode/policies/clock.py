"""What rounds take, on a machine whose own speed comes and goes.

Shapes: P plans, X = 1 + P: the machine's time, then the plans'.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby, pairwise
from statistics import median_low
from typing import NamedTuple

import numpy as np

from draftsmith.decode.tree_shapes import Plan

SHARES = np.array([0.0, 0.15, 0.05])  # of a plain round's seconds, by what `work` counts
DOUBT = np.array([0.3, 0.15, 0.05])  # and their deviations
ANY = 1e3  # variance of what nothing is known of


def work(plan: Plan | None) -> np.ndarray:
    """What a round does beside a plain one: whether it drafts, its draft calls, drafted tokens.
    What other `ways` draft costs nothing until it is verified.
    """
    if plan is None or plan.nodes == 1:
        return np.zeros(3)
    calls = (0.0, 0.0) if plan.by else (1.0, plan.levels)
    return np.array([*calls, plan.nodes - 1])


class Timed(NamedTuple):
    """A round: which of all, what was asked of it, what it came to, its seconds."""

    at: int
    asked: Plan | None
    made: Plan | None
    seconds: float


class Clock:
    """Seconds of a round of each plan, by a Kalman filter over

        log seconds = log of the machine's time + log of the plan's share of it + noise

    The machine's time walks; a share, whose unit is that of a plain round, stays nearly as it is.
    Covariances do what one would by hand: while a plan goes on what changes is the machine's doing,
    the first rounds after a change tell plans apart, those after a trial tell what the machine did
    meanwhile, and what one plan takes tells of its like, by `work`.

    Where it fails, as the machine's time leaps: what is `WILD` deviations from what was expected is
    left out if one round was so slow. If more say so, that time may be any; in the `NEWS` rounds
    after a change of plans the share of what is tried beside the best too, it alone where that
    takes longer. The best one's rounds after a trial tell: if they are as far off as the trial was
    first, that was the machine. What takes less than expected may never be asked about again.

    Rounds are counted when someone wants to know, `NEWS` of them and then by `WINDOW`, the median
    of each plan's.
    """

    WALK, AGE = 0.02**2, 1e-5  # what a round adds to the variance of the machine's time, of a share
    NOISE, OWN = 0.08**2, 0.08**2  # variance of a round, of a share beside what `work` says
    WILD, NEWS, WINDOW = 3.0, 4, 16

    def __init__(self, plans: Sequence[Plan | None]) -> None:
        """plans: the first of them plain."""
        self.at, self.index = 0, {plan: i for i, plan in enumerate(plans, 1)}
        work_PX = np.stack([work(plan) for plan in plans])
        share_P = 1 + work_PX @ SHARES
        self.mean_X, work_PX = np.log([1.0, *share_P]), work_PX * DOUBT / share_P[:, None]
        self.cov_XX = np.zeros((1 + len(plans), 1 + len(plans)))
        self.cov_XX[1:, 1:] = work_PX @ work_PX.T + self.OWN * np.eye(len(plans))
        self.cov_XX[1], self.cov_XX[:, 1], self.cov_XX[0, 0] = 0, 0, ANY
        self.age_X = np.array([self.WALK, 0, *[self.AGE] * (len(plans) - 1)])
        self.news: list[Timed] = []  # not counted yet
        self.asked: list[Plan | None] = [None, None]  # before, and now
        self.since, self.odd = self.NEWS, False  # rounds since; whether the last was left out
        self.first = 0.0  # how far off the last trial began

    def settle(self, best: Plan | None) -> None:
        """Count the rounds of `news`."""
        for asked, some in groupby(self.news, lambda one: one.asked):
            if asked != self.asked[1]:
                self.asked, self.since = [self.asked[1], asked], 0
                self.first *= asked == best
            tried, rounds = self.asked[asked != best], list(some)
            for start, end in pairwise(
                [0, *range(self.NEWS, len(rounds), self.WINDOW), len(rounds)]
            ):
                by_plan = defaultdict[Plan | None, list[float]](list)
                for one in rounds[start:end]:
                    by_plan[one.made].append(one.seconds)
                for made, each in by_plan.items():
                    self._count(rounds[end - 1].at, made, median_low(each), len(each), tried)
                self.since += end - start
        self.news.clear()

    def _count(
        self, at: int, made: Plan | None, seconds: float, rounds: int, tried: Plan | None
    ) -> None:
        """Take in the median of so many rounds."""
        i, cov_XX = self.index[made], self.cov_XX
        cov_XX.flat[:: len(cov_XX) + 1] += (at - self.at) * self.age_X
        self.at, before, self.odd = at, self.odd, False
        off = math.log(seconds) - self.mean_X[0] - self.mean_X[i]
        if not self.since and made == tried:
            self.first = off
        with_X = cov_XX[0] + cov_XX[i]
        variance = with_X[0] + with_X[i] + self.NOISE / rounds
        if (wild := off * off / self.WILD**2 - variance) > 0:
            new = self.since < self.NEWS
            if rounds == 1 and off > 0 and not (before or (new and made == tried)):
                self.odd = True
                return
            for doubt_X in self._doubts(new, made == tried, off, tried):
                cov_XX += wild * np.outer(doubt_X, doubt_X)
            with_X = cov_XX[0] + cov_XX[i]
            variance = with_X[0] + with_X[i] + self.NOISE / rounds
        self.mean_X += with_X * (off / variance)
        cov_XX -= np.outer(with_X, with_X) / variance
        least = 1 + int(self.mean_X[1:].argmin())
        if self.mean_X[least] < 0:  # nothing takes less than a plain round, so it's drawn back
            self.mean_X -= cov_XX[least] * self.mean_X[least] / (cov_XX[least, least] + self.NOISE)

    def _doubts(self, new: bool, trial: bool, off: float, tried: Plan | None) -> list[np.ndarray]:
        """The directions in which all may have leapt."""
        machine_X, share_X = np.eye(1 + len(self.index))[[0, self.index[tried]]]
        if tried is None:  # whose share is the unit of all others'
            share_X = np.repeat([1.0, 0.0, -1.0], [1, 1, len(self.index) - 1])
        if not new:
            return [machine_X]
        if trial:
            return [share_X] if off > 0 else [machine_X, share_X]
        if self.first * off > off * off / 2:  # the trial was as far off: it was the machine by then
            return [machine_X - share_X]
        return [machine_X, share_X]

    @property
    def plain(self) -> float:
        """Seconds of a plain round, now."""
        return math.exp(self.mean_X[0])

    def seconds(self) -> dict[Plan | None, float]:
        """Of a round of every plan."""
        return dict(zip(self.index, np.exp(self.mean_X[0] + self.mean_X[1:]).tolist(), strict=True))

    def variance(self, plan: Plan | None, other: Plan | None) -> float:
        """Of the logarithm of how much longer the one takes."""
        i, j = self.index[plan], self.index[other]
        return max(0.0, float(self.cov_XX[i, i] + self.cov_XX[j, j] - 2 * self.cov_XX[i, j]))
