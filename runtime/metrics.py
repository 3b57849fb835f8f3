# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of one engine, in a registry of its own, and the running totals its status shows."""

from collections import Counter
from collections.abc import Sequence as Listed

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as PromCounter

from dspark_trt.runtime.request import FinishReason
from dspark_trt.runtime.rounds import STAGES, RoundReport


class EngineMetrics:
    """Observes rounds; `registry` is what a service exposes."""

    def __init__(self, gamma: int) -> None:
        self.registry = registry = CollectorRegistry()
        self.gamma = gamma
        self.rounds = self.drafted_rounds = 0
        self.tokens = self.prompt_tokens = self.target_rows = 0
        self.accepted_tokens = 0
        self.proposed = np.zeros(
            gamma, np.int64
        )  # verified at each position, all before accepted
        self.accepted = np.zeros(gamma, np.int64)
        self.lengths = np.zeros(gamma + 1, np.int64)
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.finished: Counter[str] = Counter()
        self._active = Gauge(
            "dspark_active_requests", "Requests being decoded", registry=registry
        )
        self._waiting = Gauge(
            "dspark_waiting_requests", "Requests in the queue", registry=registry
        )
        self._rounds = PromCounter("dspark_rounds", "Engine rounds", registry=registry)
        self._tokens = PromCounter(
            "dspark_output_tokens", "Tokens committed", registry=registry
        )
        self._prompt = PromCounter(
            "dspark_prompt_tokens", "Prompt tokens computed", registry=registry
        )
        self._rows = PromCounter(
            "dspark_target_rows", "Rows the target ran on", registry=registry
        )
        self._finished = PromCounter(
            "dspark_finished_requests", "Requests that ended", ["reason"], registry=registry
        )
        self._stage = PromCounter(
            "dspark_stage_seconds", "Time by stage of a round", ["stage"], registry=registry
        )
        self._accepted_length = Histogram(
            "dspark_accepted_length",
            "Tokens committed a request and round, the target's own included",
            buckets=range(1, gamma + 2),
            registry=registry,
        )
        self._length = Histogram(
            "dspark_verification_length",
            "Drafts verified a request and round",
            buckets=range(gamma + 1),
            registry=registry,
        )
        self._position = PromCounter(
            "dspark_position",
            "Drafts reached (all before accepted) and accepted, by position",
            ["position", "outcome"],
            registry=registry,
        )
        self._gap = Gauge(
            "dspark_calibration_gap",
            "Predicted minus observed conditional acceptance of recent rounds",
            ["position"],
            registry=registry,
        )
        self._bypassed = PromCounter(
            "dspark_bypassed",
            "Decoding requests that did not draft in a round",
            registry=registry,
        )

    def queue(self, active: int, waiting: int) -> None:
        self._active.set(active)
        self._waiting.set(waiting)

    def finish(self, reason: FinishReason) -> None:
        self.finished[reason.value] += 1
        self._finished.labels(reason.value).inc()

    def observe(self, report: RoundReport) -> None:
        """Count one round."""
        drafted = report.drafted
        self.rounds += 1
        self._rounds.inc()
        tokens = int(report.committed.sum())
        self.tokens += tokens
        self._tokens.inc(tokens)
        self.target_rows += report.target_rows
        self._rows.inc(report.target_rows)
        prompt = report.target_rows - int((1 + report.lengths)[report.decoding].sum())
        self.prompt_tokens += prompt
        self._prompt.inc(prompt)
        for stage, seconds in report.seconds.items():
            self.seconds[stage] += seconds
            self._stage.labels(stage).inc(seconds)
        self._bypassed.inc(int((report.decoding & ~drafted).sum()))
        if drafted.any():
            self._observe_drafts(report.lengths[drafted], report.accepted[drafted])

    def _observe_drafts(self, lengths: np.ndarray, accepted: np.ndarray) -> None:
        self.drafted_rounds += len(lengths)
        self.accepted_tokens += int(accepted.sum())
        self.lengths += np.bincount(lengths, minlength=self.gamma + 1)
        positions = np.arange(self.gamma)
        reached = (positions <= accepted[:, None]) & (positions < lengths[:, None])
        kept = positions < accepted[:, None]
        self.proposed += reached.sum(axis=0)
        self.accepted += kept.sum(axis=0)
        for length, count in zip(lengths.tolist(), accepted.tolist(), strict=True):
            self._length.observe(length)
            self._accepted_length.observe(count + 1)
        for position in np.flatnonzero(reached.any(axis=0)).tolist():
            label = str(position + 1)
            self._position.labels(label, "reached").inc(int(reached[:, position].sum()))
            self._position.labels(label, "accepted").inc(int(kept[:, position].sum()))

    def calibration_gap(self, gap: Listed[float]) -> None:
        for position, value in enumerate(gap, 1):
            if np.isfinite(value):
                self._gap.labels(str(position)).set(value)
