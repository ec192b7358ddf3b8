"""Requests in flight by length, the input of the planner (CascadeInfer, section 4.2).

Lengths are grouped into exponentially growing buckets; cuts may lie only between buckets ("Optimizing
efficiency"). Only sums are kept per bucket, since Eq. (1) needs no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tailrace.lengths import LengthStatistics
from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.perf.qoe_model import Floats

Ints = NDArray[np.int64]

# Columns of `Workload.sums`: n, sum I, sum I^2, sum L, which are F_1 .. F_4 of Eq. (1).
SUMS = 4


def with_cuts(edges: Ints, cuts: Sequence[int]) -> Ints:
    """Add the cuts to the edges, so that the cost of a pipeline with these cuts can be computed."""
    inside = [cut for cut in cuts if edges[0] < cut < edges[-1]]
    return np.unique(np.concatenate([edges, np.array(inside, dtype=np.int64)]))


def bucket_edges(max_length: int, growth: float = 2.0, first: int = 2) -> Ints:
    """Return 0, first, first * growth, ... and max_length; shape [buckets + 1], strictly increasing.

    The paper's tiers double ([1, 2], [2, 4], [4, 8], ...). Raise ValueError for max_length or first below 1,
    or growth of at most 1.
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


def bucket_of(edges: Ints, lengths: Ints | Floats) -> Ints:
    """Return the bucket number of each length; beyond the last edge, the last bucket."""
    buckets = np.searchsorted(edges, lengths, side="right") - 1
    return np.clip(buckets, 0, len(edges) - 2).astype(np.int64)


@dataclass(frozen=True)
class Workload:
    """Requests in flight, by bucket of current length."""

    # [buckets + 1], increasing from 0.
    edges: Ints
    # [buckets, 4]: n, sum I, sum I^2, sum L of the requests in a bucket; not necessarily integers.
    sums: Floats
    # [buckets + 1]: requests in flight per token of length at each edge. Since each request makes one token
    # per iteration, this is the number of requests that pass a cut there in an iteration.
    density: Floats

    @cached_property
    def prefix(self) -> Floats:
        """Return the sums [buckets + 1, 4] over all requests shorter than each edge."""
        return np.concatenate([np.zeros((1, SUMS)), np.cumsum(self.sums, axis=0)])

    @property
    def requests(self) -> float:
        """Return the number of requests in flight."""
        return float(self.prefix[-1, 0])

    @staticmethod
    def of_history(
        edges: Ints,
        inputs: Sequence[int] | Floats | Ints,
        outputs: Sequence[float] | Floats | Ints,
        in_flight: float,
        weights: Floats | None = None,
    ) -> Workload:
        """Create it from the input and output lengths of finished requests, scaled to `in_flight` concurrent
        ones.

        `weights`: the number of requests that each stands for; None: one. A request is in flight for one
        iteration per output token, and counts in each bucket for the iterations that it spends there
        ("sequence fragments"). Raise ValueError if no request has any output.
        """
        prompt = np.asarray(inputs, dtype=np.float64)
        output = np.asarray(outputs, dtype=np.float64)
        counts = np.ones(len(prompt)) if weights is None else weights
        total = float((counts * output).sum())
        if total <= 0.0:
            raise ValueError("a workload needs requests with output")
        lo = np.minimum(edges[:-1], edges[-1]).astype(np.float64)
        hi = edges[1:].astype(np.float64).copy()
        # Longer lengths count in the last bucket.
        hi[-1] = max(hi[-1], float((prompt + output).max()))
        start = np.maximum(prompt[:, None], lo)
        end = np.minimum((prompt + output)[:, None], hi)
        steps = np.maximum(0.0, end - start)
        weight = steps * (counts * (in_flight / total))[:, None]
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
        density = (counts @ passing) * (in_flight / total)
        return Workload(edges, sums, density.astype(np.float64))


# The slowdown of each possible stage by unequal lengths in its batches, for planning.
#
# Eq. (1) is linear in sums and has no term for it.


