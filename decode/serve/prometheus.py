"""What a server counts, for Prometheus, under the names that vLLM uses where it has one.

Counts of drafting are taken when a request ends, cancelled ones included. Every line has the label
`model_name`: of a lane with its own draft `name:tag`.
"""

import logging
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draftsmith.decode.engine.request import Completion

log = logging.getLogger("draftsmith")

FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 40)
WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 300)

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class Metrics:
    """The counters of one server, for any of its threads; `model` is a lane's name."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def made(kind: type[Metric], name: str, about: str, *labels: str, **how: Any) -> Metric:
            return kind(name, about, ["model_name", *labels], registry=self.registry, **how)

        spec, ours = "vllm:spec_decode_num", "draftsmith"
        self.drafts = made(Counter, f"{spec}_drafts", "Rounds that drafted.")
        self.drafted = made(Counter, f"{spec}_draft_tokens", "Tokens drafted, all nodes of trees.")
        kept = "Drafted tokens that were kept"
        self.accepted = made(Counter, f"{spec}_accepted_tokens", f"{kept}.")
        kept += ", by their level, 0 the first."
        self.accepted_at = made(Counter, f"{spec}_accepted_tokens_per_pos", kept, "position")
        self.running = made(Gauge, "vllm:num_requests_running", "Answers in rows of the batch.")
        self.waiting = made(Gauge, "vllm:num_requests_waiting", "Answers that wait for a row.")
        self.prompt = made(Counter, "vllm:prompt_tokens", "Prompt tokens read.")
        self.generated = made(Counter, "vllm:generation_tokens", "Tokens written.")
        ended = "Answers that ended."
        self.success = made(Counter, "vllm:request_success", ended, "finished_reason")
        name, about = "vllm:time_to_first_token_seconds", "From arrival to the first token."
        self.first = made(Histogram, name, about, buckets=FIRST_S)
        name, about = "vllm:e2e_request_latency_seconds", "From arrival to the end."
        self.whole = made(Histogram, name, about, buckets=WHOLE_S)
        about = "Version of the draft; 0: the first."
        self.version = made(Gauge, f"{ours}:draft_version", about)
        about = "Versions that were taken into use."
        self.swaps = made(Counter, f"{ours}:draft_swaps", about)
        about = "Versions that didn't load or fit."
        self.refusals = made(Counter, f"{ours}:draft_swaps_refused", about)
        about = "Finished requests that the buffer acknowledged."
        self.kept = made(Counter, f"{ours}:buffer_examples", about)
        about = "Finished requests that it couldn't take."
        self.drops = made(Counter, f"{ours}:buffer_examples_dropped", about)
        self._told: set[tuple[str, type, int | None]] = set()

    def page(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def watch(self, model: str, lane: object) -> None:
        """Read the lane's gauges as the page is made; and let its counters begin at 0."""
        for name in ("running", "waiting", "version"):
            getattr(self, name).labels(model).set_function(partial(getattr, lane, name))
        from_zero = (self.drafts, self.drafted, self.accepted, self.prompt, self.generated)
        for counter in (*from_zero, self.swaps, self.refusals, self.kept, self.drops):
            counter.labels(model)

    def ended(self, model: str, made: Completion, seconds: float) -> None:
        """A request has ended, for whatever reason, so long after it arrived."""
        self.success.labels(model, made.finish_reason).inc()
        self.whole.labels(model).observe(seconds)
        counters = made.counters
        if not counters.drafted:
            return
        self.drafts.labels(model).inc(counters.reached[0])
        self.drafted.labels(model).inc(counters.nodes)
        for level in range(1, len(counters.histogram)):
            kept = sum(counters.histogram[level:])
            self.accepted.labels(model).inc(kept)
            self.accepted_at.labels(model, str(level - 1)).inc(kept)

    def swapped(self, model: str, version: int) -> None:
        self.swaps.labels(model).inc()
        log.info("%s: decodes with draft version %d", model, version)

    def refused(self, model: str, version: int, why: str) -> None:
        self.refusals.labels(model).inc()
        log.warning("%s: draft version %d refused, the old one stays: %s", model, version, why)

    def dropped(self, model: str, why: Exception) -> None:
        self.drops.labels(model).inc()
        kind = (model, type(why), getattr(why, "errno", None))
        if kind not in self._told:  # once: a full disk drops every request
            self._told.add(kind)
            log.warning("%s: finished requests aren't kept: %s", model, why)
