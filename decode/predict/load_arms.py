"""What schedulers are judged beside: rules of servers, and one that knows what will be kept.

plain        nothing is drafted
fixed:4      so many draft calls; fixed: K of them
ema          SGLang's adaptive steps (0.5.23, `--speculative-adaptive`, its default table)
dspark:1     DSpark's scheduling (arXiv 2607.05147): all rows draft K, and of all their tokens those
             of the highest chances are verified, as many as give most tokens a second by the grid;
             how many is of so many rounds ago (0: of now)
oracle       drafts and verifies what will be kept and nothing else, as much of it as pays
pearl:4      PEARL (Liu et al., arXiv 2408.11850): so many draft calls beside each target pass
ahead:80     the next draft is made beside the pass, for outcomes that hold it in 80% of rounds
and the decoder's policies that look at rounds alone: fixed, auto, table:1-8=4,9-=0, cost
"""

import re
from collections import deque
from collections.abc import Sequence
from weakref import WeakSet

import numpy as np

from draftsmith.decode.policies.choice import make_policy
from draftsmith.decode.policies.policy import ALONE, Costs, Load, Outcome, Policy
from draftsmith.decode.predict.load_grid import Grid
from draftsmith.decode.predict.load_simulator import Ahead, Moved, Overlapped, Trimming, Visit
from draftsmith.decode.tree_shapes import Plan, chain_plan

# Of SGLang's table, from so many rows: candidate steps, and what is added to a step down's limit.
SLOTS = {1: ((1, 3, 5, 7), -0.25), 8: ((0, 1, 3), 0.0), 32: ((0, 1), 0.0), 64: ((0,), 0.0)}


class Plain(Policy):
    """Nothing is drafted."""

    rests = True

    def next_plan(self, load: Load = ALONE) -> Plan | None:
        return None


class Ema(Policy):
    """Steps up and down the candidates of a batch's slot by a running mean of drafted tokens kept a
    row; costs aren't asked. Each slot has a mean of its own, which begins at its largest step.
    """

    NEW, WARM_UP, EVERY, SLACK = 0.2, 10, 5, 0.5
    rests = True

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.steps = {
            slot: sorted({min(step, plan.levels) for step in steps})
            for slot, (steps, _) in SLOTS.items()
        }
        self.at = {slot: len(steps) - 1 for slot, steps in self.steps.items()}
        self.mean = {slot: float(steps[-1]) for slot, steps in self.steps.items()}
        self.batches = dict.fromkeys(SLOTS, 0)

    def next_plan(self, load: Load = ALONE) -> Plan | None:
        slot = self._slot(load)
        step = self.steps[slot][self.at[slot]]
        return self.plans[-1].cut(step) if step else None

    def observe(self, outcome: Outcome) -> None:
        slot = self._slot(outcome.load)
        steps, at = self.steps[slot], self.at[slot]
        kept = sum(map(len, outcome.paths)) / len(outcome.paths)
        mean = self.mean[slot] = (1 - self.NEW) * self.mean[slot] + self.NEW * kept
        self.batches[slot] += 1
        late = self.batches[slot] - self.WARM_UP
        if late <= 0 or late % self.EVERY:
            return
        below = SLOTS[slot][1] - self.SLACK
        while at and mean <= steps[at - 1] + below:
            at -= 1
        if at == self.at[slot]:
            while at + 1 < len(steps) and (steps[at] == 0 or mean > steps[at] - self.SLACK):
                at += 1
        self.at[slot] = at

    def _slot(self, load: Load) -> int:
        return max(slot for slot in SLOTS if slot <= load.rows)


class Confident(Trimming):
    """DSpark's."""

    def __init__(self, plan: Plan, lag: int) -> None:
        super().__init__(plan)
        self.budgets: deque[int] = deque(maxlen=lag + 1)

    def lengths(self, ahead: Ahead) -> tuple[int, np.ndarray]:
        levels = self.plans[-1].levels
        score_BK = ahead.score_BK[:, :levels]
        order = np.argsort(-score_BK.ravel(), kind="stable")
        rows = len(score_BK)
        tokens = rows + np.concatenate([[0.0], score_BK.ravel()[order].cumsum()])
        nodes = 1 + np.arange(len(tokens)) / rows
        self.budgets.append(int((tokens / ahead.grid.seconds(rows, levels, nodes)).argmax()))
        chosen = order[: self.budgets[0]] // levels
        return levels, np.bincount(chosen, minlength=rows)


