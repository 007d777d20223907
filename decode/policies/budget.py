"""How much of each row's chain is verified: a token that is hardly ever kept costs a pass as much
as others do.

What may choose that without a bias depends on the rule (`RuleInfo.cuts`): with shared noise
anything; of draws that a rule rejects, a token's chance may be read off what lies before it alone.

Shapes: B rows, N nodes, the root first, D = N - 1 drafted tokens, K labels, X weights.
"""

from collections import defaultdict, deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftsmith.decode.policies.load import Auto
from draftsmith.decode.policies.policy import ALONE, Load, Outcome, Policy
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.tree_shapes import Plan


class Toll(NamedTuple):
    """token: seconds that one verified token more adds to a round; rate: tokens a second of rounds
    that are over.
    """

    token: float
    rate: float


def worth(survival_BN: np.ndarray, least: float) -> np.ndarray:
    """How many nodes of each row are verified, the root included, by the chance that all is kept up
    to each node: those worth their time, of which `least` is rate x seconds of a token. The choice
    of most tokens a second in the long run (Dinkelbach's form of a ratio) where seconds are a line
    in tokens. An argmax over this round's chances would let what follows a token choose it: a bias.
    """
    gain_BN = survival_BN - least
    gain_BN[:, 0] = 1  # the pending token has to be fed
    made: np.ndarray = gain_BN.cumsum(1).argmax(1) + 1
    return made


