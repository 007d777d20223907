"""Runs the server or the learner as a process that kills itself (SIGKILL) in the middle of
something: `python tests/tools/killed_midway.py SPOT TOLD serve|online ARGUMENTS`.

SPOT: one of SPOTS. TOLD: a file that gets the number of each acknowledged request.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from draftsmith.decode.engine.session import Session
from draftsmith.decode.serve import server
from draftsmith.decode.serve import versions as draft_versions
from draftsmith.decode.serve.buffer import ReplayBuffer, Served
from draftsmith.decode.serve.versions import Versions
from draftsmith.models.disk import store
from draftsmith.train import online

ENTRIES = {"serve": server.main, "online": online.main}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(
    owner: Any, name: str, number: int, before: Callable[..., None] | None, after: bool = False
) -> None:
    """At the number-th call of a function: `before` with its arguments, or after it; then death."""
    inner, calls = getattr(owner, name), 0

    @wraps(inner)
    def outer(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and before is not None:
            before(*args, **more)
            die()
        result = inner(*args, **more)
        if calls == number and after:
            die()
        return result

    setattr(owner, name, outer)


def half_of_it(path: Path, content: bytes) -> None:
    """What `write_atomically` has on the disk midway."""
    path.with_name(f".{path.name}.half").write_bytes(content[: len(content) // 2])


def nothing(*_: Any, **__: Any) -> None: ...


def in_the_third_update() -> None:
    """The weights are new, and nothing of it is on the disk."""
    steps = iter((False, False, True))
    register_optimizer_step_post_hook(lambda *_: die() if next(steps, True) else None)


SERVER: dict[str, Callable[[], None]] = {
    "half a request is written": lambda: at_call(store, "write_atomically", 5, half_of_it),
    "a request isn't acknowledged": lambda: at_call(store, "write_atomically", 5, None, after=True),
    "a new draft is about to be used": lambda: at_call(Session, "swap_drafter", 2, nothing),
    "a new draft has no number yet": lambda: at_call(Session, "swap_drafter", 2, None, after=True),
}
LEARNER: dict[str, Callable[[], None]] = {
    "an update isn't saved": in_the_third_update,
    "a version has no name": lambda: at_call(draft_versions, "settle", 2, nothing),
    "a version doesn't serve": lambda: at_call(Versions, "point", 2, nothing),
    "the pointer is half written": lambda: at_call(
        draft_versions, "write_atomically", 2, half_of_it
    ),
}
SPOTS = SERVER | LEARNER | {"never": lambda: None}


def main(spot: str, told: str, entry: str, *arguments: str) -> int:
    add, handle = ReplayBuffer.add, os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add_and_tell(self: ReplayBuffer, served: Served) -> int:
        number = add(self, served)
        os.write(handle, f"{number}\n".encode())
        return number

    ReplayBuffer.add = add_and_tell  # type: ignore[method-assign]
    SPOTS[spot]()
    return ENTRIES[entry](list(arguments)) or 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
