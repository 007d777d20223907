"""What rounds cost by how many rows decode: a grid in JSON, written by a short measurement.

    {"rows": [1, 8], "nodes": [1, 2, 5], "verify": [[...], [...]], "beside": [[...], [...]],
     "prefill": [[64, 0.01], [512, 0.07]], "stairs": ["rows"]}

verify: seconds of the target's pass over so many rows (down) of so many tokens (across); beside:
all else in a round that drafts one token fewer, draft calls above all; prefill: tokens of an
admission, its seconds. stairs: sizes of which one between two costs what the next one does, as
where graphs are recorded; others lie on straight lines.

Shapes: R numbers of rows, N numbers of tokens a row.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import open_request
from draftsmith.decode.policies.policy import ALONE, Load, Outcome, Policy
from draftsmith.decode.policies.timing import forward_call, median_times
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import Plan
from draftsmith.models.disk.read_lm import read_json

NODES = (1, 2, 3, 5, 9, 17, 33, 65)
TURN, SWEEPS, REPEATS = 4, 2, 5  # rounds of a draft in a row, how often, and passes timed alone
COLD = 2  # rounds before those without a draft that don't count


class Grid(NamedTuple):
    """As the file has it; ValueError of `read` and `of` for what isn't one."""

    rows: Sequence[int]
    nodes: Sequence[int]
    verify_RN: np.ndarray
    beside_RN: np.ndarray
    prefill: Sequence[tuple[float, float]] = ()
    stairs: Sequence[str] = ()

    @classmethod
    def read(cls, file: str) -> "Grid":
        return cls.of(read_json(Path(file)), file)

    @classmethod
    def of(cls, found: dict[str, Any], file: str) -> "Grid":
        """What `as_json` made."""
        try:
            names = ("rows", "nodes", "verify", "beside", "prefill", "stairs")
            rows, nodes, verify, beside, prefill, stairs = (found[name] for name in names)
            tables = [np.array(table, float) for table in (verify, beside)]
            rising = all(one[0] == 1 and one == sorted(set(one)) for one in (rows, nodes))
            same = all(table.shape == (len(rows), len(nodes)) for table in tables)
            true = all(np.isfinite(table).all() and table.min() >= 0 for table in tables)
            paid = [(float(tokens), float(took)) for tokens, took in prefill]
            if not (rising and same and true and tables[0].min() > 0):
                raise ValueError("sizes")
        except (KeyError, TypeError, ValueError, IndexError):
            raise ValueError(
                f"costs: got {file}, expected rows and nodes from 1 up, verify and beside with "
                "seconds of each, prefill and stairs; have it written by target=... drafter=..."
            ) from None
        return cls(rows, nodes, tables[0], tables[1], paid, stairs)

    def as_json(self) -> dict[str, Any]:
        """What `read` reads."""
        tables = {"verify": self.verify_RN.tolist(), "beside": self.beside_RN.tolist()}
        others = {"prefill": self.prefill, "stairs": self.stairs}
        return {"rows": self.rows, "nodes": self.nodes} | tables | others

    def check(self, rows: int, levels: int) -> None:
        """ValueError where there may be more rows or tokens than were measured."""
        if rows > self.rows[-1] or levels >= self.nodes[-1]:
            raise ValueError(
                f"costs: got {self.rows[-1]} rows and {self.nodes[-1]} tokens a row at most, "
                f"expected {rows} and {levels + 1}; measure more, or give a smaller batch_size or K"
            )

    def computed(self, rows: int) -> int:
        """Rows that a round computes where so many decode."""
        return self.rows[int(np.searchsorted(self.rows, rows))] if "rows" in self.stairs else rows

    def seconds(self, rows: int, levels: float, nodes: Any) -> Any:
        """Of a round of so many draft calls that verifies so many tokens a row on average, the
        root included; nodes: a number or an array of them.
        """
        verify, beside = self.parts(rows, levels, nodes)
        return verify + beside

    def cost(self, levels: float, rows: int = 1, more: float = 0.0, drafts: float = 0.0) -> float:
        """Of a round of a chain of so many, in plain ones; more: seconds that both take beside what
        was timed; drafts: that drafting takes.
        """
        plain, drafting = (self.seconds(rows, n, 1 + n) for n in (0, levels))
        return float((more + drafts + drafting) / (more + plain))

    def parts(self, rows: int, levels: float, nodes: Any) -> tuple[Any, float]:
        """Of these, the target's pass, and all else."""
        rows, sizes = self.computed(rows), self.rows
        above = int(np.searchsorted(sizes, rows))
        below = max(above - 1, 0)
        share = (rows - sizes[below]) / max(sizes[above] - sizes[below], 1)
        verify_N, beside_N = (
            table_RN[below] + share * (table_RN[above] - table_RN[below])
            for table_RN in (self.verify_RN, self.beside_RN)
        )
        if "nodes" in self.stairs:
            nodes = np.array(self.nodes)[np.searchsorted(self.nodes, nodes)]
        beside = float(np.interp(levels + 1, self.nodes, beside_N))
        return np.interp(nodes, self.nodes, verify_N), beside

    def admission(self, tokens: int) -> float:
        """Seconds of a prefill of so many tokens; of more than were measured, in proportion."""
        if not self.prefill:
            return 0.0
        sizes, seconds = zip(*self.prefill, strict=True)
        return float(np.interp(tokens, sizes, seconds)) * max(1.0, tokens / sizes[-1])


