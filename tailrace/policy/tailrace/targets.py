"""The instances to which requests may move, examined in the order of what a request costs there at least.

Without a length penalty, the slowdown of an instance's batch by a joining request is linear in the request's
context (`Costs.slowdown_s`). So of a thousand instances only the few are examined whose slowdown alone does
not exceed the cost at the best one so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np

from tailrace.cluster import ClusterView, InstanceState, InstanceView, Pool, Stage
from tailrace.handover import TRANSFERS
from tailrace.perf.steps import Floats
from tailrace.policy.cascade.layout import earliest_stage, nearest_first, stage_of
from tailrace.policy.columns import Columns, PerInstances
from tailrace.policy.tailrace.costs import Costs

# Up to this many instances it is faster to examine all: if their terms must be computed first, and if not.
_FEW: Final = 24
_FEW_KNOWN: Final = 8
# Targets that are sorted first.
_FIRST: Final = 8
# Makes up for rounding: no move may be missed by a bound.
_BELOW: Final = 1.0 - 1e-9


class Candidate(NamedTuple):
    """A target. `slowdown_s`: at most what `Costs.slowdown_s` returns for it; `position`: among all
    targets."""

    slowdown_s: float
    position: int
    instance: InstanceView


class Targets(ABC):
    """Instances to which a request may move."""

    @abstractmethod
    def least_slowdown_s(self, tokens: int) -> float:
        """Return a lower bound on `Costs.slowdown_s` at all targets for a request with `tokens` of
        context."""

    @abstractmethod
    def least_terms(self) -> tuple[float, float]:
        """Return x and y such that x + y * tokens is a lower bound on `Costs.slowdown_s` at all targets for
        any `tokens`; mostly lower than `least_slowdown_s`."""

    @abstractmethod
    def by_slowdown(self, tokens: int) -> Iterator[Candidate]:
        """Yield the targets for such a request, their bounds ascending."""

    @staticmethod
    def of(costs: Costs, instances: Sequence[InstanceView]) -> Targets:
        """Return these instances as targets."""
        if len(instances) <= _FEW or costs.penalty is not None:
            return _FewTargets(costs, instances)
        slowdowns = np.array([costs.slowdown_terms(instance) for instance in instances]).T
        return _ManyTargets(instances, *slowdowns)


class _FewTargets(Targets):
    """Targets that are all examined, in their own order."""

    def __init__(self, costs: Costs, instances: Sequence[InstanceView]) -> None:
        self._instances = instances
        self._step_s = self._per_token_s = 0.0
        if instances and costs.penalty is None:
            # The least of both terms, of whichever instances.
            self._step_s, self._per_token_s = map(
                min, *map(costs.slowdown_terms, instances), (np.inf, np.inf)
            )

    def least_slowdown_s(self, tokens: int) -> float:
        return (self._step_s + self._per_token_s * tokens) * _BELOW

    def least_terms(self) -> tuple[float, float]:
        return self._step_s * _BELOW, self._per_token_s * _BELOW

    def by_slowdown(self, tokens: int) -> Iterator[Candidate]:
        least_s = self.least_slowdown_s(tokens)
        return (Candidate(least_s, n, instance) for n, instance in enumerate(self._instances))


class _ManyTargets(Targets):
    """Targets of which few are examined. `step_s`, `per_token_s`: terms of the slowdown at each; infinite
    where the request may not move."""

    def __init__(self, instances: Sequence[InstanceView], step_s: Floats, per_token_s: Floats) -> None:
        self._instances = instances
        self._step_s = step_s
        self._per_token_s = per_token_s
        # The latest slowdowns, for this many tokens: a request's least one is asked for first.
        self._tokens = 0
        self._latest_s: Floats | None = None

    def least_slowdown_s(self, tokens: int) -> float:
        return float(self._slowdowns_s(tokens).min(initial=np.inf))

    def least_terms(self) -> tuple[float, float]:
        terms = (
            float(terms_of_targets.min(initial=np.inf)) * _BELOW
            for terms_of_targets in (self._step_s, self._per_token_s)
        )
        return next(terms), next(terms)

    def by_slowdown(self, tokens: int) -> Iterator[Candidate]:
        slowdowns_s = self._slowdowns_s(tokens)
        # Mostly the first few suffice, and the others need not be sorted.
        parted = (
            slowdowns_s.argpartition(_FIRST) if len(slowdowns_s) > _FIRST else np.arange(len(slowdowns_s))
        )
        for part in (parted[:_FIRST], parted[_FIRST:]):
            for n in part[slowdowns_s[part].argsort(kind="stable")].tolist():
                slowdown_s = float(slowdowns_s[n])
                if slowdown_s == inf:
                    return
                yield Candidate(slowdown_s, n, self._instances[n])

    def _slowdowns_s(self, tokens: int) -> Floats:
        if self._latest_s is None or tokens != self._tokens:
            self._tokens, self._latest_s = tokens, (self._step_s + self._per_token_s * tokens) * _BELOW
        return self._latest_s


class Decoders:
    """The active instances that may decode and to which another migration may be opened, with the terms of
    their slowdown by column.

    On a busy fleet those to which no more may be opened are the cheapest, and would be examined in vain by
    each decision.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._columns = PerInstances(lambda: Columns(self._read, 2))

    def targets(self, view: ClusterView) -> Targets:
        """Return them as targets. Valid until the next call."""
        if len(view.instances) <= _FEW_KNOWN or self._costs.penalty is not None:
            return _FewTargets(self._costs, [i for i in view.instances.values() if _may_receive(i)])
        columns = self._columns.of(view)
        step_s, per_token_s = columns.update(view)
        return _ManyTargets(columns.seen.views, step_s, per_token_s)

    def _read(self, instance: InstanceView) -> tuple[float, float]:
        if not _may_receive(instance):
            return inf, 0.0
        return self._costs.slowdown_terms(instance)


