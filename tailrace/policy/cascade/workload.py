"""What a pipeline is planned for: requests in flight by length (CascadeInfer, section 4.2).

Lengths fall into buckets that grow exponentially; cuts may lie only between buckets ("Optimizing
efficiency"). Of each bucket only sums are kept, for Eq. (1) needs no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tailrace.policy.cascade.qoe import Floats

Ints = NDArray[np.int64]

# Columns of `Workload.sums`: n, sum I, sum I^2, sum L, which are F_1 .. F_4 of Eq. (1).
SUMS = 4


def bucket_edges(max_length: int, growth: float = 2.0, first: int = 2) -> Ints:
    """0, first, first * growth, ... and max_length; shape [buckets + 1], strictly increasing.

    The paper's tiers double ([1, 2], [2, 4], [4, 8], ...). Raises ValueError for a max_length below 1 or a
    growth that does not grow.
    """
    if max_length < 1 or growth <= 1.0 or first < 1:
        raise ValueError(f"no buckets from {first} to {max_length} tokens that grow by {growth}")
    edges = [0]
    edge = float(first)
    while edge < max_length:
        if round(edge) > edges[-1]:
            edges.append(round(edge))
        edge *= growth
    edges.append(max_length)
    return np.array(edges, dtype=np.int64)


@dataclass(frozen=True)
class Workload:
    """Requests in flight, by bucket of present length."""

    # [buckets + 1], increasing from 0.
    edges: Ints
    # [buckets, 4]: n, sum I, sum I^2, sum L of the requests in a bucket. Need not be whole numbers.
    sums: Floats
    # [buckets + 1]: requests in flight per token of length around each edge. As each makes one token an
    # iteration, that is how many pass a cut there in an iteration.
    density: Floats

    @cached_property
    def prefix(self) -> Floats:
        """[buckets + 1, 4]: sums over all requests shorter than each edge."""
        return np.concatenate([np.zeros((1, SUMS)), np.cumsum(self.sums, axis=0)])

    @property
    def requests(self) -> float:
        """Requests in flight."""
        return float(self.prefix[-1, 0])

    def between(self, cuts: Sequence[int]) -> Floats:
        """[len(cuts) - 1, 4]: sums between any lengths, buckets being taken as evenly filled."""
        at = np.stack([np.interp(cuts, self.edges, self.prefix[:, k]) for k in range(SUMS)], axis=1)
        return np.asarray(np.diff(at, axis=0), dtype=np.float64)

    def density_at(self, length: int) -> float:
        """Requests in flight per token of length around any length."""
        return float(np.interp(length, self.edges, self.density))

    @staticmethod
    def of_snapshot(edges: Ints, inputs: Sequence[int], lengths: Sequence[int]) -> Workload:
        """From the requests that are in flight now. Longer than the last edge: in the last bucket."""
        prompt = np.asarray(inputs, dtype=np.float64)
        length = np.asarray(lengths, dtype=np.float64)
        count = len(edges) - 1
        bucket = np.clip(np.searchsorted(edges, length, side="right") - 1, 0, count - 1)
        columns = (None, prompt, prompt**2, length)
        sums = np.stack([np.bincount(bucket, weights=c, minlength=count) for c in columns], axis=1)
        per_token = sums[:, 0] / np.diff(edges)
        # An edge lies between two buckets: the mean of both.
        density = np.zeros(count + 1)
        density[1:-1] = (per_token[:-1] + per_token[1:]) / 2
        return Workload(edges, sums.astype(np.float64), density)

    @staticmethod
    def of_history(edges: Ints, inputs: Sequence[int], outputs: Sequence[int], in_flight: float) -> Workload:
        """From finished requests (their input and output lengths), as `in_flight` of them at a time.

        A request is in flight for one iteration an output token, and in each bucket for as many as its
        length spends there: "sequence fragments". Raises ValueError if no request has any output.
        """
        prompt = np.asarray(inputs, dtype=np.float64)
        output = np.asarray(outputs, dtype=np.float64)
        total = float(output.sum())
        if total <= 0.0:
            raise ValueError("a workload needs requests with output")
        lo = np.minimum(edges[:-1], edges[-1]).astype(np.float64)
        hi = edges[1:].astype(np.float64).copy()
        # What outgrows the last edge stays in the last bucket.
        hi[-1] = max(hi[-1], float((prompt + output).max()))
        start = np.maximum(prompt[:, None], lo)
        end = np.minimum((prompt + output)[:, None], hi)
        steps = np.maximum(0.0, end - start)
        weight = steps * (in_flight / total)
        middle = (start + end) / 2
        sums = np.stack(
            [
                weight.sum(axis=0),
                (weight * prompt[:, None]).sum(axis=0),
                (weight * prompt[:, None] ** 2).sum(axis=0),
                (weight * middle).sum(axis=0),
            ],
            axis=1,
        )
        inner = edges.astype(np.float64)
        passing = (prompt[:, None] < inner) & (inner < (prompt + output)[:, None])
        density = passing.sum(axis=0) * (in_flight / total)
        return Workload(edges, sums, density.astype(np.float64))
