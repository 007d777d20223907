"""How far a reader walks: files and functions of the house that a command enters before a function.

    python tests/tools/hops.py Runner.prefill draftsmith.decode.__main__ target=T drafter=D limit=1
    python tests/tools/hops.py Distillation.forward draftsmith.train.distill target=T draft=D ...

Counted are named functions of this repository, each once, with the one asked for; modules' own
bodies, lambdas and what dataclasses generate are not.
"""

import importlib
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(f"{ROOT / room}{os.sep}" for room in ("models", "decode", "train", "draftsmith"))


def main(until: str, module: str, argv: list[str]) -> None:
    entered: set[tuple[str, str]] = set()
    known: set[CodeType] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code in known:
            return
        known.add(frame.f_code)
        file, name = os.path.realpath(frame.f_code.co_filename), frame.f_code.co_qualname
        if not file.startswith(PRODUCT) or name.endswith(">"):
            return
        entered.add((file, name))
        if name == until:
            print(f"{len({file for file, _ in entered})} files, {len(entered)} functions")
            sys.stdout.flush()
            os._exit(0)  # nothing after it is of interest

    command = importlib.import_module(module).main
    sys.argv = [module, *argv]
    threading.setprofile(look)
    sys.setprofile(look)
    command(argv)
    sys.setprofile(None)
    sys.exit(f"{until} was never entered")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
