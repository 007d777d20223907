"""Which rule should stop drafting, and at which threshold: replayed on traces, not decoded.

    draftsmith trace target=T drafter=D split=tune every=true out=runs/tune
    draftsmith trace target=T drafter=D split=report every=true out=runs/report
    draftsmith stopping tune=runs/tune report=runs/report drafter=D target=T save=true

Fixed K, confidence, the product of q, entropy, and the acceptance head of the drafter folder if it
has one, each at the setting that is fastest on the tune trace; the figures are of the report trace.
`head-costs` isn't tuned: its threshold follows from c and v. Beside them the oracles, which no rule
reaches. Costs are said, or measured on this machine (target=...) once and kept beside the tune
trace, in its costs.json, for as long as nothing that they depend on changes; costs=new measures
again. c = t_draft / t_plain, v = t_verify / t_plain. save=true makes the head's threshold that of
the table, for `policy=acceptance`. See `decode/traces/simulate_stops.py` for what is counted.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftsmith.command import check_one_of, parse
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Counters
from draftsmith.decode.policies.timing import measured_costs
from draftsmith.decode.traces import simulate_stops as replay
from draftsmith.decode.traces.simulate_stops import Rounds, Stop
from draftsmith.decode.traces.store import read_traces
from draftsmith.decode.tree_shapes import chain_plan
from draftsmith.models.disk.provenance import git_commit, machine, versions
from draftsmith.models.disk.read_lm import read_json
from draftsmith.models.disk.store import what_differs, write_atomically
from draftsmith.models.fingerprint import differences, fingerprint
from draftsmith.models.scorers import FOLDER, Scored, load_acceptance, set_threshold, weights_mark
from draftsmith.printed import print_table

GRID = (
    *(0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99),
)
CAPS = (2, 3, 4, 6, 8)  # of tokens, beside the longest draft
DRAFTED, CONTEXT = 4, 256  # K, and tokens of a row, whose middle the costs are measured at
DECIDE = ("temperature", "top_k", "top_p", "min_p", "K")  # what two traces must share
Arms = Mapping[str, tuple[Mapping[str, Stop], Sequence[Rounds], Sequence[Rounds]]]


@dataclass
class Stopping:
    """Traces to tune and to report on, and what a call costs."""

    tune: str  # a trace folder, to choose on
    report: str = ""  # empty: the tune trace, whose figures are then a little too good
    drafter: str = ""  # a folder with an acceptance head; empty: the other rules
    target: str = ""  # to measure the costs with
    c: float | None = None  # of a draft call, in plain steps; none: measured
    v: float = 1.0  # of a verify call, in plain steps
    costs: str = "kept"  # kept: read beside the trace, measured if need be | new: measured again
    save: bool = False  # the threshold, into the drafter's head
    device: str = "auto"  # a GPU where there is one, else cpu
    dtype: str = "bfloat16"


def rules(K: int) -> dict[str, dict[str, Stop]]:
    """What there is to choose from without a head, by name and setting, for drafts of K at most."""
    return {
        "fixed-k": {f"K {k}": replay.fixed(k) for k in range(1, K + 1)},
        "confidence": swept("q", replay.confidence, K),
        "product": swept("h", partial(replay.chance, by="log_q"), K),
        "entropy": {f"adaedl {g:g}, K {K}": replay.adaedl(g) for g in (0.1, 0.2, 0.4)}
        | swept("limit", replay.entropy, K),
    }


def by_head(state: str, K: int) -> dict[str, Stop]:
    """Of an acceptance head that reads this state (see `ScorerConfig`)."""
    return swept("h", partial(replay.chance, newest=state != "token"), K)


def by_costs(state: str, K: int, c: float, v: float) -> dict[str, Stop]:
    """The same at the one threshold that the costs give: `simulate_stops.optimal_threshold`."""
    h = replay.optimal_threshold(c, v)
    return {f"h {h:.3g}, K {K}": replay.chance(h, newest=state != "token")}


def swept(name: str, rule: Callable[[float], Stop], K: int) -> dict[str, Stop]:
    """A rule at every threshold, each with every cap on the tokens."""
    return {
        f"{name} {x:g}, K {most}": replay.capped(rule(x), most)
        for x in GRID
        for most in (*(cap for cap in CAPS if cap < K), K)
    }


def compared(
    arms: Arms, c: float, v: float = 1.0
) -> tuple[list[dict[str, Any]], dict[str, list[Counters]]]:
    """A row an arm, each at its fastest setting on its first rounds, measured on its second ones,
    and the oracles; and the counters of the second ones. Ratios to `fixed-k` and `entropy`, with
    intervals over prompts; share_of_oracle: of what the oracle gains over fixed-k.
    """
    chosen: dict[str, str] = {}
    counters: dict[str, list[Counters]] = {}
    for arm, (options, tuned_on, reported) in arms.items():
        chosen[arm], _ = replay.tune(options, tuned_on, c, v)
        counters[arm] = replay.replay(options[chosen[arm]], reported)
    reported = arms["fixed-k"][2]
    counters["oracle-after"] = replay.replay(replay.oracle_after(), reported)
    counters["oracle"] = replay.replay(replay.oracle(), reported)
    headroom = replay.gain(counters["oracle"], counters["fixed-k"], c, v)[0] - 1
    rows = []
    for arm, own in counters.items():
        row = {"what": arm, "setting": chosen.get(arm, ""), **replay.figures(own, c, v)}
        for other, name in (("fixed-k", "over_fixed"), ("entropy", "over_entropy")):
            row[name], row[f"{name}_interval"] = replay.gain(own, counters[other], c, v)
        row["share_of_oracle"] = (row["over_fixed"] - 1) / headroom if headroom else 0.0
        rows.append(row)
    return rows, counters


def main(argv: list[str]) -> None:
    settings = parse(Stopping, argv)
    c, v = costs(settings)
    rows = compare(settings, c, v)
    print_table(
        HEAD,
        map(cells, rows),
        HEAD,
        title=f"stopping rules at c = {c:.3g}, v = {v:.3g}",
        caption="speed-up, modelled: tokens emitted / (rounds v + tokens drafted c)",
    )
    if not settings.report:
        print("settings were chosen on the prompts they are reported on: give report=")
    if settings.save:
        found = [row["setting"] for row in rows if row["what"] == "head"]
        if not found:
            raise ValueError("save: got no acceptance head, expected drafter= with one")
        threshold, _, most = found[0].removeprefix("h ").partition(", K ")
        folder = f"{settings.drafter}/{FOLDER}"
        set_threshold(folder, float(threshold), {"c": c, "v": v, "trace": settings.tune})
        print(f"{folder}: threshold {threshold}; policy=acceptance K={most} uses it")


def compare(settings: Stopping, c: float, v: float) -> list[dict[str, Any]]:
    """`compared` for what the settings name; ValueError for traces that don't fit."""
    head = load_acceptance(settings.drafter) if settings.drafter else None
    parts = [settings.tune, settings.report or settings.tune]
    check_alike(*parts)
    tuned_on, reported = (rounds(settings, part, head) for part in parts)
    longest = min(one.kept_TK.shape[1] for one in tuned_on)
    options = rules(longest)
    if head is not None:
        state = head.scorer.config.state
        options["head"] = by_head(state, longest)
        if c < v:
            options["head-costs"] = by_costs(state, longest, c, v)
    arms = {name: (own, tuned_on, reported) for name, own in options.items()}
    return compared(arms, c, v)[0]


