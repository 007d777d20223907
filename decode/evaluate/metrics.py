"""The numbers of an evaluation, from what the decoder counted. Formulas: DESIGN words, printed in
`report.figures.FORMULAS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import zip_longest

import numpy as np

from draftsmith.decode.engine.request import Completion, Counters


def total(counters: Sequence[Counters]) -> Counters:
    """What several requests counted, as one."""
    result = Counters()
    for c in counters:
        for field in fields(Counters):
            a, b = getattr(result, field.name), getattr(c, field.name)
            both = a + b
            if isinstance(a, list):
                both = [x + y for x, y in zip_longest(a, b, fillvalue=0)]
            setattr(result, field.name, both)
    return result


def block_efficiency(counters: Sequence[Counters]) -> float:
    """tau: tokens emitted per target call, bonus included; nan where there was no call."""
    rounds = sum(c.rounds for c in counters)
    return sum(c.emitted for c in counters) / rounds if rounds else float("nan")


def acceptance_by_position(counters: Sequence[Counters]) -> tuple[list[float], list[float]]:
    """(unconditional, conditional on all earlier ones) share of drafted positions kept. Rounds may
    differ in depth: each position counts those that drafted it.
    """
    one = total(counters)
    # Rounds that kept more than i drafted tokens accepted position i.
    kept = [sum(one.histogram[i + 1 :]) for i in range(len(one.reached))]
    return _shares(kept, one.reached), _shares(kept, one.tried)


def draft_acceptance_rate(counters: Sequence[Counters]) -> float | None:
    """accepted / drafted (of trees: / depth); what follows the first rejection counts as rejected;
    None where nothing was drafted.
    """
    drafted = sum(c.drafted for c in counters)
    return _accepted(counters) / drafted if drafted else None


def token_efficiency(counters: Sequence[Counters]) -> float | None:
    """accepted / (N - 1): the share of the verified tokens that were kept; None without any."""
    nodes = sum(c.nodes for c in counters)
    return _accepted(counters) / nodes if nodes else None


def loop_rate(completions: Sequence[Completion], n: int = 8) -> float:
    """The share of n-grams that their own answer had before: 0 fresh, 1 all loops."""
    seen_before = total = 0
    for completion in completions:
        seen: set[tuple[int, ...]] = set()
        for start in range(len(completion.tokens) - n + 1):
            gram = tuple(completion.tokens[start : start + n])
            seen_before += gram in seen
            seen.add(gram)
            total += 1
    return seen_before / total if total else 0.0


def bootstrap(
    statistic: Callable[[np.ndarray], float], prompts: int, *, draws: int = 2000, seed: int = 0
) -> list[float]:
    """The 95% interval [low, high] of a statistic of prompt indices, over resampled prompts."""
    rng = np.random.default_rng(seed)
    values = [statistic(rng.integers(0, prompts, prompts)) for _ in range(draws)]
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return [float(low), float(high)]


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The interval of sum(numerators) / sum(denominators) over prompts."""
    top, bottom = np.array(numerators, float), np.array(denominators, float)
    return bootstrap(lambda i: float(top[i].sum() / bottom[i].sum()), len(top))


def paired_difference(
    after: tuple[Sequence[float], Sequence[float]], before: tuple[Sequence[float], Sequence[float]]
) -> tuple[float, list[float]]:
    """The difference of two ratios of sums over the same prompts, and its interval: each draw takes
    the same prompts on both sides.
    """
    a, b, c, d = (np.array(x, float) for x in (*after, *before))

    def difference(i: np.ndarray) -> float:
        return float(a[i].sum() / b[i].sum() - c[i].sum() / d[i].sum())

    return difference(np.arange(len(a))), bootstrap(difference, len(a))


def _accepted(counters: Sequence[Counters]) -> int:
    return sum(i * n for c in counters for i, n in enumerate(c.histogram))


def _shares(part: Sequence[int], whole: Sequence[int]) -> list[float]:
    return [p / w if w else 0.0 for p, w in zip(part, whole, strict=True)]
