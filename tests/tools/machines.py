"""Machines and drafts that are known, for policies to decode with."""

from collections.abc import Callable, Iterator

import numpy as np

from draftsmith.decode.policies.policy import Load, Outcome, Policy
from draftsmith.decode.tree_shapes import Plan, StaticTree

Seconds = Callable[[int, Plan | None], float]
ROUNDS = 2000


def flat_then_linear(tokens: float, draft: float, knee: int = 32) -> Seconds:
    """A pass costs 1 up to `knee` tokens, then as many times more; a draft call so much of one."""

    def seconds(rows: int, plan: Plan | None) -> float:
        nodes, levels = (1, 0) if plan is None else (plan.nodes, plan.levels)
        each = max(1.0, rows / knee)
        return max(1.0, rows * nodes / knee) ** tokens + levels * draft * each

    return seconds


def rounds(
    plan: Plan | None, chances: list[float], rows: int, noise: np.random.Generator
) -> Iterator[tuple[int, ...]]:
    """What rows keep: at each depth a place falls off by a half, as ranks do."""
    for _ in range(rows):
        kept: list[int] = []
        while plan is not None and len(kept) < plan.levels and len(kept) < len(chances):
            if noise.random() > chances[len(kept)]:
                break
            if isinstance(plan, StaticTree):
                kept.append(0)
                continue
            place = (kept[-1] if kept else 0) + int(noise.geometric(0.5))
            if place >= plan.nodes:
                break
            kept.append(place)
        yield tuple(kept)


def decoded(
    policy: Policy,
    rows: int,
    seconds: Seconds,
    chances: list[float],
    *,
    seed: int = 0,
    jitter: float = 0.05,
    count: int = ROUNDS,
    around: float = 0.0,
) -> float:
    """Tokens a second of a row. around: what a drafted round takes that isn't told as its own."""
    noise = np.random.default_rng(seed)
    tokens = took = 0.0
    for _ in range(count):
        plan = policy.next_plan(Load(rows, rows))
        paths = list(rounds(plan, chances, rows, noise))
        this = seconds(rows, plan)
        tokens += 1 + sum(map(len, paths)) / rows
        beside = 0.0 if plan is None else around
        took += this + beside
        measured = this * (1 + jitter * noise.exponential())
        levels = 0 if plan is None else plan.levels
        told = plan, levels, paths, None, Load(rows, rows), measured, None, measured + beside
        policy.observe(Outcome(*told))
    return tokens / took


def expected(plan: Plan | None, chances: list[float]) -> float:
    """Tokens of a round, in the mean over what `rounds` draws."""
    tokens, nodes = 1.0, 1 if plan is None else plan.nodes
    place_P = np.eye(1, nodes)[0]
    fall_P = np.array([0.0, *(0.5**further for further in range(1, nodes))])
    for chance in chances[: 0 if plan is None else plan.levels]:
        if not isinstance(plan, StaticTree):
            place_P = np.convolve(place_P, fall_P)[:nodes]
        place_P = chance * place_P
        tokens += float(place_P.sum())
    return tokens
