"""The policies by name: each picks a round's tree, and may end it early or verify a part of it.

fixed             the tree as it is
confidence:0.4    stop once no drafted token of a call has that probability (transformers' rule)
entropy:0.2,0.6   AdaEDL: stop where 1 - sqrt(0.2 * H(q)), a bound on acceptance, is under a
                  limit that starts at 0.6 and follows the acceptance seen
acceptance:0.7,1  SpecDec++: stop once something drafted has been rejected with a probability
                  above 0.7, by the head in the drafter folder, after 1 call or more; without
                  numbers at the head's own threshold
depth:0.3         dynamic depth: stop once the nodes to feed next hold less than that
                  probability together
gain:0.1          OPT-Tree: stop growing a dynamic tree once a call adds fewer tokens than that to
                  what its nodes promise
cost              the K, or part of the tree, of the highest expected tokens a second, by
                  measured times of the models and running acceptance
exits:1           DEL: of the target's layers that may draft (drafter=exits:2+4+6) and of lengths
                  the best by running acceptance and bytes read; stop below a chance that follows
                  what was kept, times that number (0: never)
auto              the K, or part of the tree, or no draft at all, that gives most tokens a second
                  with as many rows as there are, by the rounds so far
budget            auto, and of what is drafted those tokens of the whole batch are verified that
                  are worth their time, another number for each row
tetris:1          of what is drafted so many tokens a row, in the mean over the batch, are verified:
                  the likeliest by the draft
table:1-8=4,9-=0  so many draft calls for so many rows that decode
cut               a dynamic tree is grown whole, then verified as far as its own chances promise
                  more than the measured time of verifying costs; none at all where that is best
"""

from collections.abc import Callable

from draftsmith.decode.policies.budget import Shares, Tetris
from draftsmith.decode.policies.exits import ExitPolicy
from draftsmith.decode.policies.load import Auto, Table
from draftsmith.decode.policies.policy import Acceptance, Confidence, Depth, Entropy, Gain, Policy
from draftsmith.decode.policies.priced import Cost, CutGrown
from draftsmith.decode.tree_shapes import Plan

POLICIES: dict[str, Callable[..., Policy]] = {
    "fixed": Policy,
    "auto": Auto,
    "budget": Shares,
    "tetris": Tetris,
    "table": Table,
    "confidence": Confidence,
    "entropy": Entropy,
    "acceptance": Acceptance,
    "depth": Depth,
    "gain": Gain,
    "cost": Cost,
    "cut": CutGrown,
    "exits": ExitPolicy,
}

NUMBERS = {"confidence": 1, "depth": 1, "gain": 1, "exits": 1, "tetris": 1}
NUMBERS |= {"entropy": 2, "acceptance": 2}


def make_policy(text: str, plan: Plan) -> Policy:
    """What `name` or `name:number,...` describes; ValueError for what no policy takes."""
    name, _, numbers = text.partition(":")
    if name not in POLICIES:
        raise ValueError(f"policy: got {text!r}, expected one of {', '.join(POLICIES)}")
    if name == "table":
        return Table(plan, numbers)
    try:
        values = [float(number) for number in numbers.split(",")] if numbers else []
    except ValueError:
        raise ValueError(f"policy: got {text!r}, expected numbers after the colon") from None
    most = NUMBERS.get(name, 0)
    if len(values) > most:
        raise ValueError(f"policy: got {text!r}, expected at most {most} numbers for {name}")
    return POLICIES[name](plan, *values)
