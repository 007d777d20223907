"""Training on two processes against one, a thread each.

    python bench/speed/ranks.py           # five minutes; two cores with nothing else to do

All are train/distill.py under `accelerate launch`, as recipes/accelerate has it, on the same text:
two processes that share the batch of the one, two with a batch of that size each, and, to see what
the machine can give at all, two that know nothing of each other. A step's time is what its record
says, from the fetching of a batch to the optimizer's step; the first ones aren't counted. The arms
take turns. On a machine with fewer free cores than processes a ratio says nothing about the code.
"""

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.bench.rows import publish, row
from draftsmith.bench.speed.gkd_arms import random_lm
from draftsmith.command import parse, run_command
from draftsmith.models.tokenizer import stand_in_tokenizer

ROOT = Path(__file__).parents[2]
CONFIGS = {1: "cpu", 2: "cpu_ddp2"}  # by the number of processes
WARM = 3  # steps
PIECE = 600  # characters


@dataclass
class Ranks:
    out: str = "runs/bench"
    pairs: int = 5
    steps: int = 13
    batch: int = 8  # sequences a step
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


def tokens_per_second(settings: Ranks, folder: Path, ranks: int, batch: int) -> float:
    """Of a training on so many processes, `batch` sequences a step on each."""
    out = Path(tempfile.mkdtemp(dir=folder))
    overrides = {
        "out": out,
        "target.path": folder / "target",
        "draft": "",
        "data": folder / "text.jsonl",
        "steps": settings.steps,
        "batch_size": batch,
        "text.max_length": settings.length,
        "warmup": 0,
        "eval_every": 0,
        "save_every": 0,
        "heldout.limit": 1,
        "heldout.max_new_tokens": 2,
        "processes": ranks,
    }
    config = ROOT / f"recipes/accelerate/{CONFIGS[ranks]}.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    recipe = ["train/distill.py", "recipe=quickstart/distill"]
    line = [*launch, *recipe, *(f"{key}={value}" for key, value in overrides.items())]
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        line, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{ranks} processes ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    counted = [r for r in records if r["step"] > WARM]
    return sum(r["tokens"] for r in counted) / sum(r["seconds"] for r in counted)


def strangers(settings: Ranks, folder: Path) -> float:
    """Of two trainings at the same time, each on half of the batch."""
    with ThreadPoolExecutor(2) as pool:
        half = settings.batch // 2
        runs = [pool.submit(tokens_per_second, settings, folder, 1, half) for _ in range(2)]
        return sum(run.result() for run in runs)


def main(argv: list[str]) -> None:
    settings = parse(Ranks, argv)
    batch = settings.batch
    arms: dict[str, Callable[[Path], float]] = {
        "one": lambda folder: tokens_per_second(settings, folder, 1, batch),
        f"two processes, batch {batch // 2} each": lambda folder: tokens_per_second(
            settings, folder, 2, batch // 2
        ),
        f"two processes, batch {batch} each": lambda folder: tokens_per_second(
            settings, folder, 2, batch
        ),
        f"two trainings of their own, batch {batch // 2} each": lambda folder: strangers(
            settings, folder
        ),
    }
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for pair in range(settings.pairs):
            for arm in list(arms)[:: 1 if pair % 2 else -1]:
                found[arm].append(arms[arm](Path(folder)))
    one = found.pop("one")
    peer = f"one process, batch {batch}"
    rows = [row(arm, peer, values, one, "tokens/s") for arm, values in found.items()]
    publish("ranks", rows, Path(settings.out), about="A thread each.")


if __name__ == "__main__":
    run_command(main, Ranks)
