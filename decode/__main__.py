"""`python -m draftsmith.decode`, the same as `python -m draftsmith evaluate`."""

import sys
from pathlib import Path

from rich.console import Console

from draftsmith.decode import report, results
from draftsmith.decode.arguments import parse
from draftsmith.decode.evaluation import evaluate
from draftsmith.decode.turns import Evaluation


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
        names = settings.drafter.split(",")
        reports = evaluate(settings, {name: name for name in names})
    except ValueError as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 2
    for name, result in reports.items():
        folder = Path(settings.out) / (Path(name).name if len(names) > 1 else "")
        report.write(result, folder)
        console.print(report.table(result))
        console.print(f"written: {folder / 'report.json'}, {folder / 'report.html'}")
    rows = [results.row(Path(name).name, result) for name, result in reports.items()]
    results.publish(f"Drafters for {settings.target}", rows, Path(settings.out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
