"""A fleet divided among several schedulers, each with a part of the instances, as one policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import MappingProxyType

from tailrace.actions import Action, Place, Placement
from tailrace.cluster import Arrival, ClusterView, RequestView
from tailrace.policy.base import Policy

# What of an arrival decides which shards are asked.
Key = Callable[[Arrival], str]


def request_key(arrival: Arrival) -> str:
    """Return the request's ID: each request goes to a random shard."""
    return arrival.request_id


def session_key(arrival: Arrival) -> str:
    """Return the session's ID, or the request's if it has none: a session stays on its shards."""
    return arrival.session_id or arrival.request_id


class Sharded(Policy):
    """Ask the schedulers of one or more shards, each of which knows and uses only its own instances.

    A shard has every `len(policies)`-th instance, so that shards get equal shares of initial pools. Requests
    migrate only within their shard. If several shards are drawn for a request, then either all are asked, and
    the front end takes the answer that the policy prefers, given a choice between these instances only, as if
    each answer contained the view of its instance; or, as a load balancer can, it asks the one that has the
    fewest requests.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        instance_ids: Iterable[str],
        *,
        drawn: int = 1,
        judge: Policy | None = None,
        key: Key = request_key,
    ) -> None:
        """`policies`: one object per shard; `judge`: another one, which compares the answers of the `drawn`
        shards; None: the one with the fewest requests is asked. Raise ValueError if there are too few
        instances or shards, or for a policy that needs statistics of the cluster's requests."""
        ids = sorted(instance_ids)
        count = len(policies)
        if not 1 <= drawn <= count <= len(ids):
            raise ValueError(f"{drawn} of {count} shards of {len(ids)} instances")
        policy = policies[0]
        if policy.lengths_period_s is not None or policy.prefixes_period_s is not None:
            raise ValueError(f"{type(policy).__name__} needs statistics of each shard, which are not kept")
        self._policies = policies
        self._judge = judge
        self._drawn = drawn
        self._key = key
        self._shards = [tuple(ids[number::count]) for number in range(count)]
        self._shard_of = {name: number for number, shard in enumerate(self._shards) for name in shard}
        self.tick_interval_s = policy.tick_interval_s

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Return the answer of the shard, or the best of several shards."""
        count = len(self._policies)
        numbers = [0] if count == 1 else Random(self._key(arrival)).sample(range(count), self._drawn)
        if self._judge is None:
            number = min(numbers, key=lambda n: sum(view.instances[name].load for name in self._shards[n]))
            return self._place_in(number, view, arrival, now)
        answers = [self._place_in(number, view, arrival, now) for number in numbers]
        placed = [answer for answer in answers if isinstance(answer, Place)]
        if len(placed) < 2:
            return placed[0] if placed else answers[0]
        chosen = {answer.instance_id: answer for answer in placed}
        preferred = self._judge.place(*_within(view, arrival, chosen), now)
        return chosen[preferred.instance_id] if isinstance(preferred, Place) else placed[0]

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Ask the scheduler of the request's shard."""
        policy, part = self._part_of(view, request)
        return policy.on_prefill_done(part, request, now)

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Ask the scheduler of the request's shard."""
        policy, part = self._part_of(view, request)
        return policy.on_reasoning_ended(part, request, now)

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Ask the scheduler of the request's shard."""
        policy, part = self._part_of(view, request)
        return policy.on_length_boundary(part, request, now)

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Ask every scheduler."""
        parts = (_part(view, shard) for shard in self._shards)
        return [
            action
            for policy, part in zip(self._policies, parts, strict=True)
            for action in policy.on_tick(part, now)
        ]

    def _place_in(self, number: int, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return self._policies[number].place(*_within(view, arrival, self._shards[number]), now)

    def _part_of(self, view: ClusterView, request: RequestView) -> tuple[Policy, ClusterView]:
        number = self._shard_of[request.instance_id]
        return self._policies[number], _part(view, self._shards[number])


def _part(view: ClusterView, names: Iterable[str]) -> ClusterView:
    """Return the view of these instances only."""
    instances = view.instances
    return replace(view, instances=MappingProxyType({name: instances[name] for name in names}))


def _within(view: ClusterView, arrival: Arrival, names: Iterable[str]) -> tuple[ClusterView, Arrival]:
    """Return the view of these instances only, and the arrival with only what these have cached."""
    part = _part(view, names)
    if not arrival.cached:
        return part, arrival
    cached: Mapping[str, object] = part.instances
    return part, replace(arrival, cached={n: held for n, held in arrival.cached.items() if n in cached})
