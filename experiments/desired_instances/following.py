"""A fleet that follows the desired number of instances, as a policy: the simulated instances are those that
it may have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from tailrace.actions import ORDERED_MAX, Action, Migrate, Placement, ReturnPrompts
from tailrace.cluster import Arrival, ClusterView, InstanceState, InstanceView, RequestState
from tailrace.perf.measured import Measured
from tailrace.perf.steps import StepModel
from tailrace.policy.base import Policy
from tailrace.policy.requests import movable
from tailrace.scaling import DesiredInstances, Scaling, need
from tailrace.slo import Slo

# Between two samples, and two looks at them by what scales, as a KEDA trigger has it.
SAMPLE_S: Final = 5.0
POLL_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one moment."""

    at_s: float
    # What the load needs now, and what is desired after delay and cool-down.
    needed: float
    desired: int
    # Instances that take requests, and those that have to be paid for.
    active: int
    paid: int


@dataclass(slots=True)
class _Member:
    """An instance that was started."""

    ready_s: float
    draining: bool = False


class Following(Policy):
    """Place by another policy, on the instances that are ready; start and drain instances as is desired.

    A started instance takes requests `startup_s` later. Of those that there are, the one started last is
    drained first, as Kubernetes does: its requests migrate, its prompts are handed back, and it has to be
    paid for until it is empty. This policy keeps state, which stands for that of the fleet.
    """

    tick_interval_s = SAMPLE_S

    def __init__(
        self,
        policy: Policy,
        scaling: Scaling,
        slo: Slo,
        startup_s: float,
        first: Sequence[str],
        measured: Measured | None,
    ) -> None:
        """`first`: instances that are ready at the start. `measured`: what profiling gave; None: nothing."""
        self._policy = policy
        self._scaling = scaling
        self._slo = slo
        self._startup_s = startup_s
        self._measured = measured
        self._nominal = StepModel.of_profile(None)
        self._members = {name: _Member(0.0) for name in first}
        self._desired = DesiredInstances(scaling, 0.0)
        self._polled_s = -math.inf
        self.lengths_period_s = scaling.window_s
        self.samples: list[Sample] = []

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Ask the policy about the instances that take requests."""
        return self._policy.place(
            replace(view, instances=self._fleet(view, now, draining=False)), arrival, now
        )

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Sample the load, follow it, and move requests off draining instances."""
        for name in [name for name, member in self._members.items() if member.draining]:
            instance = view.instances[name]
            if not instance.load and not instance.coming_tokens:
                del self._members[name]
        fleet = self._fleet(view, now, draining=True)
        assert view.lengths is not None
        needed = need(fleet.values(), view.lengths, self._slo, self._scaling, self._nominal)
        active = sum(not m.draining and m.ready_s <= now for m in self._members.values())
        desired = self._desired.update(needed, active, now)
        if now >= self._polled_s + POLL_S:
            self._polled_s = now
            self._follow(desired, view, now)
        self.samples.append(Sample(now, needed.serving, desired, active, len(self._members)))
        return self._moves(self._fleet(view, now, draining=True))

    def _fleet(self, view: ClusterView, now: float, draining: bool) -> Mapping[str, InstanceView]:
        """Return the instances that are ready, with or without those that drain."""
        fleet = {}
        for name, member in self._members.items():
            if member.ready_s > now or (member.draining and not draining):
                continue
            state = InstanceState.DRAINING if member.draining else InstanceState.ACTIVE
            fleet[name] = replace(view.instances[name], state=state, measured=self._measured)
        return MappingProxyType(dict(sorted(fleet.items())))

    def _follow(self, desired: int, view: ClusterView, now: float) -> None:
        staying = [name for name, member in self._members.items() if not member.draining]
        for name in staying[desired:]:
            if self._members[name].ready_s > now:
                del self._members[name]
            else:
                self._members[name].draining = True
        missing = desired - len(staying)
        free = [name for name in view.instances if name not in self._members]
        self._members.update({name: _Member(now + self._startup_s) for name in free[: max(0, missing)]})

    def _moves(self, fleet: Mapping[str, InstanceView]) -> list[Action]:
        targets = [i for i in fleet.values() if i.state is InstanceState.ACTIVE]
        moves: list[Action] = []
        for source in fleet.values():
            if source.state is InstanceState.ACTIVE or not targets:
                continue
            running = [r for r in source.requests if movable(r) and not r.migrating]
            for number, request in enumerate(running[: max(0, ORDERED_MAX - source.migrations_out)]):
                by_use = sorted(targets, key=lambda i: i.kv_used_tokens / i.kv_capacity_tokens)
                target = by_use[number % len(by_use)]
                moves.append(Migrate(request.request_id, source.instance_id, target.instance_id, "drain"))
            waiting = [r.request_id for r in source.requests if r.state is RequestState.WAITING]
            if waiting:
                moves.append(ReturnPrompts(source.instance_id, tuple(waiting)))
        return moves
