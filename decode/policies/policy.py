"""What a policy is, and those that stop drafting by what has been drafted.

Policies that look at every call read the device once a call; the others never do. None of them
changes an answer: with shared noise any draft may be cut, and a rule by rejection is exact for any
stopping that depends on what is drafted so far.

Shapes: B rows, F nodes fed, C children drawn from them, N nodes, I what an acceptance head reads.
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decode.drafting.base import Call, Chance, Enough, HowMany, picked
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.tree_shapes import DynamicTree, Plan, StaticTree
from draftsmith.models.scorers import Scored, Scorer, check_threshold, within


class Costs(NamedTuple):
    """Measured seconds: verify[i] of a pass over nodes[i] tokens a row, draft[i] of a draft call
    that feeds as many, level of one more of a chain that is drafted at once; between them, straight
    lines. A head's first call feeds nothing, but it takes in what was kept, which is charged in its
    place, as one pass; first: what a round spends on both where that is no such pass.
    """

    nodes: tuple[int, ...]
    verify: tuple[float, ...]
    draft: tuple[float, ...]
    first: float | None = None
    level: float | None = None

    def of(self, plan: Plan) -> float:
        """Seconds of a round of this plan."""
        if self.level is not None and plan.is_chain:
            calls = [self.level] * plan.levels
        else:
            calls = [float(np.interp(n, self.nodes, self.draft)) for n in plan.fed]
        if self.first is not None:
            calls[0] = self.first
        return sum(calls) + self.verifying(plan)

    def verifying(self, plan: Plan) -> float:
        """Of these, the target's pass."""
        return self.pass_of(plan.nodes)

    def pass_of(self, nodes: int) -> float:
        """Of a pass over so many tokens a row."""
        return float(np.interp(nodes, self.nodes, self.verify))


class Load(NamedTuple):
    """What a round works on: rows that are computed, and those of them that decode; lag: by which
    share of the mean the slowest of these keeps less, where no other takes a row that ends early.
    """

    rows: int = 1
    running: int = 1
    lag: float = 0.0


ALONE = Load()
MANY = sys.maxsize


class Outcome(NamedTuple):
    """What a finished round's rows came to. plan: None of a round that drafted nothing; levels:
    draft calls made; paths: of each row that decoded, the rank path that was kept (of a dynamic
    tree: the places of the nodes kept in its order of worth); news: what the drafter says of these
    rows (`Drafter.extend`); load: what it worked on; seconds: that it took, None where something
    else was done meanwhile; parts: of these rows' trees, as `TokenTree` has them; whole: seconds
    with all that was done for it before, or for its like, as the drafter's hearing of what it owed.
    """

    plan: Plan | None
    levels: int
    paths: Sequence[tuple[int, ...]]
    news: Tensor | None = None
    load: Load = ALONE
    seconds: float | None = None
    parts: tuple[np.ndarray, np.ndarray] | None = None
    whole: float | None = None


class Policy:
    """Always the same tree, and what other policies begin with. plans: every tree it may ask for,
    the largest last; enough, chance, orders, keep: as in `Round`; share: says which part of each
    row's drafted tree is verified, given the rows that decode [B]; priced: whether it is given
    `costs`, seconds of the models' passes; rests: whether rounds may draft nothing; stays: how many
    rounds of what was asked for there will be from this one on, with as many rows; asleep: whether
    nothing will be drafted for so long that a drafter need not hear of this round.
    """

    enough: Enough | None = None
    chance: Chance | None = None
    keep: HowMany | None = None
    share: Callable[[TokenTree, Tensor], TokenTree] | None = None
    reads_drawn = False  # whether its choices depend on the very tokens that were drawn
    orders = priced = rests = asleep = False
    costs: Costs | None = None
    stays = 1

    def __init__(self, plan: Plan) -> None:
        self.plans: tuple[Plan, ...] = (plan,)

    def choose_among(self, reads: Mapping[int, int], whole: int) -> None:
        """Hear of a drafter's `ways`; whole: bytes that a pass of the target reads. ValueError for
        too few.
        """

    @property
    def asked(self) -> bool:
        """Whether it is asked in the middle of rounds."""
        return (self.enough, self.keep, self.share) != (None, None, None)

    def next_plan(self, load: Load = ALONE) -> Plan | None:
        """The tree of the next round; None for a round that drafts nothing."""
        self.stays = MANY
        return self.plans[-1]

    def will_draft(self, load: Load) -> bool:
        """Whether the next round will draft with so much to do, as far as is known."""
        return True

    def observe(self, outcome: Outcome) -> None:
        """Learn from a round, where there is something to learn."""

    def admit(self, rows: int, seconds: float | None) -> None:
        """Hear of new rows, whose prompts took the drafter so long; None where they wait."""


