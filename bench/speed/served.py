"""What a server's users wait for: with `policy=auto` and without a draft, at loads of its capacity.

    python bench/speed/served.py                         # the one-pass table's drafter of ours
    python bench/speed/served.py loads=0.2,0.9 turns=1 requests=40 out=runs/bench/try
    python bench/speed/served.py on=twin target=TWIN drafter=DRAFTER turns=4

The capacity is the requests a second that a server without drafts answers to as many clients as it
has rows. At each load requests arrive as a Poisson process, the same for both arms, whose servers
take turns, the other one first each time, and decode on one thread, their clients on another.
goodput: answers a second that came within `patience` times what a lone request takes without drafts
(median). Each figure is the mean over turns; a ratio is over the arm without drafts, with its
interval (95%, bootstrap over turns). Rows and page: <out>/served.*, where those of other targets
stay.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from draftsmith.bench.evidence.simulated_load import served
from draftsmith.bench.evidence.traffic import Ask, Reply, at_rate, by_clients, latencies
from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, beside, markdown, source, write_table
from draftsmith.command import parse, run_command
from draftsmith.decode.evaluate.metrics import ratio_interval
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.printed import bracket
from draftsmith.train.run.recipe import gsm8k

ARMS = {"plain": "", "auto": "auto"}
ROWS = 16  # of the servers
FIGURES = ("p50", "p99", "goodput", "tokens_per_s")


@dataclass
class Served:
    on: str = "target-15m"  # what the target is called
    target: str = field(default_factory=lambda: gsm8k("target"))
    drafter: str = "runs/one-pass/ours-0/drafter"
    data: str = field(default_factory=lambda: gsm8k("data"))
    loads: str = "0.2,0.6,0.9,1.2"  # of the capacity
    turns: int = 12
    requests: int = 60  # of each arm at each load and turn
    patience: float = 4.0
    K: int = 5
    max_new_tokens: int = 64
    out: str = "runs/bench"


def main(argv: list[str]) -> None:
    settings = parse(Served, argv)
    need("ours-alone", settings.drafter)
    tokenizer = load_tokenizer(settings.target)
    prompts = load_prompts(settings.data, tokenizer, limit=64, split="report")
    asks = [Ask(i, "", prompts[i % len(prompts)].tokens) for i in range(settings.requests)]
    loads = [float(load) for load in settings.loads.split(",")]
    found: dict[tuple[float, str], list[dict[str, float]]] = {}
    with ExitStack() as servers:
        ends = {arm: servers.enter_context(served(settings, ARMS[arm])) for arm in ARMS}
        for end in ends.values():  # who drafts learns what rounds cost
            by_clients(end, asks, ROWS)
        lone = latencies(by_clients(ends["plain"], asks[:16], 1))["p50"]
        capacity = latencies(by_clients(ends["plain"], asks, ROWS))["requests_per_s"]
        for turn, load in track([(t, x) for t in range(settings.turns) for x in loads], "serving"):
            for arm in list(ARMS)[:: -1 if turn % 2 else 1]:
                replies = at_rate(ends[arm], asks, load * capacity, turn)
                told = latencies(replies) | {"goodput": goodput(replies, settings.patience * lone)}
                found.setdefault((load, arm), []).append(told)
    about = about_run() | {"capacity": capacity, "lone_s": lone}
    about |= {"on": settings.on, "target": settings.target}
    about["how"] = (
        f"{settings.drafter} drafts, K = {settings.K}; bfloat16, one thread, {ROWS} rows; "
        f"{settings.max_new_tokens} new tokens at temperature 1; {settings.requests} requests at "
        f"each load in each of {settings.turns} turns; an answer is good within "
        f"{settings.patience:g} times what a lone request takes"
    )
    rows = [about | row(load, arm, found) for load in loads for arm in ARMS]
    rows = beside(Path(settings.out) / "served.json", rows, "on")
    write_table(Path(settings.out), "served", rows, page(rows))
    print(page(rows))


def goodput(replies: list[Reply], limit: float) -> float:
    """Answers a second that took at most `limit` seconds."""
    wall = max(r.sent + r.seconds for r in replies) - min(r.sent for r in replies)
    return sum(reply.seconds <= limit for reply in replies) / wall


def row(load: float, arm: str, found: dict[Any, list[dict[str, float]]]) -> dict[str, Any]:
    """An arm's figures at one load, and their ratios to those without drafts: without an interval
    where no answer of a turn was good, none where none was of all turns.
    """
    told: dict[str, Any] = {"what": arm, "load": load}
    for name in FIGURES:
        mine, plain = ([turn[name] for turn in found[load, one]] for one in (arm, "plain"))
        told[name] = float(np.mean(mine))
        ratio = [float(np.sum(mine) / np.sum(plain))] if any(plain) else None
        told[f"{name}_ratio"] = [*ratio, *ratio_interval(mine, plain)] if all(plain) else ratio
    return told


def page(rows: list[dict[str, Any]]) -> str:
    """Markdown: a table a target, a row a load and arm."""
    lines = ["# A server under load", "", source(rows)]
    lines[-1] += (
        " Beside figures their ratio to those without drafts, with its interval over turns."
    )
    head = ("load", "arm", "p50 ms", "p99 ms", "good answers a second", "tokens/s")
    for on in dict.fromkeys(one["on"] for one in rows):
        own = [one for one in rows if one["on"] == on]
        lines += ["", f"## {on.capitalize()}", "", f"{own[0]['how']}. "]
        lines[-1] += (
            f"Capacity: {own[0]['capacity']:.3g} requests a second; a lone request takes "
            f"{1e3 * own[0]['lone_s']:,.0f} ms."
        )
        lines += ["", *markdown(head, list(map(cells, own)))]
    return "\n".join([*lines, ""])


def cells(one: dict[str, Any]) -> list[str]:
    """A row of the page."""
    found = []
    for name, unit in zip(FIGURES, (1e3, 1e3, 1, 1), strict=True):
        beside_it = ""
        if one["what"] != "plain" and (ratio := one[f"{name}_ratio"]) is not None:
            between = f" {bracket(ratio[1:])}" if ratio[1:] else ""
            beside_it = f" ({ratio[0]:.2f}{between})"
        figure = unit * one[name]
        found.append(f"{figure:,.{0 if figure > 100 else 1}f}{beside_it}")
    return [f"{one['load']:.0%}", one["what"], *found]


if __name__ == "__main__":
    run_command(main, Served)
