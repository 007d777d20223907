"""What a server's lanes do while they do it: numbers for the page at `/`, and lines for the log."""

import logging
import threading
import time
from typing import Any

from draftsmith.decode.serve.engine_thread import Lane, Service

log = logging.getLogger("draftsmith")


def standing(service: Service, lane: Lane) -> dict[str, Any]:
    """A lane's numbers: how many answers run and wait, and since the start answers that ended,
    tokens written, and of decoding, answers on their way included: rounds, the tokens that they
    emitted, tokens drafted (of trees the depth) and of these accepted; accepted_at: rounds that
    kept at least so many and one.
    """
    counted = service.counted(lane)
    at = [sum(counted.histogram[level:]) for level in range(1, len(counted.histogram))]
    return {
        "model": lane.model,
        "draft": lane.draft,
        "running": lane.running,
        "waiting": lane.waiting,
        "answers": lane.ended,
        "tokens": lane.written,
        "rounds": counted.rounds,
        "emitted": counted.emitted,
        "drafted": counted.drafted,
        "accepted": sum(at),
        "accepted_at": at,
    }


def line(now: dict[str, Any], before: dict[str, Any], seconds: float) -> str:
    """What a lane did between two of its standings, so many seconds apart."""
    names = ("answers", "tokens", "rounds", "emitted", "drafted", "accepted")
    answers, tokens, rounds, emitted, drafted, accepted = (now[n] - before[n] for n in names)
    said = [f"{now['model']}: {tokens} tokens in {seconds:.0f} s ({tokens / seconds:.1f}/s)"]
    said += [f"{answers} answers ended, {now['running']} run, {now['waiting']} wait"]
    if drafted:
        said += [f"accepted {100 * accepted / drafted:.1f}% of {drafted} drafted"]
        said += [f"tau {emitted / rounds:.2f}", f"draft version {now['draft']['version']}"]
    return ", ".join(said)


class Journal:
    """Logs a line a lane every `seconds` in which it did anything, and at the end what is left."""

    def __init__(self, service: Service, seconds: float) -> None:
        self.service, self.seconds = service, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        lanes = self.service.lanes.values()
        told, since = [standing(self.service, lane) for lane in lanes], time.perf_counter()
        ending = False
        while not ending:
            ending = self._stopped.wait(self.seconds)
            now, seconds = [standing(self.service, lane) for lane in lanes], time.perf_counter()
            for after, before in zip(now, told, strict=True):
                if any(after[name] != before[name] for name in ("tokens", "answers")):
                    log.info("%s", line(after, before, seconds - since))
            told, since = now, seconds
