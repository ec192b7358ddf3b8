"""Adaptive range refinement (CascadeInfer, section 4.3): boundaries follow the current request lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from tailrace.cluster import Stage
from tailrace.perf.qoe_model import QoeModel
from tailrace.policy.cascade.workload import Ints

# More bits than the length of any prompt in tokens has, and fewer than a context leaves of 64.
_BITS: Final = 32

# Requests as rows of (input, current length), in tokens.
Rows = Ints
# Inputs, and current lengths, of one request each.
Lengths = tuple[Sequence[int] | Ints, Sequence[int] | Ints]


class Sharing(Protocol):
    """Selects the requests of a stage that refinement compares; `rows` are sorted by length."""

    def __call__(self, rows: Rows, parts: int) -> Rows:
        """Return some of the rows; `parts`: number of the stage's instances."""
        ...


class Splitter(Protocol):
    """A rule that splits requests in two; `rows` are sorted by length, and not empty."""

    def __call__(self, rows: Rows, model: QoeModel) -> int:
        """Return the index b of the first request of the second part; the boundary is its length."""
        ...


def optimal_split(rows: Rows, model: QoeModel) -> int:
    """Return b = argmin over 0 <= i < N of Q^R[:i] + Q^R[i:], the first of equals (section 4.3)."""
    inputs = rows[:, 0].astype(np.float64)
    columns = (np.ones(len(rows)), inputs, inputs**2, rows[:, 1].astype(np.float64))
    below = np.zeros((len(rows), 5))
    # F_0 is 1 for every batch; an empty one has n = 0, so it still costs nothing.
    below[:, 0] = 1.0
    total = np.ones(5)
    for feature, column in enumerate(columns, start=1):
        summed = np.cumsum(column)
        below[1:, feature] = summed[:-1]
        total[feature] = summed[-1]
    above = total - below
    above[:, 0] = 1.0
    cost = below[:, 1] * model.requests(below) + above[:, 1] * model.requests(above)
    return int(np.argmin(cost))


def quantity_split(rows: Rows, model: QoeModel) -> int:
    """Split into equal numbers of requests (section 6.5's quantity-based refinement; with `whole`)."""
    return len(rows) // 2


def memory_split(rows: Rows, model: QoeModel) -> int:
    """Split into equal amounts of KV (section 6.5's memory-based refinement; with `whole`)."""
    lengths = rows[:, 1]
    below = np.cumsum(lengths) - lengths
    return int(np.argmin(np.abs(2 * below - lengths.sum())))


def divided(rows: Rows, parts: int) -> Rows:
    """Return one of `parts` equal parts: every parts-th row, in order of length (footnote 1)."""
    return rows[parts // 2 :: parts]


def whole(rows: Rows, parts: int) -> Rows:
    """Return all rows, independent of the number of instances: "the number of requests per stage" (section
    6.5)."""
    return rows


def by_length(lengths: Iterable[Lengths]) -> Rows:
    """Return all requests as rows sorted by length, then input."""
    rows = np.concatenate(
        [np.empty((2, 0), np.int64), *(np.array(each, dtype=np.int64) for each in lengths)], axis=1
    )
    # One number for each, since sorting numbers is ten times as fast as sorting by two columns.
    keys = np.sort((rows[1] << _BITS) | rows[0])
    return np.column_stack((keys & ((1 << _BITS) - 1), keys >> _BITS))


@dataclass(frozen=True, slots=True)
class Refinement:
    """Move each boundary towards the best split of the current requests.

    - `split`: the rule for the best split.
    - `share`: the requests of a stage that are compared: those of one instance, on average. The paper's
      baselines compare whole stages ("per stage", section 6.5).
    - `smoothing`: weight of the new boundary in the exponential moving average, which the paper leaves open.
      With 0.2, boundaries follow a change of workload by two thirds within five intervals.
    - `least_requests`: with fewer requests in both stages together the boundary stays ("e.g., when there are
      fewer than five requests").
    """

    model: QoeModel
    split: Splitter = optimal_split
    smoothing: float = 0.2
    least_requests: int = 5
    share: Sharing = divided

    def refine(self, stages: Sequence[Stage], requests: Mapping[str, Lengths]) -> tuple[Stage, ...]:
        """Return stages with refined boundaries that cover the same lengths; no range becomes empty.

        `requests`: lengths of the requests of each instance. The paper refines on each instance, from its own
        requests and the average of its successors; here a stage has one boundary, so its own side is also the
        average of its instances.
        """
        refined = list(stages)
        sides = [
            by_length(requests[name] for name in stage.instance_ids if name in requests) for stage in stages
        ]
        for at in range(len(refined) - 1):
            lower, upper = refined[at], refined[at + 1]
            boundary = self._boundary(lower, upper, sides[at : at + 2])
            refined[at] = replace(lower, hi=boundary)
            refined[at + 1] = replace(upper, lo=boundary)
        return tuple(refined)

    def _boundary(self, lower: Stage, upper: Stage, sides: Sequence[Rows]) -> int:
        now = lower.hi
        if sum(map(len, sides)) < self.least_requests:
            return now
        parts = [
            self.share(side, max(1, len(stage.instance_ids)))
            for side, stage in zip(sides, (lower, upper), strict=True)
        ]
        rows = np.concatenate(parts)
        if not len(rows):
            return now
        rows = rows[np.lexsort((rows[:, 0], rows[:, 1]))]
        target = int(rows[self.split(rows, self.model), 1])
        smoothed = round((1.0 - self.smoothing) * now + self.smoothing * target)
        return min(max(smoothed, lower.lo + 1), upper.hi - 1)
