"""Offers of all instances to arrivals, kept as long as the reports that they were worked out from.

Between two placements only few of a thousand instances have reported, and to work out the others anew would
be most of what a placement takes. Nothing is decided by what is kept: offers follow from the views and the
costs. Of many instances they are columns; of a few, where that would take longer, numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress
from math import inf
from operator import attrgetter, is_not
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import NOTHING_CACHED, CachedTokens, InstanceState, InstanceView
from tailrace.intra.due import PREFILLS, nominal_s, yielded_s
from tailrace.perf.steps import Floats, StepModel, StepTimes
from tailrace.policy.phase_load import phase_load, prompts
from tailrace.policy.tailrace.arrival import (
    OF_MANY,
    OF_ONE,
    Before,
    Offer,
    Reported,
    mean_joining_s,
    offer,
    prefill_s,
    shortage_s,
    without_kv_s,
)
from tailrace.policy.tailrace.costs import Costs, Longest
from tailrace.policy.tailrace.queue import Queue

# Up to so many instances numbers are faster.
FEW: Final = 24
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
    """One policy's."""

    def __init__(self, costs: Costs, few: int = FEW) -> None:
        """`few`: up to so many instances are gone through one by one."""
        self._costs = costs
        self._few = few
        self._instances: list[InstanceView] = []
        self._at: dict[str, int] = {}
        # Of a few instances, or of many: [fields of an offer, instances].
        self._offers: list[Offer[float]] = []
        self._table: Floats = np.empty((len(Offer._fields), 0))
        # Of those where prompts are known to wait.
        self._queues: dict[int, Queue] = {}
        # Longest contexts; only with a penalty.
        self._longest: list[int] = []
        self._not_active: set[int] = set()
        self._pooled: set[int] = set()

    @property
    def all_active(self) -> bool:
        """No instance is in any other state."""
        return not self._not_active

    @property
    def pooled(self) -> bool:
        """Whether any instance is in a pool."""
        return bool(self._pooled)

    def cheapest(
        self,
        among: Sequence[InstanceView] | None,
        prompt_tokens: int,
        now: float,
        cached: Mapping[str, CachedTokens] = NOTHING_CACHED,
    ) -> InstanceView:
        """Where an arrival costs least; the first of equals. `among`: some of them, not none; None: all.
        `cached`: what of the arrival instances hold."""
        positions: Sequence[int] = range(len(self._instances))
        if among is not None:
            positions = [self._at[instance.instance_id] for instance in among]
        if self._offers:
            found = self._cheapest_of_few(positions, prompt_tokens, now, cached)
        else:
            found = self._cheapest_of_many(positions, prompt_tokens, now, cached)
        return self._instances[found]

    def prices_s(self) -> dict[str, float]:
        """What one more request of mean length costs to decode, by instance: how dear the place is."""
        costs = self._costs
        if costs.penalty is not None:
            means = (i.context_tokens // max(1, i.load) for i in self._instances)
            pairs = zip(self._instances, means, strict=True)
            prices_s = [costs.joining_s(i, mean, costs.expected_tokens) for i, mean in pairs]
        elif self._offers:
            prices_s = [mean_joining_s(costs, offered, OF_ONE) for offered in self._offers]
        else:
            prices_s = mean_joining_s(costs, Offer(*self._table), OF_MANY).tolist()
        return dict(zip(self._at, prices_s, strict=True))

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
            tokens, seconds, after = offered.unknown, offered.unknown_s, 0
            if position in queues:
                queue = queues[position]
                known, known_s, after = queue.before(now + yielded_s(own_s, queue.found_s))
                tokens, seconds = tokens + known, seconds + known_s
            before = Before(tokens, seconds, after)
            instance = self._instances[position]
            held = cached.get(instance.instance_id) if cached else None
            found = 0.0 if held is None else float(costs.held_tokens(instance, held))
            costs_s.append(without_kv_s(offered, prompt_tokens, found, before, patience_s, OF_ONE))
            shortages_s.append(shortage_s(costs, offered, more_tokens, OF_ONE))
        if costs.penalty is not None:
            hurries = [offers[position].hurry for position in positions]
            return self._cheapest_by_length(positions, costs_s, shortages_s, hurries, prompt_tokens)
        totals_s = [cost + shortage for cost, shortage in zip(costs_s, shortages_s, strict=True)]
        return positions[totals_s.index(min(totals_s))]

    def _cheapest_of_many(
        self, positions: Sequence[int], prompt_tokens: int, now: float, cached: Mapping[str, CachedTokens]
    ) -> int:
        costs, offered = self._costs, Offer(*self._table)
        patience_s = self._patience_s(float(prefill_s(offered, prompt_tokens)[positions[0]]))
        before = Before(offered.unknown, offered.unknown_s, np.zeros(len(offered.unknown)))
        if self._queues:
            before = Before(before.tokens.copy(), before.seconds.copy(), before.after)
            own_s = nominal_s(prompt_tokens, prompt_tokens * prompt_tokens)
            for position, queue in self._queues.items():
                known, known_s, after = queue.before(now + yielded_s(own_s, queue.found_s))
                before.tokens[position] += known
                before.seconds[position] += known_s
                before.after[position] = after
        found: Floats | float = self._found(cached) if cached else 0.0
        cost_s = without_kv_s(offered, prompt_tokens, found, before, patience_s, OF_MANY)
        shortages_s = shortage_s(costs, offered, prompt_tokens + costs.expected_tokens, OF_MANY)
        all_of_them = len(positions) == len(self._instances) and isinstance(positions, range)
        if costs.penalty is None and all_of_them:
            return int((cost_s + shortages_s).argmin())
        index: NDArray[np.intp] = np.array(positions, dtype=np.intp)
        cost_s, shortages_s = cost_s[index], shortages_s[index]
        if costs.penalty is None:
            return positions[int((cost_s + shortages_s).argmin())]
        hurries = offered.hurry[index].tolist()
        return self._cheapest_by_length(
            positions, cost_s.tolist(), shortages_s.tolist(), hurries, prompt_tokens
        )

    def _cheapest_by_length(
        self,
        positions: Sequence[int],
        costs_s: list[float],
        shortages_s: list[float],
        hurries: list[float],
        prompt_tokens: int,
    ) -> int:
        """With a penalty: cheapest first, and no further than one can still cost least."""
        costs = self._costs
        least, found = (inf, 0), positions[0]
        for rank in sorted(range(len(positions)), key=costs_s.__getitem__):
            position, total_s = positions[rank], costs_s[rank]
            if total_s > least[0]:
                break
            dearer_s = costs.dearer_s(self._instances[position], prompt_tokens, self._longest[position])
            total_s += hurries[rank] * costs.expected_tokens * dearer_s
            total_s += shortages_s[rank]
            if (total_s, rank) < least:
                least, found = (total_s, rank), position
        return found

    def _found(self, cached: Mapping[str, CachedTokens]) -> Floats:
        """What of an arrival each instance holds, in tokens on its device."""
        costs, instances = self._costs, self._instances
        found = np.zeros(len(instances))
        for name, held in cached.items():
            position = self._at.get(name)
            if position is not None:
                found[position] = costs.held_tokens(instances[position], held)
        return found

    def _patience_s(self, own_s: float) -> float:
        """A user's, so the same for all, however fast they are: by the prefill on the first."""
        return self._costs.patience_s + PREFILLS * own_s

    # ---- what is kept

    def renew(self, costs: Costs, instances: Sequence[InstanceView]) -> None:
        """What follows is about these; works out what has changed."""
        kept = self._instances
        count = len(instances)
        anew = costs is not self._costs or len(kept) != count
        changed: list[int] = []
        if not anew:
            changed = list(compress(range(count), map(is_not, kept, instances)))
            anew = any(kept[n].instance_id != instances[n].instance_id for n in changed)
        if anew:
            changed = list(range(count))
            self._forget(costs, instances)
        if not changed:
            return
        if self._offers:
            for n in changed:
                steps = costs.steps_of(instances[n])
                self._offers[n] = offer(costs, Reported(*self._read(n, instances[n], steps)), steps, OF_ONE)
        else:
            self._table[:, np.array(changed, dtype=np.intp)] = self._columns(changed, instances)
        if costs.penalty is not None:
            for n in changed:
                self._longest[n] = Longest.of(instances[n]).tokens
        self._instances = list(instances)

    def _forget(self, costs: Costs, instances: Sequence[InstanceView]) -> None:
        count = len(instances)
        few = count <= self._few
        self._costs = costs
        self._instances = []
        self._at = {instance.instance_id: n for n, instance in enumerate(instances)}
        self._offers = [_NOTHING] * count if few else []
        self._table = np.empty((len(Offer._fields), 0 if few else count))
        self._queues = {}
        self._longest = [0] * count
        self._not_active = set()
        self._pooled = set()

    def _columns(self, positions: Sequence[int], instances: Sequence[InstanceView]) -> Offer[Floats]:
        """Offers of the instances at these positions."""
        costs = self._costs
        models = [costs.steps_of(instances[position]) for position in positions]
        pairs = zip(positions, models, strict=True)
        rows = [self._read(position, instances[position], steps) for position, steps in pairs]
        size = len(Reported._fields)
        values = np.fromiter(chain.from_iterable(rows), np.float64, count=size * len(rows))
        reported = Reported(*values.reshape(len(rows), size).T)
        return offer(costs, reported, _side_by_side(models), OF_MANY)

    def _read(self, position: int, instance: InstanceView, steps: StepModel) -> tuple[float, ...]:
        """The fields of `Reported`; what is no number is kept by the way."""
        if instance.state is InstanceState.ACTIVE:
            self._not_active.discard(position)
        else:
            self._not_active.add(position)
        if instance.pool is None:
            self._pooled.discard(position)
        else:
            self._pooled.add(position)
        backlog = instance.prefill_backlog_tokens
        waiting = prompts(instance) if backlog else ()
        tokens = 0
        if waiting:
            queue = Queue.of(waiting, backlog, steps)
            self._queues[position] = queue
            tokens = queue.tokens[-1]
        else:
            self._queues.pop(position, None)
        counted = instance.phase_load or phase_load(instance.requests)
        future = instance.future_load
        return (
            instance.running,
            instance.waiting,
            instance.kv_used_tokens,
            backlog,
            instance.host_kv_tokens,
            instance.kv_capacity_tokens,
            instance.context_tokens,
            counted.reasoning,
            max(future) if future else -inf,
            len(waiting),
            tokens,
        )


_NOTHING: Final = Offer[float](*[0.0] * len(Offer._fields))


def _side_by_side(models: Sequence[StepModel]) -> StepTimes[Floats]:
    """Of each instance; mostly all go by the same."""
    first = models[0]
    if all(model is first for model in models):
        return StepTimes(*(np.full(len(models), value) for value in _COEFFICIENTS(first)))
    return StepTimes(*np.array([_COEFFICIENTS(model) for model in models]).T)
