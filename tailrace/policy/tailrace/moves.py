"""Find migrations that pay for themselves, by rules that keep them from undoing each other.

The rules, in order; each is evaluated on the view alone, since a policy is stateless:

1. A request has one migration at a time.
2. No A->B together with B->A. Views count open migrations by instance and direction, not by pair, so A->B is
   ruled out if any migration to A and any migration from B are open.
3. The target has room for the request, including what was decided before.
4. The saving exceeds `margin` times the transfer time, and as much again for each previous move of the
   request, so that no request moves back and forth forever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest, nsmallest
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.actions import Migrate
from tailrace.cluster import ClusterView, InstanceView, Phase, Pool, RequestView
from tailrace.perf.horizon import HORIZON
from tailrace.perf.steps import Floats
from tailrace.policy.candidates import Ledger, with_request
from tailrace.policy.requests import RequestTable, table_of
from tailrace.policy.tailrace.costs import Costs, Longest
from tailrace.policy.tailrace.targets import Decoders, Targets


def remaining_tokens(request: RequestView, minimum: float) -> float:
    """Return the predicted remaining output tokens of a request, at most ARES's horizon.

    Without a prediction: as many as it has made so far, and at least `minimum`. That is the median for an
    output length of unknown scale. Beyond the horizon, arrivals will have changed the balance anyway.
    """
    predicted = request.predicted_remaining_tokens
    if predicted is None:
        predicted = max(minimum, float(request.output_tokens))
    return min(predicted, float(HORIZON.length))


# Larger than the rounding errors of a bound on a gain.
_ROUNDING_S: Final = 1e-6
_NO_REQUESTS: Final = Longest(0, "", 0)


@dataclass(frozen=True, slots=True)
class Move:
    """A migration, and its saving in seconds beyond what rule 4 requires."""

    request: RequestView
    target: InstanceView
    gain_s: float


class CheapestTarget(NamedTuple):
    """Where a request costs least, and that cost in seconds. `position`: among the targets."""

    cost_s: float
    position: int
    instance: InstanceView


class MovePlanner:
    """Find and reserve moves during one decision."""

    def __init__(self, costs: Costs, ledger: Ledger, margin: float) -> None:
        self._costs = costs
        self._ledger = ledger
        self._margin = margin
        # (source, target) of reserved moves, and the targets with the moved requests added.
        self._reserved: set[tuple[str, str]] = set()
        self._after: dict[str, InstanceView] = {}
        self._longest: dict[str, Longest] = {}

    def may_send(self, source: InstanceView, request: RequestView) -> bool:
        """Return whether rule 1 and the limit on transfers allow the request to move."""
        return self._ledger.may_send(source, request)

    def may_receive_from(self, source: InstanceView, target: InstanceView) -> bool:
        """Return whether rule 2 and the limit on transfers allow any request of the source to move there."""
        return self._ledger.accepts_transfers(target) and not self._opposed(source, target)

    def cheapest(self, request: RequestView, source: InstanceView, targets: Targets) -> CheapestTarget | None:
        """Return the target where the request costs least, the first of equals; applies rules 1 to 3."""
        if not self.may_send(source, request):
            return None
        costs, ledger, tokens = self._costs, self._ledger, request.context_tokens
        remaining = remaining_tokens(request, costs.expected_tokens)
        least: CheapestTarget | None = None
        for slowdown_s, position, target in targets.by_slowdown(tokens):
            if least is not None and remaining * slowdown_s > least.cost_s:
                break
            reserved = self._after.get(target.instance_id, target)
            cost_s = remaining * costs.slowdown_s(reserved, tokens, self._longest_at(target).tokens)
            # The wait for KV is not negative, so this part alone mostly decides.
            if least is not None and (cost_s, position) >= least[:2]:
                continue
            if self._opposed(source, target) or not ledger.may_receive(target, request):
                continue
            cost_s += costs.joining_shortage_s(reserved, tokens, remaining)
            if least is None or (cost_s, position) < least[:2]:
                least = CheapestTarget(cost_s, position, target)
        return least

    def best(
        self, request: RequestView, source: InstanceView, targets: Targets, least_gain_s: float = 0.0
    ) -> Move | None:
        """Return the move to the cheapest target if its gain exceeds `least_gain_s`; applies rules 1 to 4."""
        costs, tokens = self._costs, request.context_tokens
        remaining = remaining_tokens(request, costs.expected_tokens)
        others = self._longest_at(source).without(request.request_id)
        saved_s = costs.staying_s(source, tokens, remaining, others)
        required_s = self._margin * (1 + request.epoch) * costs.transfer_s(source, tokens) + least_gain_s
        if saved_s - remaining * targets.least_slowdown_s(tokens) <= required_s:
            return None
        move = self.cheapest(request, source, targets)
        if move is None or saved_s - move.cost_s <= required_s:
            return None
        return Move(request, move.instance, saved_s - move.cost_s - required_s + least_gain_s)

    def best_of(self, source: InstanceView, targets: Targets) -> Move | None:
        """Return the move of a request of the source that gains most; applies rules 1 to 4.

        Requests are examined in the order of an upper bound on their gain, until none can gain more.
        """
        requests = table_of(source.requests)
        rows = np.flatnonzero(requests.movable)
        bounds_s = self._largest_gains_s(requests, rows, source, targets)
        best: Move | None = None
        for n in (-bounds_s).argsort(kind="stable").tolist():
            gain_s = 0.0 if best is None else best.gain_s
            if bounds_s[n] <= gain_s:
                break
            request = requests.view(int(rows[n]))
            best = self.best(request, source, targets, gain_s) or best
        return best

    def _largest_gains_s(
        self, requests: RequestTable, rows: NDArray[np.intp], source: InstanceView, targets: Targets
    ) -> Floats:
        """Return an upper bound on the gain of the move of each request of these rows."""
        costs, tokens = self._costs, requests.context_tokens[rows].astype(np.float64)
        if costs.penalty is not None:
            return np.full(len(tokens), np.inf)
        predicted, made = requests.predicted_remaining_tokens[rows], requests.output_tokens[rows]
        expected = np.where(np.isnan(predicted), np.maximum(costs.expected_tokens, made), predicted)
        remaining = np.minimum(expected, float(HORIZON.length))
        steps, others = costs.steps_of(source), max(0, source.running + source.waiting - 1)
        held = np.maximum(0.0, source.kv_used_tokens + source.prefill_backlog_tokens - tokens)
        # As `Costs.staying_s`, with the longest wait for KV.
        here_s = steps.decode_base_s + steps.per_request_s * others + steps.per_kv_token_s * held
        here_s += (others + 1) * (steps.per_request_s + steps.per_kv_token_s * tokens)
        there_s, per_token_s = targets.least_terms()
        saved_s = remaining * (here_s - there_s - per_token_s * tokens)
        saved_s += costs.shortage_s(source, costs.expected_tokens)
        gains_s: Floats = saved_s - self._margin * (1.0 + requests.epochs[rows]) * costs.transfer_s(
            source, tokens
        )
        return gains_s + _ROUNDING_S

    def reserve(self, request: RequestView, target: InstanceView, reason: str) -> Migrate:
        """Reserve room for a move and return it; later decisions take it into account."""
        name = target.instance_id
        self._reserved.add((request.instance_id, name))
        reserved = with_request(self._after.get(name, target), request)
        self._after[name] = replace(reserved, running=reserved.running + 1)
        return self._ledger.reserve(request, target, reason)

    def _longest_at(self, instance: InstanceView) -> Longest:
        """Return the longest contexts on an instance, which matter only with a length penalty."""
        if self._costs.penalty is None:
            return _NO_REQUESTS
        name = instance.instance_id
        if name not in self._longest:
            self._longest[name] = Longest.of(instance)
        return self._longest[name]

    def _opposed(self, source: InstanceView, target: InstanceView) -> bool:
        """Return whether rule 2 forbids a move from source to target."""
        if source.migrations_in > 0 and target.migrations_out > 0:
            return True
        return (target.instance_id, source.instance_id) in self._reserved


# What moves on each tick: requests that a prefill instance still decodes, and, to rebalance, requests from
# the instances where they cost most to where they cost least.
#
# The second is ARES's rescheduling and CascadeInfer's rebalancing under the cost model, which expresses
# memory pressure, long steps, unequal lengths and the migration itself in seconds.

# Maximum number of handovers per tick, as in Arrow.
_HANDOVERS: Final = 64
# Maximum number of sources per tick; the others have their turn on a later tick.
SOURCES: Final = 8
# Targets per tick, since each source may use up one; and targets per request, three as in bid-ask.
TARGETS: Final = 8
BIDDERS: Final = 3


def late_handovers(mover: MovePlanner, view: ClusterView, decoders: Decoders) -> list[Migrate]:
    """Hand over requests that decode on a prefill instance because no decode instance had room for them;
    oldest first."""
    waiting: list[RequestView] = [
        request
        for instance in view.placeable()
        if instance.pool is Pool.PREFILL and instance.running > 0
        for request in instance.requests
        if request.phase is not Phase.PREFILL and not request.migrating
    ]
    targets = decoders.targets(view)
    moves: list[Migrate] = []
    for request in nsmallest(_HANDOVERS, waiting, key=lambda r: (r.arrival_s, r.request_id)):
        target = mover.cheapest(request, view.instances[request.instance_id], targets)
        if target is not None:
            moves.append(mover.reserve(request, target.instance, "prefill done"))
    return moves


def rebalance(
    mover: MovePlanner, costs: Costs, price: Mapping[str, float], instances: Sequence[InstanceView]
) -> list[Migrate]:
    """Move at most one request per source and per target, the one that saves most; most expensive sources
    first.

    `price`: cost of one more request in seconds, by instance.
    """
    if len(instances) < 2:
        return []
    sources = nlargest(SOURCES, instances, key=lambda i: (price[i.instance_id], i.instance_id))
    targets = nsmallest(TARGETS, instances, key=lambda i: (price[i.instance_id], i.instance_id))
    moves: list[Migrate] = []
    chosen: set[str] = set()
    for source in sources:
        cheaper = [t for t in targets if price[t.instance_id] < price[source.instance_id]]
        cheaper = [t for t in cheaper if t.instance_id not in chosen][:BIDDERS]
        # Otherwise every request of the source is examined in vain.
        accepting = [target for target in cheaper if mover.may_receive_from(source, target)]
        if not accepting or source.migrations_out:
            continue
        best = mover.best_of(source, Targets.of(costs, accepting))
        if best is not None:
            moves.append(mover.reserve(best.request, best.target, "rebalance"))
            chosen.add(best.target.instance_id)
    return moves
