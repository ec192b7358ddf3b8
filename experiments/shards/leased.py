"""Front ends that place requests by themselves, with rights that one scheduler has leased to them, as one
policy."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType

from tailrace.actions import Action, Place, Placement
from tailrace.cluster import Arrival, ClusterView, InstanceState, InstanceView, RequestView
from tailrace.policy.base import Policy


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What the scheduler grants: the right to place this many requests, for this many seconds."""

    requests: int
    seconds: float

    def __post_init__(self) -> None:
        """Raise ValueError for a lease that permits nothing."""
        if self.requests < 1 or self.seconds <= 0.0:
            raise ValueError(f"a lease of {self.requests} requests and {self.seconds:g} s permits nothing")


@dataclass(slots=True)
class _Lease:
    """The instances that a front end may still use, best first, and until when."""

    instance_ids: deque[str] = field(default_factory=deque)
    until_s: float = 0.0


class Leased(Policy):
    """Ask the scheduler only for leases; place the other requests on the next instance of the lease.

    A front end without a valid lease asks for one with the request that it has to place: that request gets
    the policy's own placement, and the front end gets instances for the next `terms.requests - 1`. For these
    the scheduler asks its policy where it would place one request after the other, each with as many prompt
    tokens as arrivals have on average. It counts every right that is neither used nor expired as such a
    request that waits on its instance, so that several front ends do not get the same instances. The use of a
    right is known to the scheduler at once.

    Whatever is specific to a request, such as its length and cached prefix, counts only for requests that are
    placed by a call. Decisions after the placement are the policy's own, on the whole fleet. Leases are the
    state of the front ends and of the scheduler, which this policy stands for.
    """

    def __init__(self, policy: Policy, terms: LeaseTerms, front_ends: int) -> None:
        """`front_ends` get the requests at random, as behind a load balancer. Raise ValueError for none."""
        if front_ends < 1:
            raise ValueError("there must be a front end")
        self._policy = policy
        self._terms = terms
        self._leases = [_Lease() for _ in range(front_ends)]
        self._prompts = self._prompt_tokens = 0
        # Placements that needed the scheduler.
        self.calls = 0
        self.tick_interval_s = policy.tick_interval_s
        self.lengths_period_s = policy.lengths_period_s
        self.prefixes_period_s = policy.prefixes_period_s

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Use the lease of the request's front end, or ask for one."""
        self._prompts += 1
        self._prompt_tokens += arrival.prompt_tokens
        lease = self._leases[Random(arrival.request_id).randrange(len(self._leases))]
        if now >= lease.until_s:
            lease.instance_ids.clear()
        while lease.instance_ids:
            name = lease.instance_ids.popleft()
            instance = view.instances.get(name)
            if (
                instance is not None
                and instance.state is InstanceState.ACTIVE
                and name not in arrival.excluded
            ):
                return Place(name)
        self.calls += 1
        return self._grant(lease, view, arrival, now)

    def _grant(self, lease: _Lease, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        tokens = self._prompt_tokens // self._prompts
        unused: Counter[str] = Counter()
        for other in self._leases:
            if now < other.until_s:
                unused.update(other.instance_ids)
        counted = dict(view.instances)
        for name, count in unused.items():
            if name in counted:
                counted[name] = _with_waiting(counted[name], count, tokens)
        known = replace(view, instances=MappingProxyType(counted))
        placement = self._policy.place(known, arrival, now)
        if not isinstance(placement, Place):
            return placement
        taken = placement.instance_id
        counted[taken] = _with_waiting(counted[taken], 1, arrival.prompt_tokens)
        for number in range(1, self._terms.requests):
            request = Arrival(f"{arrival.request_id}+{number}", tokens, arrival.max_tokens, arrival.seq)
            following = self._policy.place(known, request, now)
            if not isinstance(following, Place):
                break
            lease.instance_ids.append(following.instance_id)
            counted[following.instance_id] = _with_waiting(counted[following.instance_id], 1, tokens)
        lease.until_s = now + self._terms.seconds
        return placement

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Ask the policy."""
        return self._policy.on_prefill_done(view, request, now)

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Ask the policy."""
        return self._policy.on_reasoning_ended(view, request, now)

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Ask the policy."""
        return self._policy.on_length_boundary(view, request, now)

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Ask the policy."""
        return self._policy.on_tick(view, now)


def _with_waiting(instance: InstanceView, requests: int, prompt_tokens: int) -> InstanceView:
    """Return the instance as if so many more requests of this length waited there."""
    tokens = requests * prompt_tokens
    return replace(
        instance,
        waiting=instance.waiting + requests,
        prefill_backlog_tokens=instance.prefill_backlog_tokens + tokens,
        context_tokens=instance.context_tokens + tokens,
    )
