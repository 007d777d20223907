"""What each kind of drafter would give a target, before any is trained.

    draftsmith predict target=Qwen/Qwen3-8B gpu=h100 batch_size=1,4,16,64 context=2048
    draftsmith predict target=T gpu=h100 acceptance=eagle3:0.8,draft:0.6 report=runs/e/report.json

    speed-up = tau t_plain / (t_verify + drafting)             (decode/policies/foretold.py)
    t        = call + layers * layer + the longer of           (decode/predict/machines.py)
               (weights + rows * context * keys and values) / bandwidth
               2 * parameters * rows * tokens / (peak * reached)

The target's config.json is all that is read of it. Acceptance is assumed, unless it is given, read
from an evaluation's report or a trace, or of a draft LM fitted by `scaling` (results=). Of each
kind the best K, or tree of some sizes, is shown for each number of rows, and how many rows may
decode until nothing pays. With measure=true the machine is this one, measured in seconds; on a CPU
rounds of each kind, of random weights, are timed in place of the model (timed_rounds.py), where the
target has the kind and there is room: only what more context costs is then the model's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig

from draftsmith.command import check_least, numbers, parse, unknown
from draftsmith.decode.engine.memory import GIB
from draftsmith.decode.forward.product import Product, numbers_read
from draftsmith.decode.forward.size import available
from draftsmith.decode.policies.foretold import extended, kept_shares, taus, tree_tau
from draftsmith.decode.policies.timing import LEAST, forward_call, graphed, least_times
from draftsmith.decode.predict.draft_sizes import (
    Draft,
    Sizing,
    config_like,
    config_of,
    law_of,
    least_layers,
    machine_of,
    propose,
    runner_of,
    shape_of,
)
from draftsmith.decode.predict.load_grid import Grid
from draftsmith.decode.predict.load_simulator import traced
from draftsmith.decode.predict.machines import Machine, Pass
from draftsmith.decode.predict.timed_rounds import PROMPT, timed_rounds
from draftsmith.decode.traces.store import read_traces
from draftsmith.models.disk.read_lm import read_json, write_json
from draftsmith.printed import duration, print_table, times_as
from draftsmith.progress import watched

LONGEST, TREES = 12, (8, 16, 32, 64)  # drafted tokens of a chain, and of trees, that are tried
FEW = 8  # rounds of which a share is believed
DEEPEST, MOST_ROWS = 8, 4096  # levels of a tree; rows beyond which nobody asks
LIST = 32_000  # tokens that EAGLE-3's own output head knows at most

# The chance that a drafted token is kept once those before it are, of chat models of 7 to 8 billion
# parameters at temperature 0: Medusa's and EAGLE's as published (train/heldout/head_run.py); heads
# between and beyond them by their places on the 15M target (docs/results/heads.md, one-pass.md);
# lookups and own layers as seen there (training-free.md, own-layers.md).
ASSUMED = {"medusa": 0.56, "hydra": 0.66, "eagle3": 0.78, "block": 0.82, "ngram": 0.4}
ASSUMED |= {"suffix": 0.4, "exit": 0.3}
KINDS = ("draft", *ASSUMED)
# Seconds of a CPU core a row and round, by the rows of docs/results/training-free.json.
HOST = {"ngram": 1e-4, "suffix": 2e-4}


@dataclass
class Prediction:
    """What is to be served, on what, and what is known of acceptance."""

    target: str  # a folder, a config.json or a hub name
    gpu: str = "h100"  # of MACHINES, such as cpu, a100 or h100
    batch_size: str = "1,4,16,64"  # rows that decode together
    context: int = 1024  # tokens of a row, on average
    acceptance: str = ""  # 0.7, of all kinds; or eagle3:0.8,draft:0.6; of others as assumed
    report: str = ""  # a report.json of a chain: of its drafter's kind
    trace: str = ""  # a folder of `trace`, with every=true: of its drafter's kind
    results: str = ""  # rows of `draftsmith scaling`, for the draft LM
    preview: int = 0  # rank of previews of heads' LM heads (docs/methods/preview.md); 0: none
    measure: bool = False  # measure this machine, in place of gpu
    out: str = ""  # a JSON file of the rows

    def __post_init__(self) -> None:
        check_least(self, context=1, preview=0)
        if self.preview and self.measure:
            raise ValueError(
                f"got preview={self.preview} with measure=true, whose drafters have none; leave "
                "one out"
            )
        self.rows = numbers("batch_size", self.batch_size, int, least=1)
        if wrong := [kind for kind in self.chances if kind not in KINDS]:
            raise ValueError(unknown("kind", wrong[0], KINDS))

    @property
    def chances(self) -> dict[str, float]:
        """What `acceptance` says, by kind."""
        found: dict[str, float] = {}
        for part in filter(None, self.acceptance.split(",")):
            kind, _, text = part.rpartition(":")
            try:
                found |= dict.fromkeys([kind] if kind else KINDS, float(text))
            except ValueError:
                found[kind] = 0.0
            if not 0 < min(found.values()) <= max(found.values()) < 1:
                got = f"acceptance: got {self.acceptance!r}"
                raise ValueError(f"{got}, expected shares in (0, 1): 0.7, or eagle3:0.8,draft:0.6")
        return found


class Drafting(NamedTuple):
    """What drafting costs: `once` a round, and at each of its calls; level: bytes that one more
    level of a single call reads; host: seconds of a CPU, one row after another; trees: whether it
    can draft any; alone: whether its rounds are made one at a time; timed: its rounds, measured, of
    chains.
    """

    once: Pass | None = None
    each: Pass | None = None
    level: float = 0.0
    host: float = 0.0
    trees: bool = True
    alone: bool = False
    timed: Grid | None = None

    def calls(self, K: float) -> list[tuple[float, Pass]]:
        """How many calls of which passes a round of K levels makes."""
        parts = ((1.0, self.once), (K, self.each))
        return [(count, part) for count, part in parts if part is not None]

    def seconds(self, machine: Machine, rows: int, K: float, nodes: float, context: int) -> float:
        """Of a round of K levels and so many drafted nodes."""
        seen, took = rows * context, machine.host * self.host * rows
        if self.once is not None:
            weights = self.once.weights + K * self.level
            took += machine.seconds(self.once._replace(weights=weights), rows * K, seen)
        if self.each is not None:
            took += K * machine.seconds(self.each, rows * nodes / K, seen)
        return took


class Way(NamedTuple):
    """The best of a kind at a number of rows; nodes: 0 of a chain."""

    K: int
    nodes: int
    tau: float
    speedup: float

    def __str__(self) -> str:
        tree = f"dynamic:{self.K},8,{self.nodes + 1}"
        return f"{times_as(self.speedup)} {tree if self.nodes else f'K={self.K}'}"


def main(argv: list[str]) -> None:
    settings = parse(Prediction, argv)
    machine = measured() if settings.measure else machine_of(Sizing("", gpu=settings.gpu))
    config = config_of(settings.target)
    least = Sizing("", min_layers=least_layers(config))
    target, law = shape_of(config), law_of(settings.results)
    exits, context = max(1, target.layers // 3), settings.context
    said = read_json(Path(settings.report)) if settings.report else {}
    try:
        draft = own_draft(said) or propose(config, least, law, machine)[1][0]
    except ValueError:  # too small a target for one, or of a family that has none
        draft = None
    work = draft.work if draft else None
    kinds = kinds_of(target, config.vocab_size, work, exits, settings.preview)
    chances = ASSUMED | ({"draft": draft.alpha} if draft else {}) | settings.chances
    known = {kind: extended([chance], LONGEST) for kind, chance in chances.items()}
    known |= read_chances(settings, said)
    room = machine.gib * GIB - target.weights  # for keys and values
    most = max(1, min(MOST_ROWS, int(room / (target.kv * context)))) if room > 0 else MOST_ROWS
    names = {"exit": f"exit:{exits}"}
    if settings.measure and not machine.overlaps:
        sizes, called = sorted({1, *settings.rows}), [names.get(kind, kind) for kind in kinds]
        drafts = {"draft": config_like(config, draft)} if draft else {}
        of = (config, called, sizes, drafts)
        grids = [grid for _, grid in watched(timed_rounds(*of), "timing rounds", len(kinds))]
        kinds = {
            kind: how._replace(trees=grid is None and how.trees, timed=grid)
            for (kind, how), grid in zip(kinds.items(), grids, strict=True)
        }
    timed = [kind for kind, how in kinds.items() if how.timed]
    most = max(settings.rows) if timed else most
    names |= {"draft": f"draft {draft.layers}x{draft.hidden}"} if draft else {}
    rows: list[dict[str, Any]] = []
    for kind, drafting in kinds.items():

        def best_of(rows: int, how: Drafting = drafting, share_D: Any = known[kind]) -> Way:
            return best((machine, target, how), share_D, rows, context)

        row = {"kind": names.get(kind, kind), "kept": known[kind].tolist()}
        row |= {"best": {n: best_of(n) for n in settings.rows}}
        first, last = paying_rows(best_of, most)
        rows.append(row | {"pays_from": first, "pays_until": last})
    rows.sort(key=lambda row: -row["best"][settings.rows[0]].speedup)
    head = ["kind", "kept", *(f"{n} row{'s' * (n > 1)}" for n in settings.rows), "pays, rows"]
    print_table(
        head,
        [cells(row, most, "that were timed" if timed else "that fit") for row in rows],
        ["kind", "kept"],
    )
    print("\n".join(notes(settings, machine, target, timed)))
    if settings.out:
        about = {"target": settings.target, "machine": machine._asdict(), "context": context}
        for row in rows:
            row["best"] = {n: way._asdict() for n, way in row["best"].items()}
        write_json(Path(settings.out), about | {"rows": rows})


def cells(row: dict[str, Any], most: int, which: str) -> list[str]:
    """A row in words; most: the rows that fit, or were timed."""
    first, last = row["pays_from"], row["pays_until"]
    told = f"up to {last:,}" if last < most else f"all {which}: {most:,}"
    if not last or first > 1:
        told = f"from {first:,}" if last else "none"
    kept = " ".join(f"{chance:.2f}" for chance in row["kept"][:3])
    return [row["kind"], kept, *map(str, row["best"].values()), told]


def kinds_of(
    target: Draft, vocab: int, draft: Pass | None, exits: int, preview: int = 0
) -> dict[str, Drafting]:
    """What each kind costs beside a target of this shape; draft: the draft LM's pass, if there is
    one; exits: the target's layers that draft for it; preview: the rank of LM heads' that are read
    for each node.
    """
    table, square = 2 * target.hidden * vocab, 2 * target.hidden**2
    one = Pass(1, (target.weights - table) / target.layers, target.kv / target.layers)
    fused = one._replace(weights=one.weights + 3 * square)  # with what joins the taps
    sizes = min(vocab, LIST), vocab
    few, every = (2 * numbers_read(rows, target.hidden, preview) for rows in sizes)
    return {
        **({"draft": Drafting(each=draft)} if draft else {}),
        "medusa": Drafting(once=Pass(1, 0.0), level=square + table),
        "hydra": Drafting(each=Pass(1, 3 * square + table)),
        "eagle3": Drafting(once=fused, each=one._replace(weights=one.weights + few)),
        # A node's layer reads the trunk's row beside its token, by a map of both.
        "block": Drafting(once=fused, each=one._replace(weights=one.weights + 2 * square + every)),
        "ngram": Drafting(host=HOST["ngram"], trees=False),
        "suffix": Drafting(host=HOST["suffix"]),
        "exit": Drafting(
            each=Pass(exits, exits * one.weights + table, exits * one.kv), trees=False
        ),
    }


def own_draft(said: dict[str, Any]) -> Draft | None:
    """The shape of the draft LM that a report is of, where its folder is still there."""
    drafter = said.get("drafter", {})
    folder = Path(drafter.get("path", ""))
    known = drafter.get("kind") == "lm" and (folder / "config.json").exists()
    return shape_of(config_of(str(folder))) if known else None


def read_chances(settings: Prediction, said: dict[str, Any]) -> dict[str, np.ndarray]:
    """What a report (`said`) and a trace say, by kind. ValueError for a report of a tree, or of no
    draft.
    """
    found = {}
    if settings.report:
        if said.get("tree") != "chain":
            got = f"report: got {settings.report} with tree={said.get('tree')}"
            raise ValueError(f"{got}, expected a report.json of drafts by tree=chain")
        # Rounds in which nothing was drafted, as `auto` has them, rejected nothing.
        if not any(kept := said.get("acceptance_conditional", ())):
            raise ValueError(
                f"report: got {settings.report}, in which nothing drafted was kept "
                f"(policy={said.get('policy')}); evaluate again with policy=fixed K=4"
            )
        rounds = np.cumsum(said["accepted_histogram"][::-1])[::-1]  # that kept so many or more
        known = [share for share, n in zip(kept, rounds, strict=False) if n >= FEW]
        found[said["drafter"]["kind"]] = np.cumprod(known or kept[:1])
    if settings.trace:
        kept = np.concatenate([one.run_T for one in traced(settings.trace)])
        kind = read_traces(settings.trace, []).about["drafter"]["kind"]
        found[kind] = kept_shares(np.bincount(kept, minlength=2).tolist())
    found = {"draft" if kind == "lm" else kind: share_D for kind, share_D in found.items()}
    if wrong := [kind for kind in found if kind not in KINDS]:
        raise ValueError(unknown("kind", wrong[0], KINDS))
    return found


Pair = tuple[Machine, Draft, Drafting]  # what drafts for a target on a machine


def best(pair: Pair, share_D: np.ndarray, rows: int, context: int) -> Way:
    """The K or tree of the highest predicted speed-up."""
    timed = pair[2].timed
    longest = timed.nodes[-1] - 1 if timed else LONGEST
    tau_K = taus(extended(share_D, longest))
    ways = [(K, 0, float(tau_K[K - 1])) for K in range(1, longest + 1)]
    if pair[2].trees:
        levels = range(2, DEEPEST + 1)
        ways += [(K, n, tree_tau(share_D, K, n)) for K in levels for n in TREES]
    told = (Way(*way, speedup(pair, way, rows, context)) for way in ways)
    return max(told, key=lambda way: way.speedup)


def speedup(pair: Pair, way: tuple[float, float, float], rows: int, context: int) -> float:
    """Of K levels and so many nodes (0: a chain) that give this tau."""
    (machine, target, drafting), (K, nodes, tau) = pair, way
    if (grid := drafting.timed) is not None:  # after fewer tokens
        beyond = rows * max(0, context - PROMPT)  # tokens, which draft calls read too
        own = sum(calls * part.kv for calls, part in drafting.calls(K))
        more, drafts = (machine.moving(beyond * kv) for kv in (target.kv, own))
        return tau / grid.cost(K, rows, more, drafts)
    plain, verify = (
        machine.seconds(target.work, rows * n, rows * context) for n in (1, 1 + (nodes or K))
    )
    own = drafting.seconds(machine, rows, K, nodes or K, context)
    own += 1e-6 * machine.loop * (nodes > 0 or drafting.alone)
    beside = 1e-6 * machine.round
    return tau * (plain + beside) / (verify + own + beside)


def paying_rows(best_of: Callable[[int], Way], most: int) -> tuple[int, int]:
    """The first and the last rows with which it pays, by halving; (0, 0): it pays neither with one
    nor with most.
    """
    few, many = (best_of(n).speedup > 1 for n in (1, most))
    if few == many:
        return (1, most) if few else (0, 0)
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if (best_of(middle).speedup > 1) == few else (low, middle)
    return (1, low) if few else (high, most)


def measured() -> Machine:
    """This machine: what it reads and computes a second, and what calls and layers cost."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    many = 4096 if device.type == "cuda" else 64  # tokens enough to compute more than to read
    weight, x_NI = (torch.randn(n, 8192, dtype=torch.bfloat16, device=device) for n in (4096, many))
    product = Product([weight])
    shape: Any = {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 64}
    configs = {n: LlamaConfig(vocab_size=256, **shape, num_hidden_layers=n) for n in (1, 9)}
    small = {n: runner_of(config, device) for n, config in configs.items()}
    calls = {n: forward_call(runner, batch=1, length=1, context=1) for n, runner in small.items()}
    calls = {n: graphed(call, device) for n, call in calls.items()}
    own = {"read": lambda: product(x_NI[:1]), "compute": lambda: product(x_NI)}
    times = least_times({**calls, **own}, device, LEAST)
    layer = (times[9] - times[1]) / 8
    done = 2 * weight.numel() * many / times["compute"]
    return Machine(
        gib=(available(device) or 0) / GIB,
        tflops=done / 1e12,
        bandwidth=weight.nbytes / times["read"] / 1e9,
        layer=1e6 * layer,
        call=1e6 * max(0.0, times[1] - layer),
        reached=1.0,
        overlaps=device.type == "cuda",
    )


def notes(settings: Prediction, machine: Machine, target: Draft, timed: Sequence[str]) -> list[str]:
    """What the numbers rest on."""
    step = machine.seconds(target.work, 1, settings.context)
    return [
        f"target: {target.layers} layers of {target.hidden}, {target.weights / 1e9:.3g} GB; a step "
        f"of one row {duration(step)} at {settings.context} tokens of context",
        f"machine: {'measured here' if settings.measure else settings.gpu}: {machine.tflops:.4g} "
        f"TFLOP/s, {machine.bandwidth:.4g} GB/s, {machine.call:.3g} us a call, {machine.layer:.3g} "
        "us a layer" + (f", {machine.round:.3g} us a round" if machine.round else ""),
        *([f"rounds of chains timed here, of random weights: {', '.join(timed)}"] if timed else []),
        "kept: the chance that 1, 2, 3 drafted tokens are; assumed where you gave none: see "
        "docs/start/compare.md, which also says how far predictions were off",
    ]
