"""Everything that needs a GPU, in one command under ten minutes; the most telling rows first.

    make gpu                 (CPU mode, toy shapes: make gpu GPU_FLAGS=device=cpu)

Correctness (the tests marked gpu), the rounds of an 8B shape and their goals (steps.py), how the
cost grows (cost.py), what a drafted token costs by its LM head (preview.py), the bounded losses, a
step of EAGLE-3 and of DFlash (eagle.py, blocks.py, where speculators is importable), distillation
of 1B from 8B (gkd.py, beside TRL where that is).
What would run past the limit is skipped and named. Needs torch, transformers, accelerate, rich,
pytest and triton; nothing is installed. Tables go to docs/results/gpu.*; a goal is met where the
ratio reaches it.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.bench.rows import markdown, save
from draftsmith.command import USERS_ERROR, parse, run_command
from draftsmith.models.disk.provenance import versions


@dataclass
class Gpu:
    """device=cpu runs the same parts on shapes that a laptop holds."""

    device: str = "cuda"
    out: str = "docs/results"
    limit_s: float = 540.0


def main(argv: list[str]) -> int:
    settings = parse(Gpu, argv)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("got no CUDA device: nothing measured; device=cpu tries the script here")
    started, rows, skipped, failed = time.monotonic(), [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, (arguments, share) in parts(settings, folder).items():
            left = settings.limit_s - (time.monotonic() - started)
            left = min(left, share * settings.limit_s)
            if left < 20:
                skipped.append(name)
                continue
            line = [sys.executable, *arguments]
            line += [f"limit_s={left - 15}"] if name == "steps" else []
            try:
                code = subprocess.run(line, timeout=left, check=False).returncode
            except subprocess.TimeoutExpired:
                code = int(name == "tests")  # unfinished tests have shown nothing
                skipped.append(f"the end of {name}")
            written, late = Path(folder, f"{name}.json"), Path(folder, f"{name}.txt")
            lacks = code == USERS_ERROR and late.exists()  # a peer, and says so
            failed += [name] if code and not lacks else []
            rows += json.loads(written.read_text()) if written.exists() else []
            skipped += late.read_text().splitlines() if late.exists() else []
    report(settings, rows, skipped, failed)
    return 1 if failed else 0


def parts(settings: Gpu, folder: str) -> dict[str, tuple[list[str], float]]:
    """Name -> the arguments of its Python, and the most of the limit that it may take."""
    here, toy = Path(__file__).parent, settings.device == "cpu"
    common = [f"device={settings.device}", f"out={folder}"]
    shapes = ["target=toy", "draft=toy", "repeats=5"] if toy else ["target=8B", "draft=EAGLE"]
    losses = ["--device", settings.device, "--out", folder]
    losses += (
        ["--quick", "--losses", "fkl", "--rows", "64", "--vocabulary", "2000", "--hidden", "16"]
        if toy
        else []
    )
    eagle = ["--device", settings.device, "--out", folder]
    if toy:
        eagle += ["--hidden", "64", "--vocabulary", "512", "--draft", "128", "--length", "64"]
    blocks = ["--device", settings.device, "--out", folder]
    if toy:
        blocks += ["--hidden", "64", "--vocabulary", "512", "--anchors", "4", "--length", "64"]
    sizes = "64 128 2 1 2 997" if toy else "4096 14336 32 8 32 128256"
    names = ("hidden", "intermediate", "heads", "kv_heads", "layers", "vocab")
    preview = [f"{name}={size}" for name, size in zip(names, sizes.split(), strict=True)]
    preview += ["sizes=300", "ranks=32", "context=64", "turns=1"] if toy else ["ranks=256,512"]
    gkd = ["tiny=true", "pairs=1", "case=vocabulary 4k"] if toy else ["pairs=3"]
    return {
        "tests": (["-m", "pytest", "-q", "-x", "-m", "gpu", "tests/decode/test_gpu.py"], 0.3),
        "steps": ([str(here / "steps.py"), *common], 0.1 if toy else 0.6),
        "cost": ([str(here / "cost.py"), *common, *shapes], 0.2),
        "preview": ([str(here / "preview.py"), *common, *preview], 0.15),
        "losses": ([str(here / "losses.py"), *losses], 0.2),
        "eagle": ([str(here / "eagle.py"), *eagle], 0.2),
        "blocks": ([str(here / "blocks.py"), *blocks], 0.2),
        "gkd": ([str(here / "gkd.py"), *common, *gkd], 0.2),
    }


def report(
    settings: Gpu, rows: list[dict[str, Any]], skipped: list[str], failed: list[str]
) -> None:
    """gpu.json and its page; of CPU mode gpu-cpu-mode.*, whose goals are not judged."""
    judged = settings.device == "cuda"
    table = []
    for r in [r for r in rows if "goal" in r]:
        verdict = ("met" if r["ratio"] >= r["goal"] else "MISSED") if judged else "not judged"
        what = f"{r['what']} / {r['peer']}"
        table.append([what, f"{r['ratio']:.2f}", f"{r['goal']:.2f}", verdict])
    about = [
        f"{', '.join(f'{k} {v}' for k, v in versions().items())}.",
        f"Failed: {', '.join(failed) or 'none'}. Skipped: {'; '.join(skipped) or 'none'}.",
        "",
        *markdown(["goal", "ratio", "wanted", "verdict"], table),
        "",
    ]
    name = "gpu" if judged else "gpu-cpu-mode"
    save(name, rows, Path(settings.out), about="\n".join(about))
    print("\n".join([*about[1:], f"{len(rows)} rows: {Path(settings.out, name)}.json and .md"]))


if __name__ == "__main__":
    run_command(main, Gpu)
