"""Drafts of several sizes, each trained from scratch and measured along the way: rows to fit.

    python bench/evidence/scaling.py                 # what is left to do of the grid, then the page
    python bench/evidence/scaling.py seeds=1 sizes=1x64,1x128,2x128 options="steps=8 eval_every=2"

Every size is one run a seed of train/distill.py on the GSM8K pair, from random weights, on answers
of the target: its evaluations at several token counts are the points, so that five sizes at four
counts are five runs. The schedule is warm-up, then constant: under a decay only the last evaluation
would be of a finished run. Points of one run aren't independent; its seeds are. alpha and tau are
the run's own, over prompts held out from training. Tokens are those trained on, each epoch's anew.
Rows and page: <out>/scaling.*
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run
from draftsmith.command import parse, run_command
from draftsmith.decode.predict import scaling_laws as scaling
from draftsmith.models.draft_lm import load_draft
from draftsmith.train import distill
from draftsmith.train.run.recipe import gsm8k

# Of target-15m (8 layers of 384 in heads of 64): its feed-forward ratio, two heads a key-value one.
SIZES = "1x64,1x128,2x128,2x256,4x256,4x384"
RECIPE = (
    *("recipe=gsm8k/distill", "draft=", "loss=0.5*ce+0.5*fkl", "processes=1", "save_every=0"),
    *("schedule=constant", "warmup=20", "steps=800", "eval_every=100", "heldout.limit=64"),
)


@dataclass
class Grid:
    sizes: str = SIZES  # layers x hidden
    seeds: int = 3
    counts: str = "1,2,4,8"  # evaluations that become points, in units of eval_every
    options: str = ""  # more arguments for every run, space between them
    worker: int = 0  # this process's share of the runs
    workers: int = 1
    threads: int = 1
    trained: str = "runs/scaling"
    out: str = "docs/results"


def main(argv: list[str]) -> None:
    settings = parse(Grid, argv)
    torch.set_num_threads(settings.threads)
    # A size's seeds first: a grid that is broken off still has whole lines.
    grid = [(size, seed) for seed in range(settings.seeds) for size in settings.sizes.split(",")]
    for number, (size, seed) in enumerate(grid):
        if number % settings.workers == settings.worker:
            train(settings, size, seed)
    kept = [folder(settings, *place) / "rows.json" for place in grid]
    rows = [row for file in kept if file.exists() for row in json.loads(file.read_text())]
    for steps in {row["steps"] for row in rows}:
        # A seed's order packs the text a little differently: one count for all of so many steps.
        alike = [row for row in rows if row["steps"] == steps]
        tokens = round(mean(row["tokens"] for row in alike))
        for row in alike:
            row["tokens"] = tokens
    everything = Path(settings.trained) / "rows.json"
    everything.write_text(json.dumps(rows, indent=1))
    return scaling.main([f"results={everything}", f"out={settings.out}"])


def folder(settings: Grid, size: str, seed: int) -> Path:
    return Path(settings.trained) / f"{size}-{seed}"


def train(settings: Grid, size: str, seed: int) -> None:
    """One run, and the rows of its evaluations, unless they are there."""
    place = folder(settings, size, seed)
    if (place / "rows.json").exists():
        return
    need("target")
    need("answers")
    layers, hidden = map(int, size.split("x"))
    heads = max(1, hidden // 64)
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": -(-heads // 2)}
    sizes["intermediate"] = 64 * round(hidden * 1024 / 384 / 64)
    words = [f"draft.{name}={value}" for name, value in sizes.items()]
    line = [*RECIPE, *words, f"seed={seed}", f"out={place}", *settings.options.split()]
    distill.main(line)
    rows = rows_of(place, seed, [int(count) for count in settings.counts.split(",")])
    (place / "rows.json").write_text(json.dumps(rows))


def rows_of(place: Path, seed: int, counts: list[int]) -> list[dict[str, Any]]:
    """The counted evaluations of a finished run."""
    records = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    tokens, evaluated = 0, []
    for record in records:
        tokens += record.get("tokens", 0)
        if "eval_alpha" in record:
            evaluated.append(record | {"tokens": tokens, "steps": record["step"]})
    if max(counts) >= len(evaluated):
        raise ValueError(
            f"{place} has {len(evaluated) - 1} evaluations after its start, expected at least "
            f"{max(counts)} (counts=): train longer, or evaluate more often"
        )
    draft = load_draft(place / "drafter")
    size = draft.num_parameters()
    about = {"what": "0.5*ce+0.5*fkl", "target": gsm8k("target"), "data": "gsm8k/answers"}
    about |= {"seed": seed, "parameters": size, "layers": draft.config.num_hidden_layers}
    about |= {"non_embedding": size - draft.get_input_embeddings().weight.numel()}
    about |= {"hidden": draft.config.hidden_size, **about_run()}
    names = {"alpha": "eval_alpha", "tau": "eval_tau", "loss": "eval_loss"}
    return [
        about
        | {"tokens": evaluated[count]["tokens"], "steps": evaluated[count]["steps"]}
        | {name: evaluated[count][key] for name, key in names.items()}
        for count in counts
    ]


if __name__ == "__main__":
    run_command(main, Grid)
