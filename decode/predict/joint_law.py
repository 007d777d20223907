"""One law of text and size together, and what to spend next by it.

    value = u + v log10(tokens) + w log10(parameters)        ("Scaling laws for speculative
    speed-up of B rows = tau / (a round's time in plain steps)     decoding", arXiv 2505.07858)

The law is fitted to all seeds of an arm. Each place (a size after so many tokens) is left out once:
what the law of the others says of it, minus what was measured, is its error. A place whose error is
far beyond the others' is off the law. Where rows say what training took (`seconds`) and what a
round takes at some batch sizes (`costs`), both straight lines in the parameters, a budget of
seconds has a best size: more parameters see less text and draft slower.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from draftsmith.printed import short_count

Row = dict[str, Any]
Place = tuple[float, float]  # tokens, parameters

FEWEST = 3  # sizes, and token counts
OFF = 4.0  # times the usual error
BUDGETS = 1, 2, 4  # times the most that was spent


class JointLaw(NamedTuple):
    """value = u + v log10(tokens) + w log10(parameters) of one arm; r2 of all rows; errors: of each
    place when it is left out, predicted minus measured.
    """

    value: str
    what: str
    u: float
    v: float
    w: float
    r2: float
    errors: dict[Place, float]

    def at(self, tokens: np.ndarray, parameters: np.ndarray) -> np.ndarray:
        return self.u + self.v * np.log10(tokens) + self.w * np.log10(parameters)

    @property
    def error(self) -> float:
        """Root mean square over the places left out."""
        return float(np.sqrt(np.mean(np.square(list(self.errors.values())))))

    @property
    def off(self) -> list[Place]:
        """Places that the law of the others misses by more than OFF times their usual error."""
        sizes = np.abs(list(self.errors.values()))
        usual = max(1.4826 * np.median(sizes), 1e-9)
        return [place for place, error in self.errors.items() if abs(error) > OFF * usual]


class Spent(NamedTuple):
    """What a budget of training seconds gives most with, at a batch size."""

    what: str
    batch: int
    seconds: float
    parameters: float
    tokens: float
    tau: float
    speedup: float
    beyond: bool  # more than twice the tokens, or more parameters, than were measured


def joint_laws(rows: Sequence[Row]) -> list[JointLaw]:
    """Of every arm with at least FEWEST sizes and FEWEST token counts."""
    arms = dict.fromkeys(row["what"] for row in rows)
    of = {what: [row for row in rows if row["what"] == what] for what in arms}
    wide = [
        what
        for what, own in of.items()
        if min(len({row[axis] for row in own}) for axis in ("tokens", "parameters")) >= FEWEST
    ]
    return [joint_law(of[what], value) for value in ("alpha", "tau") for what in wide]


def joint_law(rows: Sequence[Row], value: str) -> JointLaw:
    """The law of one arm's rows."""
    places = [(float(row["tokens"]), float(row["parameters"])) for row in rows]
    x = np.column_stack([np.ones(len(rows)), np.log10(places)])
    y = np.array([float(row[value]) for row in rows])
    errors = {}
    for place in dict.fromkeys(places):
        here = np.array([other == place for other in places])
        found = np.linalg.lstsq(x[~here], y[~here], rcond=None)[0]
        errors[place] = float(x[here][0] @ found - y[here].mean())
    found = np.linalg.lstsq(x, y, rcond=None)[0]
    r2 = float(1 - np.var(y - x @ found) / np.var(y)) if np.ptp(y) else 1.0
    u, v, w = map(float, found)
    return JointLaw(value, rows[0]["what"], u, v, w, r2, errors)


def spending(rows: Sequence[Row], law: JointLaw) -> list[Spent]:
    """For each batch size and budget the size with the largest speed-up; none for rows that don't
    say what they cost. A size is at most twice the largest measured.
    """
    rows = [row for row in rows if row["what"] == law.what and {"seconds", "costs"} <= row.keys()]
    if not rows:
        return []
    size = np.array([float(row["parameters"]) for row in rows])
    tokens = np.array([float(row["tokens"]) for row in rows])
    seconds = np.array([float(row["seconds"]) for row in rows])
    tried = np.geomspace(size.min(), 2 * size.max(), 61)
    # Of all seeds the least: a busy machine adds to some, never takes away.
    paces = {n: (seconds / tokens)[size == n].min() for n in dict.fromkeys(size)}
    each = _straight(np.array(list(paces)), np.array(list(paces.values())), tried)
    most = max(float(row["K"]) for row in rows) + 1
    found = []
    for batch in rows[0]["costs"]:
        cost = _straight(size, np.array([float(row["costs"][batch]) for row in rows]), tried)
        for times in BUDGETS:
            budget = times * float(seconds.max())
            seen = budget / each
            tau = np.clip(law.at(seen, tried), 1, most)
            best = int(np.argmax(tau / cost))
            beyond = bool(seen[best] > 2 * tokens.max() or tried[best] > size.max())
            spent = Spent(
                *(law.what, int(batch), budget, float(tried[best]), float(seen[best])),
                *(float(tau[best]), float(tau[best] / cost[best]), beyond),
            )
            found.append(spent)
    return found


def _straight(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The line through some points, nowhere below the least of them."""
    return np.maximum(np.polyval(np.polyfit(x, y, 1), at), y.min())


LAW_HEAD = "value", "arm", "u", "v, a decade of tokens", "w, of parameters", "R²", "error", "off"
SPENT_HEAD = "arm", "rows", "training", "parameters", "tokens", "tau", "speed-up", "measured"


def law_cells(law: JointLaw) -> list[str]:
    """A law in words, in the order of LAW_HEAD."""
    off = [f"{short_count(size)} after {short_count(seen)}" for seen, size in law.off]
    fitted = [f"{figure:.3f}" for figure in (law.u, law.v, law.w, law.r2, law.error)]
    return [law.value, law.what, *fitted, ", ".join(off) or "none"]


def spent_cells(spent: Spent) -> list[str]:
    """What a budget gives in words, in the order of SPENT_HEAD."""
    grown = [f"{spent.seconds:.0f} s", short_count(spent.parameters), short_count(spent.tokens)]
    gained = [f"{spent.tau:.2f}", f"{spent.speedup:.2f}", "beyond" if spent.beyond else "within"]
    return [spent.what, str(spent.batch), *grown, *gained]
