"""A server under load, without a device: requests arrive, wait for a row, are admitted, and decode
in rounds whose seconds a grid tells; policies are the decoder's own.

With coupled sampling an answer is the same whatever drafts, and how much of a draft is kept depends
on its position alone, not on batch, policy or load. So kept drafts are read off a trace with a
round at every position, exactly; only arrivals are random. As in `Session.step`, what waits is
admitted first, prompts whole and padded to the longest, while nobody decodes.

Shapes: B rows that decode, T positions of an answer at which a round may begin, K tokens of the
longest draft.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from draftsmith.decode.policies.policy import Load, Outcome, Policy
from draftsmith.decode.predict.load_grid import Grid
from draftsmith.decode.traces.simulate_stops import COLUMNS, rounds_of
from draftsmith.decode.traces.store import read_traces
from draftsmith.decode.tree_shapes import chain_plan


class KeptRuns(NamedTuple):
    """prompt: its tokens; run_T: how many tokens of the longest draft are kept, at each position of
    the answer but the first, which comes with the prefill; score_TK: the chance that each of them
    is, as far as it can be known beforehand.
    """

    prompt: int
    run_T: np.ndarray
    score_TK: np.ndarray


def traced(folder: str) -> list[KeptRuns]:
    """Those of a trace. Scores are products of q, put right by one factor a depth, so that their
    means are the trace's shares of kept tokens. ValueError for a trace without a round at every
    position.
    """
    trace = read_traces(folder, COLUMNS, kind="decoder")
    rounds = rounds_of(trace)
    prompt_n, position_n = trace.columns["prompt"], trace.columns["position"]
    lengths = [int(position_n[prompt_n == prompt].min()) - 1 for prompt in prompt_n.unique()]
    scores = [np.exp(one.log_q_TK.cumsum(1)) for one in rounds]
    kept_K = np.concatenate([one.kept_TK for one in rounds]).mean(0)
    factor_K = kept_K / np.concatenate(scores).mean(0)
    right = [np.minimum.accumulate(np.minimum(score * factor_K, 1), 1) for score in scores]
    answers = zip(lengths, rounds, right, strict=True)
    return [KeptRuns(length, one.run_T, score_TK) for length, one, score_TK in answers]


def drawn(
    survival: Sequence[float],
    count: int,
    *,
    tokens: int,
    prompt: int = 64,
    sharpness: float = 0.0,
    seed: int = 0,
) -> list[KeptRuns]:
    """Made-up answers of so many tokens, whose j-th drafted token is kept with chance survival[j].
    sharpness: how far chances differ by position, in units of probit noise; 0: not at all.
    """
    noise = np.random.default_rng(seed)
    above = np.array([1.0, *survival[:-1]])
    chance_K = torch.tensor(np.divide(survival, above, out=np.zeros(len(above)), where=above > 0))
    shape = count, tokens - 1, len(survival)
    # Phi(m + s z) of a normal z is Phi(m / sqrt(1 + s^2)) in the mean.
    middle_K = torch.special.ndtri(chance_K) * (1 + sharpness**2) ** 0.5
    chance = torch.special.ndtr(middle_K + sharpness * torch.tensor(noise.normal(size=shape)))
    kept = noise.random(shape) < chance.numpy()
    runs, scores = kept.cumprod(2).sum(2), chance.numpy().cumprod(2)
    return [KeptRuns(prompt, *one) for one in zip(runs, scores, strict=True)]


class Arrivals(NamedTuple):
    """Seconds at which requests come, and how many more do as others end."""

    times: Sequence[float]
    after: int = 0


class Ahead(NamedTuple):
    """What an arm of the simulator may look at before a round: tokens that would be kept [B], their
    chances [B, K], and tokens that the answers lack [B].
    """

    run_B: np.ndarray
    score_BK: np.ndarray
    left_B: np.ndarray
    grid: Grid


class Trimming(Policy):
    """A policy that verifies a part of each row's draft, as far as the grid says that it pays."""

    rests = True

    def lengths(self, ahead: Ahead) -> tuple[int, np.ndarray]:
        """Draft calls of the next round, and how many drafted tokens of each row are verified."""
        raise NotImplementedError


class Moved(NamedTuple):
    """A round: draft calls; of each row the drafted tokens that were verified and kept, and the
    tokens emitted, where the answer has as many; its seconds.
    """

    levels: int
    verified_B: np.ndarray
    kept_B: np.ndarray
    emitted_B: np.ndarray
    seconds: float


class Overlapped(Policy):
    """Drafts while the target verifies, so that rounds are its own."""

    def moved(self, running: Sequence["Visit"], grid: Grid) -> Moved:
        """Of these rows."""
        raise NotImplementedError


@dataclass(eq=False)
class Visit:
    """A request and its times; at: of its answer's positions, where its next round begins."""

    answer: KeptRuns
    arrived: float
    first: float | None = None
    end: float | None = None
    at: int = 0


