# SPDX-License-Identifier: Apache-2.0
"""Records an engine's rounds in the format of `runtime.traces`, for `calibrate` and `simulate`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.bundle import Bundle
from dspark_trt.errors import TableError
from dspark_trt.runtime.estimator import draft_probabilities
from dspark_trt.runtime.round_report import RoundReport
from dspark_trt.runtime.traces import Traces, models_of, traces_from_arrays

Floats = NDArray[np.float64]


class TraceRecorder:
    """An observer: `engine.observers.append(TraceRecorder(engine.bundle).observe)`.

    One row a request and drafted round. The drafter's own probabilities are kept as well: they are what a
    drafter without confidence head is judged by.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._gamma, self._models = bundle.draft.gamma, models_of(bundle)
        self._columns: dict[str, list[NDArray[np.generic]]] = {}

    def observe(self, report: RoundReport) -> None:
        rows = np.flatnonzero(report.drafted)
        if report.draft is None or not len(rows):
            return
        accepted = report.accepted[rows]
        drafted_prob, top_prob = draft_probabilities(
            report.draft.logits[rows], report.draft.tokens[rows], report.temperature[rows]
        )
        scores = report.draft.confidence_logits
        step = report.seconds["target"] + report.seconds["verify"] + report.seconds["commit"]
        self._add(
            # Without a head: the logit of the drafted token's probability, an unfitted estimator.
            conf_logits=_logit(drafted_prob) if scores is None else scores[rows].copy(),
            accept_prefix_mask=np.arange(self._gamma) < accepted[:, None],
            request_id=np.array([report.sequences[row].id for row in rows]),
            lengths=report.lengths[rows],
            drafted_prob=drafted_prob,
            top_prob=top_prob,
            draft_seconds=np.full(len(rows), report.seconds["draft"]),
            step_seconds=np.full(len(rows), step),
        )

    def traces(
        self,
        *,
        prompt_of: Mapping[int, int] | None = None,
        domain_of: Mapping[int, int] | None = None,
        domain_names: Sequence[str] = (),
    ) -> Traces:
        """What was recorded.

        Args:
            prompt_of: prompt number of each request id, which keeps samples of a prompt together.
            domain_of: index into `domain_names` of each request id.
            domain_names: kinds of prompts.

        Raises:
            TableError: no round was drafted.
        """
        if not self._columns:
            raise TableError("no drafted round was recorded: nothing to write")
        arrays: dict[str, Any] = {
            name: np.concatenate(parts) for name, parts in self._columns.items()
        }
        ids = arrays["request_id"].tolist()
        if prompt_of is not None:
            arrays["prompt_index"] = np.array([prompt_of[each] for each in ids])
        if domain_of is not None:
            arrays["domain"] = np.array([domain_of[each] for each in ids])
            arrays["domain_names"] = list(domain_names)
        return traces_from_arrays(**arrays, models=self._models)

    def save(self, path: Path) -> int:
        """Write the file; returns how many rounds it holds.

        Raises:
            TableError: no round was drafted.
        """
        traces = self.traces()
        traces.save(path)
        return len(traces)

    def _add(self, **columns: NDArray[np.generic]) -> None:
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)


def _logit(probability: Floats) -> Floats:
    inside = np.clip(probability, 1e-6, 1 - 1e-6)
    return np.asarray(np.log(inside) - np.log1p(-inside))
