"""Training beside others who need the machine more: what they leave, or a share of the time."""

import os
import time
import warnings

POLL_SECONDS = 0.05


class Duty:
    """Rests between steps, so that work takes `share` of the time: above 0 and at most 1."""

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"duty: got {share}, expected above 0 and at most 1")
        self.share = share
        self._since = time.monotonic()

    def rest(self, stop: list[int]) -> None:
        """Before each step: pause for what it took since the last pause, or until a `stop`."""
        busy = time.monotonic() - self._since
        until = time.monotonic() + busy * (1 / self.share - 1)
        while not stop and time.monotonic() < until:
            time.sleep(min(POLL_SECONDS, max(0.0, until - time.monotonic())))
        self.worked_from_now()

    def worked_from_now(self) -> None:
        """What was before, such as waiting for requests, is no work."""
        self._since = time.monotonic()


def yield_the_processor() -> None:
    """Let this process run only when the processor would be idle: SCHED_IDLE on Linux, else the
    lowest priority. Before torch starts its threads, which inherit it. It can't be undone.
    """
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except PermissionError as error:  # some containers
            warnings.warn(f"no idle scheduling here ({error}): nice 19 alone", stacklevel=2)
