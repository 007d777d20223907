"""One table of several evaluations: their rows, and the page that is made from them.

python bench/joined.py name=trees title=Trees reports=[runs/trees/0-chain,...] out=runs/results
"""

import json
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from draftsmith.command import parse, run_command
from draftsmith.decode.report import results


@dataclass
class Joined:
    name: str  # of the files
    title: str
    reports: list[str]  # folders that `draftsmith evaluate` or `quickstart` wrote
    names: list[str] = field(default_factory=list)  # of the rows, over and over; none: their own
    seeds: bool = False  # whether rows are told apart by them
    out: str = "docs/results"


def main(argv: list[str]) -> None:
    settings = parse(Joined, argv)
    rows = []
    for folder in settings.reports:
        file = Path(folder, "results.json")
        if not file.exists():
            raise ValueError(f"got no {file}, expected that of `draftsmith evaluate`")
        rows += json.loads(file.read_text())
    if settings.names:
        rows = [r | {"what": what} for r, what in zip(rows, cycle(settings.names), strict=False)]
    if settings.seeds:
        order = list(dict.fromkeys(row["what"] for row in rows))
        rows.sort(key=lambda row: (row["temperature"], order.index(row["what"]), row["seed"]))
        rows = [row | {"what": f"{row['what']}, seed {row['seed']}"} for row in rows]
    results.publish(settings.title, rows, Path(settings.out), settings.name)


if __name__ == "__main__":
    run_command(main, Joined)
