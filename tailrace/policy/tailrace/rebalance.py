"""Migrate running requests from the instances where they cost most to where they cost least.

ARES's rescheduling and CascadeInfer's rebalancing under the cost model, which expresses memory pressure, long
steps and the migration itself in seconds. These rules keep moves from undoing each other; each is evaluated
on the view alone, since a policy is stateless:

1. A request has one migration at a time.
2. No A->B together with B->A. Views count open migrations by instance and direction, not by pair, so A->B is
   ruled out if any migration to A and any migration from B are open.
3. The target has room for the request, including what was decided before.
4. The saving exceeds `margin` times the transfer time, and as much again for each previous move of the
   request, so that no request moves back and forth forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tailrace.actions import Migrate
from tailrace.cluster import ClusterView, InstanceView
from tailrace.handover import TRANSFERS
from tailrace.perf.horizon import HORIZON
from tailrace.perf.steps import Floats
from tailrace.policy.candidates import Ledger
from tailrace.policy.requests import table_of
from tailrace.policy.tailrace.costs import Offers, shortage_s

# Maximum number of sources per tick; the others have their turn on a later tick.
SOURCES: Final = 8
# Targets per tick, since each source may use up one; and targets per source, three as in bid-ask.
TARGETS: Final = 8
BIDDERS: Final = 3


def rebalance(offers: Offers, view: ClusterView, prices_s: Floats, margin: float) -> list[Migrate]:
    """Move at most one request per source and per target, the one that saves most; most expensive sources
    first.

    `prices_s`: cost of one more request, by instance; infinite for those that exchange no requests.
    """
    among = [n for n in prices_s.argsort(kind="stable").tolist() if prices_s[n] < np.inf]
    targets, instances = among[:TARGETS], offers.instances
    ledger = Ledger(view.instances, TRANSFERS, TRANSFERS)
    moves: list[Migrate] = []
    for position in among[: -SOURCES - 1 : -1]:
        source = instances[position]
        cheaper = [n for n in targets if prices_s[n] < prices_s[position]][:BIDDERS]
        accepting = [n for n in cheaper if _may_receive(instances[n], source, ledger)]
        # Otherwise every request of the source would be examined in vain.
        if source.migrations_out or not accepting:
            continue
        move = _best_move(offers, position, accepting, margin, ledger)
        if move is not None:
            moves.append(move)
            targets.remove(offers.at[move.target_id])
    return moves


def _may_receive(target: InstanceView, source: InstanceView, ledger: Ledger) -> bool:
    """Return whether rule 2 and the limit on transfers allow any request of the source to move there."""
    opposed = source.migrations_in > 0 and target.migrations_out > 0
    return not opposed and ledger.accepts_transfers(target)


def _best_move(
    offers: Offers, source: int, targets: Sequence[int], margin: float, ledger: Ledger
) -> Migrate | None:
    """Return the move of a request of the source that gains most; None: none gains anything."""
    costs, instance = offers.costs, offers.instances[source]
    requests = table_of(instance.requests)
    rows = np.flatnonzero(requests.movable)
    tokens = requests.context_tokens[rows].astype(np.float64)
    # Without a prediction a request is expected to make as many tokens as it has made so far, the median for
    # a length of unknown scale. Beyond ARES's horizon, arrivals will have changed the balance anyway.
    predicted, made = requests.predicted_remaining_tokens[rows], requests.output_tokens[rows]
    remaining = np.where(np.isnan(predicted), np.maximum(costs.expected_tokens, made), predicted)
    remaining = np.minimum(remaining, float(HORIZON.length))
    growth = np.minimum(remaining, costs.expected_tokens)
    # What is saved here is what the request would cost if it came back.
    here, steps = offers.of(source), costs.steps_of(instance)
    others, held = max(0.0, here.requests - 1.0), np.maximum(0.0, here.held - tokens)
    each_s = steps.per_request_s + steps.per_kv_token_s * tokens
    batch_s = steps.decode_s(others, 0.0) + steps.per_kv_token_s * held
    saved_s = remaining * (batch_s + (others + 1.0) * each_s)
    saved_s += shortage_s(here, growth + here.swapped)
    there = offers.of_each(targets)
    cost_s = remaining * (there.joining_s + there.joining_token_s * tokens)
    cost_s += shortage_s(there, tokens + growth + there.swapped)
    moving_s = margin * (1.0 + requests.epochs[rows]) * costs.transfer_s(instance, tokens)
    # [targets, requests].
    gains_s = saved_s - cost_s - moving_s
    if gains_s.max(initial=0.0) <= 0.0:
        return None
    for n in (-gains_s).argsort(axis=None, kind="stable").tolist():
        target, row = divmod(n, len(rows))
        if gains_s[target, row] <= 0.0:
            break
        request, receiver = requests.view(int(rows[row])), offers.instances[targets[target]]
        if ledger.may_receive(receiver, request):
            return ledger.reserve(request, receiver, "rebalance")
    return None
