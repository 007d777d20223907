"""Every kind of head on one target: tau over seeds, at equal tree size and at equal draft time.

    python bench/evidence/heads.py                    # trains what isn't trained yet, then measures
    python bench/evidence/heads.py kinds=medusa,eagle3 seeds=1 prompts=8 out=runs/heads/try

The heads are trained by their gsm8k recipes, on the same answers of the same target
(recipe=gsm8k/prepare), one run a seed. Held-out prompts are then decoded with four draft calls, as
chains, a static tree and dynamic trees of as many nodes as it, at temperature 0 and 1; and with
chains of every depth (first seed), of which the deepest counts that is drafted as fast as four
tokens of the last kind. What was measured is kept beside each run. Rows and page: <out>/heads.*
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from draftsmith.bench.evidence import head_page
from draftsmith.bench.reproduce import need
from draftsmith.bench.rows import about_run, write_table
from draftsmith.bench.speed.workers import launch
from draftsmith.command import parse, run_command
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.metrics import (
    acceptance_by_position,
    block_efficiency,
    ratio_interval,
)
from draftsmith.decode.policies.timing import isolated_times
from draftsmith.decode.prompts.prompts import load_prompts
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.train.run.recipe import gsm8k

Kinds = dict[str, tuple[str, ...]]  # what is compared: its entry, its recipe, more arguments
Trees = dict[str, tuple[str, int]]  # how they decode: a tree, and its depth
KINDS: Kinds = {
    "medusa": ("heads", "medusa/gsm8k"),
    "hydra": ("heads", "hydra/gsm8k"),
    "hydra++": ("heads", "hydra/gsm8k-plus"),
    "eagle1": ("eagle", "eagle1/gsm8k"),
    "eagle3": ("eagle", "eagle3/gsm8k"),
}
# Four levels each; the trees with 24 nodes, the root included.
TREES = {
    "chain": "chain",
    "static": "eagle-25",
    "dynamic": "dynamic:4,8,24",
    "dynamic, sharpness 2": "dynamic:4,8,24,2",
}
DEPTH = 4


@dataclass
class Heads:
    target: str = field(default_factory=lambda: gsm8k("target"))
    data: str = field(default_factory=lambda: gsm8k("data"))
    kinds: str = ",".join(KINDS)
    seeds: int = 3
    prompts: int = 24
    max_new_tokens: int = 64
    batch_size: int = 24
    deepest: int = 5  # chain that is tried for equal draft time, with the first seed
    threads: int = 1
    trained: str = "runs/heads"  # the runs, <what>-<seed> each
    options: str = ""  # more arguments for the training entries, space between them
    out: str = "docs/results"


def main(argv: list[str]) -> None:
    settings = parse(Heads, argv)
    kinds = settings.kinds.split(",")
    rows = trained_and_measured(settings, {what: KINDS[what] for what in kinds}, trees)
    write_table(Path(settings.out), "heads", rows, head_page.page(rows))
    print(head_page.page(rows))


def trees(settings: Heads, levels: int, seed: int) -> Trees:
    """Every tree, and with the first seed chains of every depth."""
    found = {tree: (plan, min(DEPTH, levels)) for tree, plan in TREES.items()}
    deepest = min(settings.deepest, levels) if seed == 0 else 0
    return found | {f"chain {K}": ("chain", K) for K in range(1, deepest + 1)}


def trained_and_measured(
    settings: Heads, kinds: Kinds, trees: Callable[[Any, int, int], Trees]
) -> list[dict[str, Any]]:
    """The rows of all kinds and seeds; what has been trained or measured is kept and read. trees:
    how (settings, levels of the drafter, seed) are decoded.
    """
    for seed in range(settings.seeds):
        for what, recipe in kinds.items():
            train(settings, what, seed, recipe)
    torch.set_num_threads(settings.threads)
    target, tokenizer = load_target(TargetSpec(settings.target, dtype="bfloat16"), "cpu")
    asked = load_prompts(settings.data, tokenizer, limit=settings.prompts)
    prompts = [prompt.tokens for prompt in asked]
    rows: list[dict[str, Any]] = []
    pairs = [(what, seed) for what in kinds for seed in range(settings.seeds)]
    for what, seed in track(pairs, "decoding"):
        kept = folder(settings, what, seed).with_name(f"measured-{asked_for(settings)}.json")
        if not kept.exists():
            drafter = load_drafter(str(folder(settings, what, seed)), target, tokenizer)
            assert drafter is not None
            about = {"what": what, "target": settings.target, "data": settings.data, "seed": seed}
            about |= trained_by(settings, what, seed) | about_run()
            model = getattr(drafter, "head", None) or drafter.runner.model
            about |= {"parameters": sum(p.numel() for p in model.parameters())}
            arms = trees(settings, drafter.levels, seed)
            found = measured(settings, arms, target, tokenizer, drafter, prompts)
            kept.write_text(json.dumps([about | row for row in found]))
        rows += json.loads(kept.read_text())
    return rows


def asked_for(settings: Heads) -> str:
    """What a measurement is a function of, beside the head: it is kept under this name."""
    parts = (settings.prompts, settings.max_new_tokens, settings.batch_size, settings.deepest)
    return "-".join(map(str, parts))


def folder(settings: Heads, what: str, seed: int) -> Path:
    """The drafter folder of a run."""
    return Path(settings.trained) / f"{what}-{seed}" / "drafter"


def train(settings: Heads, what: str, seed: int, recipe: tuple[str, ...]) -> None:
    """Run the recipe with this seed; a finished run is left as it is."""
    out = folder(settings, what, seed).parent
    if (out / "drafter" / "draftsmith.json").exists():
        return
    need("target", settings.target)
    need("answers")
    entry, name, *more = recipe
    given = [f"recipe={name}", f"seed={seed}", f"out={out}", f"target.path={settings.target}"]
    given += [f"heldout.prompts={settings.data}", *more]
    launch(entry, *given, *settings.options.split())


def trained_by(settings: Heads, what: str, seed: int) -> dict[str, Any]:
    """What the run says of itself."""
    meta = json.loads((folder(settings, what, seed) / "draftsmith.json").read_text())
    made = {"steps": None, "argv": None} | meta["provenance"]
    records = (folder(settings, what, seed).parent / "metrics.jsonl").read_text().splitlines()
    seconds = sum(json.loads(record).get("seconds", 0.0) for record in records)
    found = {"steps": made["steps"], "recipe": made["recipe"], "argv": made["argv"]}
    return found | {"train_seconds": seconds}


def measured(
    settings: Heads,
    arms: Trees,
    target: Any,
    tokenizer: Any,
    drafter: Drafter,
    prompts: list[list[int]],
) -> list[dict[str, Any]]:
    """The rows of one drafter: every tree at two temperatures."""
    rows = []
    for tree, (plan, K) in arms.items():
        options: dict[str, Any] = {"K": K, "tree": plan, "batch_size": settings.batch_size}
        decoder = Decoder(target, tokenizer, drafter, **options)
        cost = costs(decoder, drafter)
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature, max_new_tokens=settings.max_new_tokens)
            row = decoded(decoder.generate(prompts, params))
            row |= {"tree": tree, "temperature": temperature, **cost}
            row["max_new_tokens"] = settings.max_new_tokens
            rows.append(row)
    return rows


def costs(decoder: Decoder, drafter: Drafter) -> dict[str, Any]:
    """What a round's drafting costs alone, at batch 1: the median of isolated calls."""
    plan, times = decoder.settings.plan, times_of(decoder, drafter)
    draft = plan.levels * times["draft"] + (times["extend"] or 0.0)
    sizes = {"K": plan.levels, "N": plan.nodes}
    return sizes | {"draft_ms": 1e3 * draft, "c": times["draft"] / times["plain"]}


def times_of(decoder: Decoder, drafter: Drafter, batch: int = 1) -> dict[str, Any]:
    """Of its plan, in the middle of a GSM8K answer: see `isolated_times`."""
    plan = decoder.settings.plan
    at = {"batch": batch, "context": 160, "prompt": 96, "nodes": plan.nodes}
    return isolated_times(decoder.runner, drafter, plan, **at)


def decoded(done: list[Completion]) -> dict[str, Any]:
    """tau of one setting, with its interval over prompts."""
    counters = [completion.counters for completion in done]
    emitted, rounds = [c.emitted for c in counters], [c.rounds for c in counters]
    return {
        "tau": block_efficiency(counters),
        "tau_interval": ratio_interval(emitted, rounds),
        "acceptance_conditional": acceptance_by_position(counters)[1],
        "n_prompts": len(done),
        "emitted": emitted,
        "rounds": rounds,
    }


if __name__ == "__main__":
    run_command(main, Heads)
