# SPDX-License-Identifier: Apache-2.0
"""Rounds that a simulated request plays: what the scheduler is told, and what would be accepted.

Legend: N rounds, Q requests, K = γ drafted tokens.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.errors import RequestError, TableError
from dspark_trt.runtime.calibration import Calibration, sigmoid
from dspark_trt.runtime.traces import Traces

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Workload:
    """Rounds grouped by request. A simulated request starts anywhere in one and goes round in it."""

    confidence: Floats  # [N, K] calibrated conditional acceptance
    accepted: Ints  # [N] drafts the target would accept, were all verified
    start: Ints  # [Q] first round of each request
    following: Ints  # [N] the next round of the same request
    domain: Ints  # [Q]
    domain_names: tuple[str, ...]

    @property
    def gamma(self) -> int:
        return int(self.confidence.shape[1])

    @classmethod
    def from_traces(cls, traces: Traces, calibration: Calibration | None = None) -> Self:
        """Fully verified rounds of traces, in their order; TableError if there are none."""
        usable = traces.fully_verified()
        if not len(usable):
            raise TableError("no round of the traces was verified in full; nothing to simulate")
        order = np.argsort(usable.request_id, kind="stable")
        chosen = calibration or Calibration.identity(usable.gamma)
        return cls._grouped(
            chosen.confidence(usable.conf_logits)[order],
            usable.accepted[order],
            usable.request_id[order],
            usable.domain[order],
            usable.domain_names,
        )

    @classmethod
    def synthetic(
        cls,
        conditional: ArrayLike,  # [D, K] acceptance given that the prefix was accepted, by domain
        *,
        domain_names: tuple[str, ...],
        requests: int = 300,
        rounds: int = 100,
        round_spread: float = 1.5,
        request_spread: float = 0.4,
        seed: int = 0,
    ) -> Self:
        """Calibrated confidences around given acceptances, and outcomes drawn from them.

        Logits are normal with a part shared by a request's rounds; each position's mean is set so that
        the conditional acceptance of the rounds that reach it is the one asked for.
        """
        wanted = np.atleast_2d(np.asarray(conditional, dtype=np.float64))
        if len(wanted) != len(domain_names) or not np.all((wanted > 0) & (wanted < 1)):
            raise RequestError(
                f"conditional acceptances must lie in (0, 1), one row for each of "
                f"{list(domain_names)}, got {wanted.tolist()}"
            )
        rng = np.random.default_rng(seed)
        domain = np.arange(requests) % len(wanted)
        request = np.repeat(np.arange(requests), rounds)
        shape = (request.size, wanted.shape[1])
        own = request_spread * rng.normal(size=requests)[request]
        noise = round_spread * rng.normal(size=shape) + own[:, None]
        confidence = np.empty(shape)
        for row, acceptances in enumerate(wanted):
            of_domain = domain[request] == row
            confidence[of_domain] = _centred(noise[of_domain], acceptances)
        kept = np.logical_and.accumulate(rng.random(shape) < confidence, axis=1)
        return cls._grouped(
            confidence, kept.sum(axis=1), request, domain[request], tuple(domain_names)
        )

    @classmethod
    def _grouped(
        cls,
        confidence: Floats,
        accepted: Ints,
        request: Ints,
        domain: Ints,
        names: tuple[str, ...],
    ) -> Self:
        start = np.flatnonzero(np.r_[True, request[1:] != request[:-1]])
        end = np.r_[start[1:], request.size] - 1
        following = np.arange(1, request.size + 1)
        following[end] = start
        return cls(confidence, accepted, start, following, domain[start], names)


def _centred(noise: Floats, acceptances: Floats) -> Floats:  # [N, K], [K] -> [N, K]
    """σ(μ_k + noise) with μ_k such that its mean over rounds that reach k is acceptances[k]."""
    reach = np.ones(len(noise))
    confidence = np.empty_like(noise)
    for k, wanted in enumerate(acceptances):
        low, high = -20.0, 20.0
        for _ in range(50):
            middle = (low + high) / 2
            mean = np.average(sigmoid(middle + noise[:, k]), weights=reach)
            low, high = (middle, high) if mean < wanted else (low, middle)
        confidence[:, k] = sigmoid(low + noise[:, k])
        reach *= confidence[:, k]
    return confidence
