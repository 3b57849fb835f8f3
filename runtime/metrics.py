# SPDX-License-Identifier: Apache-2.0
"""Running totals of one engine, as plain numbers; Prometheus reads them only when it scrapes.

`EngineMetrics.registry` is what a service exposes. A round costs a few array additions.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dspark_trt.runtime.request import FinishReason
from dspark_trt.runtime.round_report import STAGES, RoundReport

Counts = NDArray[np.int64]
Gap = Callable[[], NDArray[np.float64]]


class EngineMetrics(Collector):  # type: ignore[misc]  # the library has no types
    """Observes rounds.

    Args:
        gamma: drafts a round.
        calibration_gap: predicted minus observed conditional acceptance `[K]`, asked when read.
    """

    def __init__(self, gamma: int, calibration_gap: Gap) -> None:
        self.registry = CollectorRegistry()
        self.active = self.waiting = 0
        self.rounds = self.target_rows = 0
        self.tokens = self.prompt_tokens = 0
        self.reasons: Counter[str] = Counter()  # decoding requests by why ℓ was chosen
        # Drafted rounds by ℓ and accepted drafts: all there is to say about acceptance.
        self._outcomes: Counter[tuple[int, int]] = Counter()
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.finished: Counter[str] = Counter()
        self._gamma = gamma
        self._gap = calibration_gap
        self.registry.register(self)

    def _table(self) -> Counts:  # [K+1, K+1]
        """Drafted rounds by ℓ and accepted drafts."""
        table = np.zeros((self._gamma + 1, self._gamma + 1), np.int64)
        for outcome, rounds in self._outcomes.items():
            table[outcome] = rounds
        return table

    @property
    def lengths(self) -> Counts:  # [K+1]
        """Drafted rounds by ℓ."""
        return np.asarray(self._table().sum(axis=1))

    @property
    def accepted_lengths(self) -> Counts:  # [K+1]
        """Drafted rounds by accepted drafts."""
        return np.asarray(self._table().sum(axis=0))

    @property
    def reached(self) -> Counts:  # [K]
        """Drafts verified at a position, all before them accepted."""
        table = self._table()
        verified, accepted = np.indices(table.shape)
        seen = np.minimum(accepted + 1, verified)
        return np.array([table[seen > k].sum() for k in range(self._gamma)])

    @property
    def accepted(self) -> Counts:  # [K]
        """Drafts accepted at a position."""
        by_count = self.accepted_lengths
        return by_count[::-1].cumsum()[::-1][1:]

    @property
    def accepted_length(self) -> float | None:
        """τ over all drafted rounds; None before the first."""
        rounds = int(self.lengths.sum())
        return 1 + int(self.accepted.sum()) / rounds if rounds else None

    def finish(self, reason: FinishReason) -> None:
        self.finished[reason.value] += 1

    def observe(self, report: RoundReport) -> None:
        """Count one round."""
        self.rounds += 1
        self.target_rows += report.target_rows
        for stage, seconds in report.seconds.items():
            self.seconds[stage] += seconds
        reason = None if report.planned is None else report.planned.reason
        decoding_rows = 0
        for sequence, decodes, drafts, verified, accepted, committed in zip(
            report.sequences,
            report.decoding.tolist(),
            report.drafted.tolist(),
            report.lengths.tolist(),
            report.accepted.tolist(),
            report.committed.tolist(),
            strict=True,
        ):
            self.tokens += committed
            if decodes:
                decoding_rows += 1 + verified
            if drafts:
                self._outcomes[verified, accepted] += 1
                if reason is not None:
                    self.reasons[reason] += 1
            elif decodes and sequence.request.speculate:
                self.reasons[report.undrafted_reason] += 1
        self.prompt_tokens += report.target_rows - decoding_rows

    def collect(self) -> Iterator[Metric]:
        """What Prometheus sees."""
        yield GaugeMetricFamily("dspark_active_requests", "Requests being decoded", self.active)
        yield GaugeMetricFamily(
            "dspark_waiting_requests", "Requests in the queue", self.waiting
        )
        yield CounterMetricFamily("dspark_rounds", "Engine rounds", self.rounds)
        yield CounterMetricFamily("dspark_output_tokens", "Tokens committed", self.tokens)
        yield CounterMetricFamily(
            "dspark_prompt_tokens", "Prompt rows computed", self.prompt_tokens
        )
        yield CounterMetricFamily(
            "dspark_target_rows", "Rows the target ran on", self.target_rows
        )
        text = "Decoding requests and rounds by why so many drafts were verified"
        yield self._labelled(
            CounterMetricFamily("dspark_verification_reasons", text, labels=["reason"]),
            self.reasons,
        )
        yield self._labelled(
            CounterMetricFamily(
                "dspark_finished_requests", "Requests that ended", labels=["reason"]
            ),
            self.finished,
        )
        yield self._labelled(
            CounterMetricFamily("dspark_stage_seconds", "Time by stage", labels=["stage"]),
            self.seconds,
        )
        yield _histogram(
            "dspark_verification_length", "Drafts verified a request and round", self.lengths, 0
        )
        yield _histogram(
            "dspark_accepted_length",
            "Tokens committed a request and round, the target's own included",
            self.accepted_lengths,
            1,
        )
        position = CounterMetricFamily(
            "dspark_position",
            "Drafts reached (all before accepted) and accepted, by position",
            labels=["position", "outcome"],
        )
        gap = GaugeMetricFamily(
            "dspark_calibration_gap",
            "Predicted minus observed conditional acceptance of recent rounds",
            labels=["position"],
        )
        counts = zip(self.reached.tolist(), self.accepted.tolist(), strict=True)
        for k, (missed, (reached, accepted)) in enumerate(
            zip(self._gap().tolist(), counts, strict=True)
        ):
            position.add_metric([str(k + 1), "reached"], reached)
            position.add_metric([str(k + 1), "accepted"], accepted)
            if missed == missed:  # NaN: nothing was seen there
                gap.add_metric([str(k + 1)], missed)
        yield position
        yield gap

    @staticmethod
    def _labelled(
        family: CounterMetricFamily, values: Counter[str] | dict[str, float]
    ) -> CounterMetricFamily:
        for label, value in values.items():
            family.add_metric([label], value)
        return family


def _histogram(
    name: str, text: str, counts: NDArray[np.int64], first: int
) -> HistogramMetricFamily:
    """One bucket a value `first, first + 1, ..`."""
    running = np.cumsum(counts).tolist()
    buckets = [(str(float(first + i)), float(total)) for i, total in enumerate(running)]
    buckets.append(("+Inf", float(running[-1])))
    values = np.arange(first, first + len(counts))
    return HistogramMetricFamily(name, text, buckets, float((counts * values).sum()))
