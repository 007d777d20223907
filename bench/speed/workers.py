"""Processes that a benchmark starts: arms with a peak memory each of their own, training runs."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftsmith.launch import run_as_user

MIB = 2**20


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def resident(device: str, peak: bool) -> float:
    """MiB this process holds now, or held at most."""
    if device == "cuda":
        read = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
        return read() / MIB
    status = Path("/proc/self/status").read_text()
    field = "VmHWM:" if peak else "VmRSS:"
    return int(status.split(field)[1].split()[0]) / 1024


def launch(entry: str, *argv: str) -> None:
    """Run a training entry in a process of its own; ValueError where it fails, which says why."""
    words = ["prepare"] if entry == "prepare" else ["train", entry]
    words += ["processes=1", *argv]
    if code := run_as_user(words)[0]:
        raise ValueError(f"draftsmith {shlex.join(words)} ended with code {code}, see above")


def train(entry: str, result: Path, *argv: str) -> None:
    """Run a training entry, whose folder is that of `result`, unless that is there."""
    if not result.exists():
        launch(entry, f"out={result.parent}", *argv)


def settings(of: Any, **changes: object) -> list[str]:
    """The arguments that give a process these settings, some of them changed."""
    return [f"{key}={value}" for key, value in (asdict(of) | changes).items()]


class Arm:
    """One worker process, driven line by line. command: what its Python runs."""

    def __init__(self, *command: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A waiting thread of one arm must not spin on the core that the other arm needs.
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"an arm of the benchmark died with code {self.process.wait()}")
        return line

    def run(self) -> dict[str, float]:
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        return json.loads(self.read())

    def close(self) -> None:
        self.process.communicate()
