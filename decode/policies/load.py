"""Policies that ask how much there is to do: what is drafted falls as rows are added, to nothing
where plain decoding is faster.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from draftsmith.decode.drafting.owed import NAP
from draftsmith.decode.policies.clock import Clock, Timed
from draftsmith.decode.policies.policy import ALONE, MANY, Load, Outcome, Policy
from draftsmith.decode.policies.priced import Counts, Rated, counts_of
from draftsmith.decode.tree_shapes import Plan

FADES = 0.9  # of a mean's past, at each new figure
Ranges = tuple[tuple[int, int], ...]  # up to so many rows: draft calls


class Table(Policy):
    """So many draft calls for so many rows that decode: `table:1-8=4,9-32=2,33-=0`, vLLM's
    `num_speculative_tokens_per_batch_size` in other words.
    """

    rests = True

    def __init__(self, plan: Plan, text: str) -> None:
        super().__init__(plan)
        self.ranges = read_table(text, plan.levels)

    def next_plan(self, load: Load = ALONE) -> Plan | None:
        levels = self._levels(load)
        self.stays = MANY  # rows that end may change it, and they end a call
        return self.plans[-1].cut(levels) if levels else None

    def will_draft(self, load: Load) -> bool:
        return self._levels(load) > 0

    def _levels(self, load: Load) -> int:
        return next(K for last, K in self.ranges if load.running <= last)


def read_table(text: str, most: int) -> Ranges:
    """The ranges in a table's text; ValueError where they don't follow each other from 1 on."""
    found = [re.fullmatch(r"(\d+)-(\d*)=(\d+)", part) for part in text.split(",")]
    ranges = [(int(m[1]), int(m[2] or MANY), int(m[3])) for m in found if m]
    starts = [1, *(end + 1 for _, end, _ in ranges)]
    follow = [a == b <= end and n <= most for a, (b, end, n) in zip(starts, ranges, strict=False)]
    if not all(follow) or len(ranges) < len(found) or starts[-1] <= MANY:
        raise ValueError(
            f"policy table: got {text!r}, expected ranges of rows from 1 on without a gap, the "
            f"last one open, and the draft calls of each, at most {most}: table:1-8={most},9-=0"
        )
    return tuple((end, levels) for _, end, levels in ranges)


@dataclass
class Pace:
    """Of rounds with so many rows: what each tree takes, how often each was asked for, and how many
    rounds of what was chosen were timed; the tree now, the one held best, the round of the next
    choice (0 before the first), and periods until another tree is tried; anew: the round from which
    plain ones are to be timed again; near: whether there is another tree to try; woken: that the
    drafter was, for it; token: seconds that a row's token took by the best at the last choice;
    debt: those that trials lost, less their share of all seconds; gave, took: a row's tokens and
    seconds in the trial that goes on; stayed, usual: rounds since there are so many rows, and the
    mean of before; waking, wakes: seconds beyond their own of the drafts since the last round
    without, and the mean of before.
    """

    clock: Clock
    asked: Counter[Plan | None] = field(default_factory=Counter)
    rounds: int = 0
    choice: Plan | None = None
    best: Plan | None = None
    next: int = 0
    due: int = 0
    every: int = 0
    anew: int = 0
    near: bool = True
    woken: bool = False
    token: float = 0.0
    debt: float = 0.0
    gave: float = 0.0
    took: float = 0.0
    stayed: int = 0
    usual: float = 0.0
    waking: float = 0.0
    wakes: float = 0.0

    def left(self) -> None:
        """There are more rows now, or fewer."""
        self.woke()
        self.usual, self.stayed = faded(self.usual, self.stayed), 0

    def woke(self) -> None:
        """What drafts needed beside their own seconds is known."""
        if self.waking:
            self.wakes, self.waking = faded(self.wakes, self.waking), 0.0


class Auto(Policy):
    """The tree, of all parts of the one given and none at all, that gives most tokens a second with
    as many rows as there are now: goodput, as SmartSpec (Liu et al., arXiv 2406.14066) has it,

        (1 + sum over drafted nodes of the chance that each is kept) / seconds of a round

    Nothing is measured beforehand. Seconds are those of rounds that were decoded with as many rows,
    told apart from what the machine does meanwhile (`Clock`). Chances are counted over recent
    rounds (`counts_of`), and how often less is drafted than asked for, as look-ups do, whose rounds
    count as what they were. Of a drafter with `ways` that read nothing the trees these draft are
    weighed beside the usual. A batch that nobody joins ends with its slowest row, whose kept tokens
    are what counts then.

    With a number of rows that is new, `PLAIN` rounds are plain; then comes the largest tree of at
    most `START` tokens in all, and until rows have drafted `LEARN` times in a way what seems `FAR`
    as good as none will do. Drafts take `BESIDE` more than is timed, as plain rounds after them
    do. Of trees nearly as good as the best one is tried after `EVERY` periods, that which may be
    the best by most, then half as often each time that this changes nothing, but after four times
    `EVERY` while it may be the best by one deviation, twice where it is new; for longer while it
    gives more than the best one promises. Plain rounds are timed anew each time there have been
    twice as many rounds, at most `SELDOM` periods apart. Where no tree is that good, and long
    before a trial, the drafter sleeps (not at first, when trials tell most); before one it hears
    of `NAP` rounds. What trials lose, with all around them, is to be `PAID` of all seconds: a
    trial waits until that is no more than `FREE` plain rounds beyond it, fewer of more than
    `LEARN` rows. A drafter that is awake takes in each prompt: that is shared out over an answer's
    tokens, as many as recent answers had; the first ones, up to three times as slow, don't count.

    The seconds of the first `COLD` plain rounds of all, which take up to twice as long as those
    that follow, and after a draft, whose weights stand in the cache (3 to 8% more), don't count.

    Differences from SmartSpec: positions have chances of their own, trees are weighed as chains
    are, the search doesn't stop at the first fall, and no profile is needed.
    """

    PLAIN, START, LEARN, PERIOD, TRY = 5, 32, 16, 8, 2
    REST = 16  # periods at most from one choice to the next
    EVERY, SELDOM = 4, 128
    PAID, FREE, MOST = 0.005, 6.0, 64.0  # MOST: plain rounds that are owed at most
    NEAR, FAR = 0.8, 0.5  # of the best rate: what is tried, and what is tried where seldom is due
    COLD, BESIDE = 2, 0.01  # rounds; of seconds
    READY, AWAKE = 4, 256  # readings of prompts before one is timed; rows' rounds without sleep
    KNOWN = 200  # rows whose drafts tell how many tokens there will be, at most
    ANSWER = 64.0  # tokens of one, before any
    rests = True

    def __init__(self, plan: Plan) -> None:
        self.plans, self.counts = (), dict[int, Counts]()
        self._weigh_too(plan)
        self.at = 0  # rounds of all
        self.plain = 0  # rounds since the last that drafted, or the first of all
        self.heard = NAP  # rounds since the drafter slept, or more
        self.tried, self.drafted = Counter[int](), 0  # rows that drafted, by way, and rounds
        self.answers, self.emitted, self.new = 1.0, self.ANSWER, 0  # recent ones, and their tokens
        self.prompt, self.read = math.inf, 0  # seconds that one takes the drafter; how often read
        self.rows = 1  # of the last round

    def choose_among(self, reads: Mapping[int, int], whole: int) -> None:
        for way, read in reads.items():
            if not read and way not in self.counts:
                self._weigh_too(replace(self.plans[-1], by=way))

    def _weigh_too(self, plan: Plan) -> None:
        """All parts of this tree; the largest of the first one stays the last."""
        self.counts[plan.by] = counts_of(plan)
        self.plans = *self.counts[plan.by].plans, *self.plans
        self.paces: defaultdict[int, Pace] = defaultdict(self._pace)

    def _pace(self) -> Pace:
        nothing = (counts.nothing for counts in self.counts.values())
        return Pace(Clock([None, *nothing, *self.plans]), due=self.EVERY, every=self.EVERY)

    def next_plan(self, load: Load = ALONE) -> Plan | None:
        pace, self.asleep = self.paces[load.rows], False
        cold = max(0, self.COLD - self.plain)
        if pace.asked[None] < self.PLAIN:
            self.stays = cold + self.PLAIN - pace.asked[None]
            return None
        if not pace.next:
            pace.clock.settle(None)
            small = [plan for plan in self.counts[0].plans if load.rows * plan.nodes <= self.START]
            pace.choice = (small or self.counts[0].plans[:1])[-1]
            pace.next = pace.rounds + self._tries(load)
        elif pace.rounds >= pace.next:
            pace.choice, lasts = self._choose(pace, load)
            # While little is known, what was learned is used at once.
            pace.next = pace.rounds + (lasts if pace.rounds > self.PERIOD else self._tries(load))
        self.stays = pace.next - pace.rounds + (cold if pace.choice is None else 0)
        if pace.choice is None and pace.best is None:
            rounds = pace.next - pace.rounds + (pace.due - 1) * self.PERIOD
            self.asleep = not pace.near or (rounds > NAP and load.rows * pace.rounds > self.AWAKE)
            self.stays = max(self.stays, 2 * NAP)  # a call isn't cut for a choice
        return pace.choice

    def will_draft(self, load: Load) -> bool:
        return self.paces[load.rows].choice is not None

    def observe(self, outcome: Outcome) -> None:
        asked = made = outcome.plan
        if asked is not None:
            counts = self.counts[asked.by]
            counts.news.append(outcome)
            self.tried[asked.by] += len(outcome.paths)
            self.drafted += 1
            made = counts.cuts[asked][outcome.levels]
        self.at += 1
        self.heard = 0 if self.asleep else self.heard + 1
        self.new += len(outcome.paths) + sum(map(len, outcome.paths))
        pace = self.paces[outcome.load.rows]
        if self.rows != outcome.load.rows:
            self.paces[self.rows].left()
            self.rows = outcome.load.rows
        pace.stayed += 1
        self.plain = 0 if asked is not None else self.plain + 1
        if asked is None:
            pace.woke()
        if outcome.seconds is None or outcome.seconds <= 0:
            return
        if not 0 < self.plain <= self.COLD:
            pace.rounds += asked == pace.choice
            pace.asked[asked] += 1
            pace.clock.news.append(Timed(self.at, asked, made, outcome.seconds))
        tries = asked != pace.best or pace.woken
        if pace.next and (made is not None or tries or pace.debt):
            whole, plain, lost = outcome.whole or outcome.seconds, pace.clock.plain, 0.0
            if self.drafted <= self.TRY:
                whole = outcome.seconds  # what a drafter sets up at its first draft it keeps
            if made is not None:
                pace.waking += whole - outcome.seconds
            if tries:  # one round may be the machine's doing, and counts up to a bound
                tokens = 1 + sum(map(len, outcome.paths)) / max(1, len(outcome.paths))
                if made is not None:
                    pace.gave += 1 + (1 - outcome.load.lag) * (tokens - 1)
                    pace.took += outcome.seconds
                lost = min(whole - tokens * (pace.token or plain), 2 * self.FREE * plain)
            owed = pace.debt + lost - self.PAID * whole
            pace.debt = min(max(owed, 0.0), self.MOST * plain)

    def admit(self, rows: int, seconds: float | None) -> None:
        if self.new:  # of as many answers that have ended, in the long run
            fades = FADES**rows
            self.answers = fades * self.answers + rows
            self.emitted, self.new = fades * self.emitted + self.new, 0
        self.read += seconds is not None
        if seconds is not None and self.read > self.READY:  # a spell may make it longer
            self.prompt = min(seconds / rows, faded(self.prompt, seconds / rows))

    def _choose(self, pace: Pace, load: Load) -> tuple[Plan | None, int]:
        """The tree to go on with, and for how many rounds."""
        prompt = self.prompt * self.answers / self.emitted if self.prompt < math.inf else 0.0
        tokens, seconds = self._weighed(pace, load, prompt)
        rates = {plan: tokens[plan] / each for plan, each in seconds.items()}
        best = max(rates, key=lambda plan: rates[plan])
        if pace.best is None:
            pace.anew = pace.rounds + self.REST * self.PERIOD
        if best != pace.best:
            pace.best, pace.due, pace.every = best, self.EVERY, self.EVERY
        spent = pace.took * (1 + self.BESIDE) + load.rows * pace.gave * prompt
        leads, pace.gave, pace.took = pace.gave > rates[best] * spent, 0.0, 0.0
        if leads and pace.choice not in (None, best):
            return pace.choice, self._tries(load)
        over = (pace.rounds - pace.next) // self.PERIOD  # as calls have it
        pace.due, pace.token = pace.due - 1 - over, 1 / rates[best]
        woken, pace.woken = pace.woken, False
        if pace.due <= 0 and not woken:  # what it was woken for is paid for already
            free = self.FREE * min(1.0, self.LEARN / load.rows)
            owed = pace.debt - free * seconds[None]
            pace.due = max(0, math.ceil(owed / (self.PAID * self.PERIOD * seconds[best])))
        others = self._near(pace, rates)
        pace.near = bool(others)
        if best is None and self.heard >= NAP:
            new = [plan for plan in self.plans if self.tried[plan.by] < self.LEARN]
            second = max(new, key=lambda plan: rates[plan], default=None)
            if second is not None and rates[second] >= self.FAR * rates[None]:
                return second, self._tries(load)
        if pace.due > 0:
            # To choose, and a call more, takes what a small model's round does.
            periods = min(pace.due, self.REST, max(1, pace.rounds // self.PERIOD))
            pace.due -= periods - 1
            return best, periods * self.PERIOD
        if best is None and others and self.heard < NAP and not woken:
            # The drafter hears first of what it is to go on from.
            pace.due, pace.woken = 1, True
            return None, NAP - self.heard
        pace.due = pace.every = min(2 * pace.every, self.SELDOM)
        pace.near = bool(self._near(pace, rates))
        if best is not None and pace.rounds >= pace.anew:
            # However slow they seemed: what a spell of the machine's said must not last.
            pace.anew = pace.rounds + min(pace.rounds, self.SELDOM * self.PERIOD)
            return None, self.TRY
        if not others:
            return best, self.PERIOD
        most = {p: rates[p] * self._more(pace, p, tokens[p]) for p in others}
        other = max(most, key=lambda plan: most[plan])
        if most[other] > rates[best]:  # soon again, until it is known
            soon = 4 * self.EVERY if pace.asked[other] else 2 * self.EVERY
            pace.due = pace.every = min(pace.every, soon)
        return other, self.PERIOD if other is None else self._tries(load)

    def _weighed(self, pace: Pace, load: Load, prompt: float) -> tuple[Rated, Rated]:
        """Tokens of a row's round of each plan, and of none, and its seconds."""
        pace.clock.settle(pace.best)
        whole = pace.clock.seconds()
        whole = {p: each * (1 + self.BESIDE * (p is not None)) for p, each in whole.items()}
        tokens, seconds = Rated({None: 1.0}), Rated({None: whole[None]})
        for counts in self.counts.values():
            promised, took = counts.weighed(whole)
            tokens, seconds = tokens | promised, seconds | took
        waking = pace.wakes / max(pace.usual, pace.stayed, 1)
        for plan in self.plans:  # as the slowest row has it, its share of the prompt with it
            tokens[plan] = 1 + (1 - load.lag) * (tokens[plan] - 1)
            seconds[plan] += load.rows * tokens[plan] * prompt + waking
        return tokens, seconds

    def _tries(self, load: Load) -> int:
        """Rounds of a trial: of many rows one tells enough, but of a drafter's first drafts."""
        return self.TRY if load.rows < self.LEARN or self.drafted < self.TRY else 1

    def _more(self, pace: Pace, plan: Plan | None, tokens: float) -> float:
        """How many times the rate it seems to have a tree may have, by one deviation."""
        variance = pace.clock.variance(plan, pace.best)
        if plan is None:
            return math.exp(math.sqrt(variance))
        often = self.counts[plan.by].reached_D[0]  # that it draws a blank is known
        drafted = max(1, min(self.tried[plan.by], self.KNOWN))
        more = math.exp(math.sqrt((tokens - 1) / tokens**2 / drafted + often**2 * variance))
        return more if pace.asked[plan] else more * (2 - 1 / tokens)  # may keep twice as much

    def _near(self, pace: Pace, rates: dict[Plan | None, float]) -> list[Plan | None]:
        """What is to be tried beside the best, if it were now."""
        least = rates[pace.best] * (self.FAR if pace.every == self.SELDOM else self.NEAR)
        return [plan for plan in rates if plan != pace.best and rates[plan] >= least]


def faded(mean: float, new: float) -> float:
    """With the mean of before, 0 where there was none."""
    return FADES * mean + (1 - FADES) * new if mean else new
