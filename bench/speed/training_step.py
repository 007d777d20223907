"""One training step, ours against speculators': arms in processes of their own, and their rows.

Shapes are a bench's own; what it shares with the others is here.
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.bench.rows import lower, publish
from draftsmith.bench.speed.workers import Arm, resident, settings, synchronise

OURS, PEER = "draftsmith", "speculators, eager"
GOALS = {"MiB": 1 / 0.6, "s": 1.5}


def step(loss: Callable[[], Tensor], device: str) -> float:
    """Seconds of one forward and backward, adding to the gradients."""
    synchronise(device)
    start = time.perf_counter()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        value = loss()
    value.backward()
    synchronise(device)
    return time.perf_counter() - start


def work(loss: Callable[[], Tensor], device: str) -> None:
    """An arm's process, its inputs made: one step for each line on stdin."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far was that of the set-up
    base = resident(device, peak=False)
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = step(loss, device)
        peak = resident(device, peak=True) - base
        print(json.dumps({"seconds": seconds, "peak": peak}), flush=True)


def compare(args: Any, file: str, what: str, shape: str, documents: int) -> list[dict[str, Any]]:
    """Two rows, time and memory, on a row of so many packed documents. file: the bench, which is
    its own arm; shape: in words.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # of the arms
    arms = {
        name: Arm(file, *settings(args, worker=name, documents=documents)) for name in (OURS, PEER)
    }
    for arm in arms.values():
        assert arm.read() == "ready\n"
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for pair in range(1 + args.pairs):
        for name in list(arms)[:: 1 if pair % 2 else -1]:
            runs[name].append(arms[name].run())
    for arm in arms.values():
        arm.close()
    shape += f", {documents} document{'s' * (documents > 1)}, {args.device}"
    peaks = {name: [runs[name][-1]["peak"]] for name in arms}
    seconds = {name: [run["seconds"] for run in runs[name][1:]] for name in arms}
    rows = [
        lower(f"{what} step, time, {shape}", PEER, seconds[OURS], seconds[PEER], "s"),
        lower(f"{what} step, peak memory, {shape}", PEER, peaks[OURS], peaks[PEER], "MiB"),
    ]
    return [row | {"goal": GOALS[row["unit"]]} for row in rows]


def measure(args: Any, file: str, what: str, shape: str, loss: Callable[[str], Any]) -> None:
    """A bench: its rows for one packed document and four, or as an arm its steps. loss: of an arm;
    the rest as in `compare`. ValueError without speculators.
    """
    name = Path(file).stem
    if folder := os.environ.get("DRAFTSMITH_SPECULATORS"):
        sys.path.append(folder)
    if args.worker:
        work(loss(args.worker), args.device)
        return
    if importlib.util.find_spec("speculators") is None:
        reason = f"{what}'s step: speculators isn't importable; see bench/speed/eagle.py"
        os.makedirs(args.out, exist_ok=True)
        Path(args.out, f"{name}.txt").write_text(reason + "\n")  # gpu.py lists it as skipped
        raise ValueError(reason)
    rows = [row for count in (1, 4) for row in compare(args, file, what, shape, count)]
    publish(name, rows, Path(args.out))
    print("Both are better when lower; their ratio is theirs / ours.")