class Oracle(Confident):
    """Knows what will be kept, and verifies of it as much as pays."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, lag=0)

    def lengths(self, ahead: Ahead) -> tuple[int, np.ndarray]:
        kept_B = np.minimum(ahead.run_B, ahead.left_B - 1)
        known_BK = np.arange(ahead.score_BK.shape[1]) < kept_B[:, None]
        _, verified_B = super().lengths(ahead._replace(score_BK=known_BK.astype(float)))
        return int(verified_B.max()), verified_B


class Pearl(Overlapped):
    """Draft calls and the target's pass at once. A row whose last draft failed has one drafted
    token verified (and the others beside it, unless it fails), any other as many as are drafted in
    the meantime; a round that keeps all has no token of the target's own.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.sure = WeakSet[Visit]()  # whose last draft was kept

    def moved(self, running: Sequence[Visit], grid: Grid) -> Moved:
        levels = self.plans[-1].levels
        verified_B = np.array([levels if one in self.sure else 1 for one in running])
        kept = []
        for one, most in zip(running, verified_B.tolist(), strict=True):
            firsts = one.answer.run_T[one.at : one.at + most] > 0
            kept.append(len(firsts) if firsts.all() else int(firsts.argmin()))
            (self.sure.add if firsts.all() else self.sure.discard)(one)
        kept_B = np.array(kept)
        seconds = max(grid.parts(len(running), levels, verified_B.mean()))
        return Moved(levels, verified_B, kept_B, np.minimum(kept_B + 1, verified_B), seconds)


class OneAhead(Overlapped):
    """The draft of the round to come is there if the outcome was foreseen, in so many percent of
    rows; if one of a batch wasn't, all wait for another.
    """

    def __init__(self, plan: Plan, percent: int) -> None:
        super().__init__(plan)
        self.foreseen, self.noise = percent / 100, np.random.default_rng(0)

    def moved(self, running: Sequence[Visit], grid: Grid) -> Moved:
        levels = self.plans[-1].levels
        verified_B = np.full(len(running), levels)
        kept_B = np.minimum([one.answer.run_T[one.at] for one in running], levels)
        passes, drafts = grid.parts(len(running), levels, levels + 1)
        missed = bool((self.noise.random(len(running)) >= self.foreseen).any())
        return Moved(
            levels, verified_B, kept_B, kept_B + 1, float(max(passes, drafts) + missed * drafts)
        )


def arm(text: str, K: int, grid: Grid, rows: int) -> Policy:
    """What an arm's name describes, for drafts of K and batches of so many rows; ValueError for
    what isn't one.
    """
    name, _, number = text.partition(":")
    plan = chain_plan(K)
    if text in OWN:
        return OWN[text](plan)
    if name in NUMBERED and number:
        least, most = NUMBERED[name][0], NUMBERED[name][1] or K
        if not number.isdecimal() or not least <= int(number) <= most:
            raise ValueError(f"policies: got {text!r}, expected {name}:{least} to {name}:{most}")
        if name in ("dspark", "ahead"):
            return {"dspark": Confident, "ahead": OneAhead}[name](plan, int(number))
        if name == "pearl":
            return Pearl(chain_plan(int(number)))
        return Policy(chain_plan(int(number)))
    if name not in JUDGED:
        raise ValueError(
            f"policies: got {text!r}, expected some of {', '.join((*OWN, *JUDGED))}, dspark:LAG, "
            "fixed:K, pearl:K, ahead:PERCENT; those that look at drafts are for draftsmith stopping"
        )
    policy = make_policy(text, plan)
    if policy.priced:
        took = tuple(float(grid.seconds(rows, n - 1, n)) for n in grid.nodes)
        policy.costs = Costs(tuple(grid.nodes), took, (0.0,) * len(took))
    return policy


OWN = {"plain": Plain, "ema": Ema, "oracle": Oracle}
# What the number may be; None: K.
NUMBERED = {"fixed": (1, None), "dspark": (0, 9), "pearl": (1, None), "ahead": (0, 100)}
JUDGED = ("fixed", "auto", "table", "cost")


def named(text: str) -> list[str]:
    """The names in a list; ranges of a table hold commas of their own."""
    return re.split(r",(?=[a-z])", text)
