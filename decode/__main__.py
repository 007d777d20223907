"""`python -m draftsmith.decode`, the same as `python -m draftsmith evaluate`."""

import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from draftsmith.command import parse
from draftsmith.decode.evaluate.arms import Evaluation
from draftsmith.decode.evaluate.evaluate import evaluate
from draftsmith.decode.report import report, results


def main(argv: list[str]) -> int:
    """Evaluate, write report.json and report.html, print the table; 2 after a user's error."""
    console = Console()
    if not argv or argv[0] in ("-h", "--help", "help"):
        console.print(f"python -m draftsmith evaluate KEY=VALUE ...\n\n{Evaluation.__doc__}\n")
        for name, hint in Evaluation.__annotations__.items():
            default = getattr(Evaluation, name, "(required)")
            console.print(f"  {name}={default}  [dim]{getattr(hint, '__name__', hint)}[/dim]")
        return 0
    try:
        settings = parse(Evaluation, argv)
        reports = evaluate(settings, arms(settings.drafter.split(",")))
    except ValueError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        return 2
    for name, result in reports.items():
        folder = Path(settings.out) / (name if len(reports) > 1 else "")
        report.write(result, folder)
        console.print(report.table(result))
        console.print(f"written: {folder / 'report.json'}, {folder / 'report.html'}", markup=False)
    rows = [results.row(name, result) for name, result in reports.items()]
    results.publish(f"Drafters for {settings.target}", rows, Path(settings.out))
    return 0


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
    sys.exit(main(sys.argv[1:]))
