"""What a `report.json` holds: its keys in order, the type of each, and what must agree.

A report is one evaluation of one drafter on one target. Keys are stable; more may be added.
"""

import math
from collections.abc import Callable
from typing import Any

VERSION = 1
ROUNDING = 1e-6  # a share is a quotient of fp32 sums
Check = tuple[str, Callable[[Any], bool]]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1 + ROUNDING


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_interval(value: Any) -> bool:
    pair = isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
    return pair and value[0] <= value[1]


def _optional(check: Check) -> Check:
    words, test = check
    return f"{words}, or null", lambda value: value is None or test(value)


def _list_of(check: Check) -> Check:
    words, test = check
    return f"a list, each {words}", lambda value: isinstance(value, list) and all(map(test, value))


TEXT: Check = ("a text", lambda value: isinstance(value, str))
FLAG: Check = ("true or false", lambda value: isinstance(value, bool))
OBJECT: Check = ("an object", lambda value: isinstance(value, dict))
ANY: Check = ("anything", lambda value: True)
NUMBER: Check = ("a finite number", _is_number)
SHARE: Check = ("a number from 0 to 1", _is_share)
COUNT: Check = ("a whole number from 0", _is_count)
INTERVAL: Check = ("[low, high] with low <= high", _is_interval)

VERDICT: dict[str, Check] = {
    "dtype": TEXT,
    "baseline": TEXT,
    "same": COUNT,
    "total": COUNT,
    "worst_margin": _optional(NUMBER),
}
# Dotted names are keys of an object; an object that may be null is looked into only where it isn't.
SCHEMA: dict[str, Check] = {
    "schema": (f"the number {VERSION}", lambda value: value == VERSION),
    "target": TEXT,
    "drafter": OBJECT,
    "drafter.kind": TEXT,
    "drafter.path": _optional(TEXT),
    "rule": TEXT,
    "lossless": FLAG,
    "lossy": TEXT,
    "device": TEXT,
    "dtype": TEXT,
    "threads": COUNT,
    "batch": COUNT,
    "temperature": NUMBER,
    "top_k": COUNT,
    "top_p": SHARE,
    "min_p": SHARE,
    "stop": _list_of(TEXT),
    "seed": COUNT,
    "policy": ANY,
    "tree": ANY,
    "K": NUMBER,
    "N": NUMBER,
    "max_new_tokens": COUNT,
    "context": NUMBER,
    "n_prompts": COUNT,
    "skipped": OBJECT,
    "skipped.prompts": COUNT,
    "skipped.of": COUNT,
    "skipped.context": COUNT,
    "skipped.turns": COUNT,
    "tau": NUMBER,
    "tau_interval": INTERVAL,
    "alpha": _optional(SHARE),
    "alpha_interval": _optional(INTERVAL),
    "coupled_acceptance": _optional(SHARE),
    "draft_acceptance_rate": _optional(SHARE),
    "token_efficiency": _optional(SHARE),
    "acceptance_by_position": _list_of(SHARE),
    "acceptance_conditional": _list_of(SHARE),
    "accepted_histogram": _list_of(COUNT),
    "tokens_per_s": OBJECT,
    "tokens_per_s.plain": NUMBER,
    "tokens_per_s.speculative": NUMBER,
    "times": OBJECT,
    "times.plain": NUMBER,
    "times.verify": NUMBER,
    "times.draft": _optional(NUMBER),
    "times.extend": _optional(NUMBER),
    "times.prefill": _optional(NUMBER),
    "speedup": NUMBER,
    "speedup_interval": _optional(INTERVAL),  # null: fewer than two batches were timed
    "speedup_specbench": _optional(NUMBER),
    "ideal_speedup": _optional(NUMBER),
    "efficiency": _optional(NUMBER),
    "c": _optional(NUMBER),
    "mbsu": _optional(NUMBER),
    "loop_rate": SHARE,
    "task": _optional(OBJECT),
    "task.name": TEXT,
    "task.n": COUNT,
    "task.plain": SHARE,
    "task.speculative": SHARE,
    "task.difference": NUMBER,
    "task.difference_interval": INTERVAL,
    "agreement": _optional(OBJECT),
    "agreement.share": SHARE,
    "agreement.interval": INTERVAL,
    "identical": _optional(OBJECT),
    **{f"identical.{key}": check for key, check in VERDICT.items()},
    "identical_same_shape": _optional(OBJECT),
    **{f"identical_same_shape.{key}": check for key, check in VERDICT.items()},
    "divergences": _list_of(OBJECT),
    "categories": OBJECT,
    "specbench": OBJECT,
    "versions": OBJECT,
    "commit": _optional(TEXT),
    "command": TEXT,
}
CATEGORY: dict[str, Check] = {
    "tau": _optional(NUMBER),
    "speedup": _optional(NUMBER),
    "speedup_specbench": _optional(NUMBER),
    "n_prompts": COUNT,
}
DIVERGENCE: dict[str, Check] = {
    "prompt": COUNT,
    "position": COUNT,
    "dtype": TEXT,
    "margin": NUMBER,
    "near_tie": FLAG,
    "baseline": TEXT,
}


