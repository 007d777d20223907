"""Everything that needs a GPU, in one command under ten minutes; the most telling rows first.

    make gpu                 (CPU mode, for trying the script: make gpu GPU_FLAGS=device=cpu)

Correctness (the tests marked gpu), then decoding against transformers' `generate` on a pair of
published shapes with random weights, then the bounded loss against the naive one. Tables go to
docs/results/gpu.json and gpu.md with commit, command and machine. A part that would run past the
time limit is skipped and named. Needs torch, transformers, rich and pytest, nothing installed.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from draftsmith.decode.arguments import parse
from draftsmith.models.draft_lm import draft_from_config
from draftsmith.models.provenance import git_commit, versions
from draftsmith.models.tokenizer import stand_in_tokenizer


@dataclass
class Gpu:
    """device=cpu runs the same parts on shapes that a laptop holds."""

    device: str = "cuda"
    out: str = "docs/results"
    limit_s: float = 540.0


def main(argv: list[str]) -> int:
    settings = parse(Gpu, argv)
    if settings.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing measured. `device=cpu` tries the script on this machine.")
        return 2
    started, rows, skipped, failed = time.monotonic(), [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, command in parts(settings, Path(folder)).items():
            left = settings.limit_s - (time.monotonic() - started)
            if left < 30:
                skipped.append(name)
                continue
            try:
                code = subprocess.run(command(), timeout=left, check=False).returncode
            except subprocess.TimeoutExpired:
                skipped.append(name)
                continue
            if code:
                failed.append(name)
            written = Path(folder) / f"{name}.json"
            if written.exists():
                rows += json.loads(written.read_text())
    write(settings, rows, skipped, failed, time.monotonic() - started)
    return 1 if failed else 0


def parts(settings: Gpu, folder: Path) -> dict[str, Any]:
    """Name -> a function that gives the command; models are made only when their turn comes."""
    here = Path(__file__).parent
    python = [sys.executable]
    small = settings.device == "cpu"

    def generation() -> list[str]:
        target, drafter = make_pair(folder, small=small)
        dataset = folder / "prompts.txt"
        dataset.write_text("\n".join(f"prompt {i} " * 40 for i in range(6)))
        where = [f"target={target}", f"drafter={drafter}", f"prompts={dataset}", f"out={folder}"]
        size = ["limit=2", "max_new_tokens=32"] if small else ["limit=4", "max_new_tokens=128"]
        return [*python, str(here / "generation.py"), *where, *size, f"device={settings.device}"]

    def losses() -> list[str]:
        flags = ["--device", settings.device, "--out", str(folder)]
        return [*python, str(here / "losses.py"), *flags, *(["--quick"] if small else [])]

    return {
        "tests": lambda: [*python, "-m", "pytest", "-q", "-m", "gpu", "tests/test_gpu.py"],
        "generation": generation,
        "losses": losses,
    }


def make_pair(folder: Path, *, small: bool) -> tuple[Path, Path]:
    """A random target of Llama-3.2-1B's shape and a draft of two of its layers (small: a toy),
    saved as plain folders. Their acceptance means nothing; their cost is that of the shape.
    """
    tokenizer = stand_in_tokenizer()
    config = LlamaConfig(vocab_size=128_256, max_position_embeddings=8_192, rms_norm_eps=1e-5)
    shape = {"layers": 16, "hidden": 2_048, "heads": 32, "kv_heads": 8, "intermediate": 8_192}
    if small:
        config.vocab_size = 1_024
        shape = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 256}
    paths = []
    for name, layers in (("target", shape["layers"]), ("drafter", max(1, shape["layers"] // 8))):
        model = draft_from_config(
            config, **{**shape, "layers": layers}, seed=0, vocab_size=config.vocab_size
        )
        model.to(torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        paths.append(folder / name)
    return paths[0], paths[1]


def write(
    settings: Gpu,
    rows: list[dict[str, Any]],
    skipped: list[str],
    failed: list[str],
    seconds: float,
) -> None:
    """gpu.json and the page made from it; CPU mode writes gpu-cpu-mode.* instead."""
    name = "gpu" if settings.device == "cuda" else "gpu-cpu-mode"
    machine = platform.processor() or platform.machine()
    if settings.device == "cuda":
        machine = torch.cuda.get_device_name()
    about = {
        "commit": git_commit(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "machine": machine,
        "seconds": round(seconds),
        "skipped": skipped,
        "failed": failed,
        "versions": versions(),
    }
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    rows = [row | {k: about[k] for k in ("commit", "command", "machine")} for row in rows]
    (out / f"{name}.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    lines = [f"# {name}", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| what | peer | ratio | min | max | ours | theirs | unit |", "|" + "---|" * 8]
    for r in rows:
        lines.append(
            f"| {r['what']} | {r['peer']} | {r['ratio']:.2f} | {r['ratio_min']:.2f} | "
            f"{r['ratio_max']:.2f} | {r['ours']:.4g} | {r['theirs']:.4g} | {r['unit']} |"
        )
    (out / f"{name}.md").write_text("\n".join(lines) + "\n")
    print(
        f"written: {out / name}.json and .md; "
        f"failed: {failed or 'none'}; skipped: {skipped or 'none'}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