def _may_receive(instance: InstanceView) -> bool:
    return instance.state is InstanceState.ACTIVE and decodes(instance) and instance.migrations_in < TRANSFERS


# If pools are set: which instances may prefill, and which may decode (Arrow, sections 5.2 to 5.4).
#
# Pools are an explicit decision to separate prefill from decode, so they take precedence over the cost model:
# a request leaves a prefill instance to decode whether or not that pays. Arrow's own rules choose the
# members.

PREFILL_SIDE: Final = (Pool.PREFILL, Pool.DECODE_TO_PREFILL)
DECODE_SIDE: Final = (Pool.DECODE, Pool.PREFILL_TO_DECODE)


def pooled(view: ClusterView) -> bool:
    """Return whether any instance is in a pool."""
    return any(i.pool is not None for i in view.instances.values())


def prefillers(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Return the instances on the prefill side or in no pool; if there are none, all, since any instance can
    prefill."""
    return [i for i in instances if i.pool not in DECODE_SIDE] or list(instances)


def decodes(instance: InstanceView) -> bool:
    """Return whether the instance is on the decode side or in no pool."""
    return instance.pool not in PREFILL_SIDE


def decoders(instances: Iterable[InstanceView]) -> list[InstanceView]:
    """Return the instances on the decode side or in no pool."""
    return [i for i in instances if decodes(i)]


def within_stage(view: ClusterView, usable: Sequence[InstanceView], tokens: int) -> Sequence[InstanceView]:
    """Return the instances of `usable` in the earliest stage for the length, else in the nearest stage that
    has any."""
    stages = view.stages
    if not stages:
        return usable
    names = {i.instance_id: i for i in usable}
    for number in nearest_first(len(stages), earliest_stage(stages, tokens)):
        members = [names[name] for name in stages[number].instance_ids if name in names]
        if members:
            return members
    return usable


def next_stage(view: ClusterView, instance_id: str, tokens: int) -> list[InstanceView]:
    """Return the active instances of the stage for the length if it is later than the instance's own."""
    at = stage_of(view.stages, instance_id)
    if at is None:
        return []
    to = earliest_stage(view.stages, tokens)
    return _active(view, view.stages[to]) if to > at else []


def groups(view: ClusterView, instances: Sequence[InstanceView]) -> list[list[InstanceView]]:
    """Group the instances that may exchange requests on a tick: by stage; without stages, all in one."""
    if not view.stages:
        return [list(instances)]
    allowed = {i.instance_id for i in instances}
    return [[i for i in _active(view, stage) if i.instance_id in allowed] for stage in view.stages]


def _active(view: ClusterView, stage: Stage) -> list[InstanceView]:
    active = InstanceState.ACTIVE
    members = (view.instances.get(name) for name in stage.instance_ids)
    return [i for i in members if i is not None and i.state is active]