class Confidence(Policy):
    """Stops after a call whose best drafted token is improbable."""

    def __init__(self, plan: Plan, threshold: float = 0.4) -> None:
        super().__init__(plan)
        check_threshold(threshold, "policy confidence")
        self.enough = lambda call: call.log_q_BC.amax(1).exp() < threshold


class Depth(Policy):
    """Dynamic depth decoding (Brown et al., arXiv 2409.00142): the probability of the whole beam
    that would be fed next; of a static tree, of all that a call drafted.
    """

    def __init__(self, plan: Plan, threshold: float = 0.3) -> None:
        super().__init__(plan)
        check_threshold(threshold, "policy depth")
        width = plan.width if isinstance(plan, DynamicTree) else len(plan.paths)
        if isinstance(plan, StaticTree):  # a dynamic one is judged by what orders it
            self.chance = lambda call: call.log_q_BC

        def enough(call: Call) -> Tensor:
            assert call.path_BC is not None
            beam_BC = call.path_BC.topk(min(width, call.path_BC.shape[1]), dim=1).values
            return beam_BC.exp().sum(1) < threshold

        self.enough = enough


class Gain(Policy):
    """OPT-Tree (Wang et al., arXiv 2406.17276): the tokens that a tree of so many nodes promises, 1
    and the chances of its best paths, grow by less than `least` with another call.
    """

    def __init__(self, plan: Plan, least: float = 0.1) -> None:
        super().__init__(plan)
        if not isinstance(plan, DynamicTree) or least < 0:
            raise ValueError(
                f"policy gain: got {plan.nodes} nodes of a {type(plan).__name__} and {least:g}, "
                "expected tree=dynamic:levels,width,nodes, and a number of tokens from 0 up"
            )

        best_BC = torch.empty(0)

        def enough(call: Call) -> Tensor:
            nonlocal best_BC
            assert call.path_BC is not None
            before_BC = best_BC if call.depth else call.path_BC[:, :0]
            all_BC = torch.cat([before_BC, call.path_BC], 1)
            best_BC = all_BC.topk(min(plan.nodes - 1, all_BC.shape[1]), 1).values
            return best_BC.exp().sum(1) - before_BC.exp().sum(1) < least

        self.enough = enough


class AcceptanceHead:
    """(call) -> what it adds to the log chance of its children's paths [B, C]; a copy of the scorer
    on `device` in fp32, its calibration folded into its last map.

    A head that reads the state a token was drawn from, or none, scores the children. One that reads
    the state after a token scores the nodes fed, which stand for their children: the newest tokens
    of a round are never scored (nor in the official code), and the root, which is kept, counts 0.
    """

    def __init__(self, scorer: Scorer, device: torch.device) -> None:
        made = copy.deepcopy(scorer)
        with torch.no_grad():
            made.out.weight.mul_(made.scale)
            made.out.bias.copy_(made.calibrated(made.out.bias))
        made.to(device)
        self.config = made.config
        self.enter = None if made.enter is None else tuple(made.enter.parameters())
        *self.blocks, self.out = (tuple(linear.parameters()) for linear in (*made.blocks, made.out))

    def __call__(self, call: Call) -> Tensor:
        states_BFH = call.states_BFH[..., : self.config.hidden].float()
        if self.config.state == "token":
            if call.depth == 0:
                return torch.zeros_like(call.of_BC, dtype=torch.float32)
            return self._log_chance(states_BFH).gather(1, call.of_BC)
        if call.of_BC.shape[1] > 1:
            states_BFH = picked(states_BFH, call.of_BC)
        if self.config.scalars:
            numbers = [READ[name](call)[..., None] for name in self.config.scalars]
            states_BFH = torch.cat([states_BFH, *numbers], -1)
        return self._log_chance(states_BFH)

    def _log_chance(self, x: Tensor) -> Tensor:
        """Log probability [...] of inputs [..., I]."""
        x = x if self.enter is None else F.linear(x, *self.enter)
        for block in self.blocks:
            x = x + F.silu(F.linear(x, *block))
        return F.logsigmoid(F.linear(x, *self.out)[..., 0])


