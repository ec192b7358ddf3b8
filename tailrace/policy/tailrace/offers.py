"""Cache the instances' offers to arrivals (`arrival.Offer`), and find the cheapest.

Between two placements, few of a thousand instances have reported; recomputing all offers would dominate the
time of a placement. An offer depends only on the instance's view and the costs, so the cache does not affect
decisions. The offers of many instances are stored in one array; those of few as scalars, which is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import NOTHING_CACHED, CachedTokens, ClusterView, InstanceState, InstanceView
from tailrace.intra.earliest_due import PREFILLS, due_after_s, nominal_s
from tailrace.perf.steps import Floats, StepModel, StepTimes
from tailrace.policy.columns import SeenInstances
from tailrace.policy.requests import table_of
from tailrace.policy.tailrace.arrival import (
    OF_MANY,
    OF_ONE,
    Offer,
    QueueAhead,
    Reported,
    cost_without_shortage_s,
    mean_joining_s,
    offer,
    prefill_s,
    shortage_s,
)
from tailrace.policy.tailrace.costs import Costs, Longest
from tailrace.policy.tailrace.queue import Queue, QueueColumns

# Up to this many instances scalars are faster than arrays.
FEW: Final = 24
# Up to this many changed ones, too, even where there are many.
_FEW_CHANGED: Final = 8
_COEFFICIENTS: Final = attrgetter(
    "prefill_base_s",
    "per_token_s",
    "per_token_squared_s",
    "decode_base_s",
    "per_request_s",
    "per_kv_token_s",
    "chunk_tokens",
)


class OfferPlanner:
    """The offers of a view's instances under one policy's costs. Call `update` before each decision."""

    def __init__(self, costs: Costs, few: int = FEW) -> None:
        """`few`: largest number of instances that are computed one by one instead of in arrays."""
        self._costs = costs
        self._few = few
        self._seen = SeenInstances()
        # One of the two is used: offers of few instances, or of many as [fields of an offer, instances].
        self._offers: list[Offer[float]] = []
        self._table: Floats = np.empty((len(Offer._fields), 0))
        # By position, of instances whose view lists waiting prompts.
        self._queues: dict[int, Queue] = {}
        # The same, if there are many instances: by column, and the positions of those that do not fit.
        self._queue_columns = QueueColumns(0)
        self._long_queues: set[int] = set()
        # Longest contexts; only with a length penalty.
        self._longest: list[int] = []
        self._not_active: set[int] = set()
        self._pooled: set[int] = set()

    @property
    def instances(self) -> Sequence[InstanceView]:
        """Return the instances in instance-id order; valid until the next call of `update`."""
        return self._seen.views

    @property
    def all_active(self) -> bool:
        """Return whether all instances are active."""
        return not self._not_active

    @property
    def pooled(self) -> bool:
        """Return whether any instance is in a pool."""
        return bool(self._pooled)

    def cheapest(
        self,
        among: Sequence[InstanceView] | None,
        prompt_tokens: int,
        now: float,
        cached: Mapping[str, CachedTokens] = NOTHING_CACHED,
    ) -> InstanceView:
        """Return the instance where an arrival costs least; the first of equals.

        `among`: the instances to choose from, at least one; None: all. `cached`: cached tokens of the arrival
        by instance.
        """
        positions: Sequence[int] = range(len(self._seen.views))
        if among is not None:
            positions = [self._seen.at[instance.instance_id] for instance in among]
        if self._offers:
            position = self._cheapest_of_few(positions, prompt_tokens, now, cached)
        else:
            position = self._cheapest_of_many(positions, prompt_tokens, now, cached)
        return self._seen.views[position]

    def prices_s(self) -> dict[str, float]:
        """Return the cost of decoding one more request of mean length, by instance."""
        costs = self._costs
        if costs.penalty is not None:
            means = (i.context_tokens // max(1, i.load) for i in self._seen.views)
            pairs = zip(self._seen.views, means, strict=True)
            prices_s = [costs.joining_s(i, mean, costs.expected_tokens) for i, mean in pairs]
        elif self._offers:
            prices_s = [mean_joining_s(costs, offered, OF_ONE) for offered in self._offers]
        else:
            prices_s = mean_joining_s(costs, Offer(*self._table), OF_MANY).tolist()
        return dict(zip(self._seen.at, prices_s, strict=True))

    # ---- an arrival

    def _cheapest_of_few(
        self, positions: Sequence[int], prompt_tokens: int, now: float, cached: Mapping[str, CachedTokens]
    ) -> int:
        costs, offers, queues = self._costs, self._offers, self._queues
        patience_s = self._patience_s(prefill_s(offers[positions[0]], prompt_tokens))
        more_tokens = prompt_tokens + costs.expected_tokens
        own_s = nominal_s(prompt_tokens, prompt_tokens * prompt_tokens)
        costs_s: list[float] = []
        shortages_s: list[float] = []
        for position in positions:
            offered = offers[position]
            tokens, seconds, after = offered.unlisted, offered.unlisted_s, 0
            if position in queues:
                queue = queues[position]
                known, known_s, after = queue.before(now + due_after_s(own_s, queue.queued_s))
                tokens, seconds = tokens + known, seconds + known_s
            before = QueueAhead(tokens, seconds, after)
            instance = self._seen.views[position]
            held = cached.get(instance.instance_id) if cached else None
            usable = 0.0 if held is None else float(costs.held_tokens(instance, held))
            costs_s.append(
                cost_without_shortage_s(offered, prompt_tokens, usable, before, patience_s, OF_ONE)
            )
            shortages_s.append(shortage_s(costs, offered, more_tokens, OF_ONE))
        if costs.penalty is not None:
            decode_weights = [offers[position].decode_weight for position in positions]
            return self._cheapest_by_length(positions, costs_s, shortages_s, decode_weights, prompt_tokens)
        totals_s = [cost + shortage for cost, shortage in zip(costs_s, shortages_s, strict=True)]
        return positions[totals_s.index(min(totals_s))]

    def _cheapest_of_many(
        self, positions: Sequence[int], prompt_tokens: int, now: float, cached: Mapping[str, CachedTokens]
    ) -> int:
        costs, offered = self._costs, Offer(*self._table)
        first = Offer[float](*self._table[:, positions[0]].tolist())
        patience_s = self._patience_s(prefill_s(first, prompt_tokens))
        before = QueueAhead(offered.unlisted, offered.unlisted_s, np.zeros(len(offered.unlisted)))
        if self._queues:
            own_s = nominal_s(prompt_tokens, prompt_tokens * prompt_tokens)
            ahead, ahead_s, behind = self._queue_columns.before(own_s, now)
            before = QueueAhead(offered.unlisted + ahead, offered.unlisted_s + ahead_s, behind)
            for position in self._long_queues:
                queue = self._queues[position]
                known, known_s, after = queue.before(now + due_after_s(own_s, queue.queued_s))
                before.tokens[position] += known
                before.seconds[position] += known_s
                before.after[position] = after
        usable_tokens: Floats | float = self._usable_tokens(cached) if cached else 0.0
        cost_s = cost_without_shortage_s(offered, prompt_tokens, usable_tokens, before, patience_s, OF_MANY)
        shortages_s = shortage_s(costs, offered, prompt_tokens + costs.expected_tokens, OF_MANY)
        all_of_them = len(positions) == len(self._seen.views) and isinstance(positions, range)
        if costs.penalty is None and all_of_them:
            return int((cost_s + shortages_s).argmin())
        index: NDArray[np.intp] = np.array(positions, dtype=np.intp)
        cost_s, shortages_s = cost_s[index], shortages_s[index]
        if costs.penalty is None:
            return positions[int((cost_s + shortages_s).argmin())]
        decode_weights = offered.decode_weight[index].tolist()
        return self._cheapest_by_length(
            positions, cost_s.tolist(), shortages_s.tolist(), decode_weights, prompt_tokens
        )

    def _cheapest_by_length(
        self,
        positions: Sequence[int],
        costs_s: list[float],
        shortages_s: list[float],
        decode_weights: list[float],
        prompt_tokens: int,
    ) -> int:
        """Add the terms of a length penalty, cheapest instances first, until no other can be cheaper."""
        costs = self._costs
        least, cheapest = (inf, 0), positions[0]
        for rank in sorted(range(len(positions)), key=costs_s.__getitem__):
            position, total_s = positions[rank], costs_s[rank]
            if total_s > least[0]:
                break
            slowdown_s = costs.slowdown_s(self._seen.views[position], prompt_tokens, self._longest[position])
            total_s += decode_weights[rank] * costs.expected_tokens * slowdown_s
            total_s += shortages_s[rank]
            if (total_s, rank) < least:
                least, cheapest = (total_s, rank), position
        return cheapest

    def _usable_tokens(self, cached: Mapping[str, CachedTokens]) -> Floats:
        """Return the cached tokens of an arrival on each instance, as equivalent tokens on its device."""
        costs, instances = self._costs, self._seen.views
        tokens = np.zeros(len(instances))
        for name, held in cached.items():
            position = self._seen.at.get(name)
            if position is not None:
                tokens[position] = costs.held_tokens(instances[position], held)
        return tokens

    def _patience_s(self, own_s: float) -> float:
        """Return the wait that counts double. It is the user's, so one value for all instances, by the
        prefill time on the first one."""
        return self._costs.patience_s + PREFILLS * own_s

    # ---- cache

    def update(self, costs: Costs, view: ClusterView) -> None:
        """Use the instances of this view, and recompute the offers of those that changed."""
        same = self._seen.changed(view)
        if costs is not self._costs:
            same = None
        if same is None:
            instances = list(view.instances.values())
            changed = list(range(len(instances)))
            self._reset(costs, len(instances))
        else:
            changed = same
            names = (self._seen.views[n].instance_id for n in changed)
            instances = [view.instances[name] for name in names]
        if changed:
            self._recompute(changed, instances)
        self._seen.replace(view, same)

    def _recompute(self, positions: Sequence[int], instances: Sequence[InstanceView]) -> None:
        """Recompute the offers of these instances, which are at these positions."""
        costs = self._costs
        models = [costs.steps_of(instance) for instance in instances]
        rows = [self._read(*each) for each in zip(positions, instances, models, strict=True)]
        if self._offers or len(rows) <= _FEW_CHANGED:
            for n, steps, row in zip(positions, models, rows, strict=True):
                offered = offer(costs, Reported(*row), steps, OF_ONE)
                if self._offers:
                    self._offers[n] = offered
                else:
                    self._table[:, n] = offered
        else:
            size = len(Reported._fields)
            values = np.fromiter(chain.from_iterable(rows), np.float64, count=size * len(rows))
            reported = Reported(*values.reshape(len(rows), size).T)
            offers = offer(costs, reported, _stacked(models), OF_MANY)
            self._table[:, np.array(positions, dtype=np.intp)] = offers
        if costs.penalty is not None:
            for n, instance in zip(positions, instances, strict=True):
                self._longest[n] = Longest.of(instance).tokens

    def _reset(self, costs: Costs, count: int) -> None:
        few = count <= self._few
        self._seen.forget()
        self._costs = costs
        self._offers = [_EMPTY] * count if few else []
        self._table = np.empty((len(Offer._fields), 0 if few else count))
        self._queues = {}
        self._queue_columns = QueueColumns(0 if few else count)
        self._long_queues = set()
        self._longest = [0] * count
        self._not_active = set()
        self._pooled = set()

    def _read(self, position: int, instance: InstanceView, steps: StepModel) -> tuple[float, ...]:
        """Return the fields of `Reported`, and update the state, pool and queue of the position."""
        if instance.state is InstanceState.ACTIVE:
            self._not_active.discard(position)
        else:
            self._not_active.add(position)
        if instance.pool is None:
            self._pooled.discard(position)
        else:
            self._pooled.add(position)
        backlog = instance.prefill_backlog_tokens
        requests = table_of(instance.requests)
        waiting = requests.prompts() if backlog else ()
        tokens = 0
        if waiting:
            queue = Queue.of(waiting, backlog, steps)
            self._set_queue(position, queue)
            tokens = queue.tokens[-1]
        elif position in self._queues:
            self._set_queue(position, None)
        future = instance.future_load
        return (
            instance.running,
            instance.waiting,
            instance.kv_used_tokens,
            backlog,
            instance.host_kv_tokens,
            instance.kv_capacity_tokens,
            instance.context_tokens,
            requests.reasoning(),
            max(future) if future else -inf,
            len(waiting),
            tokens,
        )

    def _set_queue(self, position: int, queue: Queue | None) -> None:
        if queue is None:
            del self._queues[position]
        else:
            self._queues[position] = queue
        if self._offers:
            return
        if self._queue_columns.set(position, queue):
            self._long_queues.discard(position)
            return
        self._long_queues.add(position)
        while len(self._long_queues) > self._few and self._queue_columns.deepen():
            fit = {n for n in self._long_queues if self._queue_columns.set(n, self._queues[n])}
            self._long_queues -= fit


_EMPTY: Final = Offer[float](*[0.0] * len(Offer._fields))


def _stacked(models: Sequence[StepModel]) -> StepTimes[Floats]:
    """Return the step times of several instances as arrays; fast if all have the same model."""
    first = models[0]
    if all(model is first for model in models):
        return StepTimes(*(np.full(len(models), value) for value in _COEFFICIENTS(first)))
    return StepTimes(*np.array([_COEFFICIENTS(model) for model in models]).T)
