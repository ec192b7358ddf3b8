"""The worker's half of ARES (section 5.2): "perform local future state simulation, and proactively report".

A worker reports `FutureLoad()(its requests)`; the scheduler has only to add and subtract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.perf.horizon import HORIZON, Horizon, floats


@dataclass(frozen=True)
class FutureLoad:
    """Token load of one instance now and at the steps of the horizon, N_i(B_i, t)."""

    horizon: Horizon = HORIZON

    def __call__(self, requests: Sequence[tuple[int, float]]) -> tuple[float, ...]:
        """From each request's (context tokens, expected remaining tokens); 1 + points values."""
        if not requests:
            return (0.0,) * len(self.horizon.steps)
        tokens, remaining = zip(*requests, strict=True)
        return self.simulate(tokens, remaining)

    def simulate(self, tokens: Sequence[int], remaining: Sequence[float]) -> tuple[float, ...]:
        """The same from columns."""
        return self.of_each(tokens, remaining, (len(tokens),))[0]

    def of_each(
        self, tokens: Sequence[int], remaining: Sequence[float], counts: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """The same for several instances, whose requests follow each other: `counts` of each."""
        loads = self.horizon.contributions(floats(tokens), floats(remaining))
        # Tokens are whole numbers: sums and their differences are exact.
        sums = np.zeros((len(tokens) + 1, len(self.horizon.steps)))
        loads.cumsum(axis=0, out=sums[1:])
        lengths = np.array(counts, dtype=np.intp)
        ends = lengths.cumsum()
        return list(map(tuple, (sums[ends] - sums[ends - lengths]).tolist()))