def likeliest(survival_BN: np.ndarray, count: int) -> np.ndarray:
    """Likewise, of so many drafted tokens of all rows, whatever they cost."""
    best = np.argsort(-survival_BN[:, 1:], axis=None, kind="stable")[:count]
    rows, nodes = survival_BN.shape
    made: np.ndarray = 1 + np.bincount(best // (nodes - 1), minlength=rows)
    return made


class Survival:
    """The chance that a token is kept if the one before is: sigmoid(w f + b of its depth), f the
    log odds of the draft's best score. Learned as rounds end from what was tried, by a Newton step
    each `EVERY` labels on the last `MEMORY` and a normal prior (vLLM's `acceptance_estimator.py`
    starts there too, but forgets it). Of drafts that say nothing f is 0: that counts by depth.
    """

    SLOPE, BIAS, PRIOR, EVERY, MEMORY = 0.5, -0.2, 1.0, 128, 2048

    def __init__(self, levels: int) -> None:
        self.start = np.array([self.SLOPE] + [self.BIAS] * levels)
        self.weights = self.start
        self.known, self.new = np.zeros((0, 2 + levels)), 0

    def chance(self, sure_BD: np.ndarray) -> np.ndarray:
        """Of tokens [B, D] so sure (`TokenTree`)."""
        return self._sigmoid(self._inputs(sure_BD))

    def take(self, sure_BD: np.ndarray, tried_B: np.ndarray, kept_B: np.ndarray) -> None:
        """Of so many tokens of each row, of which the first were kept."""
        depth_1D = np.arange(1, 1 + sure_BD.shape[1])[None]
        labels_BDX = self._inputs(sure_BD), (depth_1D <= kept_B[:, None])[..., None]
        new_KX = np.concatenate(labels_BDX, 2)[depth_1D <= tried_B[:, None]]
        self.known = np.concatenate([self.known, new_KX])[-self.MEMORY :]
        self.new += len(new_KX)
        if self.new < self.EVERY:
            return
        self.new, inputs_KX, kept = 0, self.known[:, :-1], self.known[:, -1]
        chance_K = self._sigmoid(inputs_KX)
        curve_XX = (inputs_KX * (chance_K * (1 - chance_K))[:, None]).T @ inputs_KX
        curve_XX += self.PRIOR * np.eye(len(curve_XX))
        slope_X = inputs_KX.T @ (kept - chance_K) + self.PRIOR * (self.start - self.weights)
        # Far from the best weights Newton's step overshoots.
        self.weights = self.weights + np.clip(np.linalg.solve(curve_XX, slope_X), -1, 1)

    def _inputs(self, sure_BD: np.ndarray) -> np.ndarray:
        log_odds_BD = np.clip(sure_BD - np.log(-np.expm1(np.minimum(sure_BD, -1e-12))), -40, 40)
        depth_DX = np.eye(sure_BD.shape[1], len(self.weights) - 1)
        depth_BDX = np.broadcast_to(depth_DX, (len(sure_BD), *depth_DX.shape))
        return np.concatenate([log_odds_BD[..., None], depth_BDX], 2)

    def _sigmoid(self, inputs: np.ndarray) -> np.ndarray:
        made: np.ndarray = 1 / (1 + np.exp(-np.clip(inputs @ self.weights, -40, 40)))
        return made


def survival(chance_BD: np.ndarray, active_B: Tensor) -> np.ndarray:
    """[B, N]; of rows that rest 0."""
    chance_BD = chance_BD * active_B.cpu().numpy()[:, None]
    return np.concatenate([np.ones((len(chance_BD), 1)), chance_BD.cumprod(1)], 1)


def parted(tree: TokenTree, verified_B: np.ndarray) -> TokenTree:
    return replace(tree, verified_B=torch.from_numpy(verified_B).to(tree.tokens_BN.device))


def needs_chain(plan: Plan, name: str) -> None:
    if not plan.is_chain:
        raise ValueError(
            f"policy {name}: got a tree of {plan.nodes} nodes, expected a chain; use tree=chain, "
            "or policy=auto, or policy=cut for a dynamic tree"
        )


class Shares(Auto):
    """`auto`, and of what it drafts in a round those tokens of the whole batch are verified that
    are worth it: DSpark's confidence scheduling (arXiv 2607.05147), for chains of any drafter.
    Every `WHOLE`th round verifies all: what it takes more than others do is what tokens cost.

    Differences from DSpark: costs are a line, learned from rounds, not a profile; tokens are
    weighed one by one (`worth`); chances are learned online, not by a head.
    """

    WHOLE, MEMORY = 16, 32

    def __init__(self, plan: Plan) -> None:
        needs_chain(plan, "budget")
        super().__init__(plan)
        self.survival, self.load, self.drafts = Survival(plan.levels), ALONE, 0
        # By rows, tree and whether all was verified: seconds, tokens verified, tokens emitted.
        self.took: defaultdict[object, deque[tuple[float, int, int]]]
        self.took = defaultdict(lambda: deque(maxlen=self.MEMORY))
        self.tolls: dict[int, Toll] = {}  # by rows
        self.share = self._share

    def next_plan(self, load: Load = ALONE) -> Plan | None:
        self.load = load
        return super().next_plan(load)

    def _share(self, tree: TokenTree, active_B: Tensor) -> TokenTree:
        (sure_BD, verified_B), toll = tree.parts, self.tolls.get(self.load.rows)
        self.drafts += 1
        if toll is not None and self.drafts % self.WHOLE != 1:
            survival_BN = survival(self.survival.chance(sure_BD), active_B)
            verified_B = worth(survival_BN, toll.rate * toll.token)
        return parted(tree, verified_B)

    def observe(self, outcome: Outcome) -> None:
        if outcome.parts is not None:
            sure_BD, verified_B = outcome.parts
            kept_B = np.array([len(path) for path in outcome.paths])
            self.survival.take(sure_BD, np.minimum(verified_B - 1, kept_B + 1), kept_B)
            if outcome.seconds is not None and self.paces[outcome.load.rows].next:
                whole = bool((verified_B > sure_BD.shape[1]).all())
                emitted = len(kept_B) + int(kept_B.sum())
                outcome = self._charged(outcome, whole, int((verified_B - 1).sum()), emitted)
        super().observe(outcome)

    def _charged(self, outcome: Outcome, whole: bool, tokens: int, emitted: int) -> Outcome:
        """Learn the toll; the round as if it had verified as much as those like it do."""
        rows, plan, seconds = outcome.load.rows, outcome.plan, outcome.seconds
        assert seconds is not None
        plain = self.paces[rows].clock.plain
        # At first as if passes were flat to so many tokens, and linear beyond.
        token = self.tolls[rows].token if rows in self.tolls else plain / (rows + self.START)
        self.took[rows, plan, whole].append((seconds, tokens, emitted))
        part = np.array(self.took[rows, plan, False] or self.took[rows, plan, whole])
        if whole and self.took[rows, plan, False]:
            # Of both the lower quartile: a busy machine adds to some rounds, never takes away.
            all_of_it = np.array(self.took[rows, plan, True])
            more = all_of_it[:, 1].mean() - part[:, 1].mean()
            longer = np.quantile(all_of_it[:, 0], 0.25) - np.quantile(part[:, 0], 0.25)
            lean = tokens / 8
            token = float(np.clip((longer + token * lean) / (more + lean), 0, plain / rows))
        rate = part[:, 2].sum() / part[:, 0].sum()
        self.tolls[rows] = Toll(token, max(rate, outcome.load.running / plain))
        # While a token's seconds are overestimated, no round may come to nothing or less.
        charged = seconds + token * (part[:, 1].mean() - tokens)
        return outcome._replace(seconds=max(charged, seconds / 2))


class Tetris(Policy):
    """TETRIS (Wu et al., arXiv 2502.15197): all of the chain is drafted, and `each` tokens a row in
    the mean are verified, those likeliest by the drawn tokens' own chances: by shared noise these
    are the best scores'; a rule by rejection they would bias.
    """

    reads_drawn = True

    def __init__(self, plan: Plan, each: float = 1.0) -> None:
        needs_chain(plan, "tetris")
        super().__init__(plan)
        if not 0 <= each <= plan.levels:
            raise ValueError(
                f"policy tetris: got {each:g} verified tokens a row, expected 0 to the "
                f"{plan.levels} that are drafted"
            )
        self.each, self.share = each, self._share

    def _share(self, tree: TokenTree, active_B: Tensor) -> TokenTree:
        chance_BN = survival(np.exp(tree.parts[0]), active_B)
        return parted(tree, likeliest(chance_BN, round(self.each * int(active_B.sum()))))
