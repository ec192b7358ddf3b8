"""The decision core of a scheduler: the cluster model, the policy in force, and the events that make it
decide.

Pure except that policy calls are timed: callers pass both times, so that a recording of the inputs gives the
same decisions again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, overload

from tailrace import __version__
from tailrace.actions import Place, Refuse
from tailrace.cluster import Arrival, Phase, Stage, length_bounds
from tailrace.control.active_policy import ActivePolicy
from tailrace.control.events import Arrived, Input, PolicyFollowed, Reported, Ticked, TicksForgotten
from tailrace.control.recording import FORMAT, InstanceKnown, Line, Started
from tailrace.control.reported_cluster import PhaseChange, ReportedCluster
from tailrace.control.runner import Calls, DecisionPoint, Executor, Moment, PolicyRunner
from tailrace.control.shadow import Shadow
from tailrace.policy.base import Policy
from tailrace.records import PolicyRecord
from tailrace.slo import Slo

_POINT_OF_PHASE_END: Final = {
    Phase.PREFILL: DecisionPoint.PREFILL_DONE,
    Phase.REASONING: DecisionPoint.REASONING_ENDED,
}


class DecidedArrival(NamedTuple):
    """An arrival, completed by what the model knew, and what was decided about it."""

    arrival: Arrival
    placement: Place | Refuse


class LiveControl:
    """Feed events to the model and ask the policy about them."""

    def __init__(
        self, model: ReportedCluster, active: ActivePolicy, executor: Executor, calls: Calls
    ) -> None:
        self.model = model
        self.active = active
        self.runner = PolicyRunner(model, active, executor, calls)
        self.shadow: Shadow | None = None
        self._executor = executor
        # Placements made so far.
        self._placements = 0
        # The policy that was asked about these requests.
        self._outgrown = OutgrownRequests({})
        self._outgrown_policy: Policy = active.policy
        self._checked_memberships = 0
        # The stages for which the bounds, by instance, were computed.
        self._bounded_stages: tuple[Stage, ...] = ()
        self._bounds: dict[str, int] = {}

    # ---- an event comes, it is applied, the policy is asked, its actions are submitted

    @overload
    def handle(self, event: Arrived) -> DecidedArrival: ...
    @overload
    def handle(self, event: Input) -> DecidedArrival | None: ...
    def handle(self, event: Input) -> DecidedArrival | None:
        """Apply an event to the model, and ask the policy about what it shows.

        The placement, migrations, offers, copies and pool moves that the policy decides are in the model
        before this returns. What becomes of a wrong or late answer, `PolicyGuard` decides (guard.py). Only an
        arrival has a result. Any scheduler may place, leader or not, because pool moves are compare-and-swap.
        """
        if isinstance(event, Reported):
            # A standby keeps lengths as well, because it may lead in a moment.
            self.model.keep_lengths(self.active.declared.lengths_period_s, event.now_s)
        changes = self.model.apply(event)
        match event:
            case Arrived():
                return self._place(event.incoming, Moment(event.now_s, event.wall_s))
            case Reported(deciding=True):
                at = Moment(event.now_s, event.wall_s)
                for change in changes:
                    self._phase_changed(change, at)
                self._check_lengths(event.report.instance_id, at)
            case Ticked():
                self.runner.tick(Moment(event.now_s, event.wall_s))
            case TicksForgotten():
                # Another scheduler leads, and when it ticks is unknown here.
                self.runner.last_tick_s = None
            case PolicyFollowed():
                self._follow(event.policy, event.slo)
            case _:
                # The model knows; nothing is decided on it.
                pass
        return None

    def _place(self, asked: Arrival, at: Moment) -> DecidedArrival:
        """Place a request, enter the placement into the model, and submit the actions decided with it, such
        as a pool move."""
        cached = self.model.cache.of_arrival(
            asked.block_names, asked.block_tokens, asked.context_tokens, at.model_s
        )
        arrival = asked.completed(self._placements, cached)
        self._placements += 1
        policy = self.active.name
        placement = self._drop_impossible_pull(self.runner.place(arrival, at))
        if isinstance(placement, Place):
            self.model.place(arrival, placement.instance_id, at.model_s, placement.pull_from)
            self.model.hot.arrived(arrival, at.model_s)
            if placement.also:
                self._executor.submit(placement.also, policy)
        elif placement.final:
            self.model.count_refused(arrival.model, arrival.prompt_tokens, at.model_s)
        return DecidedArrival(arrival, placement)

    def _follow(self, record: PolicyRecord | None, slo: Slo) -> None:
        """Decide by this policy (None: the default) and for these SLOs from now on."""
        self.active.follow(record, slo)
        if self.shadow is not None:
            self.shadow.follow_slo(slo)
        self.model.hot.track(self.active.declared.prefixes_period_s)

    # ---- a shadow policy

    def follow_shadow(self, shadow: Shadow | None) -> None:
        """Ask this shadow policy the same questions from now on; None: ask none."""
        if self.shadow is not None:
            self.runner.watchers.remove(self.shadow)
        if shadow is not None:
            self.runner.watchers.append(shadow)
        self.shadow = shadow

    # ---- recordings

    def state(self, now_s: float) -> list[Line]:
        """Return the complete state as the first lines of a recording."""
        model, instances = self.model.state()
        active = self.active
        # Questions put to another policy do not count.
        outgrown = self._outgrown.found if self._outgrown_policy is active.policy else {}
        started = Started(
            format=FORMAT,
            version=__version__,
            now_s=now_s,
            policy=active.record,
            default=active.default,
            slo=active.slo,
            placements=self._placements,
            outgrown=outgrown,
            last_tick_s=self.runner.last_tick_s,
            model=model,
        )
        return [started, *instances]

    @staticmethod
    def restored(
        started: Started, instances: Sequence[InstanceKnown], executor: Executor, calls: Calls
    ) -> LiveControl:
        """Build a control from a recorded state. Raise UnknownPolicyError, UnusablePolicyError or
        ParameterError."""
        active = ActivePolicy(started.default, started.slo)
        control = LiveControl(ReportedCluster(), active, executor, calls)
        control.active.switch(started.policy, started.slo)
        control.model.restore(started.model, instances, started.now_s)
        control._placements = started.placements
        control._outgrown_policy = control.active.policy
        control._outgrown = OutgrownRequests(started.outgrown)
        control.runner.last_tick_s = started.last_tick_s
        return control

    # ---- internal

    def _drop_impossible_pull(self, placement: Place | Refuse) -> Place | Refuse:
        """Drop a pull from an instance of another model or KV layout, which the worker would refuse.

        Blocks are named by their tokens alone, so a policy may choose such an instance.
        """
        if isinstance(placement, Refuse) or not placement.pull_from:
            return placement
        if self.model.can_exchange_kv(placement.instance_id, placement.pull_from):
            return placement
        return replace(placement, pull_from="")

    def _phase_changed(self, change: PhaseChange, at: Moment) -> None:
        point = _POINT_OF_PHASE_END.get(change.left)
        if point is not None:
            self.runner.request_changed(point, change.request, at)

    def _check_lengths(self, instance_id: str, at: Moment) -> None:
        """Ask the policy about requests on this instance that have outgrown its stage."""
        if not self.model.stages:
            self._outgrown.clear()
            return
        if self._outgrown_policy is not self.active.policy:
            # The policy has changed and has not been asked about any request.
            self._outgrown_policy = self.active.policy
            self._outgrown.clear()
        if self._checked_memberships != self.model.memberships:
            self._checked_memberships = self.model.memberships
            self._outgrown.keep_instances(lambda name: self.model.tracked(name) is not None)
        tracked = self.model.tracked(instance_id)
        if tracked is None:
            return
        bound = self._length_bound(instance_id)
        requests = tracked.requests()
        outgrown = [] if bound is None else requests.where(requests.context_tokens >= bound)
        for request in outgrown:
            if self._outgrown.add(request.request_id, instance_id):
                # The view for this request includes the decision about the previous one.
                self.runner.request_changed(DecisionPoint.LENGTH_BOUNDARY, request, at)
        self._outgrown.keep(instance_id, lambda name: tracked.find(name) is not None)

    def _length_bound(self, instance_id: str) -> int | None:
        """Return the context from which a request has outgrown this instance's stage; None: it has none."""
        stages = self.model.stages
        if stages is not self._bounded_stages:
            self._bounded_stages, self._bounds = stages, length_bounds(stages)
        return self._bounds.get(instance_id)


