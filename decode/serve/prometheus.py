"""What a server counts, for Prometheus, under the names that vLLM uses where it has one.

Counts of drafting are taken when a request ends, cancelled ones included. Every line has the label
`model_name`: of a lane with its own draft `name:tag`.
"""

import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draftsmith.decode.engine.request import Completion

log = logging.getLogger("draftsmith")

FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 40)
WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 300)


class Metrics:
    """The counters of one server, in a registry of their own. Methods may be called by any thread;
    `model` is a lane's name.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, ["model_name", *labels], registry=registry)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(name, about, ["model_name"], registry=registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, about, ["model_name"], registry=registry, buckets=buckets)

        spec = "vllm:spec_decode_num"
        self.drafts = counter(f"{spec}_drafts", "Rounds that drafted.")
        self.drafted = counter(f"{spec}_draft_tokens", "Tokens drafted, all nodes of trees.")
        self.accepted = counter(f"{spec}_accepted_tokens", "Drafted tokens that were kept.")
        self.accepted_at = counter(
            f"{spec}_accepted_tokens_per_pos",
            "Drafted tokens that were kept, by their level, 0 the first.",
            "position",
        )
        self.running = gauge("vllm:num_requests_running", "Answers in rows of the batch.")
        self.waiting = gauge("vllm:num_requests_waiting", "Answers that wait for a row.")
        self.prompt = counter("vllm:prompt_tokens", "Prompt tokens read.")
        self.generated = counter("vllm:generation_tokens", "Tokens written.")
        self.success = counter("vllm:request_success", "Answers that ended.", "finished_reason")
        self.first = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_S
        )
        self.whole = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", WHOLE_S
        )
        self.version = gauge("draftsmith:draft_version", "Version of the draft; 0: the first.")
        self.swaps = counter("draftsmith:draft_swaps", "Versions that were taken into use.")
        self.refusals = counter(
            "draftsmith:draft_swaps_refused", "Versions that didn't load or fit."
        )
        self.kept_examples = counter(
            "draftsmith:buffer_examples", "Finished requests that the buffer acknowledged."
        )
        self.dropped_examples = counter(
            "draftsmith:buffer_examples_dropped", "Finished requests that it couldn't take."
        )

        self._told: set[tuple[str, type, int | None]] = set()

    def page(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def watch(
        self,
        model: str,
        *,
        running: Callable[[], int],
        waiting: Callable[[], int],
        version: Callable[[], int],
    ) -> None:
        """Read these as the page is made; and let every counter of the lane begin at 0."""
        self.running.labels(model).set_function(running)
        self.waiting.labels(model).set_function(waiting)
        self.version.labels(model).set_function(version)
        from_zero = (self.drafts, self.drafted, self.accepted, self.prompt, self.generated)
        of_learning = (self.swaps, self.refusals, self.kept_examples, self.dropped_examples)
        for counter in (*from_zero, *of_learning):
            counter.labels(model)

    def began(self, model: str, prompt_tokens: int, seconds: float) -> None:
        """A request's prompt is read and its first token there, so long after it arrived."""
        self.prompt.labels(model).inc(prompt_tokens)
        self.first.labels(model).observe(seconds)

    def emitted(self, model: str, tokens: int) -> None:
        self.generated.labels(model).inc(tokens)

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

    def kept(self, model: str) -> None:
        self.kept_examples.labels(model).inc()

    def dropped(self, model: str, why: Exception) -> None:
        self.dropped_examples.labels(model).inc()
        kind = (model, type(why), getattr(why, "errno", None))
        if kind not in self._told:  # once: a full disk drops every request
            self._told.add(kind)
            log.warning("%s: finished requests aren't kept: %s", model, why)
