"""Policies that weigh what a tree promises against what verifying it costs on this machine.

Shapes: B rows, N nodes of a grown tree, the root included.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from draftsmith.decode.policies.policy import ALONE, Load, Outcome, Policy
from draftsmith.decode.tree_shapes import DynamicTree, Plan, StaticTree

Rated = dict[Plan | None, float]  # of each plan, and of none


def parts(plan: Plan) -> tuple[Plan, ...]:
    """From the smallest to the whole: every depth; of static trees ranks below 1, 2, 4, all, of
    dynamic ones a quarter of the nodes, half of them, all.
    """
    found: list[Plan] = []
    for cut in (plan.cut(levels) for levels in range(1, plan.levels + 1)):
        if isinstance(cut, DynamicTree):
            fewer = [plan.nodes // share for share in (4, 2, 1)]
            found += [replace(cut, nodes=max(2, min(nodes, cut.nodes))) for nodes in fewer]
            continue
        for limit in (1, 2, 4, 1 << 30):
            found.append(replace(cut, paths=tuple(p for p in cut.paths if max(p) < limit)))
    return tuple(dict.fromkeys(found))


class Counts:
    """What became of recent rounds of a tree and of its `parts`: how many tokens each promises, and
    how deep their drafts went, of which a look-up's often end early, or at once.

    Shapes: D levels.
    """

    MEMORY, LEAN = 0.995, 8.0  # of each row that is heard of

    def __init__(self, plan: Plan, shape: tuple[int, int]) -> None:
        self.plans = parts(plan)
        self.hits, self.trials = np.zeros((2, *shape))
        self.drafted_D, self.might_D = np.zeros((2, plan.levels))
        self.news: list[Outcome] = []  # not counted yet
        # Of each plan what is drafted of it, by levels; to find nothing takes longer than to rest.
        self.nothing = StaticTree((), plan.by)
        self.cuts: dict[Plan, list[Plan]] = {
            p: [self.nothing, *(p.cut(d) for d in range(1, p.levels + 1))] for p in self.plans
        }

    def weighed(self, seconds: Mapping[Plan | None, float]) -> tuple[Rated, Rated]:
        """Tokens of a row's round of each plan, and its seconds, given those of rounds that draft
        as deep as they may; by all rounds so far.
        """
        self.settle()
        reached, took = self.reached_D.tolist(), Rated()
        for plan, cuts in self.cuts.items():
            each = [seconds[cut] for cut in cuts]
            more = zip(reached, each, each[1:], strict=False)
            took[plan] = each[0] + sum(chance * (last - least) for chance, least, last in more)
        return self.expected(), took

    def expected(self) -> Rated:
        """These tokens, by what is settled."""
        raise NotImplementedError

    @property
    def reached_D(self) -> np.ndarray:
        """The chance that 1, 2, ... levels are drafted of a plan that has them."""
        reached_D: np.ndarray = ((self.drafted_D + 1) / (self.might_D + 1)).cumprod()
        return reached_D

    def settle(self) -> None:
        """Count the rounds of `news`, whose like come together."""
        weights: defaultdict[tuple[Plan | None, int, tuple[int, ...]], float] = defaultdict(float)
        weight = 1.0
        for outcome in reversed(self.news):
            for path in outcome.paths:
                weights[outcome.plan, outcome.levels, path] += weight
            weight *= self.MEMORY ** len(outcome.paths)
        self.news.clear()
        for counts in (self.hits, self.trials, self.drafted_D, self.might_D):
            counts *= weight
        for (plan, levels, path), weight in weights.items():
            assert plan is not None
            self.drafted_D[:levels] += weight
            self.might_D[: min(levels + 1, plan.levels)] += weight
            self.count(plan, levels, path, weight)

    def count(self, plan: Plan, levels: int, kept: tuple[int, ...], weight: float) -> None:
        """What a row kept of so many levels."""
        raise NotImplementedError


class PathCounts(Counts):
    """Of a static tree: how often each rank at each depth was kept. A node's chance is the product
    along its path of P(rank r kept at depth d | its parent kept), leaning on all depths' average
    where counts are few.
    """

    def __init__(self, plan: StaticTree) -> None:
        super().__init__(plan, (plan.levels, 1 + max(map(max, plan.paths))))
        self.paths = plan.paths

    def expected(self) -> Rated:
        pooled = (self.hits.sum(0) + 1) / (self.trials.sum(0) + 2)
        table = (self.hits + self.LEAN * pooled) / (self.trials + self.LEAN)
        chances: dict[tuple[int, ...], float] = {(): 1.0}
        for path in self.paths:
            chances[path] = chances[path[:-1]] * float(table[len(path) - 1, path[-1]])
        found, reached = Rated(), [1.0, *self.reached_D.tolist()]
        gives = {path: chance * reached[len(path)] for path, chance in chances.items()}
        for plan in self.plans:
            assert isinstance(plan, StaticTree)
            found[plan] = 1 + sum(map(gives.__getitem__, plan.paths))
        return found

    def count(self, plan: Plan, levels: int, kept: tuple[int, ...], weight: float) -> None:
        assert isinstance(plan, StaticTree)
        drafted = set(plan.paths)
        for depth in range(min(len(kept) + 1, levels)):
            for rank in range(self.hits.shape[1]):
                self.trials[depth, rank] += weight * ((*kept[:depth], rank) in drafted)
            if depth < len(kept):
                self.hits[depth, kept[depth]] += weight


class PlaceCounts(Counts):
    """Of a dynamic tree, by depth, for every number of nodes that one may have: the best few of a
    tree would have kept what was kept as far as it is among them.
    """

    def __init__(self, plan: DynamicTree) -> None:
        self.nodes = sorted({part.nodes for part in parts(plan)})
        super().__init__(plan, (len(self.nodes), plan.levels))

    def expected(self) -> Rated:
        chance_D = np.full(self.hits.shape[1], 0.5)
        found: Rated = {}
        for nodes, hits_D, trials_D in zip(self.nodes, self.hits, self.trials, strict=True):
            # Where little was tried with so many nodes, as with fewer.
            lean_D = (hits_D.sum() + chance_D) / (trials_D.sum() + 1)
            chance_D = (hits_D + self.LEAN * lean_D) / (trials_D + self.LEAN)
            sums = 1 + (self.reached_D * chance_D.cumprod()).cumsum()
            found |= {p: float(sums[p.levels - 1]) for p in self.plans if p.nodes == nodes}
        return found

    def count(self, plan: Plan, levels: int, kept: tuple[int, ...], weight: float) -> None:
        for i, nodes in enumerate(self.nodes):
            if nodes > plan.nodes:
                break
            of_it = next((d for d, place in enumerate(kept) if place >= nodes), len(kept))
            self.hits[i, :of_it] += weight
            self.trials[i, : min(of_it + 1, levels)] += weight


def counts_of(plan: Plan) -> Counts:
    """What counts the rounds of a tree and of its parts."""
    return PathCounts(plan) if isinstance(plan, StaticTree) else PlaceCounts(plan)


class Cost(Policy):
    """Of all parts of the tree the one that promises most tokens a second by measured `costs`,
    chosen anew every `PERIOD` rounds.
    """

    PERIOD = 8

    priced = True

    def __init__(self, plan: Plan) -> None:
        self.counts = counts_of(plan)
        self.plans = self.counts.plans
        self.choice, self.rounds = self.plans[-1], 0

    def next_plan(self, load: Load = ALONE) -> Plan | None:
        if (costs := self.costs) is not None and self.rounds and self.rounds % self.PERIOD == 0:
            seconds: Rated = {plan: costs.of(plan) for plan in self.plans}
            seconds[self.counts.nothing] = costs.pass_of(1)
            tokens, seconds = self.counts.weighed(seconds)
            self.choice = max(self.plans, key=lambda plan: tokens[plan] / seconds[plan])
        self.stays = self.PERIOD - self.rounds % self.PERIOD
        return self.choice

    def observe(self, outcome: Outcome) -> None:
        self.rounds += 1
        if outcome.plan is not None:
            self.counts.news.append(outcome)


class CutGrown(Policy):
    """Draws a dynamic tree, then verifies as much of it as pays (the drafted nodes are paid for
    already, their verification isn't): the number of nodes n that maximises

        tokens(n) - rate * seconds(n),    tokens(n) = B + r * sum over rows of their n best chances

    rate: tokens a second of the rounds so far, drafting included, which makes this the choice of
    the most tokens a second in the long run (Dinkelbach's form of a ratio), not of one round; r:
    drafted tokens kept so far over those promised. A node's chance is what orders the tree. Where
    rounds have given less than plain decoding would have in their time, most draft nothing; every
    `RETRY`th tries again.

    One reading of the device a round. All rows verify as many nodes.
    """

    RETRY, MEMORY, LEAN, HEAR = 32, 0.95, 8.0, 4
    SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257)  # nodes, the root included
    priced = rests = True

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

    def next_plan(self, load: Load = ALONE) -> Plan | None:
        pays = self.rows + self.kept >= self.plain
        if self.heard >= self.HEAR and not pays and self.idle < self.RETRY:
            self.idle += 1
            return None
        self.idle = 0
        return self.plans[-1]

    def observe(self, outcome: Outcome) -> None:
        if outcome.plan is None:
            return
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