# What `models.scorers.SCALARS` names, of each child [B, C].
READ = {
    "log_q": lambda call: within(call.log_q_BC),
    "entropy": lambda call: call.entropy_BF.gather(1, call.of_BC),
    "lead": lambda call: within(call.lead_BC),
    "depth": lambda call: torch.full_like(call.of_BC, call.depth, dtype=torch.float32),
    "path": lambda call: within(call.joint_BC),
    "rank": lambda call: within(call.rank_BC.float()),
}


class Acceptance(Policy):
    """SpecDec++ (Huang et al., arXiv 2405.19715): go on while the best path is wholly kept with a
    chance of at least 1 - threshold, by an acceptance head; of a batch, the mean chance of the rows
    that decode. A dynamic tree is ordered and pruned by that chance too, if the head has learned
    from trees and tells siblings apart (by the state that they were drawn from, or by numbers).

    threshold: None for the head's own. least: draft calls before it may stop.
    """

    def __init__(self, plan: Plan, threshold: float | None = None, least: float = 1) -> None:
        super().__init__(plan)
        if threshold is not None:
            check_threshold(threshold, "policy acceptance")
        if not 1 <= least <= plan.levels or least != int(least):
            raise ValueError(
                f"policy acceptance: got at least {least:g} draft calls, expected a whole number "
                f"from 1 to the tree's {plan.levels}"
            )
        self.threshold, self.least = threshold, int(least)

    def read_by(self, head: Scored, device: torch.device) -> None:
        """Judge by this head, whose states come on `device`."""
        threshold = head.threshold if self.threshold is None else self.threshold
        self.chance = AcceptanceHead(head.scorer, device)
        of_trees = head.about.get("traced", {}).get("tree", "chain") != "chain"
        self.orders = of_trees and head.scorer.config.state != "token"

        def enough(call: Call) -> Tensor:
            assert call.path_BC is not None
            # NaN, of a broken draft or an idle row, must not decide for the other rows.
            best_B = (call.path_BC.amax(1).exp() * call.active_B).nan_to_num(nan=0.0)
            mean = best_B.sum() / call.active_B.sum().clamp(min=1)
            stop = (mean < 1 - threshold) & (call.depth + 1 >= self.least)
            return stop.expand_as(best_B)

        self.enough = enough


class Entropy(Policy):
    """AdaEDL (Agrawal et al., arXiv 2410.18351): drafting stops where 1 - sqrt(gamma H(q)), a bound
    on acceptance, is below the limit. The limit rises while less than `GOAL` of the drafted tokens
    are kept, and falls while more are: the walk of Zhang et al., arXiv 2309.08168, its constants as
    recalled, but GOAL: with 0.9 the quickstart's draft never drafts a second token.
    """

    GOAL, MEMORY, STEP, INERTIA = 0.6, 0.5, 0.01, 0.9

    def __init__(self, plan: Plan, gamma: float = 0.2, limit: float = 0.6) -> None:
        super().__init__(plan)
        check_threshold(limit, "policy entropy")
        if not gamma > 0:
            raise ValueError(f"policy entropy: got a factor of {gamma}, expected a number above 0")
        self.limit, self.rate = limit, self.GOAL
        self.enough = lambda call: 1 - (gamma * call.entropy_BF.amin(1)).sqrt() < self.limit

    def observe(self, outcome: Outcome) -> None:
        if not outcome.paths or not outcome.levels:
            return
        kept = sum(map(len, outcome.paths)) / (len(outcome.paths) * outcome.levels)
        self.rate = self.MEMORY * self.rate + (1 - self.MEMORY) * kept
        wanted = self.limit + (self.STEP if self.rate < self.GOAL else -self.STEP)
        self.limit = min(max(self.INERTIA * self.limit + (1 - self.INERTIA) * wanted, 0.0), 1.0)
