"""The numbers of an evaluation, from what the decoder counted. Formulas: DESIGN words, printed in
`report.figures.FORMULAS`.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np

from draftsmith.decode.engine.request import Completion, Counters

FEW = 30  # prompts; of fewer an interval is wide, and a warning says how wide


def total(counters: Sequence[Counters]) -> Counters:
    """What several requests counted, as one."""
    result = Counters()
    for c in counters:
        for name, a in vars(result).items():
            b = getattr(c, name)
            lists = isinstance(a, list)
            both = [x + y for x, y in zip_longest(a, b, fillvalue=0)] if lists else a + b
            setattr(result, name, both)
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
    by_reached, by_tried = (
        [k / n if n else 0.0 for k, n in zip(kept, rounds, strict=True)]
        for rounds in (one.reached, one.tried)
    )
    return by_reached, by_tried


def kept_shares(counters: Sequence[Counters]) -> tuple[float | None, float | None]:
    """accepted / drafted (of trees: / depth), where what follows the first rejection counts as
    rejected; and accepted / (N - 1), of the tokens verified; None where there were none.
    """
    one = total(counters)
    accepted = sum(i * n for i, n in enumerate(one.histogram))
    return (
        accepted / one.drafted if one.drafted else None,
        accepted / one.nodes if one.nodes else None,
    )


def loop_rate(completions: Sequence[Completion]) -> float:
    """The share of 8-grams that their own answer had before: 0 fresh, 1 all loops."""
    fresh = total = 0
    for tokens in (completion.tokens for completion in completions):
        grams = [tuple(tokens[start : start + 8]) for start in range(len(tokens) - 7)]
        fresh += len(set(grams))
        total += len(grams)
    return (total - fresh) / total if total else 0.0


def bootstrap(
    statistic: Callable[[np.ndarray], float], prompts: int, *, draws: int = 2000
) -> list[float]:
    """The 95% interval [low, high] of a statistic of prompt indices, over resampled prompts."""
    return [float(end) for end in bootstraps(statistic, prompts, draws)]


def bootstraps(
    statistics: Callable[[np.ndarray], float | np.ndarray], prompts: int, draws: int = 2000
) -> np.ndarray:
    """The intervals [2, ...] of several statistics on the same draws."""
    rng = np.random.default_rng(0)
    values = [np.asarray(statistics(rng.integers(0, prompts, prompts))) for _ in range(draws)]
    return np.asarray(np.nanpercentile(np.stack(values), [2.5, 97.5], axis=0))


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
