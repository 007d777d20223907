"""What a drafter is worth: plain decoding and drafters in turns, with proof that tokens are alike.

    draftsmith evaluate target=TARGET drafter=DRAFTER prompts=prompts.jsonl temperature=1

Writes report.json and report.html; see decode/evaluate/evaluate.py. `python -m draftsmith.decode`
is the same.
"""

from pathlib import Path

from rich.console import Console

from draftsmith.command import parse, run_command
from draftsmith.decode.evaluate.arms import Evaluation
from draftsmith.decode.evaluate.evaluate import evaluate
from draftsmith.decode.report import results
from draftsmith.decode.report.page import write
from draftsmith.decode.report.terminal import table


def main(argv: list[str]) -> None:
    """Evaluate, write report.json and report.html, print the table."""
    console = Console()
    settings = parse(Evaluation, argv)
    reports = evaluate(settings, arms(settings.drafter.split(",")))
    for name, result in reports.items():
        folder = Path(settings.out) / (name if len(reports) > 1 else "")
        write(result, folder)
        console.print(table(result))
        console.print(f"written: {folder / 'report.json'}, {folder / 'report.html'}", markup=False)
    rows = [results.row(name, result) for name, result in reports.items()]
    results.publish(f"Drafters for {settings.target}", rows, Path(settings.out))


def arms(paths: list[str]) -> dict[str, str]:
    """Name -> path: the last part of each path, or as many as tell them all apart.

    Raises ValueError for an empty name, or the same drafter twice.
    """
    if len(set(paths)) < len(paths) or "" in paths:
        raise ValueError(f"drafter: got {','.join(paths)!r}, expected names, each of them once")
    parts = [(path,) if path == "ngram" else Path(path).resolve().parts for path in paths]
    names: list[str] = []
    for depth in range(1, 1 + max(map(len, parts))):
        names = ["-".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(paths):
            break
    return dict(zip(names, paths, strict=True))


if __name__ == "__main__":
    run_command(main, Evaluation)