@dataclass
class Day:
    """All that a simulation tells. seconds: its length; drafted, verified, kept: drafted tokens
    over all rounds of all rows, of which `rests` drafted nothing.
    """

    requests: list[Visit] = field(default_factory=list)
    seconds: float = 0.0
    rounds: int = 0
    rests: int = 0
    drafted: int = 0
    verified: int = 0
    kept: int = 0


def simulated(
    policy: Policy, answers: Sequence[KeptRuns], arrivals: Arrivals, grid: Grid, batch_size: int
) -> Day:
    """Serve the answers in turn, at most `batch_size` at a time, to the last one's end; where
    requests come as others end, until one ends that nothing follows.
    """
    day, clock, left = Day(), 0.0, arrivals.after
    due, running = deque(arrivals.times), list[Visit]()
    waiting: deque[Visit] = deque()
    while due or waiting or running:
        while due and due[0] <= clock:
            waiting.append(Visit(answers[len(day.requests) % len(answers)], due.popleft()))
            day.requests.append(waiting[-1])
        if not waiting and not running:
            clock = due[0]
            continue
        if waiting and len(running) < batch_size:
            free = min(len(waiting), batch_size - len(running))
            new = [waiting.popleft() for _ in range(free)]
            clock += grid.admission(free * max(one.answer.prompt for one in new))
            for one in new:
                one.first = clock
            running += new
        else:
            clock += advanced(policy, running, grid, day)
        ended = [one for one in running if one.at >= len(one.answer.run_T)]
        for one in ended:
            one.end = clock
        running = [one for one in running if one.end is None]
        due.extend([clock] * min(len(ended), left))
        if arrivals.after and len(ended) > left:
            break  # a client has nothing left to ask: from here on the load falls
        left -= len(ended) if arrivals.after else 0
    day.seconds = clock - day.requests[0].arrived
    return day


def advanced(policy: Policy, running: Sequence[Visit], grid: Grid, day: Day) -> float:
    """The seconds of a round, which moves its rows on."""
    rows = len(running)
    load = Load(grid.computed(rows), rows)
    if isinstance(policy, Overlapped):
        made = policy.moved(running, grid)
    else:
        made = in_turn(policy, running, grid, load)
    for one, emitted in zip(running, made.emitted_B.tolist(), strict=True):
        one.at = min(one.at + emitted, len(one.answer.run_T))
    day.rounds += rows
    day.rests += 0 if made.levels else rows
    day.drafted += rows * made.levels
    day.verified += int(made.verified_B.sum())
    day.kept += int(made.kept_B.sum())
    plan = chain_plan(made.levels) if made.levels else None
    paths = [(0,) * kept for kept in made.kept_B.tolist()]
    policy.observe(Outcome(plan, made.levels, paths, None, load, made.seconds))
    return made.seconds


def in_turn(policy: Policy, running: Sequence[Visit], grid: Grid, load: Load) -> Moved:
    """A round that drafts, then verifies."""
    plan = policy.next_plan(load)
    run_B = np.array([one.answer.run_T[one.at] for one in running])
    left_B = np.array([len(one.answer.run_T) - one.at for one in running])
    levels = 0 if plan is None else plan.levels
    verified_B = np.full(len(running), levels)
    if isinstance(policy, Trimming):
        score_BK = np.stack([one.answer.score_TK[one.at] for one in running])
        levels, verified_B = policy.lengths(Ahead(run_B, score_BK, left_B, grid))
    kept_B = np.minimum(run_B, verified_B)
    seconds = float(grid.seconds(load.running, levels, 1 + verified_B.mean()))
    return Moved(levels, verified_B, kept_B, kept_B + 1, seconds)


def figures(day: Day, limit: float) -> dict[str, Any]:
    """Of a simulation, in seconds: tokens a second, of all requests and of those that took at most
    `limit` a token; ttft: from arrival to the first token; tpot: a token after it; latency: to the
    last one (50 and 99% of requests that ended); tokens drafted, verified and kept a round of a
    row; rested: the share of these rounds that drafted nothing.
    """
    tokens, met = 0, 0
    waits: dict[str, list[float]] = {"ttft": [], "tpot": [], "latency": []}
    for one in day.requests:
        tokens += one.at + (one.first is not None)
        if one.first is not None and one.end is not None:
            waits["ttft"].append(one.first - one.arrived)
            waits["tpot"].append((one.end - one.first) / max(1, len(one.answer.run_T)))
            waits["latency"].append(one.end - one.arrived)
            met += (one.at + 1) * (waits["tpot"][-1] <= limit)
    rates = {"tokens_per_s": tokens / day.seconds, "goodput": met / day.seconds}
    found = {"tokens": tokens, "seconds": day.seconds, "requests": len(waits["ttft"]), **rates}
    for name, seconds in waits.items():
        found |= {f"{name}_p{q}": float(np.percentile(seconds, q)) for q in (50, 99)}
    rounds = max(1, day.rounds)
    parts = {name: getattr(day, name) / rounds for name in ("drafted", "verified", "kept")}
    return found | parts | {"rested": day.rests / rounds}
