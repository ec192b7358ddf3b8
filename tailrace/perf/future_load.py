"""The worker's part of ARES (section 5.2): "perform local future state simulation, and proactively report".

A worker reports `FutureLoad()(its requests)`, which the scheduler only needs to add and subtract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.perf.horizon import HORIZON, Floats, Horizon, floats


@dataclass(frozen=True)
class FutureLoad:
    """Simulate the token load of an instance now and at the steps of the horizon, N_i(B_i, t)."""

    horizon: Horizon = HORIZON

    def __call__(self, requests: Sequence[tuple[int, float]]) -> tuple[float, ...]:
        """Return the 1 + points loads of requests given as (context tokens, expected remaining tokens)."""
        if not requests:
            return (0.0,) * len(self.horizon.steps)
        tokens, remaining = zip(*requests, strict=True)
        return self.simulate(tokens, remaining)

    def simulate(self, tokens: Sequence[int], remaining: Sequence[float]) -> tuple[float, ...]:
        """Return the same for requests given as two columns."""
        return self.of_each(tokens, remaining, (len(tokens),))[0]

    def of_each(
        self, tokens: Sequence[int] | Floats, remaining: Sequence[float] | Floats, counts: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Return the same for several instances; `counts`: number of consecutive requests of each."""
        loads = self.horizon.contributions(floats(tokens), floats(remaining))
        # Tokens are integers, so sums and their differences are exact.
        sums = np.zeros((len(tokens) + 1, len(self.horizon.steps)))
        loads.cumsum(axis=0, out=sums[1:])
        lengths = np.array(counts, dtype=np.intp)
        ends = lengths.cumsum()
        return list(map(tuple, (sums[ends] - sums[ends - lengths]).tolist()))
