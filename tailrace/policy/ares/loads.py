"""Collect the loads of all decode instances (Algorithm 1, line 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from tailrace.cluster import InstanceView
from tailrace.perf.future_load import FutureLoad
from tailrace.perf.horizon import Floats, Horizon, floats
from tailrace.policy.requests import table_of


@dataclass(frozen=True)
class Loads:
    """Token loads of `instances` now and at each step of the horizon: tokens[i, k], k = 0 is now."""

    instances: Sequence[InstanceView]
    horizon: Horizon
    tokens: Floats

    @property
    def weighted(self) -> Floats:
        """Return w_i (line 13); without a horizon, the current load."""
        if not self.horizon.points:
            return self.tokens[:, 0]
        result: Floats = self.tokens[:, 1:] @ self.horizon.betas
        return result


def collect(instances: Sequence[InstanceView], horizon: Horizon) -> Loads:
    """Collect the reported loads.

    A report is older than the view: requests that were placed or left since are included in `context_tokens`
    but not in `future_load`; they are assumed to last for the whole horizon.
    """
    width = horizon.points + 1
    rows = [instance.future_load for instance in instances]
    if set(map(len, rows)) != {width}:
        rows = _completed(instances, horizon)
    values = np.fromiter(chain.from_iterable(rows), np.float64, count=width * len(rows))
    tokens: Floats = values.reshape(len(rows), width)
    held = floats([instance.context_tokens for instance in instances])
    tokens += (held - tokens[:, 0])[:, None]
    # More tokens may have left than the reported future load still has.
    return Loads(instances, horizon, np.maximum(tokens, 0.0))


def _completed(instances: Sequence[InstanceView], horizon: Horizon) -> list[tuple[float, ...]]:
    """Return the reported future loads; simulate those of workers that report none, or another horizon."""
    rows = [instance.future_load for instance in instances]
    missing = [n for n, row in enumerate(rows) if len(row) != horizon.points + 1]
    if not horizon.points:
        for n in missing:
            rows[n] = (float(instances[n].context_tokens),)
    if not missing or not horizon.points:
        return rows
    # All at once: a simulation of one instance takes as long as one of a dozen.
    tables = [table_of(instances[n].requests) for n in missing]
    simulated = FutureLoad(horizon).of_each(
        np.concatenate([table.context_tokens for table in tables]).astype(np.float64),
        np.concatenate([table.expected_remaining_tokens for table in tables]),
        [len(table.context_tokens) for table in tables],
    )
    for n, row in zip(missing, simulated, strict=True):
        rows[n] = row
    return rows
