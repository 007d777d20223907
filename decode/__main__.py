"""What a drafter is worth: plain decoding and drafters in turns, with proof that tokens are alike.

    draftsmith evaluate target=TARGET drafter=DRAFTER prompts=prompts.jsonl temperature=1

Writes report.json and report.html; see decode/evaluate/evaluate.py. `python -m draftsmith.decode`
is the same.
"""

from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.command import parse, run_command
from draftsmith.decode.evaluate.advice import pays
from draftsmith.decode.evaluate.arms import Evaluation
from draftsmith.decode.evaluate.evaluate import evaluate
from draftsmith.decode.report import results
from draftsmith.decode.report.page import write
from draftsmith.decode.report.printed import bracket, number, print_table, times_as
from draftsmith.decode.report.terminal import comparison, table
from draftsmith.models.folder.drafter_folder import save_defaults
from draftsmith.models.servers.export import serve_line


def main(argv: list[str]) -> None:
    """Evaluate, write report.json and report.html, print the table."""
    console = Console()
    settings = parse(Evaluation, argv)
    Path(settings.out).mkdir(parents=True, exist_ok=True)  # or an error, before all the decoding
    reports = evaluate(settings, arms(settings.drafter.split(",")))
    for name, result in reports.items():
        folder = Path(settings.out) / (name if len(reports) > 1 else "")
        write(result, folder)
        advice = result.get("advice")
        if advice and not pays(advice):
            print(advice["says"])
        console.print(table(result))
        console.print(f"written: {folder / 'report.json'}, {folder / 'report.html'}", markup=False)
        if advice:
            tell(advice, result["drafter"], settings)
    rows = [results.row(name, result) for name, result in reports.items()]
    if len(rows) > 1:
        console.print(comparison(rows))
    results.publish(f"Drafters for {settings.target}", rows, Path(settings.out))


def tell(advice: dict[str, Any], drafter: dict[str, Any], settings: Evaluation) -> None:
    """What every depth would give, the advice, and with `save` the lines that then serve it."""
    rows = [
        [str(one["K"]), number(one["tau"]), times_as(one["speedup"]), bracket(one["interval"])]
        for one in advice["depths"]
    ]
    print_table(["K", "tau", "speed-up, foretold", "95%"], rows)
    print(advice["says"])
    if settings.save and not pays(advice):
        print(f"nothing saved: {drafter['path']} keeps its K")
    elif settings.save:
        folder = Path(drafter["path"])
        save_defaults(folder, K=advice["best"])
        print(f"saved: K={advice['best']} in {folder}; to serve it:")
        print(serve_line(folder, settings.target))


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
