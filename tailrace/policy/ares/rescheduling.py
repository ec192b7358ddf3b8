"""ARES's Algorithm 1: decode rescheduling in three phases.

Notation: N_i is the load of instance i in tokens, w_i its time-weighted load, w_bar their mean; N(r) and
N^(r) are the current and the predicted remaining tokens of request r.

Choices that the paper leaves open are parameters of `Rescheduling`:

- theta = 0.1. Figure 13's variance of 0.78 ms^2 is, at the slope of figure 8, a spread of about a tenth of
  the load of an instance; a wider band would leave more.
- Line 15 admits to U instances below (1 + theta) w_bar, not (1 - theta): implemented as written
  (`theta_under`, which may be negative). With the other reading, an overloaded instance among many average
  ones has no target; and more targets can only make the best one better.
- C_mig (line 20): the time to open and commit a migration, and to copy the request's KV at the rate that
  recent migrations to the target have reached (`InstanceView.migration_tokens_per_s`). Without a measured
  rate: `copy_tokens_per_s`; 50,000 are 25 Gbit/s for the paper's 7B model (57 KB per token), and 100 Gbit/s
  for a 32B model of 262 KB per token.
- T_exec: the source's own mean token interval; `token_interval_s` (section 5.3's 18.23 ms) if it has none.
- C_mem (line 21): `memory_share` of the target's KV capacity; the rest is for the growth of other requests.
- Line 21 adds only N^(r) to the target's load. The migrated request also has N(r) tokens of KV, so both are
  added here.
- A request without a prediction is assumed to use all of its remaining `max_tokens`, and counts with N(r)
  alone in line 21. Without a horizon, predictions are ignored.
- Line 26's "0" is `least_gain`: a minimum share of the variance that a migration must remove.
- B_s (line 20) contains the source's decoding requests and its preempted requests with KV in host memory,
  which can be sent from there. A preempted request without KV stays until it is recomputed.
- An instance with an open migration out is not a source: its load is about to change by an amount that the
  view does not contain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import InstanceView, RequestView
from tailrace.perf.horizon import Floats, FutureLoad, Horizon, floats
from tailrace.perf.remaining import expected_remaining
from tailrace.policy.candidates import with_request
from tailrace.policy.parameters import Parametrized, parameter
from tailrace.policy.requests import RequestTable, table_of


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


def time_weighted_variance(tokens: Floats, weights: Floats) -> float:
    """Equation 4 of ARES: sum_k weights[k] * Var_i(tokens[i, k]). `tokens`: [instances, steps]."""
    return float(tokens.var(axis=0) @ weights)


def change(load: Floats, source: Floats, target: Floats, weights: Floats, instances: int) -> float:
    """Return the change of equation 4 when `load` (one entry per step) moves from source to target.

    The mean is unchanged, so only two squares change: (s - x)^2 - s^2 + (t + x)^2 - t^2 = 2x (x + t - s).
    """
    return float(2.0 / instances * ((load * (load + target - source)) @ weights))


Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]

# Sources whose requests are evaluated together.
_SOURCES = 4
# Overloaded instances that a plan examines. With a thousand instances hundreds are overloaded, and where none
# of their requests may move, a plan that examines all of them takes a third of a second, during which nothing
# is placed.
SOURCES_MAX: Final = 16


class Constants(Parametrized):
    """The constants of Algorithm 1."""

    theta: float = parameter(
        0.1,
        "an instance is overloaded from (1 + theta) times the mean weighted load",
        source="ours, of ARES's Algorithm 1, line 14",
        minimum=0.0,
    )
    theta_under: float = parameter(
        0.1,
        "an instance is underloaded below (1 + theta_under) times the mean weighted load",
        source="ours, of ARES's Algorithm 1, line 15",
        minimum=-1.0,
    )
    open_s: float = parameter(
        0.01,
        "time to open and commit a migration, part of C_mig",
        unit="s",
        source="ours, of ARES's Algorithm 1, line 20",
        minimum=0.0,
    )
    copy_tokens_per_s: float = parameter(
        50_000.0,
        "assumed copy rate of KV to an instance without a measured rate, part of C_mig",
        unit="tokens/s",
        source="ours, of ARES's Algorithm 1, line 20",
        minimum=1.0,
    )
    token_interval_s: float = parameter(
        0.01823,
        "T_exec of a source that reports no token interval",
        unit="s",
        source="ARES, section 5.3",
        minimum=1e-6,
    )
    memory_share: float = parameter(
        0.9,
        "C_mem: share of the target's KV capacity that load and prediction may reach",
        source="ours, of ARES's Algorithm 1, line 21",
        minimum=0.0,
    )
    least_gain: float = parameter(
        0.0,
        "minimum share of the variance that a migration must remove",
        source="ARES, Algorithm 1, line 26",
        minimum=0.0,
    )


@dataclass(frozen=True, slots=True)
class Move:
    """A selected migration: the request, and positions in `Loads.instances`."""

    request: RequestView
    source: int
    target: int
    # Decrease of equation 4.
    gain: float


@dataclass(frozen=True, slots=True)
class Targets:
    """The set U: one entry per underloaded instance."""

    positions: Indices
    # Tokens by which the load may rise (line 21).
    headroom: Floats
    # Free KV tokens, limited by the maximum model length.
    free: Floats
    # Seconds to copy the KV of one token there.
    copy_s: Floats
    # The largest block size of all, in tokens.
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """The set C of line 23: requests and targets; `allowed` selects the pairs."""

    requests: Sequence[RequestView]
    # One entry per request: position of its source, N(r), N^(r) (without a prediction, the most possible).
    sources: Indices
    tokens: Floats
    remaining: Floats
    # Longest copy time by line 20: N^(r) * T_exec less the time to open the migration.
    patience_s: Floats
    # N(r) + N^(r), and the KV tokens needed at once.
    demand: Floats
    needed: Floats
    targets: Targets

    def allowed(self) -> Mask:
        """Return a mask [requests, targets] of the pairs in C (lines 19 to 21)."""
        mask: Mask = self.demand[:, None] <= self.targets.headroom
        mask &= self.tokens[:, None] * self.targets.copy_s < self.patience_s[:, None]
        mask &= self.needed[:, None] <= self.targets.free
        mask &= self.sources[:, None] != self.targets.positions
        return mask


class Rescheduling(Constants):
    """Algorithm 1; the module describes it."""

    def plan(self, loads: Loads, turn: int = 0) -> Move | None:
        """Select the best migration (lines 4-10); return None if there is none.

        The result is exact for up to `SOURCES_MAX` overloaded instances, although not all candidates are
        evaluated: targets that another one dominates, and sources whose bound on the gain is below the best
        found, are skipped. Of more, half of those that are examined have the largest bounds, and the other
        half are those whose turn it is: where no request of the first may move, the others' would never be
        examined.
        """
        if not len(loads.instances):
            return None
        over, under = self.classify(loads)
        if not len(over) or not len(under):
            return None
        targets = _undominated(loads, self.targets(loads, under))
        bounds = _bounds(loads, over, under)
        order = _examined(np.argsort(-bounds, kind="stable"), turn)
        best: Move | None = None
        for first in range(0, len(order), _SOURCES):
            batch = order[first : first + _SOURCES]
            if best is not None and bounds[batch[0]] <= best.gain:
                break
            move = self.select(loads, self.enumerate(loads, over[batch], targets))
            if move is not None and (best is None or move.gain > best.gain):
                best = move
        if best is None or not self.least_gain:
            return best
        variance = time_weighted_variance(loads.tokens, loads.horizon.weights)
        return best if best.gain >= self.least_gain * variance else None

    def after(self, loads: Loads, move: Move) -> Loads:
        """Return the loads after a move, to select the next one of the same interval."""
        request = move.request
        horizon = loads.horizon
        remaining = expected_remaining(request) if horizon.points else np.inf
        moved = horizon.contributions(floats([request.context_tokens]), floats([remaining]))[0]
        tokens = loads.tokens.copy()
        tokens[move.source] = (tokens[move.source] - moved).clip(min=0.0)
        tokens[move.target] += moved
        instances = list(loads.instances)
        source = instances[move.source]
        instances[move.source] = dataclasses.replace(source, migrations_out=source.migrations_out + 1)
        instances[move.target] = with_request(instances[move.target], request)
        return Loads(instances, horizon, tokens)

    # ---- phase 1

    def classify(self, loads: Loads) -> tuple[Indices, Indices]:
        """Return the positions of overloaded (by w_i) and underloaded instances (by N_i; lines 11-16)."""
        weighted = loads.weighted
        mean = float(weighted.mean())
        over = np.flatnonzero(weighted > (1.0 + self.theta) * mean)
        under = np.flatnonzero(loads.tokens[:, 0] < (1.0 + self.theta_under) * mean)
        return over, under

    # ---- phase 2

    def targets(self, loads: Loads, under: Indices) -> Targets:
        """Collect for the instances of U what lines 20 and 21 need."""
        views = [loads.instances[position] for position in under.tolist()]
        capacity = floats([view.kv_capacity_tokens for view in views])
        longest = floats([view.max_model_len or np.inf for view in views])
        return Targets(
            positions=under,
            headroom=self.memory_share * capacity - loads.tokens[under, 0],
            free=np.minimum(floats([view.kv_free_tokens for view in views]), longest),
            copy_s=floats([1.0 / (view.migration_tokens_per_s or self.copy_tokens_per_s) for view in views]),
            block_tokens=max((view.block_tokens for view in views), default=1),
        )

    def enumerate(self, loads: Loads, over: Indices, targets: Targets) -> Candidates:
        """Enumerate the candidates of these overloaded instances (lines 17-23)."""
        tables: list[tuple[RequestTable, Indices]] = []
        origins: list[tuple[int, float, int]] = []
        for position in over.tolist():
            source = loads.instances[position]
            if source.migrations_out:
                continue
            table = table_of(source.requests)
            rows = np.flatnonzero(table.with_kv & table.decoding)
            tables.append((table, rows))
            origins.append((position, source.token_interval_s or self.token_interval_s, len(rows)))
        counts = [count for _, _, count in origins]
        sources = np.repeat(np.array([at for at, _, _ in origins], dtype=np.intp), counts)
        interval_s = np.repeat(floats([interval for _, interval, _ in origins]), counts)
        tokens = _joined([table.context_tokens[rows] for table, rows in tables])
        remaining = np.full(len(tokens), np.inf)
        promised = np.zeros(len(tokens))
        if loads.horizon.points:
            remaining = _joined([table.expected_remaining_tokens[rows] for table, rows in tables])
            # NaN: no prediction.
            known = _joined([table.predicted_remaining_tokens[rows] for table, rows in tables])
            np.copyto(promised, known, where=~np.isnan(known))
        patience_s = remaining * interval_s - self.open_s
        # Line 20 for the fastest of the targets.
        kept = np.flatnonzero(tokens * targets.copy_s.min(initial=np.inf) < patience_s)
        tokens, remaining = tokens[kept], remaining[kept]
        block_tokens = targets.block_tokens
        return Candidates(
            requests=_Rows(tables, kept),
            sources=sources[kept],
            tokens=tokens,
            remaining=remaining,
            patience_s=patience_s[kept],
            demand=tokens + promised[kept],
            needed=(np.ceil(tokens / block_tokens) + 1.0) * block_tokens,
            targets=targets,
        )

    # ---- phase 3

    def select(self, loads: Loads, candidates: Candidates) -> Move | None:
        """Return the candidate that decreases equation 4 most (lines 24-31); the first of equals.

        Moving load x from s to t changes it by 2/n sum_k weights[k] x (x + t - s). Only the term in t depends
        on the target, and it is a matrix product.
        """
        if not candidates.requests:
            return None
        weights = loads.horizon.weights
        there = loads.tokens[candidates.targets.positions].T
        moved = loads.horizon.contributions(candidates.tokens, candidates.remaining)
        weighted = moved * weights
        changes = weighted @ there
        changes += np.einsum("rk,rk->r", weighted, moved - loads.tokens[candidates.sources])[:, None]
        changes[~candidates.allowed()] = np.inf
        row, column = divmod(int(changes.argmin()), changes.shape[1])
        gain = -2.0 / len(loads.instances) * float(changes[row, column])
        if not gain > 0.0:
            return None
        target = int(candidates.targets.positions[column])
        return Move(candidates.requests[row], int(candidates.sources[row]), target, gain)


class _Rows(Sequence[RequestView]):
    """Requests of several tables, viewed on access: of thousands of candidates one is moved."""

    def __init__(self, tables: Sequence[tuple[RequestTable, Indices]], kept: Indices) -> None:
        """`tables`: each with the rows that count; `kept`: those of all these rows that are meant."""
        self._tables = tables
        self._kept = kept

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestView]: ...
    def __getitem__(self, index: int | slice) -> RequestView | Sequence[RequestView]:
        if isinstance(index, slice):
            return _Rows(self._tables, self._kept[index])
        at = int(self._kept[index])
        for table, rows in self._tables:
            if at < len(rows):
                return table.view(int(rows[at]))
            at -= len(rows)
        raise IndexError(index)


def _joined(columns: Sequence[NDArray[np.generic]]) -> Floats:
    return np.concatenate(columns).astype(np.float64) if columns else np.empty(0)


def _bounds(loads: Loads, over: Indices, under: Indices) -> Floats:
    """Return an upper bound on the decrease of equation 4 for each overloaded instance.

    2/n sum_k weights[k] x (s - t - x) is largest for x = (s - t) / 2 at each step, and for the least t.
    """
    least = loads.tokens[under].min(axis=0)
    gap = (loads.tokens[over] - least).clip(min=0.0)
    bounds: Floats = (gap * gap) @ loads.horizon.weights * (0.5 / len(loads.instances))
    # The factor makes up for rounding: no candidate may be missed by it.
    return bounds * (1.0 + 1e-9)


def _examined(order: Indices, turn: int) -> Indices:
    """Return the sources to examine, given all by their bounds; see `Rescheduling.plan`."""
    if len(order) <= SOURCES_MAX:
        return order
    half = SOURCES_MAX // 2
    first, others = order[:half], order[half:]
    turns = -(-len(others) // half)
    begin = turn % turns * half
    return np.concatenate((first, others[begin : begin + half]))


def _undominated(loads: Loads, targets: Targets) -> Targets:
    """Drop targets dominated by another: at most the load at every step, at least the room, as fast a copy.

    Exact: x and the weights are not negative, so a dominated target is never the better choice; and if the
    source itself dominates it, no target as loaded as the source lowers the variance.
    """
    tokens = loads.tokens[targets.positions]
    traits = np.column_stack((tokens, -targets.headroom, -targets.free, targets.copy_s))
    left = np.argsort(tokens.sum(axis=1), kind="stable")
    kept: list[int] = []
    while len(left):
        first, left = left[0], left[1:]
        kept.append(int(first))
        left = left[(traits[left] < traits[first]).any(axis=1)]
    index = np.array(sorted(kept), dtype=np.intp)
    return dataclasses.replace(
        targets,
        positions=targets.positions[index],
        headroom=targets.headroom[index],
        free=targets.free[index],
        copy_s=targets.copy_s[index],
    )