def rounds(settings: Stopping, folder: str, head: Scored | None) -> list[Rounds]:
    """A trace's rounds, with the head's scores where there is one."""
    own = () if head is None else ("draft_state", *head.scorer.config.scalars)
    read = tuple(dict.fromkeys((*replay.COLUMNS, *own)))
    trace = read_traces(folder, read, kind="decoder")
    made_by = (trace.about["drafter"] or {}).get("mark")
    if settings.drafter and made_by != weights_mark(settings.drafter):
        raise ValueError(
            f"{folder}: got a trace of a drafter of mark {made_by}, expected the weights in "
            f"{settings.drafter}; trace that drafter"
        )
    return replay.rounds_of(trace, None if head is None else replay.log_chances(head.scorer, trace))


def check_alike(tune: str, report: str) -> None:
    """ValueError for traces of two targets, or of two ways to sample or to draft."""
    one, other = (read_traces(part, ["prompt"]).about for part in (tune, report))
    differ = differences(one["target"] or {}, other["target"] or {})
    for name in DECIDE:
        values = [about.get("settings", {}).get(name) for about in (one, other)]
        differ += [] if values[0] == values[1] else [f"{name}: {values[0]} and {values[1]}"]
    if differ:
        raise ValueError(
            f"report: got {report}, made otherwise than {tune} ({'; '.join(differ)}), expected "
            "the same target, sampling and K; trace both alike"
        )


