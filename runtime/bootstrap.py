# SPDX-License-Identifier: Apache-2.0
"""How sure a mean over rounds is, when rounds of one request are not independent of each other."""

import numpy as np
from numpy.typing import NDArray

_SAMPLES = 1000


def interval_of_ratio(
    sums: NDArray[np.number],  # [n] of each request's rounds
    rounds: NDArray[np.number],  # [n]
    *,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % interval of the mean over all rounds, from a bootstrap over the n requests."""
    drawn = np.random.default_rng(seed).integers(0, len(rounds), (_SAMPLES, len(rounds)))
    means = sums[drawn].sum(axis=1) / rounds[drawn].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
