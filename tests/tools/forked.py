"""Processes like `python SCRIPT ...`, but that what all of them import is imported once: they are
forked from one process that has done nothing else. Of one's own each takes five seconds for that.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

COMMON = ["accelerate.commands.launch", "transformers.models.llama.modeling_llama"]
COMMON += ["torch._dynamo", "draftsmith.decode.serve.server", "draftsmith.decode.__main__"]
COMMON += [f"draftsmith.train.{entry}" for entry in ("prepare", "distill", "online")]
STREAMS = ("out", "err")
NOTHING: Mapping[str, str] = MappingProxyType({})

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(COMMON)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Forked:
    """A process that runs a script ("x.py", "-m module" or "-c code" and its arguments) in a
    folder, with these variables beside our own; used as a `subprocess.Popen` is.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] = NOTHING, cwd: Path | None = None
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        for name in STREAMS:
            Path(self.folder.name, name).touch()
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        given = ([str(word) for word in command], variables, str(cwd or Path.cwd()))
        self.process = context.Process(target=_run, args=(*given, self.folder.name))
        self.process.start()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    @property
    def out(self) -> str:
        """What it has written by now."""
        return Path(self.folder.name, "out").read_text()

    @property
    def err(self) -> str:
        """What it has written to stderr by now."""
        return Path(self.folder.name, "err").read_text()

    @property
    def told(self) -> str:
        return self.out + self.err

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float = 1800.0) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"not done after {timeout} s: {self.told}"
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid or 0, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    command: Sequence[str], env: Mapping[str, str] = NOTHING, cwd: Path | None = None
) -> Forked:
    """A script's process, at its end."""
    process = Forked(command, env, cwd)
    process.wait()
    return process


def launched(*arguments: str) -> Forked:
    """`accelerate launch` with these arguments at its end; what it starts are processes as users
    have them.
    """
    return run(["-m", "accelerate.commands.launch", *arguments])


def ranks(command: Sequence[str], world: int = 2, cwd: Path | None = None) -> list[Forked]:
    """Processes that train together, at their end: those that
    `accelerate launch --config_file recipes/accelerate/cpu_ddp2.yaml` would start.
    """
    shared = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    shared |= {"ACCELERATE_DYNAMO_BACKEND": "no", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    shared |= {"LOCAL_WORLD_SIZE": str(world)}
    processes = [
        Forked(command, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd)
        for rank in range(world)
    ]
    for process in processes:
        process.wait()
    return processes


def _run(command: list[str], variables: dict[str, str], cwd: str, folder: str) -> None:
    for stream, name in enumerate(STREAMS, 1):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    torch.set_num_threads(1)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "-c", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")
