"""Adaptive range refinement (CascadeInfer, section 4.3): boundaries follow the lengths that there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tailrace.cluster import Stage
from tailrace.perf.qoe_model import QoeModel
from tailrace.policy.cascade.workload import Ints

# Requests as rows of (input, present length), in tokens.
Rows = Ints


class Sharing(Protocol):
    """What of a stage's requests, sorted by length, is weighed if it has `parts` instances."""

    def __call__(self, rows: Rows, parts: int) -> Rows:
        """Some of the rows."""
        ...


class Splitter(Protocol):
    """Where to cut requests in two; `rows` are sorted by length, and there is at least one."""

    def __call__(self, rows: Rows, model: QoeModel) -> int:
        """The index b of the first request of the second part; the boundary is its length."""
        ...


def optimal_split(rows: Rows, model: QoeModel) -> int:
    """b = argmin over 0 <= i < N of Q^R[:i] + Q^R[i:], the first of equals (section 4.3)."""
    inputs = rows[:, 0].astype(np.float64)
    columns = (np.ones(len(rows)), inputs, inputs**2, rows[:, 1].astype(np.float64))
    below = np.zeros((len(rows), 5))
    # F_0 is 1 whatever the batch; of an empty one n is 0, so it costs nothing all the same.
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
    """As many requests on either side (section 6.5's quantity-based refinement; with `whole`)."""
    return len(rows) // 2


def memory_split(rows: Rows, model: QoeModel) -> int:
    """As much KV on either side (section 6.5's memory-based refinement; with `whole`)."""
    lengths = rows[:, 1]
    below = np.cumsum(lengths) - lengths
    return int(np.argmin(np.abs(2 * below - lengths.sum())))


def divided(rows: Rows, parts: int) -> Rows:
    """One of `parts` equal parts: of rows sorted by length, every parts-th from the middle (footnote 1)."""
    return rows[parts // 2 :: parts]


def whole(rows: Rows, parts: int) -> Rows:
    """All of them, however many instances share them: "the number of requests per stage" (section 6.5)."""
    return rows


def by_length(rows: Sequence[tuple[int, int]]) -> Rows:
    """Rows sorted by length, then input."""
    array = np.array(sorted(rows, key=lambda row: (row[1], row[0])), dtype=np.int64)
    return array.reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class Refinement:
    """Moves each boundary towards where it would be best now.

    - `split`: what "best" is.
    - `share`: the part of a stage that is weighed: one instance's, on average; the paper's baselines weigh
      stages as they are, for "per stage" is what section 6.5 says of both.
    - `smoothing`: weight of the new boundary in the exponential moving average; the paper names none. 0.2
      means that a change of workload is followed by two thirds in five intervals.
    - `least_requests`: fewer in the two stages together leave their boundary as it is ("e.g., when there are
      fewer than five requests").
    """

    model: QoeModel
    split: Splitter = optimal_split
    smoothing: float = 0.2
    least_requests: int = 5
    share: Sharing = divided

    def refine(
        self, stages: Sequence[Stage], requests: Mapping[str, Sequence[tuple[int, int]]]
    ) -> tuple[Stage, ...]:
        """Stages with refined boundaries; they tile what they tiled, and none becomes empty.

        `requests`: (input, present length) of the requests of each instance. The paper refines at each
        instance, from its own requests and the average of its successors; here a stage has one boundary, so
        its own side is the average of its instances too.
        """
        refined = list(stages)
        for at in range(len(refined) - 1):
            lower, upper = refined[at], refined[at + 1]
            boundary = self._boundary(lower, upper, requests)
            refined[at] = replace(lower, hi=boundary)
            refined[at + 1] = replace(upper, lo=boundary)
        return tuple(refined)

    def _boundary(self, lower: Stage, upper: Stage, requests: Mapping[str, Sequence[tuple[int, int]]]) -> int:
        now = lower.hi
        sides = [
            [row for name in stage.instance_ids for row in requests.get(name, ())] for stage in (lower, upper)
        ]
        if sum(map(len, sides)) < self.least_requests:
            return now
        parts = [
            self.share(by_length(side), max(1, len(stage.instance_ids)))
            for side, stage in zip(sides, (lower, upper), strict=True)
        ]
        rows = np.concatenate(parts)
        if not len(rows):
            return now
        rows = rows[np.lexsort((rows[:, 0], rows[:, 1]))]
        wanted = int(rows[self.split(rows, self.model), 1])
        smoothed = round((1.0 - self.smoothing) * now + self.smoothing * wanted)
        return min(max(smoothed, lower.lo + 1), upper.hi - 1)
