"""What the scheduler collects each interval (Algorithm 1, line 4): the loads of all decode instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from tailrace.cluster import InstanceView
from tailrace.perf.future_load import FutureLoad
from tailrace.perf.horizon import Floats, Horizon, expected_remaining, floats


@dataclass(frozen=True)
class Loads:
    """Token loads of `instances`, now and at each step of the horizon: tokens[i, k], k = 0 is now."""

    instances: Sequence[InstanceView]
    horizon: Horizon
    tokens: Floats

    @property
    def weighted(self) -> Floats:
        """w_i (line 13); without a horizon the load of now."""
        if not self.horizon.points:
            return self.tokens[:, 0]
        result: Floats = self.tokens[:, 1:] @ self.horizon.betas
        return result


def collect(instances: Sequence[InstanceView], horizon: Horizon) -> Loads:
    """Loads as reported.

    A report is older than the view: what was placed there since, or has left, is in `context_tokens` but not
    in `future_load`, and is taken to stay for the horizon.
    """
    width = horizon.points + 1
    rows = [instance.future_load for instance in instances]
    if set(map(len, rows)) != {width}:
        rows = [_simulated(instance, horizon) for instance in instances]
    values = np.fromiter(chain.from_iterable(rows), np.float64, count=width * len(rows))
    tokens: Floats = values.reshape(len(rows), width)
    held = floats([instance.context_tokens for instance in instances])
    tokens += (held - tokens[:, 0])[:, None]
    # Where more has left than the report's future still holds.
    return Loads(instances, horizon, np.maximum(tokens, 0.0))


def _simulated(instance: InstanceView, horizon: Horizon) -> tuple[float, ...]:
    """What is reported; where a worker reports nothing, or for another horizon, its part is done here."""
    reported = instance.future_load
    if len(reported) == horizon.points + 1:
        return reported
    if not horizon.points:
        return (float(instance.context_tokens),)
    return FutureLoad(horizon).simulate(
        [request.context_tokens for request in instance.requests],
        [expected_remaining(request) for request in instance.requests],
    )
