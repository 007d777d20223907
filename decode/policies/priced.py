"""Policies that weigh what a tree promises against what verifying it costs on this machine.

Shapes: B rows, N nodes of a grown tree, the root included.
"""

from dataclasses import replace

import numpy as np
from torch import Tensor

from draftsmith.decode.policies.policy import Outcome, Policy
from draftsmith.decode.tree_shapes import DynamicTree, Plan, StaticTree, chain_plan


class Cost(Policy):
    """Of all parts of the tree the one that promises most tokens a second, chosen anew every
    `PERIOD` rounds. A node's chance to be kept is the product along its path of P(rank r kept at
    depth d | its parent kept), counted over recent rounds, and leaning on all depths' average where
    counts are few.
    """

    PERIOD, MEMORY, LEAN = 8, 0.995, 8.0

    priced = True

    def __init__(self, plan: Plan) -> None:
        self.plans = parts(plan)
        self.paths = counted(plan)
        shape = plan.levels, 1 + max(max(path) for path in self.paths)
        self.hits, self.trials = np.zeros(shape), np.zeros(shape)
        self.choice, self.rounds = self.plans[-1], 0

    def next_plan(self) -> Plan:
        if self.costs is not None and self.rounds and self.rounds % self.PERIOD == 0:
            chances = self.chances()
            self.choice = max(self.plans, key=lambda plan: self.rate(plan, chances))
        self.rounds += 1
        return self.choice

    def rate(self, plan: Plan, chances: dict[tuple[int, ...], float]) -> float:
        """Expected tokens a second of a row."""
        assert self.costs is not None
        return (1 + sum(chances[path] for path in counted(plan))) / self.costs.of(plan)

    def chances(self) -> dict[tuple[int, ...], float]:
        """Rank path -> the chance that it is kept."""
        pooled = (self.hits.sum(0) + 1) / (self.trials.sum(0) + 2)
        table = (self.hits + self.LEAN * pooled) / (self.trials + self.LEAN)
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for path in self.paths:
            found[path] = found[path[:-1]] * float(table[len(path) - 1, path[-1]])
        return found

    def observe(self, outcome: Outcome) -> None:
        if outcome.plan is None:
            return
        self.hits *= self.MEMORY
        self.trials *= self.MEMORY
        drafted = set(counted(outcome.plan))
        for kept in outcome.paths:
            for depth in range(min(len(kept) + 1, outcome.levels)):
                for rank in range(self.hits.shape[1]):
                    self.trials[depth, rank] += (*kept[:depth], rank) in drafted
                if depth < len(kept):
                    self.hits[depth, kept[depth]] += 1


def counted(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The rank paths that `Cost` counts: of a dynamic tree, whose ranks aren't known, a chain's."""
    return plan.paths if isinstance(plan, StaticTree) else chain_plan(plan.levels).paths


def parts(plan: Plan) -> tuple[Plan, ...]:
    """From the smallest to the whole: every depth, and of static trees ranks below 1, 2, 4, all."""
    found: list[Plan] = []
    for cut in (plan.cut(levels) for levels in range(1, plan.levels + 1)):
        if isinstance(cut, DynamicTree):
            found.append(cut)
            continue
        for limit in (1, 2, 4, 1 << 30):
            found.append(replace(cut, paths=tuple(p for p in cut.paths if max(p) < limit)))
    return tuple(dict.fromkeys(found))


class CutGrown(Policy):
    """Draws a dynamic tree, then verifies as much of it as pays (the drafted nodes are paid for
    already, their verification isn't): the number of nodes n that maximises

        tokens(n) - rate * seconds(n),    tokens(n) = B + r * sum over rows of their n best chances

    rate: tokens a second of the rounds so far, drafting included, which makes this the choice of
    the most tokens a second in the long run (Dinkelbach's form of a ratio), not of one round; r:
    drafted tokens kept so far over those promised. A node's chance is what orders the tree. Where
    rounds have given less than plain decoding would have in their time, most draft nothing; every
    `RETRY`th tries again. Not with drafters that must be fed each round's tokens (draft LMs).

    One reading of the device a round. All rows verify as many nodes.
    """

    RETRY, MEMORY, LEAN, HEAR = 32, 0.95, 8.0, 4
    SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257)  # nodes, the root included
    priced = True

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan, DynamicTree):
            raise ValueError(
                "policy cut: got a tree whose nodes have no order, expected tree=dynamic:levels,"
                "width,nodes"
            )
        super().__init__(plan)
        self.sizes = [size for size in self.SIZES if size < plan.nodes] + [plan.nodes]
        # Running sums over drafting rounds: rows, their promised and kept drafted tokens, seconds,
        # and what plain decoding would have given in these.
        self.rows = self.promised = self.kept = self.seconds = self.plain = 0.0
        self.heard = self.idle = 0  # rounds heard of, and those without a draft since the last
        self.keep = self._keep

    def next_plan(self) -> Plan | None:
        pays = self.rows + self.kept >= self.plain
        if self.rests and self.heard >= self.HEAR and not pays and self.idle < self.RETRY:
            self.idle += 1
            return None
        self.idle = 0
        return self.plans[-1]

    def observe(self, outcome: Outcome) -> None:
        self.heard += 1
        self.kept += sum(map(len, outcome.paths))

    def _keep(self, log_chance_BN: Tensor, active_B: Tensor) -> int:
        if self.costs is None:
            return self.plans[-1].nodes
        # NaN, of a broken draft or an idle row, must not decide for the other rows.
        chance_BN = (log_chance_BN.exp() * active_B[:, None]).nan_to_num(nan=0.0)
        best_BN = chance_BN.sort(1, descending=True).values
        promised = best_BN.sum(0).cumsum(0).tolist()  # the one reading of the device
        rows, whole = promised[0], self.plans[-1]
        share = (self.kept + self.LEAN) / (self.promised + self.LEAN)
        drafting = self.costs.of(whole) - self.costs.verifying(whole)
        each = [
            (rows + share * (promised[n - 1] - rows), self.costs.pass_of(n), n) for n in self.sizes
        ]
        rate = (self.rows + self.kept) / self.seconds if self.seconds else 0.0
        rate = rate or max(tokens / (drafting + seconds) for tokens, seconds, _ in each)
        _, seconds, nodes = max(each, key=lambda one: one[0] - rate * one[1])
        took = drafting + seconds
        for name, new in (
            ("rows", rows),
            ("promised", promised[nodes - 1] - rows),
            ("kept", 0.0),  # until the round is heard of
            ("seconds", took),
            ("plain", rows * took / self.costs.verify[0]),
        ):
            setattr(self, name, self.MEMORY * getattr(self, name) + new)
        return nodes
