"""A training entry in as many processes as are asked for, from wherever draftsmith is installed.

    draftsmith train distill --processes 8 recipe=... lr=1e-4
    draftsmith train distill --config fsdp2 recipe=...

is `accelerate launch --config_file recipes/accelerate/fsdp2.yaml train/distill.py recipe=...`, but
that a user's error stays one line: accelerate's launcher reports a process that ends with an error
by a traceback of its own. One process without a configuration needs no launcher and is this one.
"""

import importlib
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError

import draftsmith.recipes
from draftsmith.command import INTERRUPTED, parted, unknown

CONFIGS = Path(draftsmith.recipes.__file__).parent / "accelerate"


@dataclass
class Launch:
    """How an entry is launched; the other keys are the entry's."""

    config: str = ""  # of recipes/accelerate, or the path of a YAML for `accelerate launch`
    processes: int = 0  # 0: one a GPU, one on the CPU, or as the configuration says


def launch(module: str, argv: list[str]) -> int:
    """Run `main` of the entry `module`; the exit code of the process that ended first with one.
    ValueError: a configuration that there isn't; of one process also what the entry raises.
    """
    asked, rest = parted(Launch, argv)
    config, many = asked.config, asked.processes
    if not config and many != 1:
        from accelerate.commands.config.config_args import default_config_file
        from torch import cuda

        own_config = Path(default_config_file).is_file() and not many
        many = many or (0 if own_config else max(1, cuda.device_count()))
        config = "" if own_config else "gpu_ddp" if cuda.is_available() else "cpu_ddp2"
    if many == 1 and not asked.config:
        return importlib.import_module(module).main(rest) or 0
    flags = ["--num_processes", str(many)] if many else []
    if config:
        ours = {path.stem: path for path in CONFIGS.glob("*.yaml")}
        file = ours.get(config, Path(config))
        if not file.is_file():
            raise ValueError(unknown("config", config, sorted(ours)) + " (or a YAML's path)")
        flags += ["--config_file", str(file)]
    return launched([*flags, "--module", module, *rest])


def run_as_user(words: Sequence[str], script: str = "") -> tuple[int, str]:
    """`draftsmith WORDS`, or a script with these, in a process of its own, printed before it runs;
    its exit code, and the last line that it told on stderr.
    """
    from torch import cuda

    program = f"python {shlex.quote(script)}" if script else "draftsmith"
    print(f"$ {program} {shlex.join(words)}", flush=True)  # or, in a file, it would stand below
    # Threads that sleep while they wait: spinning ones halve the speed of a machine that is shared.
    env = {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "OMP_WAIT_POLICY": "PASSIVE"}
    if not cuda.is_available():
        env["DS_ACCELERATOR"] = "cpu"  # or deepspeed, where installed, warns that it found none
    command, told = [sys.executable, *([script] if script else ("-m", "draftsmith")), *words], ""
    with subprocess.Popen(command, env=env | os.environ, stderr=subprocess.PIPE, text=True) as ran:
        try:
            for line in ran.stderr or ():
                print(line, end="", file=sys.stderr, flush=True)
                told = line.strip() or told
        except KeyboardInterrupt:
            ran.terminate()  # as a terminal has told it, too: it saves
            ran.wait()
            raise
    return ran.returncode, told


def launched(flags: list[str]) -> int:
    """`accelerate launch` with these arguments, told by its exit code alone: 1 of a process that
    was killed, which couldn't tell.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # the processes speak for themselves
    signal.signal(signal.SIGINT, lambda *_: None)  # they get it, too, and save
    code = 0
    try:
        launch_command(launch_command_parser().parse_args(flags))
    except CalledProcessError as failed:
        code = failed.returncode
    except ChildFailedError as failed:
        code = failed.get_first_failure()[1].exitcode
    except SignalException:
        code = INTERRUPTED
    if code < 0:
        print(f"a process was ended by {signal.Signals(-code).name}", file=sys.stderr)
    return code if code >= 0 else 1
