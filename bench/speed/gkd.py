"""Distillation against TRL's GKDTrainer: the same pair, rows, loss, optimizer and dtype.

    python bench/speed/gkd.py                     # two cores, small models; four minutes
    python bench/speed/gkd.py device=cuda         # a draft of 1B for a target of 8B

TRL 1.16 must be importable, or be in the folder that the variable DRAFTSMITH_TRL names (pip install
--no-deps --target FOLDER trl). Both run their own loops on the same rows in the same order, theirs
with its own collator: forward KL (beta=0) at temperature 1, AdamW, clipping at 1, bf16 autocast
(the default of both), no dropout, no accumulation, no logging; on-policy, sampled answers of at
most as many tokens to the same prompts. Unless told not to, GKDTrainer checkpoints activations, and
then generates without a KV cache: the peer is told not to; "defaults" is what it does untold.

Each arm is a process that times whole steps, from the beginning of one to that of the next; arms
take turns (on CUDA one runs after the other), the order swapped from pair to pair, after a turn
that isn't counted. With "identical batches" the losses of the first step must agree; "packed" is
what our recipes do, "cached states" what they can do too: the target's states are on disk, put
there before. Memory is the most that an arm held beyond what it held before its first step, when
both have the same models.

MFU: 2 flops a weight and trained token for the target and 6 for the draft, without embeddings and
without attention's own products, a second; over the device's peak in bf16.
"""

import importlib.util
import os
import statistics
import sys
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from draftsmith.bench.rows import lower, publish, row
from draftsmith.bench.speed.device import LLAMA_8B
from draftsmith.bench.speed.gkd_arms import (
    CACHED,
    DEFAULTS,
    IDENTICAL,
    PACKED,
    PEER,
    Bench,
    Case,
    Shape,
    work,
)
from draftsmith.bench.speed.workers import Arm
from draftsmith.command import parse, run_command

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # bf16 flops a second, dense
Runs = dict[str, list[dict[str, float]]]


def written(case: Case, *arms: str) -> Case:
    """The same on-policy."""
    return replace(case, arms=(*case.arms[:2], *arms), length=1024, on_policy=1.0, steps=1, goal=3)


SMALL_ARMS = (PEER, IDENTICAL, PACKED, CACHED)
SMALL = Case((8, 384, 1024, 6, 3, 4096), (2, 192, 512, 4, 2, 4096), SMALL_ARMS)
WIDE = Case((2, 256, 688, 4, 2, 131_072), (1, 128, 352, 4, 2, 131_072), batch=2, length=256)
BIG = Case(LLAMA_8B, (16, 2048, 8192, 32, 8, 128_256), length=2048)
CASES = {
    "cpu": {
        "vocabulary 4k": SMALL,
        "vocabulary 128k": WIDE,
        "on-policy": written(replace(SMALL, target=(6, 256, 688, 4, 2, 4096)), DEFAULTS),
    },
    "cuda": {"8B <- 1B": BIG, "8B <- 1B, on-policy": written(replace(BIG, batch=16))},
}
TINY = {"target": (1, 32, 64, 2, 1, 640), "draft": (1, 16, 32, 2, 1, 640), "batch": 2, "answer": 8}


def weights(shape: Shape) -> int:
    """Elements of the matrices that a token is multiplied by."""
    layers, hidden, intermediate, heads, kv_heads, vocab = shape
    width = hidden // heads
    attention = 2 * hidden * width * (heads + kv_heads)
    return layers * (attention + 3 * hidden * intermediate) + hidden * vocab


