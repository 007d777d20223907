"""Where a result comes from: the code's commit, the versions, the recipe, seeds, the machine."""

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    *("draftsmith", "torch", "transformers", "accelerate", "datasets", "deepspeed", "tokenizers"),
)
KERNELS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


def provenance(
    argv: list[str], seed: int, data_hash: str | None, steps: int, acceptance: float | None = None
) -> dict[str, Any]:
    """What a drafter folder records about its making. argv: the arguments of the run, as given;
    data_hash: `Examples.fingerprint()` of the training examples; steps: of the optimizer;
    acceptance: alpha on held-out prompts, sum_v min(p, q), where it was measured.
    """
    return {
        "recipe": dict(arg.split("=", 1) for arg in argv).get("recipe"),
        "argv": list(argv),
        "commit": git_commit(),
        "versions": versions(),
        "seeds": {"run": seed},
        "data_hash": data_hash,
        "steps": steps,
        "acceptance": acceptance,
    }


def git_commit(file: Path = Path(__file__)) -> str | None:
    """The commit of the repository that tracks `file`, "-dirty" appended when tracked files differ;
    where none does, the one that this installed copy was built from, None where it names none.
    """
    folder = str(file.resolve().parent)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        if _git(folder, "ls-files", file.name):
            commit = _git(folder, "rev-parse", "HEAD")
            return f"{commit}-dirty" if _git(folder, "status", "--porcelain", "-uno") else commit
    built_from = resources.files("draftsmith") / "COMMIT"
    return built_from.read_text().strip() if built_from.is_file() else None


def command_line() -> str:
    """What started this process, as it can be typed again."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def versions() -> dict[str, str | None]:
    """Version of Python and of each package that matters here; None where one isn't installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine(device: str = "cuda") -> str:
    """The GPU in words; where there is none, or `device` is cpu, the processor's cores, name and
    widest of `KERNELS`: a name stands for several generations.
    """
    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    told = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name.*?: (.*)", told, re.M)
    name = found[1] if found else platform.processor() or platform.machine()
    widest = [f" ({kernel})" for kernel in KERNELS if re.search(rf"\b{kernel}\b", told)]
    return f"{os.cpu_count()} cores of {name}{''.join(widest[:1])}"


def _git(folder: str, *arguments: str) -> str:
    command = ["git", "-C", folder, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
