"""The slowdown of each possible stage by unequal lengths in its batches, for planning.

Eq. (1) is linear in sums and has no term for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.perf.qoe_model import Floats
from tailrace.policy.cascade.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class Slowdown:
    """Factors for each stage from one edge to another: [buckets + 1, buckets + 1], or 1.0 for all."""

    # On the whole decode step, and on its part per KV token.
    step: Floats | float = 1.0
    attention: Floats | float = 1.0

    @staticmethod
    def of(penalty: FittedLengthPenalty, workload: Workload, batch: int) -> Slowdown:
        """Compute the factors for batches of `batch` requests drawn evenly from a stage's requests in flight.

        Lengths are assumed to be uniform within a bucket.
        """
        ends = len(workload.edges)
        step, attention = np.ones((ends, ends)), np.ones((ends, ends))
        at = (np.arange(batch) + 0.5) / batch
        requests = workload.prefix[:, 0]
        for lo in range(ends - 1):
            for hi in range(lo + 1, ends):
                if requests[hi] <= requests[lo]:
                    continue
                quantiles = requests[lo] + at * (requests[hi] - requests[lo])
                lengths = np.interp(quantiles, requests[lo : hi + 1], workload.edges[lo : hi + 1])
                whole = np.maximum(1, lengths).astype(np.int64)
                step[lo, hi] = penalty.step_factor(whole)
                attention[lo, hi] = penalty.attention_factor(whole)
        return Slowdown(step, attention)
