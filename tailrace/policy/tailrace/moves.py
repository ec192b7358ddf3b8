"""Migrations that pay for themselves, and the rules that keep them from undoing each other.

Rules, in order; each is read off the view, since a policy remembers nothing:

1. One migration of a request at a time.
2. No A->B with B->A. Views count open migrations by instance and direction, not by pair: A->B is out of the
   question where something is on its way to A and something is leaving B, whatever it is.
3. Room: the target's view has memory for the request, what was decided before included.
4. It pays: what is saved is more than `margin` times what the transfer takes; and as much again for each
   time the request has moved before, so that no request goes back and forth for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from tailrace.actions import Migrate
from tailrace.cluster import InstanceView, RequestView
from tailrace.perf.horizon import HORIZON
from tailrace.policy.candidates import Ledger, with_request
from tailrace.policy.tailrace.costs import AtLeast, Costs, Longest


def remaining_tokens(request: RequestView, at_least: float) -> float:
    """As predicted; without a prediction as long again as it has gone on, and `at_least`.

    That is the median for output lengths of which nothing but the scale is unknown. No further than ARES's
    horizon: by then arrivals will have changed the balance anyway.
    """
    predicted = request.predicted_remaining_tokens
    if predicted is None:
        predicted = max(at_least, float(request.output_tokens))
    return min(predicted, float(HORIZON.length))


_NO_INSTANCES: Final = Longest(0, "", 0)
_NOTHING: Final = AtLeast()


@dataclass(frozen=True, slots=True)
class Move:
    """A migration and what it saves, in seconds, beyond what it must."""

    request: RequestView
    target: InstanceView
    gain_s: float


class MovePlanner:
    """Finds and books moves for the length of one decision."""

    def __init__(self, costs: Costs, ledger: Ledger, margin: float) -> None:
        self._costs = costs
        self._ledger = ledger
        self._margin = margin
        # (source, target) of moves booked here, and targets as they will be.
        self._booked: set[tuple[str, str]] = set()
        self._after: dict[str, InstanceView] = {}
        self._longest: dict[str, Longest] = {}

    def may_send(self, source: InstanceView, request: RequestView) -> bool:
        """Rule 1, and the limit on transfers."""
        return self._ledger.may_send(source, request)

    def cheapest(
        self, request: RequestView, source: InstanceView, targets: Iterable[InstanceView]
    ) -> tuple[InstanceView, float] | None:
        """The target at which the request costs least, and how much, by rules 1 to 3 alone."""
        if not self.may_send(source, request):
            return None
        costs, ledger, tokens = self._costs, self._ledger, request.context_tokens
        remaining = remaining_tokens(request, costs.expected_tokens)
        least: tuple[InstanceView, float] | None = None
        for target in targets:
            there = self._after.get(target.instance_id, target)
            cost_s = remaining * costs.dearer_s(there, tokens, self._longest_at(target).tokens)
            # The rest only adds to it: mostly this is enough to know.
            if least is not None and cost_s >= least[1]:
                continue
            if self._opposed(source, target) or not ledger.may_receive(target, request):
                continue
            cost_s += costs.joining_shortage_s(there, tokens, remaining)
            if least is None or cost_s < least[1]:
                least = target, cost_s
        return least

    def best(
        self,
        request: RequestView,
        source: InstanceView,
        targets: Iterable[InstanceView],
        least_gain_s: float = 0.0,
        at_least: AtLeast = _NOTHING,
    ) -> Move | None:
        """The same, if moving there saves more than it must by more than `least_gain_s`.

        `at_least`: what is known already of all the targets; only spares looking at them.
        """
        costs, tokens = self._costs, request.context_tokens
        remaining = remaining_tokens(request, costs.expected_tokens)
        others = self._longest_at(source).without(request.request_id)
        saved_s = costs.staying_s(source, tokens, remaining, others)
        must_s = self._margin * (1 + request.epoch) * costs.transfer_s(source, tokens) + least_gain_s
        if saved_s - at_least.joining_s(tokens, remaining) <= must_s:
            return None
        found = self.cheapest(request, source, targets)
        if found is None or saved_s - found[1] <= must_s:
            return None
        return Move(request, found[0], saved_s - found[1] - must_s + least_gain_s)

    def reserve(self, request: RequestView, target: InstanceView, reason: str) -> Migrate:
        """It is decided: what comes after goes by it."""
        name = target.instance_id
        self._booked.add((request.instance_id, name))
        there = with_request(self._after.get(name, target), request)
        self._after[name] = replace(there, running=there.running + 1)
        return self._ledger.reserve(request, target, reason)

    def _longest_at(self, instance: InstanceView) -> Longest:
        """Of use only where unequal lengths cost; reads all requests of the instance once."""
        if self._costs.penalty is None:
            return _NO_INSTANCES
        name = instance.instance_id
        if name not in self._longest:
            self._longest[name] = Longest.of(instance)
        return self._longest[name]

    def _opposed(self, source: InstanceView, target: InstanceView) -> bool:
        """Rule 2."""
        if source.migrations_in > 0 and target.migrations_out > 0:
            return True
        return (target.instance_id, source.instance_id) in self._booked