class Sweep(Policy):
    """Drafts nothing, then, unless all are to be plain, 1, 2, 4 ... tokens, a few rounds of each,
    and notes their seconds.
    """

    rests = True

    def __init__(self, plan: Plan, turn: int = TURN, plain: bool = False) -> None:
        super().__init__(plan)
        deepest = 0 if plain else plan.levels
        self.nodes = [n for n in NODES if n <= deepest] + [deepest + 1]
        self.seconds: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        drafting = [n for n in self.nodes[1:] for _ in range(turn)]
        rest = COLD + 2 * turn  # without a draft
        self.turns = [1] * rest + drafting
        self.ends = [COLD, *range(rest, len(self.turns) + 1, turn)]  # of what is alike
        self.rounds = 0

    def next_plan(self, load: Load = ALONE) -> Plan | None:
        at = self.rounds % len(self.turns)
        self.stays = next(end for end in self.ends if end > at) - at
        return self.plans[-1].cut(self.turns[at] - 1) if self.turns[at] > 1 else None

    def observe(self, outcome: Outcome) -> None:
        cold = self.rounds % len(self.turns) < COLD
        self.rounds += 1
        if outcome.seconds is not None and not cold:
            self.seconds[outcome.load.rows, outcome.levels + 1].append(outcome.seconds)


def measured_grid(decoder: Decoder, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> Grid:
    """Of sessions of so many rows that answer these prompts with chains of up to the decoder's K:
    medians of whole rounds as they are served, of which the target's passes are timed apart.
    """
    whole = whole_rounds(decoder, prompts, rows)
    longest = max(map(len, prompts)) + SWEEPS * sum(Sweep(decoder.settings.plan).turns) // 2
    verify = []
    for count in rows:
        at: dict[str, Any] = {"batch": count, "context": longest}
        calls = {n: forward_call(decoder.runner, length=n, **at) for n in whole.nodes}
        times = median_times(calls, decoder.runner.device, REPEATS)
        verify.append([times[n] for n in whole.nodes])
    # On a busy machine a part may seem to take longer.
    verify_RN = np.minimum(verify, whole.verify_RN)
    return whole._replace(verify_RN=verify_RN, beside_RN=whole.verify_RN - verify_RN)


def whole_rounds(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    turn: int = TURN,
    sweeps: int = SWEEPS,
) -> Grid:
    """The same, nothing of a round apart: all of it stands under `verify`. turn: rounds of a plan
    in a row, where there is one row; sweeps: over all plans. ValueError for a context in which they
    have no room, and for a drafter that drafts otherwise than it is asked.
    """
    before, plan = decoder.policy, decoder.settings.plan
    longest = max(map(len, prompts))
    how: dict[str, Any] = {"tokenizer": decoder.tokenizer, "context": decoder.context}
    prefill: defaultdict[int, list[float]] = defaultdict(list)
    whole = []
    try:
        for count in (rows[0], *rows):  # the first one warms up
            decoder.policy = sweep = Sweep(plan, max(TURN, turn // count), decoder.drafter is None)
            limit = sweeps * sum(sweep.turns) + 2  # no row may end
            if longest + limit > decoder.context:
                raise ValueError(
                    f"rounds: got a context of {decoder.context} tokens, expected "
                    f"{longest + limit} at least, to time them; give a model with a longer one"
                )
            params = SamplingParams(max_new_tokens=limit, ignore_eos=True)
            session = decoder.open_session(count, longest + limit)
            for i in range(count):
                prompt = list(prompts[i % len(prompts)])
                session.submit(open_request(prompt, i, i, params=params, **how))
            started = time.perf_counter()
            session.step()
            most = max(len(prompts[i % len(prompts)]) for i in range(count))
            prefill[count * most].append(time.perf_counter() - started)
            sweep.rounds = 0
            while sweep.rounds < sweeps * len(sweep.turns):
                session.step()
            session.close()
            if missing := [n for n in sweep.nodes if not sweep.seconds[count, n]]:
                raise ValueError(f"rounds: got none of {missing} tokens from this drafter, to time")
            whole.append([np.median(sweep.seconds[count, n]) for n in sweep.nodes])
    finally:
        decoder.policy = before
    whole_RN = np.array(whole[1:])
    paid = [(tokens, min(seconds)) for tokens, seconds in sorted(prefill.items())]
    return Grid(rows, sweep.nodes, whole_RN, np.zeros_like(whole_RN), paid, ["rows"])
