"""ARES's prediction horizon (section 5): future decode steps at which loads are compared, and their weights.

The paper leaves H and beta_t open. Here:

- H = 2,048 steps: the paper's only length scale is "2000 tokens in our settings" (section 5.3), and beyond it
  predictions err by thousands of tokens (table 1).
- The weights sum to one. Line 15 of Algorithm 1 compares a current load, N_i, with w_bar, a mean of weighted
  sums of loads (line 13), and only with weights that sum to one are these the same quantity. In equation 4
  the whole future then counts as much as the present.
- Weights decrease geometrically, to a tenth at the end, since predictions get worse with distance.
- Loads change slowly compared to a step, so the sum over t is taken over `points` equidistant steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Horizon:
    """Steps t = H/points, 2H/points, ..., H with their beta_t. `points` 0: only the present counts."""

    length: int = 2_048
    points: int = 8
    # beta_H / beta_0.
    end_weight: float = 0.1
    # [1 + points]: 0 and the steps.
    steps: Floats = field(init=False, repr=False, compare=False)
    # [1 + points]: 1 for the present (sigma_0 of equation 4), then beta_t.
    weights: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid combination."""
        if self.points < 0 or self.length < 1 or not 0.0 < self.end_weight <= 1.0:
            raise ValueError(f"no horizon has {self.points} points in {self.length} steps")
        if self.points > self.length:
            raise ValueError(f"horizon_points is {self.points}, more than horizon_tokens, {self.length}")
        steps = np.round(np.arange(self.points + 1) * (self.length / max(1, self.points)))
        betas = self.end_weight ** (steps[1:] / self.length)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "weights", np.concatenate(([1.0], betas / max(betas.sum(), 1e-300))))

    @property
    def betas(self) -> Floats:
        """Return beta_t [points], which sum to one."""
        return self.weights[1:]

    def contributions(self, tokens: Floats, remaining: Floats) -> Floats:
        """Return each request's load now and at each step, [requests, 1 + points].

        `tokens`: N(r). `remaining`: remaining output tokens, infinite if unbounded. A request grows by one
        token per step, and its load ends with its last token.
        """
        alive = self.steps < remaining[:, None]
        alive[:, 0] = True
        loads: Floats = (tokens[:, None] + self.steps) * alive
        return loads


def floats(values: Sequence[float] | Floats) -> Floats:
    """Return the values as an array."""
    return np.array(values, dtype=np.float64)


# The horizon of workers' reports, and the policies' default.
HORIZON = Horizon()
# The present only.
NOW = Horizon(points=0)


# The worker's part of ARES (section 5.2): "perform local future state simulation, and proactively report".
#
# A worker reports `FutureLoad()(its requests)`, which the scheduler only needs to add and subtract.


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
