"""The worker's half of ARES (section 5.2): "perform local future state simulation, and proactively report".

A worker reports `FutureLoad()(its requests)`; the scheduler has only to add and subtract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.policy.ares.horizon import HORIZON, Horizon, floats, prediction


@dataclass(frozen=True)
class FutureLoad:
    """Token load of one instance now and at the steps of the horizon, N_i(B_i, t)."""

    horizon: Horizon = HORIZON

    def __call__(self, requests: Sequence[tuple[int, float | None]]) -> tuple[float, ...]:
        """From each request's (context tokens, predicted remaining tokens); 1 + points values."""
        if not requests:
            return (0.0,) * len(self.horizon.steps)
        tokens, remaining = zip(*requests, strict=True)
        return self.simulate(tokens, remaining)

    def simulate(self, tokens: Sequence[int], remaining: Sequence[float | None]) -> tuple[float, ...]:
        """The same from columns."""
        loads = self.horizon.contributions(floats(tokens), floats([prediction(r) for r in remaining]))
        return tuple(loads.sum(axis=0).tolist())
