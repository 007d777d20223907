"""The rows that every benchmark writes: ours against a peer, pair by pair, in the same run."""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftsmith.decode.report.results import machine
from draftsmith.models.disk.provenance import git_commit

HEAD = ("what", "peer", "ratio", "range", "pairs", "ours", "theirs", "unit")


def row(
    what: str, peer: str, ours: Sequence[float], theirs: Sequence[float], unit: str
) -> dict[str, Any]:
    """One comparison of a rate, higher being better; `ours[i]` and `theirs[i]` ran side by side.

    The ratio is the median over pairs of ours / theirs: above 1 is better for us.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "what": what,
        "peer": peer,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "pairs": len(ratios),
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs),
        "unit": unit,
    }


def lower(
    what: str, peer: str, ours: Sequence[float], theirs: Sequence[float], unit: str
) -> dict[str, Any]:
    """The same for what is better when lower: the ratio is peer / ours, above 1 good for us too."""
    swapped = row(what, peer, theirs, ours, unit)
    return {**swapped, "ours": swapped["theirs"], "theirs": swapped["ours"]}


def cells(r: dict[str, Any]) -> list[str]:
    """A row in words, in the order of HEAD."""
    spread = f"{r['ratio_min']:.2f} to {r['ratio_max']:.2f}"
    numbers = [f"{r['ratio']:.2f}", spread, str(r["pairs"]), f"{r['ours']:.4g}"]
    return [r["what"], r["peer"], *numbers, f"{r['theirs']:.4g}", r["unit"]]


def publish(
    name: str,
    rows: list[dict[str, Any]],
    folder: Path = Path("runs/bench"),
    *,
    about: str = "",
    picture: str = "",
) -> None:
    """Print the rows as a table, and `save` them."""
    table = Table(title=f"bench {name}: a ratio above 1 is better for us; median over pairs")
    for column in HEAD:
        table.add_column(column, justify="left" if column in ("what", "peer", "unit") else "right")
    for r in rows:
        table.add_row(*cells(r))
    console = Console()
    console.width = console.width if console.is_terminal else 120
    console.print(table)
    save(name, rows, folder, about=about, picture=picture)


def save(
    name: str, rows: list[dict[str, Any]], folder: Path, *, about: str = "", picture: str = ""
) -> None:
    """Write <name>.json, the page <name>.md made from it, and <name>.svg if there is a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = [f"# bench {name}", "", f"{about} A ratio above 1 is better for us.".strip(), ""]
    lines += markdown(HEAD, [cells(r) for r in rows])
    if picture:
        (folder / f"{name}.svg").write_text(picture)
        lines += ["", f"![{name}]({name}.svg)"]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def about_run() -> dict[str, Any]:
    """Commit, command and machine, beside every kept number."""
    line = " ".join(["python", *sys.orig_argv[1:]])
    return {"commit": git_commit(), "command": line, "machine": machine()}


def command() -> str:
    """The same in words, for the head of a page."""
    return "`{command}` at commit {commit} on {machine}".format(**about_run())


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(r)} |" for r in (head, ["---"] * len(head), *body)]