def costs(settings: Stopping) -> tuple[float, float]:
    """(c, v), as said, as kept beside the tune trace, or measured and kept, and prints which;
    ValueError where none of it can be.
    """
    check_one_of("costs", settings.costs, ("kept", "new"))
    if settings.c is not None:
        if not settings.c > 0 or not settings.v > 0:
            raise ValueError(f"c, v: got {settings.c}, {settings.v}, expected numbers above 0")
        print("costs: as given")
        return settings.c, settings.v
    if not settings.target or not settings.drafter:
        raise ValueError("c: got none, expected c=..., or target= and drafter= to measure it")
    rounds(settings, settings.tune, None)  # costs are kept beside traces of this drafter alone
    decoder, file = Decoder.of(settings), Path(settings.tune) / "costs.json"
    now = measured_with(decoder, settings.drafter)
    try:
        found = kept_costs(file, now, settings.costs == "new")
        print(f"costs: {file}, measured {found.get('when')}, commit {found.get('commit')}")
        return found["c"], found["v"]
    except ValueError as why:
        print(f"costs: measured now: {why}")
    c, v = measured(decoder)
    when = time.strftime("%F %R UTC", time.gmtime())
    made = {"c": c, "v": v, "when": when, "commit": git_commit(), "with": now}
    try:
        write_atomically(file, json.dumps(made, indent=1).encode() + b"\n")
    except OSError as error:  # of a folder that can't be written, a full disk
        print(f"costs: not kept: {error}")
    return c, v


def measured_with(decoder: Decoder, drafter: str) -> dict[str, Any]:
    """All that the costs of one row depend on, in JSON."""
    device = decoder.runner.device.type
    return {
        "machine": machine("cpu"),
        "device": "cpu" if device == "cpu" else machine(device),
        "threads": torch.get_num_threads(),
        "dtype": str(decoder.runner.dtype),
        "target": fingerprint(decoder.runner.model, decoder.tokenizer),
        "drafter": weights_mark(drafter),
        "shape": {"rows": 1, "K": DRAFTED, "context": CONTEXT},
        "versions": versions(),
    }


def kept_costs(file: Path, now: Mapping[str, Any], again: bool) -> dict[str, Any]:
    """What an earlier call kept; ValueError, why to measure, where it doesn't hold now."""
    if again or not file.exists():
        raise ValueError("costs=new" if again else "none were kept")
    found = read_json(file)
    if not all(isinstance(found.get(x), float) and found[x] > 0 for x in "cv"):
        raise ValueError(f"got {file} without c and v above 0, it was edited")
    if differ := what_differs(found.get("with"), now):
        raise ValueError(f"{file} was measured with others ({'; '.join(differ)})")
    return found


def measured(decoder: Decoder, K: int = DRAFTED) -> tuple[float, float]:
    """(c, v) of one row on this machine, v at drafts of K."""
    assert decoder.drafter is not None
    found = measured_costs(decoder.runner, decoder.drafter, chain_plan(K), 1, CONTEXT)
    plain, draft = found.verify[0], found.draft[0]
    return draft / plain, (found.of(chain_plan(K)) - K * draft) / plain


HEAD = (
    *("rule", "setting", "speed-up", "95%", "over fixed K", "95%", "tau", "drafted a round"),
    "discarded a token",
)


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row in words, in the order of HEAD."""
    found = [row["what"], row["setting"]]
    for name in ("speedup", "over_fixed"):
        low, high = row[f"{name}_interval"]
        found += [f"{row[name]:.3f}", f"{low:.3f} to {high:.3f}"]
    return found + [f"{row[name]:.2f}" for name in ("tau", "K", "discard_rate")]
