"""The rows that every benchmark writes: ours against a peer, pair by pair, in the same run."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.decode.report.results import unrepeatable
from draftsmith.models.disk.provenance import command_line, git_commit, machine
from draftsmith.printed import print_table

BENCH = Path(__file__).resolve().parent
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
    title = f"bench {name}: a ratio above 1 is better for us; median over pairs"
    print_table(HEAD, map(cells, rows), ("what", "peer", "unit"), title=title)
    save(name, rows, folder, about=about, picture=picture)


def save(
    name: str, rows: list[dict[str, Any]], folder: Path, *, about: str = "", picture: str = ""
) -> None:
    """Write <name>.json, the page <name>.md made from it, and <name>.svg if there is a picture."""
    run = about_run()
    rows = [r | run for r in rows]
    made = page(name, rows, about=about, picture=bool(picture))
    write_table(folder, name, rows, made, picture)


def write_table(
    folder: Path, name: str, rows: list[dict[str, Any]], page: str, picture: str = ""
) -> None:
    """Write <name>.json, <name>.md, and <name>.svg if there is a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / f"{name}.md").write_text(page)
    if picture:
        (folder / f"{name}.svg").write_text(picture)


def page(name: str, rows: list[dict[str, Any]], *, about: str, picture: bool) -> str:
    """Markdown. about: sentences that follow the one on where the rows come from."""
    words = f"{source(rows)} {about}".rstrip(" ")
    lines = [f"# bench {name}", "", f"{words} A ratio above 1 is better for us.", ""]
    lines += markdown(HEAD, [cells(r) for r in rows])
    if picture:
        lines += ["", f"![{name}]({name}.svg)"]
    return "\n".join(lines) + "\n"


def beside(file: Path, rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """The rows after those that a file has of others, by these keys."""
    before = json.loads(file.read_text()) if file.exists() else []
    new = {tuple(row[key] for key in keys) for row in rows}
    return [row for row in before if tuple(row[key] for key in keys) not in new] + rows


def about_run() -> dict[str, Any]:
    """Commit, command and machine, beside every kept number."""
    return {"commit": git_commit(), "command": command_line(), "machine": machine()}


def source(rows: Sequence[dict[str, Any]]) -> str:
    """Where rows come from, for the head of their page: whole sentences."""
    line, *others = dict.fromkeys(r["command"] for r in rows)
    if others:
        line = " ".join(line.split()[:2])
    commits = ", ".join(sorted({str(r["commit"])[:12] for r in rows}))
    script = Path(line.split()[1])
    moved = [path for path in BENCH.rglob(script.name) if not (BENCH.parent / script).exists()]
    words = f"`{line}`{' with the arguments in each row' if others else ''} at commit {commits}"
    words += "".join(f" (now {path.relative_to(BENCH.parent).as_posix()})" for path in moved)
    machines = " and ".join(dict.fromkeys(r["machine"] for r in rows))
    return f"{words} on {machines}.{unrepeatable(rows)}"


def interval(values: Sequence[float], draws: int = 10_000) -> list[float]:
    """95%, bootstrap of the mean: `metrics.bootstrap` with all draws at once."""
    found = np.array(values)
    drawn = np.random.default_rng(0).integers(0, len(found), (draws, len(found)))
    return np.percentile(found[drawn].mean(1), [2.5, 97.5]).tolist()


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(r)} |" for r in (head, ["---"] * len(head), *body)]
