"""What a drafter is worth: plain decoding and drafters in turns, with proof that tokens are alike.

    draftsmith evaluate target=TARGET drafter=DRAFTER prompts=prompts.jsonl temperature=1

Writes report.json and report.html; see decode/evaluate/evaluate.py. What an earlier run wrote there
is kept in a folder beside them. `python -m draftsmith.decode` is the same.
"""

from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import composed, has_folder
from draftsmith.decode.evaluate.advice import in_words
from draftsmith.decode.evaluate.arms import Evaluation
from draftsmith.decode.evaluate.evaluate import evaluate
from draftsmith.decode.report import results
from draftsmith.decode.report.page import write
from draftsmith.decode.report.terminal import comparison, table
from draftsmith.models.folder.drafter_folder import read_meta, save_defaults
from draftsmith.models.servers.export import serve_line, served_K
from draftsmith.printed import bracket, number, print_table, times_as


def main(argv: list[str]) -> None:
    """Evaluate, write report.json and report.html, print the table."""
    console = Console()
    settings = parse(Evaluation, argv)
    Path(settings.out).mkdir(parents=True, exist_ok=True)  # or an error, before all the decoding
    seen: set[Path] = set()

    def written(reports: dict[str, dict[str, Any]]) -> dict[str, Path]:
        several = len(reports) > 1
        folders = {name: Path(settings.out) / (name if several else "") for name in reports}
        for folder in {Path(settings.out), *folders.values()} - seen:
            set_aside(folder)
            seen.add(folder)
        for name, folder in folders.items():
            write(reports[name], folder)
        return folders

    reports = evaluate(settings, arms(settings.drafter.split(",")), written)
    for name, folder in written(reports).items():
        result, advice = reports[name], reports[name].get("advice")
        if advice and not advice["pays"]:
            print(f"{name}: {advice['says']}")
        console.print(table(result))
        console.print(f"written: {folder / 'report.json'}, {folder / 'report.html'}", markup=False)
        if advice:
            tell(name, advice, result["drafter"], settings)
        if settings.save:
            pretend(result, settings.target)
    rows = [row for name, result in reports.items() for row in results.rows_of(name, result)]
    if len(reports) > 1:
        console.print(comparison(rows))
        print_table(results.PAIRED, results.differences(rows), results.PAIRED[1:2])
    results.publish(f"Drafters for {settings.target}", rows, Path(settings.out))


def set_aside(folder: Path) -> None:
    """Keep what an earlier run wrote there in earlier-1, earlier-2, ..."""
    names = (f"{name}.{kind}" for name in ("report", "results") for kind in ("json", "html", "md"))
    old = [folder / name for name in names if (folder / name).is_file()]
    if old:
        place = next(p for n in count(1) if not (p := folder / f"earlier-{n}").exists())
        place.mkdir()
        for path in old:
            path.rename(place / path.name)
        print(f"kept: {place}, what an earlier run wrote in {folder}")


def tell(name: str, advice: dict[str, Any], drafter: dict[str, Any], settings: Evaluation) -> None:
    """What every way would give, the advice, and with `save` the lines that then serve it."""
    rows = []
    for one in advice["depths"]:
        words = [str(one["K"]), one["tree"], one["policy"], number(one["tau"])]
        words += [times_as(one["speedup"]), bracket(one["interval"])]
        rows.append([*words, times_as(one["measured"]), bracket(one["measured_interval"])])
    head = ["K", "tree", "policy", "tau", "speed-up, foretold", "95%", "measured", "its 95%"]
    print_table(head, rows, head[1:3])
    print(f"{name}: {advice['says']}")
    if settings.save and not advice["pays"]:
        print(f"nothing saved: {drafter['path']} keeps its K")
    elif settings.save:
        folder, tree = Path(drafter["path"]), advice["tree"]
        kept = {"K": advice["best"], "policy": advice["policy"], "served_K": advice["served_K"]}
        if Path(tree).is_file():
            tree = str(Path(tree).resolve()).removeprefix(f"{folder.resolve()}/")
        save_defaults(folder, **kept, tree=None if tree == "chain" else tree)
        print(f"saved: {in_words(advice | {'K': advice['best']})} in {folder}; to serve it:")
        # Not `policy=auto`, the server's own: this pays with as many rows as were measured.
        print(f"draftsmith serve target={settings.target} drafter={folder} policy=")
        print(serve_line(folder, settings.target))


def pretend(result: dict[str, Any], target: str) -> None:
    """The lines of servers that make up answers at the acceptance that a chain was measured with,
    for the depth that they would draft to: how fast each would be.
    """
    # By `auto` the advice knows a fixed depth's.
    told = {"fixed": result, "auto": result.get("advice")}.get(result["policy"])
    folder, rates = Path(result["drafter"]["path"]), (told or {}).get("acceptance_by_position", ())
    if result["tree"] != "chain" or not any(rates):
        return
    rates = [round(rate, 4) for rate in rates[: served_K(read_meta(folder))]]
    if lines := serve_line(folder, target, rates):
        print(f"how fast a server would be at this acceptance, with made-up answers:\n{lines}")


def arms(paths: list[str]) -> dict[str, str]:
    """Name -> path: the last part of each path, or as many as tell them all apart.

    Raises ValueError for an empty name, or the same drafter twice.
    """
    if len(set(paths)) < len(paths) or "" in paths:
        raise ValueError(f"drafter: got {','.join(paths)!r}, expected names, each of them once")
    split = [composed(path) for path in paths]
    parts = [Path(name).resolve().parts if has_folder(name) else (name,) for _, name in split]
    names: list[str] = []
    for depth in range(1, 1 + max(map(len, parts))):
        ends = ["-".join(part[-depth:]) for part in parts]
        names = [
            f"{looked}{'++' if '++' in path else '+'}{end}" if looked else end
            for path, (looked, _), end in zip(paths, split, ends, strict=True)
        ]
        if len(set(names)) == len(paths):
            break
    return dict(zip(names, paths, strict=True))


if __name__ == "__main__":
    run_command(main, Evaluation)
