"""The rows that every benchmark writes: ours against a peer, pair by pair, in the same run."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


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


def publish(name: str, rows: list[dict[str, Any]], folder: Path = Path("runs/bench")) -> None:
    """Print the rows as a table and write them to runs/bench/<name>.json."""
    table = Table(title=f"bench {name}: a ratio above 1 is better for us; median over pairs")
    for column in ("what", "peer", "ratio", "range", "pairs", "ours", "theirs", "unit"):
        table.add_column(column, justify="left" if column in ("what", "peer", "unit") else "right")
    for r in rows:
        spread = f"{r['ratio_min']:.2f} to {r['ratio_max']:.2f}"
        numbers = (f"{r['ratio']:.2f}", spread, str(r["pairs"]), f"{r['ours']:.4g}")
        table.add_row(r["what"], r["peer"], *numbers, f"{r['theirs']:.4g}", r["unit"])
    Console().print(table)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(rows, indent=1))