def schema_problems(report: dict[str, Any]) -> list[str]:
    """A line for each key that is missing, of a wrong type, or at odds with another; else none."""
    problems = _problems(report, SCHEMA, "")
    if problems:
        return problems
    for table in ("categories", "specbench"):
        for name, category in report[table].items():
            problems += _problems(category, CATEGORY, f"{table}.{name}.")
    for i, divergence in enumerate(report["divergences"]):
        problems += _problems(divergence, DIVERGENCE, f"divergences[{i}].")
    return problems or _contradictions(report)


def ordered(report: dict[str, Any]) -> dict[str, Any]:
    """The report with its keys in the order of the schema, then what was added, by name."""
    known = [key for key in SCHEMA if "." not in key and key in report]
    return {key: report[key] for key in [*known, *sorted(set(report) - set(known))]}


def _problems(values: Any, schema: dict[str, Check], prefix: str) -> list[str]:
    if not isinstance(values, dict):
        return [f"{prefix.rstrip('.')}: got {values!r:.60}, expected an object"]
    problems = []
    for key, (words, test) in schema.items():
        outer, _, inner = key.rpartition(".")
        place = values.get(outer) if outer else values
        if not isinstance(place, dict):
            continue  # the object itself is null, or already named as a problem
        if inner not in place:
            problems.append(f"{prefix}{key}: missing, expected {words}")
        elif not test(place[inner]):
            problems.append(f"{prefix}{key}: got {place[inner]!r:.60}, expected {words}")
    return problems


def _contradictions(report: dict[str, Any]) -> list[str]:
    problems = []

    def expect(holds: bool, words: str) -> None:
        if not holds:
            problems.append(words)

    by_position, conditional = report["acceptance_by_position"], report["acceptance_conditional"]
    levels = len(by_position)
    rounds = len(report["accepted_histogram"])
    expect(
        len(conditional) == levels and rounds == (levels + 1 if rounds else 0),
        f"acceptance_by_position, acceptance_conditional, accepted_histogram: got {levels}, "
        f"{len(conditional)} and {rounds} values, expected D, D and D + 1",
    )
    for name in ("tau", "alpha"):
        value, interval = report[name], report[f"{name}_interval"]
        expect(
            (value is None) == (interval is None),
            f"{name}: got {value}, but {name}_interval {interval}; expected both or neither",
        )
    for key in ("identical", "identical_same_shape"):
        verdict = report[key]
        if verdict is None:
            continue
        same, total, dtype = verdict["same"], verdict["total"], verdict["dtype"]
        listed = sum(
            (d["dtype"], d["baseline"]) == (dtype, verdict["baseline"])
            for d in report["divergences"]
        )
        expect(same <= total, f"{key}: got {same} same of {total}")
        expect(
            total - same <= listed,
            f"{key}: {total - same} answers differ in {dtype}, but {listed} are listed in "
            "divergences; expected each one",
        )
    expect(
        report["lossless"] == (not report["lossy"]),
        f"lossless: got {report['lossless']} with lossy = {report['lossy']!r}",
    )
    expect(
        report["lossless"] or report["task"] is not None or report["agreement"] is not None,
        "a lossy run: got neither task nor agreement; expected one of them beside tau",
    )
    counted = sum(category["n_prompts"] for category in report["categories"].values())
    expect(
        not report["categories"] or counted == report["n_prompts"],
        f"categories: got {counted} prompts in them, expected n_prompts = {report['n_prompts']}",
    )
    return problems
