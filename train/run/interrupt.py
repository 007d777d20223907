"""Ctrl-C and SIGTERM as a request: finish the step, save, and go."""

import contextlib
import signal
import time
from collections.abc import Iterator

AGAIN_SECONDS = 2.0
GO_ON = "repeat the same command to resume"  # what a user does after that


@contextlib.contextmanager
def stop_request() -> Iterator[list[int]]:
    """A list that gets the signals as they come; a second Ctrl-C interrupts at once."""
    received: list[int] = []
    first = 0.0

    def note(number: int, _: object) -> None:
        nonlocal first
        # A launcher repeats what the terminal has sent to all: that isn't a second wish.
        now = time.monotonic()
        if received and number == signal.SIGINT and now - first > AGAIN_SECONDS:
            raise KeyboardInterrupt
        first = first or now
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
