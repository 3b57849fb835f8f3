# SPDX-License-Identifier: Apache-2.0
"""Arrays every scheduler shares: survival, the order of candidates, expected tokens, and prefix-closed lengths.

Legend: R requests, K = γ drafted tokens, N = R·K candidates, n admitted candidates. The candidate
(r, k) is "verify the k-th drafted token of request r"; its value is the survival a_{r,k}.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.errors import CapacityError, RequestError

Floats = NDArray[np.float64]
Lengths = NDArray[np.int64]


class Candidates(NamedTuple):
    """What a round could verify."""

    survival: Floats  # [R, K]; -1 beyond a request's limit: ranks behind every candidate
    limits: Lengths  # [R] most drafts of each request
    available: int  # how many candidates limits and the token budget leave

    def up_to(self, longest: int) -> "Candidates":
        """Those of them in the first ``longest`` positions."""
        limits = np.minimum(self.limits, longest)
        available = min(self.available, int(limits.sum()))
        return Candidates(self.survival[:, :longest], limits, available)


def survival_from_confidence(confidence: ArrayLike) -> Floats:  # [R, K] -> [R, K]
    """a_k = Π_{i≤k} c_i of conditional acceptance probabilities (paper, section 3.2.1).

    Out-of-range values are clipped to [0, 1]; NaN counts as 0: a broken confidence buys nothing.
    Raises RequestError unless the input has two dimensions.
    """
    values = np.asarray(confidence, dtype=np.float64)
    if values.ndim != 2:
        raise RequestError(f"confidence must be [requests, drafted], got shape {values.shape}")
    clipped = np.fmin(np.fmax(values, 0.0), 1.0)
    return np.asarray(np.multiply.accumulate(clipped, axis=1), dtype=np.float64)


def candidates(
    confidence: ArrayLike,  # [R, K]
    *,
    limits: ArrayLike | None = None,  # [R] most drafts a request may have verified
    max_tokens_per_step: int | None = None,
) -> Candidates:
    """What may be verified; CapacityError if the requests alone exceed the token budget."""
    survival = survival_from_confidence(confidence)
    requests, drafted = survival.shape
    available = survival.size
    if limits is None:
        allowed = np.full(requests, drafted)
    else:
        # Two ufuncs: np.clip takes several times as long on a handful of requests.
        allowed = np.minimum(np.maximum(np.asarray(limits, dtype=np.int64), 0), drafted)
        if allowed.shape != (requests,):
            raise RequestError(f"limits must be [{requests}], got shape {allowed.shape}")
        available = int(allowed.sum())
        if available < survival.size:
            survival = np.where(np.arange(drafted) < allowed[:, None], survival, -1.0)
    if max_tokens_per_step is not None:
        if requests > max_tokens_per_step:
            raise CapacityError(
                f"{requests} requests need a token each, max_tokens_per_step is {max_tokens_per_step}"
            )
        available = min(available, max_tokens_per_step - requests)
    return Candidates(survival, allowed, available)


def ranking(offered: Candidates) -> Lengths:  # -> [R * K]
    """Flat indices of candidates, best survival first, those beyond the limits last.

    Survival never rises along a row and equal values keep their order, so whatever ranks before
    (r, k) includes (r, 1), .., (r, k - 1): every first n of them are prefixes of their rows.
    """
    return np.asarray((-offered.survival).ravel().argsort(kind="stable"), dtype=np.int64)


def expected_tokens(offered: Candidates, ranked: Lengths) -> Floats:  # -> [available + 1]
    """τ(n): tokens a round commits when its n best candidates are verified, bonus tokens included."""
    tokens = np.empty(min(offered.available, ranked.size) + 1)
    tokens[0] = len(offered.survival)
    tokens[1:] = offered.survival.ravel()[ranked[: tokens.size - 1]]
    return np.asarray(np.add.accumulate(tokens))


def best_lengths(
    offered: Candidates, admitted: int, ranked: Lengths | None = None
) -> Lengths:  # -> [R]
    """Lengths that verify the ``admitted`` best candidates, by their ranking where it is known.

    Without one it is enough to find the last admitted value: everything above it is a prefix of its row, since
    survival never rises along a row; equal values are handed out row by row from the left.
    """
    requests, drafted = offered.survival.shape
    if admitted <= 0:
        return np.zeros(requests, np.int64)
    if admitted == int(offered.limits.sum()):
        return offered.limits
    if ranked is not None:
        return np.bincount(ranked[:admitted] // drafted, minlength=requests)
    size = offered.survival.size
    last = np.partition(offered.survival, size - admitted, axis=None)[size - admitted]
    lengths = np.add.reduce(offered.survival > last, axis=1)
    ties = np.add.reduce(offered.survival == last, axis=1)
    spare = admitted - int(lengths.sum())
    handed_out = np.minimum(np.maximum(spare - (np.cumsum(ties) - ties), 0), ties)
    return np.asarray(lengths + handed_out, dtype=np.int64)
