"""Where a result comes from: the code's commit, the versions, the recipe, the seeds."""

import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    *("draftsmith", "torch", "transformers", "accelerate", "datasets", "deepspeed", "tokenizers"),
)


def provenance(
    *,
    recipe: str | None,
    argv: list[str],
    seeds: dict[str, int],
    data_hash: str | None,
    steps: int,
    acceptance: float | None = None,
) -> dict[str, Any]:
    """What a drafter folder records about its making.

    recipe: its name, None without one; argv: the arguments of the run, as given; seeds: all, by
    what they were for; data_hash: `Examples.fingerprint()` of the training examples; steps: of the
    optimizer; acceptance: alpha on held-out prompts, sum_v min(p, q), when it was measured.
    """
    return {
        "recipe": recipe,
        "argv": list(argv),
        "commit": git_commit(),
        "versions": versions(),
        "seeds": dict(seeds),
        "data_hash": data_hash,
        "steps": steps,
        "acceptance": acceptance,
    }


def git_commit(file: Path = Path(__file__)) -> str | None:
    """The commit of the repository that tracks `file`, "-dirty" appended when tracked files differ;
    None outside git, without git, or when an installed copy merely lies in someone's repository.
    """
    folder = str(file.resolve().parent)
    try:
        if not _git(folder, "ls-files", file.name):
            return None
        commit = _git(folder, "rev-parse", "HEAD")
        return f"{commit}-dirty" if _git(folder, "status", "--porcelain", "-uno") else commit
    except (OSError, subprocess.CalledProcessError):
        return None


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


def _git(folder: str, *arguments: str) -> str:
    command = ["git", "-C", folder, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
