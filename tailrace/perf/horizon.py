"""The prediction horizon: coming decode steps at which loads are compared, and the weight of each.

The paper leaves H and beta_t open. Settled here:

- H = 2,048 steps: the paper's one length scale is "2000 tokens in our settings" (section 5.3), and beyond it
  predictions err by thousands of tokens (table 1).
- The weights sum to one. Line 15 compares a load of now, N_i, with w_bar, a mean of weighted sums of loads
  (line 13); only with weights that sum to one are the two the same quantity. In equation 4 the future then
  counts in all as much as the present does.
- Weights fall geometrically, to a tenth at the end: a prediction is the worse the further it reaches.
- Loads change slowly against a step, so the sum over t is taken over `points` equidistant steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import RequestView
from tailrace.lengths import tokens_left

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
        """Raises ValueError."""
        if self.points < 0 or self.length < max(1, self.points) or not 0.0 < self.end_weight <= 1.0:
            raise ValueError(f"no horizon has {self.points} points in {self.length} steps")
        steps = np.round(np.arange(self.points + 1) * (self.length / max(1, self.points)))
        betas = self.end_weight ** (steps[1:] / self.length)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "weights", np.concatenate(([1.0], betas / max(betas.sum(), 1e-300))))

    @property
    def betas(self) -> Floats:
        """[points]: beta_t, summing to one."""
        return self.weights[1:]

    def contributions(self, tokens: Floats, remaining: Floats) -> Floats:
        """What each request adds to its instance's load now and at each step, [requests, 1 + points].

        `tokens`: N(r). `remaining`: tokens to come, infinite where nothing bounds them. A request grows by
        one token a step, and its load is gone when its last token is made.
        """
        alive = self.steps < remaining[:, None]
        alive[:, 0] = True
        loads: Floats = (tokens[:, None] + self.steps) * alive
        return loads


def expected_remaining(request: RequestView) -> float:
    """Tokens to come as predicted; without a prediction as many as may come, infinite where that is open."""
    predicted = request.predicted_remaining_tokens
    if predicted is not None:
        return predicted
    return tokens_left(request.prompt_tokens, request.output_tokens, request.max_tokens)


def floats(values: Sequence[float]) -> Floats:
    """An array of them."""
    return np.array(values, dtype=np.float64)


# What workers report by, and what the policies go by unless told otherwise.
HORIZON = Horizon()
# The present alone.
NOW = Horizon(points=0)
