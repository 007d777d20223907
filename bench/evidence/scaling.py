"""Drafts of several sizes, each trained and measured along the way: rows to fit.

    python bench/evidence/scaling.py                 # what is left to do of the grid, then the page
    python bench/evidence/scaling.py seeds=1 sizes=1x64,1x128,2x128 options="steps=8 eval_every=2"
    python bench/evidence/scaling.py family=block    # our block drafter: sizes are layers

Every size is one run a seed on the GSM8K pair, on answers of the target: draft LMs from random
weights by train/distill.py, block drafters by train/blocks.py as their recipe begins them. A run's
evaluations at several token counts are the points, so that five sizes at four counts are five runs.
The schedule is warm-up, then constant: under a decay only the last evaluation would be of a
finished run. Points of one run aren't independent; its seeds are. alpha and tau are the run's own,
over prompts held out from training. Tokens are those trained on, each epoch's anew. `costs`: what a
round of a chain of K takes in plain steps, by isolated forwards, for 1 to 64 rows. Rows and page:
<out>/<name>.*
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from draftsmith.bench.evidence.heads import times_of
from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run
from draftsmith.command import check_one_of, parse, run_command
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.predict import scaling_laws as scaling
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.train import blocks, distill
from draftsmith.train.run.recipe import gsm8k


class Family(NamedTuple):
    """What is trained: its entry and recipe, its name in rows, the sizes tried, words of one."""

    main: Callable[[list[str]], None]
    recipe: tuple[str, ...]
    what: str
    sizes: str
    words: Callable[[str], list[str]]


def draft_words(size: str) -> list[str]:
    """layers x hidden, as target-15m has them (8 x 384 in heads of 64): its feed-forward ratio, two
    heads a key-value one.
    """
    layers, hidden = map(int, size.split("x"))
    heads = max(1, hidden // 64)
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": -(-heads // 2)}
    sizes["intermediate"] = 64 * round(hidden * 1024 / 384 / 64)
    return [f"draft.{name}={value}" for name, value in sizes.items()]


def block_words(layers: str) -> list[str]:
    return [f"head.layers={layers}"]


CONSTANT = ("schedule=constant", "warmup=20", "processes=1", "save_every=0")
DRAFT = ("recipe=gsm8k/distill", "draft=", "loss=0.5*ce+0.5*fkl", *CONSTANT)
DRAFT += ("steps=800", "eval_every=100", "heldout.limit=64")
BLOCK = ("recipe=block/gsm8k", "batch_size=2", *CONSTANT)
BLOCK += ("steps=200", "eval_every=25", "heldout.limit=64", "heldout.max_new_tokens=64")
SIZES = "1x64,1x128,2x128,2x256,4x256,4x384"
FAMILIES = {
    "draft": Family(distill.main, DRAFT, "0.5*ce+0.5*fkl", SIZES, draft_words),
    "block": Family(blocks.main, BLOCK, "block", "1,2,4", block_words),
}
BATCHES = 1, 4, 16, 64


@dataclass
class Grid:
    family: str = "draft"  # draft | block
    sizes: str = ""  # layers x hidden of draft LMs, layers of blocks; empty: the family's
    seeds: int = 3
    counts: str = "1,2,4,8"  # evaluations that become points, in units of eval_every
    options: str = ""  # more arguments for every run, space between them
    worker: int = 0  # this process's share of the runs
    workers: int = 1
    threads: int = 1
    trained: str = "runs/scaling"
    out: str = "docs/results"
    name: str = "scaling"


def main(argv: list[str]) -> None:
    settings = parse(Grid, argv)
    check_one_of("family", settings.family, FAMILIES)
    settings.sizes = settings.sizes or FAMILIES[settings.family].sizes
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
    words = {"results": everything, "out": settings.out, "name": settings.name}
    return scaling.main([f"{name}={value}" for name, value in words.items()])


def folder(settings: Grid, size: str, seed: int) -> Path:
    return Path(settings.trained) / f"{size}-{seed}"


def train(settings: Grid, size: str, seed: int) -> None:
    """One run, and the rows of its evaluations, unless they are there."""
    place = folder(settings, size, seed)
    if (place / "rows.json").exists():
        return
    need("target")
    need("answers")
    family = FAMILIES[settings.family]
    words = [*family.recipe, *family.words(size), f"seed={seed}", f"out={place}"]
    family.main([*words, *settings.options.split()])
    counts = [int(count) for count in settings.counts.split(",")]
    (place / "rows.json").write_text(json.dumps(rows_of(place, family.what, seed, counts)))


def rows_of(place: Path, what: str, seed: int, counts: list[int]) -> list[dict[str, Any]]:
    """The counted evaluations of a finished run."""
    records = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    tokens, seconds, evaluated = 0, 0.0, []
    for record in records:
        tokens += record.get("tokens", 0)
        seconds += record.get("seconds", 0.0)
        if "eval_tau" in record:
            so_far = {"tokens": tokens, "seconds": seconds, "steps": record["step"]}
            evaluated.append(record | so_far)
    if max(counts) >= len(evaluated):
        raise ValueError(
            f"{place} has {len(evaluated) - 1} evaluations after its start, expected at least "
            f"{max(counts)} (counts=): train longer, or evaluate more often"
        )
    about = {"what": what, "target": gsm8k("target"), "data": "gsm8k/answers", "seed": seed}
    about |= {"size": place.name.rpartition("-")[0]} | measured(place / "drafter") | about_run()
    # A block drafter's evaluation tells alpha by depth.
    alpha = "eval_alpha" if "eval_alpha" in evaluated[0] else "eval_alpha_0"
    names = {"alpha": alpha, "tau": "eval_tau", "loss": "eval_loss"}
    return [
        about
        | {name: evaluated[count][name] for name in ("tokens", "seconds", "steps")}
        | {name: evaluated[count][key] for name, key in names.items()}
        for count in counts
    ]


def measured(drafter: Path) -> dict[str, Any]:
    """A drafter's size, and what a round of its chain takes in plain steps, by rows at once."""
    target, tokenizer = load_target(TargetSpec(gsm8k("target"), dtype="bfloat16"), "cpu")
    draft = load_drafter(str(drafter), target, tokenizer)
    assert draft is not None
    model = draft.head if draft.taps else draft.runner.model
    size = sum(weight.numel() for weight in model.parameters())
    found: dict[str, Any] = {"parameters": size}
    if not draft.taps:
        found["non_embedding"] = size - model.get_input_embeddings().weight.numel()
    costs = {}
    for batch in BATCHES:
        decoder = Decoder(target, tokenizer, draft, K=min(5, draft.levels), batch_size=batch)
        plan, times = decoder.settings.plan, times_of(decoder, draft, batch)
        round_ = times["verify"] + plan.levels * times["draft"] + (times["extend"] or 0.0)
        costs[str(batch)] = round_ / times["plain"]
    return found | {"K": plan.levels, "costs": costs}


if __name__ == "__main__":
    run_command(main, Grid)
