"""ARES, Algorithm 1: decode rescheduling in three phases.

What the paper leaves open is settled here by parameters of `Rescheduling`:

- theta = 0.1. Figure 13's variance of 0.78 ms^2 is, at the slope of figure 8, a spread of about a tenth of
  the load of an instance; a wider band would leave more.
- Line 15 admits to U what is below (1 + theta) w_bar, not (1 - theta): kept as it stands (`theta_under`,
  which may be negative). With the other reading an overloaded instance among many average ones has nowhere
  to send to, and the more targets there are, the better the best one.
- C_mig (line 20): opening and committing, and copying the request's KV, `copy_tokens_per_s` of it. 50,000: 25
  Gbit/s for the paper's 7B model (57 KB a token), and 100 Gbit/s for a 32B model of 262 KB a token.
- T_exec: the source's own mean token interval; `token_interval_s` (section 5.3's 18.23 ms) if it has none.
- C_mem (line 21): `memory_share` of the target's KV capacity; the rest is for what others grow by meanwhile.
- Line 21 adds only N^(r) to the target's load. What is moved has N(r) tokens of KV too: here both are added.
- A request without prediction passes line 20, and counts with N(r) alone in line 21. Without a horizon no
  prediction is looked at.
- Line 26's "0" is `least_gain`: a share of the variance that a migration must take away to be worth it.
- An instance with a migration out under way is no source: its load is about to change, by how much the view
  does not say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import Phase, RequestState, RequestView
from tailrace.policy.ares.horizon import Floats, floats, prediction
from tailrace.policy.ares.loads import Loads
from tailrace.policy.ares.variance import time_weighted_variance
from tailrace.policy.room import with_request

Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]

# Requests whose pairs with all targets are looked at together; bounds the memory, not the result.
_ROWS = 4_096


@dataclass(frozen=True, slots=True)
class Move:
    """A migration to make: the request, and positions in `Loads.instances`."""

    request: RequestView
    source: int
    target: int
    # What equation 4 falls by.
    gain: float


@dataclass(frozen=True, slots=True)
class Candidates:
    """The set C of line 23: `requests` that pass line 20, and targets; `allowed` says which pairs."""

    requests: Sequence[RequestView]
    # One entry a request: position of its source, N(r), N^(r) (infinite: no prediction).
    sources: Indices
    tokens: Floats
    remaining: Floats
    # Tokens that N_t may rise by (line 21), and KV blocks' capacity needed.
    demand: Floats
    needed: Floats
    # One entry a target: position, room by line 21, KV free by its own view (for a request it can run).
    targets: Indices
    headroom: Floats
    free: Floats

    def allowed(self, rows: slice, columns: Indices) -> Mask:
        """[requests, targets]: whether the pair is in C (lines 19 and 21)."""
        targets = self.targets[columns]
        mask: Mask = self.demand[rows, None] <= self.headroom[columns]
        mask &= self.needed[rows, None] <= self.free[columns]
        mask &= self.sources[rows, None] != targets
        return mask

    def triples(self) -> Iterator[tuple[str, int, int]]:
        """C written out: (request id, source, target)."""
        mask = self.allowed(slice(None), np.arange(len(self.targets)))
        for row, column in np.argwhere(mask):
            yield self.requests[row].request_id, int(self.sources[row]), int(self.targets[column])


class Rescheduling:
    """Algorithm 1 with its constants."""

    def __init__(
        self,
        *,
        theta: float = 0.1,
        theta_under: float = 0.1,
        open_s: float = 0.01,
        copy_tokens_per_s: float = 50_000.0,
        token_interval_s: float = 0.01823,
        memory_share: float = 0.9,
        least_gain: float = 0.0,
    ) -> None:
        """The module's docstring has the reasons."""
        self.theta = theta
        self.theta_under = theta_under
        self.open_s = open_s
        self.copy_tokens_per_s = copy_tokens_per_s
        self.token_interval_s = token_interval_s
        self.memory_share = memory_share
        self.least_gain = least_gain

    def plan(self, loads: Loads) -> Move | None:
        """Lines 4-10: the migration to make, if any is worth it."""
        if not len(loads.instances):
            return None
        over, under = self.classify(loads)
        if not len(over) or not len(under):
            return None
        candidates = self.enumerate(loads, over, under)
        return self.select(loads, candidates) if candidates.requests else None

    def after(self, loads: Loads, move: Move) -> Loads:
        """Loads as they will be, for the next choice of the same interval."""
        request = move.request
        horizon = loads.horizon
        remaining = prediction(request.predicted_remaining_tokens if horizon.points else None)
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
        """Lines 11-16: positions of overloaded instances, by w_i, and of underloaded ones, by N_i."""
        weighted = loads.weighted
        mean = float(weighted.mean())
        over = np.flatnonzero(weighted > (1.0 + self.theta) * mean)
        under = np.flatnonzero(loads.tokens[:, 0] < (1.0 + self.theta_under) * mean)
        return over, under

    # ---- phase 2

    def enumerate(self, loads: Loads, over: Indices, under: Indices) -> Candidates:
        """Lines 17-23."""
        requests: list[RequestView] = []
        sources: list[int] = []
        least: list[float] = []
        for position in over.tolist():
            source = loads.instances[position]
            if source.migrations_out:
                continue
            movable = [r for r in source.requests if _movable(r)]
            requests += movable
            sources += [position] * len(movable)
            least += [1.0 / (source.token_interval_s or self.token_interval_s)] * len(movable)
        tokens = floats([r.context_tokens for r in requests])
        if loads.horizon.points:
            remaining = floats([prediction(r.predicted_remaining_tokens) for r in requests])
        else:
            remaining = np.full(len(requests), np.inf)
        migration_s = self.open_s + tokens / self.copy_tokens_per_s
        kept = np.flatnonzero(remaining > migration_s * floats(least))  # line 20
        tokens, remaining = tokens[kept], remaining[kept]
        targets = [loads.instances[position] for position in under.tolist()]
        longest = floats([t.max_model_len or np.inf for t in targets])
        capacity = floats([t.kv_capacity_tokens for t in targets])
        block_tokens = max((t.block_tokens for t in targets), default=1)
        return Candidates(
            requests=[requests[n] for n in kept.tolist()],
            sources=np.array(sources, dtype=np.intp)[kept],
            tokens=tokens,
            remaining=remaining,
            demand=tokens + np.where(np.isfinite(remaining), remaining, 0.0),
            needed=(np.ceil(tokens / block_tokens) + 1.0) * block_tokens,
            targets=under,
            headroom=self.memory_share * capacity - loads.tokens[under, 0],
            free=np.minimum(floats([t.kv_free_tokens for t in targets]), longest),
        )

    # ---- phase 3

    def select(self, loads: Loads, candidates: Candidates) -> Move | None:
        """Lines 24-31: the candidate that takes the most off equation 4; the first of equals.

        Moving load x from s to t changes it by 2/n sum_k weights[k] x (x + t - s): without its last term the
        same for all targets, and that term is a product of matrices.
        """
        weights = loads.horizon.weights
        columns = _frontier(loads.tokens[candidates.targets], candidates.headroom, candidates.free)
        there = loads.tokens[candidates.targets[columns]].T
        best, best_at = 0.0, (-1, -1)
        for first in range(0, len(candidates.requests), _ROWS):
            rows = slice(first, first + _ROWS)
            moved = loads.horizon.contributions(candidates.tokens[rows], candidates.remaining[rows])
            here = loads.tokens[candidates.sources[rows]]
            weighted = moved * weights
            own = np.einsum("rk,rk->r", weighted, moved - here)
            changes = weighted @ there
            changes += own[:, None]
            changes[~candidates.allowed(rows, columns)] = np.inf
            row, column = divmod(int(changes.argmin()), len(columns))
            if changes[row, column] < best:
                best = float(changes[row, column])
                best_at = (first + row, int(columns[column]))
        gain = -2.0 / len(loads.instances) * best
        if gain <= 0.0 or gain < self.least_gain * time_weighted_variance(loads.tokens, weights):
            return None
        row, column = best_at
        return Move(
            candidates.requests[row], int(candidates.sources[row]), int(candidates.targets[column]), gain
        )


def _movable(request: RequestView) -> bool:
    return (
        request.state is RequestState.RUNNING and request.phase is not Phase.PREFILL and not request.migrating
    )


def _frontier(tokens: Floats, headroom: Floats, free: Floats) -> Indices:
    """Positions of targets that are not beaten by one with no more load at any step and no less room.

    Exact: x and the weights are not negative, so the beaten target is never the better choice; and where the
    one that beats it is the source itself, no target as loaded as the source lowers the variance.
    """
    count = len(tokens)
    traits = np.column_stack((tokens, -headroom, -free))
    order = np.argsort(tokens.sum(axis=1), kind="stable")
    kept: list[int] = []
    best = np.empty((count, traits.shape[1]))
    for position in order.tolist():
        found = len(kept)
        if not (best[:found] <= traits[position]).all(axis=1).any():
            best[found] = traits[position]
            kept.append(position)
    return np.sort(np.array(kept, dtype=np.intp))
