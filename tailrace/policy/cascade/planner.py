"""Length-aware stage partition (CascadeInfer, section 4.2): plan which lengths each instance serves.

f(e, l), the least cost of serving all lengths below l with e instances, is

    f(e, l) = min over e' < e and l' < l of  f(e', l') + (e - e') * Q(requests in [l', l) / (e - e')) + c(l')

The paper's third index, the number of stages, constrains nothing, and the result is a minimum over it, so it
is omitted. A set of requests is divided into k equal parts by dividing its sums by k; the paper takes every
k-th request of the sorted set, which needs the set and approximates the same.
With Eq. (1), k * Q(S / k) = n * D_0 + n * (D_1 n + D_2 sum I + D_3 sum I^2 + D_4 sum L) / k.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from tailrace.cluster import Stage
from tailrace.perf.qoe_model import Floats, QoeModel
from tailrace.policy.cascade.workload import Slowdown, Workload

# For one of so many numbers of instances the exact planner compares all ways to divide them; about the square
# root of a thousand, for which it takes the least time.
_ROWS: Final = 16
_NO_SLOWDOWN: Final = Slowdown()


@dataclass(frozen=True, slots=True)
class Plan:
    """A pipeline: stage i serves lengths [cuts[i], cuts[i + 1]) with counts[i] instances.

    `cost`: total Q, in seconds per output token summed over the requests in flight.
    """

    cuts: tuple[int, ...]
    counts: tuple[int, ...]
    cost: float

    def stages(self, instance_ids: Sequence[str]) -> tuple[Stage, ...]:
        """Return the stages with instances in this order. Raise ValueError if their number is wrong."""
        if len(instance_ids) != sum(self.counts):
            raise ValueError(f"{len(instance_ids)} instances for a plan of {sum(self.counts)}")
        stages: list[Stage] = []
        assigned = 0
        for lo, hi, count in zip(self.cuts[:-1], self.cuts[1:], self.counts, strict=True):
            stages.append(Stage(lo, hi, tuple(instance_ids[assigned : assigned + count])))
            assigned += count
        return tuple(stages)


class Costs:
    """The costs of stages and cuts for one workload, in seconds per output token summed over all requests."""

    def __init__(
        self,
        workload: Workload,
        model: QoeModel,
        transfer_s_per_token: float,
        slowdown: Slowdown = _NO_SLOWDOWN,
        work: Floats | None = None,
        most_work: float = math.inf,
    ) -> None:
        """`transfer_s_per_token`: seconds to transfer the KV of one token between two instances.

        A cut at l' costs each request that passes it in an iteration the transfer of l' tokens. `slowdown`:
        factors on the decode part of Eq. (1); the paper has none. `work`: the work of each possible stage, in
        instances (`stage_work`); plans assign at most `most_work` to an instance. None: no limit.
        """
        self.workload = workload
        self.edges = workload.edges
        self.work = work
        self.most_work = most_work
        d0, d1, d2, d3, d4 = model.d
        # [B + 1, B + 1] over (l', l): `fixed` is independent of the number of instances k, `shared` is
        # divided by k.
        requests, inputs, squares, lengths = np.moveaxis(
            workload.prefix[None, :, :] - workload.prefix[:, None, :], 2, 0
        )
        decode = slowdown.step * (d1 * requests + d4 * slowdown.attention * lengths)
        self.fixed: Floats = requests * (slowdown.step * d0)
        self.shared: Floats = requests * (decode + d2 * inputs + d3 * squares)
        # The first entry is 0, as is the first edge; the last is unused, since there is no cut at the end.
        self.cut: Floats = workload.density * workload.edges * transfer_s_per_token

    @property
    def buckets(self) -> int:
        """Return the number of buckets."""
        return len(self.edges) - 1

    def stage(self, lo: int, hi: int, count: int) -> float:
        """Return the cost of `count` instances that serve the buckets [lo, hi)."""
        return float(self.fixed[lo, hi] + self.shared[lo, hi] / count)

    def plan(self, cuts: Sequence[int], counts: Sequence[int]) -> Plan:
        """Return the plan with these cuts, given as edge numbers from 0 to the number of buckets."""
        stages = zip(cuts[:-1], cuts[1:], counts, strict=True)
        cost = sum(self.stage(lo, hi, count) for lo, hi, count in stages)
        cost += sum(float(self.cut[cut]) for cut in cuts[1:-1])
        return Plan(tuple(int(self.edges[cut]) for cut in cuts), tuple(counts), cost)

    def layout(self, cuts: Sequence[int], counts: Sequence[int]) -> Plan:
        """Return the plan with these cuts, given as lengths. Raise ValueError if one is not an edge."""
        at = np.searchsorted(self.edges, cuts)
        if at[-1] >= len(self.edges) or (self.edges[at] != cuts).any():
            raise ValueError(f"cuts {list(cuts)} are not all among the edges")
        return self.plan(at.tolist(), counts)

    def load(self, plan: Plan) -> float:
        """Return the largest work per instance of any stage; 0 if the work is unknown."""
        if self.work is None:
            return 0.0
        at = np.searchsorted(self.edges, plan.cuts)
        return float((self.work[at[:-1], at[1:]] / np.array(plan.counts)).max())

    def stages(self, instances: int) -> Floats:
        """Return the cost [B + 1, B + 1, E] of each stage with E - j instances; infinite if these are too
        few."""
        counts = np.arange(instances, 0, -1)
        costs = self.fixed[:, :, None] + self.shared[:, :, None] / counts
        if self.work is not None:
            # The factor keeps a stage that is exactly at the limit from failing by rounding.
            costs[self.work[:, :, None] > self.most_work * (1.0 + 1e-9) * counts] = np.inf
        return costs


class Planner(Protocol):
    """A planning algorithm."""

    def __call__(self, costs: Costs, instances: int) -> Plan:
        """Return a plan for that many instances. Raise ValueError without instances."""
        ...


def exact(costs: Costs, instances: int) -> Plan:
    """Return the optimal plan over all numbers of stages, cuts and instances per stage.

    Plans that overload an instance are excluded unless all do. Of plans with equal cost, one with a longer
    last stage is returned. It is optimal if the cost of a stage is convex in its number of instances, as it
    is of a QoE model without negative coefficients. Raise ValueError without instances.
    """
    if instances < 1:
        raise ValueError("a pipeline needs an instance")
    ends = costs.buckets + 1
    most = -(-instances // _ROWS) * _ROWS
    # stages[l', l, most + k] = the cost of a stage from l' to l with k instances, infinite for k < 1.
    stages = np.full((ends, ends, 2 * most + 1), np.inf)
    stages[:, :, most + 1 :] = costs.stages(most)[:, :, ::-1]
    # reach[l', e] = f(e, l') + c(l')
    reach = np.full((ends, most + 1), np.inf)
    reach[0, 0] = 0.0
    for end in range(1, ends - 1):
        reach[end] = least_sums(reach[:end], stages[:end, end]) + costs.cut[end]
    plan = _trace(costs, instances, reach, stages)
    if plan is None:
        unlimited = copy.copy(costs)
        unlimited.most_work = math.inf
        return exact(unlimited, instances)
    return plan


def least_sums(reach: Floats, stages: Floats) -> Floats:
    """Return for each number e of instances the minimum of reach[l', j] + stages[l', e - j] over l' and j.

    The cost of a stage is convex in its number of instances. So with more instances, those before the stage
    with the least sum are not fewer, and only for every `_ROWS`-th e must all j be compared. This takes a
    fifth of the time with a thousand instances, in which no placement is decided.
    """
    most, blocks = reach.shape[1] - 1, reach.shape[1] // _ROWS
    # sums[l', e / _ROWS, j]
    of_rows = np.lib.stride_tricks.sliding_window_view(stages[:, ::-1], most + 1, axis=1)[:, ::-_ROWS]
    sums = reach[:, None] + of_rows
    # Rounding must not let it decrease.
    at = np.maximum.accumulate(sums.argmin(axis=2), axis=1)
    least = np.empty(most + 1)
    least[::_ROWS] = sums.min(axis=(0, 2))
    # Between two such rows: all j from that of the one to that of the other, for each l' in turn.
    first = at[:, :-1].ravel()
    widths = at[:, 1:].ravel() - first + 1
    begins = np.cumsum(widths) - widths
    start, block = np.divmod(np.repeat(np.arange(len(widths)), widths), blocks)
    j = np.arange(len(start)) + np.repeat(first - begins, widths)
    between = np.arange(1, _ROWS)[:, None]
    sums = reach[start, j] + stages[start, most + _ROWS * block - j + between]
    found = np.minimum.reduceat(sums, begins, axis=1).reshape(_ROWS - 1, len(reach), blocks).min(axis=1)
    least[:-1].reshape(blocks, _ROWS)[:, 1:] = found.T
    return least


def _trace(costs: Costs, instances: int, reach: Floats, stages: Floats) -> Plan | None:
    """Reconstruct the plan by walking back from f(E, L); return None if no plan has a finite cost."""
    end, left = costs.buckets, instances
    cuts: list[int] = [end]
    counts: list[int] = []
    while end > 0:
        # By the number of instances before the stage.
        totals = reach[:end] + stages[:end, end, left : left + reach.shape[1]][:, ::-1]
        start, before = np.unravel_index(int(np.argmin(totals)), totals.shape)
        if math.isinf(totals[start, before]):
            return None
        counts.append(left - int(before))
        left = int(before)
        end = int(start)
        cuts.append(end)
    return costs.plan(cuts[::-1], counts[::-1])


def heuristic(costs: Costs, instances: int) -> Plan:
    """Return the plan of the paper's two-phase heuristic: one instance per stage, then merging by gain.

    Never better than `exact`.
    """
    cuts, counts = _merged(costs, *_one_each(costs, instances))
    return costs.plan(cuts, counts)


def chain(costs: Costs, instances: int) -> Plan:
    """Return the best plan with one instance per stage (a baseline of section 6.5; phase 1 of the heuristic).

    There are at most as many stages as buckets; further instances share stages.
    """
    return costs.plan(*_one_each(costs, instances))


def no_pipeline(costs: Costs, instances: int) -> Plan:
    """Return the plan with all instances in one stage (a baseline of section 6.5)."""
    if instances < 1:
        raise ValueError("a pipeline needs an instance")
    return costs.plan((0, costs.buckets), (instances,))


def _one_each(costs: Costs, instances: int) -> tuple[list[int], list[int]]:
    """Phase 1: return the best pipeline with one instance per stage, as cuts and counts; O(E B^2)."""
    if instances < 1:
        raise ValueError("a pipeline needs an instance")
    ends = costs.buckets + 1
    # [l', l]: the cost of a stage from l' to l and of the cut at l'.
    step = np.full((ends, ends), np.inf)
    upper = np.triu_indices(ends, 1)
    step[upper] = (costs.fixed + costs.shared + costs.cut[:, None])[upper]
    single = min(instances, costs.buckets)
    best = np.full(ends, np.inf)
    best[0] = 0.0
    choice = np.zeros((single, ends), dtype=np.int64)
    for stage in range(single):
        totals = best[:, None] + step
        choice[stage] = np.argmin(totals, axis=0)
        best = totals.min(axis=0)
    cuts = [costs.buckets]
    for stage in reversed(range(single)):
        cuts.append(int(choice[stage, cuts[-1]]))
    cuts.reverse()
    counts = [1] * single
    # More instances than buckets: add each of the rest to the stage that gains most by it.
    for _ in range(instances - single):
        gains = [
            costs.stage(lo, hi, count) - costs.stage(lo, hi, count + 1)
            for lo, hi, count in zip(cuts[:-1], cuts[1:], counts, strict=True)
        ]
        counts[int(np.argmax(gains))] += 1
    return cuts, counts


def _merged(costs: Costs, cuts: list[int], counts: list[int]) -> tuple[list[int], list[int]]:
    """Phase 2: merge the two adjacent stages with the greatest gain until no merge gains.

    There are at most as many stages as buckets, so the naive scan of the paper is fast enough.
    """
    cuts, counts = list(cuts), list(counts)
    while len(counts) > 1:
        gains = [
            costs.stage(cuts[i], cuts[i + 1], counts[i])
            + costs.stage(cuts[i + 1], cuts[i + 2], counts[i + 1])
            + float(costs.cut[cuts[i + 1]])
            - costs.stage(cuts[i], cuts[i + 2], counts[i] + counts[i + 1])
            for i in range(len(counts) - 1)
        ]
        at = int(np.argmax(gains))
        if gains[at] <= 0.0:
            break
        counts[at : at + 2] = [counts[at] + counts[at + 1]]
        del cuts[at + 1]
    return cuts, counts
