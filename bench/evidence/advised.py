"""How near the advice of `evaluate` comes: speed-ups foretold from one run, beside measured ones.

    python bench/evidence/advised.py
    python bench/evidence/advised.py pairs=quickstart temperatures=1 limit=8 out=runs/advised

A run of `counted` draft calls a round foretells chains of every other depth, and of these the best;
each is then measured in a run of its own, on the same prompts, beside plain decoding in turns.
Rows and page: <out>/advice.*; the row with `best` is what `evaluate` advised and measured itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, markdown, source, write_table
from draftsmith.command import parse, run_command, unknown
from draftsmith.decode.__main__ import arms
from draftsmith.decode.evaluate.arms import Evaluation
from draftsmith.decode.evaluate.evaluate import evaluate
from draftsmith.train.run.recipe import gsm8k

HEAD = ("pair", "T", "way", "tau", "foretold", "measured", "off by")
NEAR = 0.1


class Pair(NamedTuple):
    """What is decoded: a target, and the step of `bench/reproduce.py` that leaves the drafter."""

    target: str
    prompts: str
    step: str
    drafter: str


def pairs() -> dict[str, Pair]:
    """Those of the committed tables, by name."""
    here = gsm8k("target"), gsm8k("data")
    quick = "runs/quickstart/target/model", "stdlib", "quickstart-runs"
    return {
        "quickstart": Pair(*quick, "runs/quickstart/distill/drafter"),
        "gsm8k": Pair(*here, "distill", "runs/gsm8k/distill/drafter"),
        "medusa": Pair(*here, "medusa", "runs/heads/medusa-0/drafter"),
        "eagle3": Pair(*here, "eagle3-alone", "runs/one-pass/eagle3-0/drafter"),
    }


@dataclass
class Advised:
    pairs: str = "quickstart,gsm8k,medusa,eagle3"
    temperatures: str = "0,1"
    K: str = "1,2,3,4,6"  # depths that are measured
    counted: int = 4  # that of the run whose counts foretell the others
    limit: int = 32  # prompts
    max_new_tokens: int = 64
    repeats: int = 3  # of every run, of which each prompt's least time counts
    threads: int = 1
    out: str = "docs/results"


def main(argv: list[str]) -> None:
    settings, known = parse(Advised, argv), pairs()
    asked = settings.pairs.split(",")
    if wrong := [name for name in asked if name not in known]:
        raise ValueError(unknown("pair", wrong[0], known))
    for name in asked:
        need("target", known[name].target)
        need(known[name].step, known[name].drafter)
    runs = [(name, float(T)) for name in asked for T in settings.temperatures.split(",")]
    rows: list[dict[str, Any]] = []
    for name, temperature in track(runs, "evaluating"):
        pair = known[name]

        def run(K: int, *, advice: bool, pair: Pair = pair, T: float = temperature) -> Any:
            found = evaluate(
                Evaluation(
                    target=pair.target,
                    drafter=pair.drafter,
                    prompts=pair.prompts,
                    K=K,
                    temperature=T,
                    limit=settings.limit,
                    max_new_tokens=settings.max_new_tokens,
                    repeats=settings.repeats,
                    threads=settings.threads,
                    advice=advice,
                    identity=False,
                ),
                arms([pair.drafter]),
            )
            return next(iter(found.values()))

        about = {"what": name, "drafter": pair.drafter, "temperature": temperature}
        about |= {key: getattr(settings, key) for key in ("counted", "repeats")}
        about["prompts"] = settings.limit
        rows += [about | row | about_run() for row in judged(settings, run)]
    write_table(Path(settings.out), "advice", rows, page(rows))
    print(page(rows))


def judged(settings: Advised, run: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """A row for each depth that the drafter drafts, and one for what was advised."""
    advice = run(settings.counted, advice=True)["advice"]
    chains = {r["K"]: r for r in advice["depths"] if (r["tree"], r["policy"]) == ("chain", "fixed")}
    for K in map(int, settings.K.split(",")):
        if K in chains:
            report = run(K, advice=False)
            now = {"tau_measured": report["tau"], "speedup": report["speedup"]}
            now["speedup_interval"] = report["speedup_interval"]
            yield row_of(chains[K], now, best=False)
    (best,) = (row for row in advice["depths"] if ways(row) == ways(advice | {"K": advice["best"]}))
    now = {"tau_measured": None, "speedup": best["measured"]}
    yield row_of(best, now | {"speedup_interval": best["measured_interval"]}, best=True)


def ways(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["K"], row["tree"], row["policy"]


def row_of(told: dict[str, Any], now: dict[str, Any], *, best: bool) -> dict[str, Any]:
    """What was foretold of a way to decode, and what was measured."""
    about = {key: told[key] for key in ("K", "tree", "policy", "tau")}
    foretold = {"foretold": told["speedup"], "foretold_interval": told["interval"]}
    return about | foretold | now | {"best": best}


def off(row: dict[str, Any]) -> float:
    """How far the foretold speed-up is above the measured one, as a share of it."""
    return float(row["foretold"] / row["speedup"] - 1)


def page(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    measured = [row for row in rows if row["speedup"] is not None]
    advised = [row for row in measured if row["best"]]
    near = [sum(abs(off(row)) <= NEAR for row in part) for part in (measured, advised)]
    repeats = rows[0].get("repeats", 1)
    least = f", the least time of {repeats}" if repeats > 1 else ""
    lines = [
        "# How near the advice comes",
        "",
        f"{source(rows)} Speed-ups over plain decoding, foretold by the counts of one run with "
        f"K = {rows[0]['counted']}, and measured in runs of their own; {rows[0]['prompts']} "
        f"held-out prompts, one at a time{least}; 95% intervals over prompts. **Advised** is what "
        f"`evaluate` chose and measured by itself. Within 10%: {near[0]} of {len(measured)}; of "
        f"those advised {near[1]} of {len(advised)}.",
        "",
        *markdown(HEAD, [cells(row) for row in measured]),
    ]
    return "\n".join(lines) + "\n"


def cells(row: dict[str, Any]) -> list[str]:
    """A row in words, in the order of HEAD."""
    way = f"K = {row['K']}"
    if (row["tree"], row["policy"]) != ("chain", "fixed"):
        way += f", {row['tree']}, {row['policy']}"
    spread = row["speedup_interval"] or (float("nan"),) * 2
    return [
        row["what"],
        f"{row['temperature']:g}",
        f"**advised: {way}**" if row["best"] else way,
        f"{row['tau']:.2f}",
        f"{row['foretold']:.2f}",
        f"{row['speedup']:.2f} [{spread[0]:.2f}, {spread[1]:.2f}]",
        f"{off(row):+.0%}",
    ]


if __name__ == "__main__":
    run_command(main, Advised)
