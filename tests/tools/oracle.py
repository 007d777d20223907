"""The real `speculators` package, which EAGLE-3's layers, loss and folders are held against."""

import importlib
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

VERSION = "0.9.0"
# What it imports and our environment lacks. Without dependencies, so that it brings no other torch.
PACKAGES = (
    *(f"speculators=={VERSION}", f"hs-connectors=={VERSION}", "openai", "pydantic-settings"),
    *("loguru", "jiter", "aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist"),
    *("multidict", "propcache", "yarl"),
)


def speculators() -> ModuleType:
    """The package: an installed one, that of the folder DRAFTSMITH_SPECULATORS, or one that pip
    puts there once (by default into the folder for temporary files). Skips where it can't be had.
    """
    if not _version():
        folder = given_folder()
        if not (folder / "speculators").is_dir():
            _install(folder)
        # Last: ours win where both have a package.
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    if _version() != VERSION:
        pytest.skip(f"got speculators {_version() or 'nowhere'}, expected {VERSION}")
    try:
        return importlib.import_module("speculators")
    except ImportError as error:
        pytest.skip(f"speculators doesn't import here: {error}")


def given_folder() -> Path:
    """Where it lies if it isn't installed; on the path of a process that has asked for it."""
    default = Path(tempfile.gettempdir()) / f"draftsmith-speculators-{VERSION}"
    return Path(os.environ.get("DRAFTSMITH_SPECULATORS", default))


def _version() -> str:
    try:
        return metadata.version("speculators")
    except metadata.PackageNotFoundError:
        return ""


def _install(folder: Path) -> None:
    """pip writes beside the folder, which then appears at once: two test processes may try."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        command += ["--retries", "1", "--timeout", "15", "--target", fresh]
        try:
            done = subprocess.run(
                [*command, *PACKAGES], capture_output=True, text=True, timeout=120
            )
        except subprocess.TimeoutExpired:
            pytest.skip("speculators isn't installed, and pip didn't get it in 120 s")
        if done.returncode:
            words = done.stderr.strip().splitlines() or ["no reason given"]
            pytest.skip(f"speculators isn't installed, and pip can't get it: {words[-1]}")
        try:
            Path(fresh).rename(folder)
        except OSError:
            assert (folder / "speculators").is_dir()  # another process was first
            return
        Path(fresh).mkdir()  # what the context removes
