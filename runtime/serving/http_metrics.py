# SPDX-License-Identifier: Apache-2.0
"""What the server adds to the engine's metrics: answers, refusals, and times as clients feel them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dspark_trt.runtime.request import Completion

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class HttpMetrics:
    """One registry a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._answers = Counter(
            "dspark_http_answers",
            "Answers by route and status; 499: the client went away",
            ("route", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "dspark_http_seconds",
            "From request to the end of the answer",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._first_token = Histogram(
            "dspark_first_token_seconds",
            "From submission to a sequence's first token, time in the queue included",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._per_token = Histogram(
            "dspark_seconds_per_token",
            "Mean time between a sequence's tokens",
            buckets=(0.0005, 0.001, 0.0025, *_SECONDS[:9]),
            registry=self.registry,
        )
        self.running = Gauge(
            "dspark_http_generating",
            "Requests whose answer is being made",
            registry=self.registry,
        )
        self.disconnects = Counter(
            "dspark_http_disconnects",
            "Clients that went away before their answer was complete",
            registry=self.registry,
        )

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._answers.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def finished(self, done: Completion) -> None:
        stats = done.stats
        if stats.output_tokens:
            self._first_token.observe(stats.first_token_seconds)
        if stats.tokens_per_second:
            self._per_token.observe(1 / stats.tokens_per_second)