class OutgrownRequests:
    """The instance on which each such request was found last. Pure."""

    def __init__(self, found: Mapping[str, str]) -> None:
        """`found`: instance by request, as `found` returns it."""
        self._found = dict(found)
        self._on: dict[str, set[str]] = {}
        for request_id, instance_id in found.items():
            self._on.setdefault(instance_id, set()).add(request_id)

    @property
    def found(self) -> dict[str, str]:
        """Return the instance of each request."""
        return dict(self._found)

    def add(self, request_id: str, instance_id: str) -> bool:
        """Add a request; return False if it was found there already."""
        before = self._found.get(request_id)
        if before == instance_id:
            return False
        if before is not None:
            self._on[before].discard(request_id)
        self._found[request_id] = instance_id
        self._on.setdefault(instance_id, set()).add(request_id)
        return True

    def keep(self, instance_id: str, is_there: Callable[[str], bool]) -> None:
        """Remove the requests that have left an instance."""
        on_it = self._on.get(instance_id)
        if on_it:
            for request_id in [name for name in on_it if not is_there(name)]:
                on_it.discard(request_id)
                del self._found[request_id]

    def keep_instances(self, is_known: Callable[[str], bool]) -> None:
        """Remove the requests of instances that have left the cluster."""
        for instance_id in [name for name in self._on if not is_known(name)]:
            for request_id in self._on.pop(instance_id):
                del self._found[request_id]

    def clear(self) -> None:
        """Remove all."""
        self._found.clear()
        self._on.clear()