@dataclass(frozen=True, slots=True, eq=False)
class Slowdown:
    """Factors for each stage from one edge to another: [buckets + 1, buckets + 1], or 1.0 for all."""

    # On the whole decode step, and on its part per KV token.
    step: Floats | float = 1.0
    attention: Floats | float = 1.0

    @staticmethod
    def of(penalty: FittedLengthPenalty, workload: Workload, batch: int) -> Slowdown:
        """Compute the factors for batches of `batch` requests drawn evenly from a stage's requests in flight.

        Lengths are assumed to be uniform within a bucket.
        """
        ends = len(workload.edges)
        step, attention = np.ones((ends, ends)), np.ones((ends, ends))
        at = (np.arange(batch) + 0.5) / batch
        requests = workload.prefix[:, 0]
        for lo in range(ends - 1):
            for hi in range(lo + 1, ends):
                if requests[hi] <= requests[lo]:
                    continue
                quantiles = requests[lo] + at * (requests[hi] - requests[lo])
                lengths = np.interp(quantiles, requests[lo : hi + 1], workload.edges[lo : hi + 1])
                whole = np.maximum(1, lengths).astype(np.int64)
                step[lo, hi] = penalty.step_factor(whole)
                attention[lo, hi] = penalty.attention_factor(whole)
        return Slowdown(step, attention)


# The requests of a period by their input and output lengths, for which stages are planned (section 4.2).
#
# Requests that finished in the period give the output lengths; those that arrived in it give the numbers by
# prompt length. Both are needed: if a stage is overloaded, fewer requests finish than arrive, and counting
# only those would give it even fewer instances.


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Requests; each row stands for `weights` of them."""

    inputs: Floats
    outputs: Floats
    weights: Floats
    # Seconds in which they arrived; None: unknown.
    seconds: float | None

    @property
    def requests(self) -> float:
        """Return the number of requests."""
        return float(self.weights.sum())

    @staticmethod
    def of_history(history: Sequence[tuple[int, int]], seconds: float | None) -> Traffic:
        """Create it from (input, output) lengths of earlier requests."""
        rows = np.array(history, dtype=np.float64).reshape(-1, 2)
        return Traffic(rows[:, 0], rows[:, 1], np.ones(len(rows)), seconds)

    @staticmethod
    def of_period(statistics: LengthStatistics, edges: Ints) -> Traffic | None:
        """Create it from a period; return None if no request arrived or no output length is known.

        In each bucket of prompt lengths, finished requests represent those that arrived. Prompts of a bucket
        in which none has finished count with the mean output of all.
        """
        prompts, prompt_weights = statistics.arrived()
        inputs, outputs, weights = statistics.finished()
        if not len(prompts) or float(weights @ outputs) <= 0.0:
            return None
        buckets = len(edges) - 1
        arrived_at, finished_at = bucket_of(edges, prompts), bucket_of(edges, inputs)
        arrived = np.bincount(arrived_at, weights=prompt_weights, minlength=buckets)
        finished = np.bincount(finished_at, weights=weights, minlength=buckets)
        share = np.divide(arrived, finished, out=np.zeros(buckets), where=finished > 0)
        without_finished = finished[arrived_at] == 0
        mean_output = float(weights @ outputs / weights.sum())
        traffic = Traffic(
            np.concatenate([inputs, prompts[without_finished]]).astype(np.float64),
            np.concatenate([outputs, np.full(int(without_finished.sum()), mean_output)]),
            np.concatenate([weights * share[finished_at], prompt_weights[without_finished]]),
            statistics.seconds,
        )
        return traffic if float(traffic.weights @ traffic.outputs) > 0.0 else None

    def in_flight(self, edges: Ints, requests: float) -> Workload:
        """Return the workload of `requests` concurrent requests. Raise ValueError without any output."""
        return Workload.of_history(edges, self.inputs, self.outputs, requests, self.weights)