def measure(settings: Bench, name: str, case: Case, arms: list[str]) -> Runs:
    """The turns of each arm but the first; without those of a peer that died on the way."""
    fields = ("device", "pairs", "dtype", "tiny")
    flags = [f"{field}={getattr(settings, field)}" for field in fields]
    runs: Runs = {arm: [] for arm in arms}
    for group in [arms] if settings.device == "cpu" else [[arm] for arm in arms]:
        processes = {arm: Arm(__file__, *flags, f"case={name}", f"arm={arm}") for arm in group}
        try:
            for process in processes.values():
                assert process.read() == "ready\n"
            for pair in range(1 + settings.pairs):
                for arm in group[:: 1 if pair % 2 else -1]:
                    runs[arm].append(processes[arm].run())
        except RuntimeError:
            if group != [PEER]:
                raise
            del runs[PEER]
            print(f"{name}: {PEER} died, of too little memory perhaps; see above")
        for process in processes.values():
            process.close()
    if PEER in runs and not case.on_policy:
        losses = [runs[arm][0]["loss"] for arm in (IDENTICAL, PEER)]
        near = 1e-3 if settings.dtype == "float32" else 2e-2
        assert abs(losses[0] / losses[1] - 1) < near, f"the first losses are {losses}"
    return {arm: turns[1:] for arm, turns in runs.items()}


def rates(runs: list[dict[str, float]], of: str) -> list[float]:
    return [run[of] / run["seconds"] for run in runs]


def compare(case: Case, runs: Runs, about: str) -> list[dict[str, Any]]:
    """Ours against theirs: trained tokens and steps a second, peak memory."""
    rows = []
    for peer, arm in product((PEER, DEFAULTS), (IDENTICAL, PACKED, CACHED)):
        if peer not in runs or arm not in runs:
            continue
        what = f"{about}, {'same prompts' if case.on_policy else arm}"
        tokens = [rates(runs[a], "tokens") for a in (arm, peer)]
        rows.append(row(what, peer, *tokens, "tokens/s") | {"goal": case.goal})
        if (peer, arm) == (PEER, IDENTICAL):
            steps = [rates(runs[a], "steps") for a in (arm, peer)]
            peaks = [[runs[a][-1]["peak"]] for a in (arm, peer)]
            rows.append(row(what, peer, *steps, "steps/s"))
            memory = lower(f"{what}, peak memory", peer, *peaks, "MiB")
            wide = case.target[-1] > 100_000
            rows.append(memory | ({"goal": 3.0} if wide and not case.on_policy else {}))
    return rows


def utilisation(case: Case, runs: Runs, about: str) -> list[dict[str, Any]]:
    """MFU, with our tokens a second beside it; of devices whose peak is known."""
    device = torch.cuda.get_device_name()
    peak = next((flops / 1e12 for name, flops in PEAKS.items() if name in device), None)
    if peak is None or case.on_policy:
        return []
    tokens = rates(runs[IDENTICAL], "tokens")
    used = [rate * (2 * weights(case.target) + 6 * weights(case.draft)) / 1e12 for rate in tokens]
    found = row(f"MFU, {about}", f"peak of {device}", used, [peak] * len(used), "TFLOP/s")
    return [found | {"goal": 0.4, "tokens_per_s": statistics.median(tokens)}]


def main(argv: list[str]) -> None:
    settings = parse(Bench, argv)
    cases = CASES[settings.device]
    if settings.tiny:
        cases = {name: replace(case, **TINY) for name, case in cases.items()}
    if folder := os.environ.get("DRAFTSMITH_TRL"):
        sys.path.append(folder)  # last: ours win where both have a package
    if settings.arm:
        warnings.simplefilter("ignore")
        work(settings, cases[settings.case])
        return
    out, rows, cuda = Path(settings.out), [], settings.device == "cuda"
    out.mkdir(parents=True, exist_ok=True)
    missing = importlib.util.find_spec("trl") is None
    if missing:
        reason = "distillation against GKDTrainer: trl isn't importable; see bench/speed/gkd.py"
        (out / "gkd.txt").write_text(reason + "\n")  # gpu.py lists it as skipped
        if not cuda:
            raise ValueError(reason)
        print(reason)
    for name, case in cases.items():
        arms = [a for a in case.arms if not (missing and a in (PEER, DEFAULTS))]
        if settings.case not in ("", name):
            continue
        runs = measure(settings, name, case, arms)
        about = f"{name}, {settings.dtype} {settings.device}"
        rows += compare(case, runs, about) + (utilisation(case, runs, about) if cuda else [])
        publish("gkd", rows, out)


if __name__ == "__main__":
    run_command(main, Bench)
