"""Training on two processes against one, a thread each, on batches of the same size.

    python bench/ranks.py           # a minute; two cores

Both are train/distill.py under `accelerate launch`, as recipes/accelerate has it, on the same text
with the same total batch. A step's time is what its record says, from the fetching of a batch to
the optimizer's step; the first ones aren't counted. The processes take turns. On a machine with
fewer free cores than processes the ratio says nothing about the code.
"""

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from gkd_arms import random_lm
from rows import publish, row

from draftsmith.decode.arguments import parse
from draftsmith.models.tokenizer import stand_in_tokenizer

ROOT = Path(__file__).parents[1]
CONFIGS = {1: "cpu", 2: "cpu_ddp2"}  # by the number of processes
WARM = 3  # steps
PIECE = 600  # characters


@dataclass
class Ranks:
    out: str = "runs/bench"
    pairs: int = 2
    steps: int = 13
    batch: int = 8  # of all processes together
    length: int = 256


def prepare(folder: Path) -> None:
    """A random target of the quickstart's shape with a tokenizer, and text."""
    tokenizer = stand_in_tokenizer()
    shape = (6, 256, 688, 4, 2, len(tokenizer))
    random_lm(shape, "cpu", torch.bfloat16, 0).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    text = "".join(map(inspect.getsource, (argparse, inspect, json, statistics, subprocess)))
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    lines = [json.dumps({"text": piece}) for piece in pieces]
    (folder / "text.jsonl").write_text("\n".join(lines))


def tokens_per_second(settings: Ranks, folder: Path, ranks: int) -> float:
    out = Path(tempfile.mkdtemp(dir=folder))
    overrides = {
        "out": out,
        "target.path": folder / "target",
        "draft": "",
        "data": folder / "text.jsonl",
        "steps": settings.steps,
        "batch_size": settings.batch // ranks,
        "max_length": settings.length,
        "warmup": 0,
        "eval_every": 0,
        "save_every": 0,
        "heldout_prompts": 1,
        "max_new_tokens": 2,
        "processes": ranks,
    }
    config = ROOT / f"recipes/accelerate/{CONFIGS[ranks]}.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    recipe = ["train/distill.py", "recipe=quickstart/distill"]
    command = [*launch, *recipe, *(f"{key}={value}" for key, value in overrides.items())]
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{ranks} processes ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    counted = [r for r in records if r["step"] > WARM]
    return sum(r["tokens"] for r in counted) / sum(r["seconds"] for r in counted)


def main(argv: list[str]) -> None:
    settings = parse(Ranks, argv)
    found: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for pair in range(settings.pairs):
            for ranks in list(found)[:: 1 if pair % 2 else -1]:
                found[ranks].append(tokens_per_second(settings, Path(folder), ranks))
    what = f"two processes, a thread each, {os.cpu_count()} cores, batch {settings.batch}"
    both = row(what, "one process, a thread", found[2], found[1], "tokens/s")
    publish("ranks", [both | {"goal": 1.6}], Path(settings.out))


if __name__ == "__main__":
    main(sys.argv[1:])
