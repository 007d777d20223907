"""A table of drafters, measured by `evaluate` beside each other on one target or several.

    python bench/evidence/evaluated.py      # the target's own layers: exits, skipped ones, guesses
    python bench/evidence/evaluated.py name=one-pass-twin 'title=On a costly twin' \\
        targets=twin=runs/twin/target drafters=runs/twin/ours-0,runs/twin/eagle3-0 threads=2 \\
        K=5 'trees=chain;dynamic:5,6,17'

targets: name=folder of each target, comma between: the target itself, a copy that was trained to
exit early, a costly twin (`bench/speed/twin.py`). Each takes the drafters of the same place in
`drafters`, lists with a semicolon between (one list: of all); name=DRAFTER@POLICY where it has a
name, or policy, of its own. Every tree, and chains of every K, at every temperature; the page shows
of each drafter and tree the K with the largest measured speed-up. Prompt lookup takes no part in
trees. Rows and page: <out>/<name>.*, where the rows of other targets and machines stay. What was
measured at this commit isn't measured again.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.progress import track

from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, beside, markdown, source, write_table
from draftsmith.command import parse, run_command
from draftsmith.decode.__main__ import arms
from draftsmith.decode.evaluate.arms import Evaluation
from draftsmith.decode.evaluate.evaluate import evaluate
from draftsmith.models.disk.provenance import git_commit
from draftsmith.train.run.recipe import gsm8k

FIGURES = ("tau", "tau_interval", "alpha", "c", "mbsu", "speedup", "speedup_interval")
FIGURES += ("ideal_speedup", "K", "tree", "policy", "temperature", "n_prompts", "identical")
HEAD = (
    "drafter",
    "tree",
    "K",
    "tau",
    "alpha",
    "c",
    "MBSU",
    "speed-up",
    "ideal",
    "same tokens",
)


@dataclass
class Table:
    name: str = "own-layers"
    title: str = "Drafters made of the target's own layers"
    targets: str = field(default_factory=lambda: f"target={gsm8k('target')}")
    drafters: str = "exit:2,exit:4,exit:6,skip:3+5,jacobi:4"
    data: str = field(default_factory=lambda: gsm8k("data"))
    K: str = "1,3"
    trees: str = "chain"  # semicolon between
    temperatures: str = "0,1"
    prompts: int = 16
    max_new_tokens: int = 64
    repeats: int = 1  # of which each prompt's least time counts
    threads: int = 1
    identity: bool = True  # also compare tokens in fp32
    out: str = "docs/results"


def main(argv: list[str]) -> None:
    settings = parse(Table, argv)
    targets = [target.partition("=") for target in settings.targets.split(",")]
    lists = settings.drafters.split(";")
    if len(lists) not in (1, len(targets)):
        raise ValueError(f"drafters: got {len(lists)} lists for {len(targets)} targets")
    lists = lists * len(targets) if len(lists) == 1 else lists
    chains = [("chain", int(K)) for K in settings.K.split(",")]
    plans = [
        plan
        for tree in settings.trees.split(";")
        for plan in (chains if tree == "chain" else [(tree, None)])
    ]
    runs = [
        (name, path, names, *plan, float(temperature))
        for (name, _, path), names in zip(targets, lists, strict=True)
        for temperature in settings.temperatures.split(",")
        for plan in plans
    ]
    rows: list[dict[str, Any]] = []
    for name, path, names, tree, K, temperature in track(runs, "evaluating"):
        need("target", path)
        about = {"on": name, "target": path, "data": settings.data} | about_run()
        for policy, drafters in by_policy(names, tree):
            asked = Evaluation(
                target=path,
                drafter=",".join(drafters.values()),
                prompts=settings.data,
                K=K,
                tree=tree,
                policy=policy,
                temperature=temperature,
                limit=settings.prompts,
                max_new_tokens=settings.max_new_tokens,
                repeats=settings.repeats,
                threads=settings.threads,
                advice=False,
                identity=settings.identity,
            )
            rows += [row | about for row in measured(settings, asked, drafters)]
    out = Path(settings.out)
    rows = beside(out / f"{settings.name}.json", rows, "on", "machine")
    write_table(out, settings.name, rows, page(settings.title, rows))
    print(page(settings.title, rows))


def measured(settings: Table, asked: Evaluation, drafters: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of one evaluation; at a commit without changes kept, and read again by the same
    table.
    """
    commit = str(git_commit())
    known = f"{commit} {replace(settings, out='')} {drafters} {asked}".encode()
    kept = Path(f"runs/evaluated/{settings.name}/{sha256(known).hexdigest()[:16]}.json")
    if commit.endswith("-dirty") or not kept.exists():
        found = [
            {"what": what} | {key: report[key] for key in FIGURES}
            for what, report in evaluate(asked, drafters).items()
        ]
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return list(json.loads(kept.read_text()))


def by_policy(names: str, tree: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The drafters that take part with a tree, name -> drafter, by the policy that they asked for;
    those without a name as `evaluate` calls them.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for one in names.split(","):
        name, _, rest = one.rpartition("=")
        drafter, _, policy = rest.partition("@")
        if tree == "chain" or drafter != "ngram":
            found.setdefault(policy, []).append((name, drafter))
    for policy, some in found.items():
        usual = arms([drafter for _, drafter in some])
        yield policy, {own or name: path for name, (own, path) in zip(usual, some, strict=True)}


def page(title: str, rows: list[dict[str, Any]]) -> str:
    """Markdown: a table for each target, temperature and machine, of each drafter and tree its
    fastest K.
    """
    many = " or ".join(dict.fromkeys(str(row["n_prompts"]) for row in rows))
    lines = [
        f"# {title}",
        "",
        f"{source(rows)} {many} held-out prompts of a set, one at a time; "
        "of each tree the K with the largest measured speed-up over plain decoding. MBSU: tau / "
        "(1 + K bytes read by a draft call / bytes of a plain step). Intervals: 95%, over prompts.",
    ]
    several = len({row["machine"] for row in rows}) > 1
    where = itemgetter("on", "data", "temperature", "machine")
    for place in dict.fromkeys(map(where, rows)):
        on, data, temperature, machine = place
        here = [row for row in rows if where(row) == place]
        title = f"{on} ({here[0]['target']}), {data}, temperature {temperature:g}"
        lines += ["", f"## {title}{f', {machine}' * several}", ""]
        each = dict.fromkeys((row["what"], row["tree"]) for row in here)
        best = [max((r for r in here if (r["what"], r["tree"]) == a), key=speed) for a in each]
        lines += markdown(HEAD, list(map(cells, best)))
    return "\n".join(lines) + "\n"


def speed(row: dict[str, Any]) -> float:
    return float(row["speedup"])


def cells(row: dict[str, Any]) -> list[str]:
    """A row in words, in the order of HEAD."""
    low, high = row["tau_interval"]
    alpha = "-" if row["alpha"] is None else f"{row['alpha']:.3f}"
    numbers = [f"{row['tau']:.2f} [{low:.2f}, {high:.2f}]", alpha, f"{row['c']:.3f}"]
    low, high = row["speedup_interval"] or (float("nan"),) * 2
    numbers += [f"{row['mbsu']:.2f}", f"{row['speedup']:.2f} [{low:.2f}, {high:.2f}]"]
    same = row["identical"]
    agree = "-" if same is None else f"{same['same'] + same['excused']} of {same['total']}"
    return [
        row["what"],
        row["tree"],
        f"{row['K']:.3g}",
        *numbers,
        f"{row['ideal_speedup']:.2f}",
        agree,
    ]


if __name__ == "__main__":
    run_command(main, Table)
