"""The deciding half of a scheduler: its model of the cluster, the policy in force, and what asks it.

Pure but for the policies' calls being timed: whoever calls brings both times, so that a recording of what was
fed in gives the same decisions again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tailrace import __version__
from tailrace.actions import Place, Refuse
from tailrace.cluster import Arrival, ClusterView, Incoming, Phase, length_bounds
from tailrace.control.recording import (
    FORMAT,
    Arrived,
    Event,
    InstanceKnown,
    PolicyFollowed,
    RecordedPolicy,
    Reported,
    Started,
    Ticked,
    TicksForgotten,
)
from tailrace.control.reported_cluster import PhaseChange, ReportedCluster
from tailrace.control.runner import ActivePolicy, Calls, Executor, Moment, Point, PolicyRunner
from tailrace.control.shadow import Shadow
from tailrace.policy.base import Policy
from tailrace.records import PolicyRecord
from tailrace.slo import Slo
from tailrace.v1 import monitor_pb2

_LEFT: Final = {Phase.PREFILL: Point.PREFILL_DONE, Phase.REASONING: Point.REASONING_ENDED}


class LiveControl:
    """Feeds what happens to the model and asks the policy about it."""

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
        # Requests that have outgrown the stage of their instance: a policy is asked once about each.
        self._outgrown: dict[str, str] = {}
        self._asked: Policy = active.policy

    def follow(self, record: PolicyRecord | None, slo: Slo) -> None:
        """Decide by that policy, or the default, and for these SLOs."""
        if self.model.tap is not None:
            self.model.tap(PolicyFollowed(None if record is None else _recorded(record), slo))
        self.active.follow(record, slo)
        if self.shadow is not None:
            self.shadow.follow_slo(slo)
        self.model.count_fresh_by(self.active.quantum_tokens)
        self.model.hot.keep(self.active.policy.prefixes_period_s)

    def follow_shadow(self, shadow: Shadow | None) -> None:
        """Ask this one the same questions from now on; None: nobody."""
        if self.shadow is not None:
            self.runner.watchers.remove(self.shadow)
        if shadow is not None:
            self.runner.watchers.append(shadow)
        self.shadow = shadow

    def arrived(self, incoming: Incoming, at: Moment) -> tuple[Arrival, Place | Refuse]:
        """Place a request, count the placement in, and submit what the policy decided beside it, such as a
        pool move. Any scheduler may: pool moves are compare-and-swap, so that it need not lead."""
        if self.model.tap is not None:
            self.model.tap(Arrived(incoming, at.model_s, at.policy_s))
        arrival = Arrival(
            incoming.request_id,
            incoming.prompt_tokens,
            incoming.max_tokens,
            self._placements,
            incoming.output_tokens,
            incoming.excluded,
            self.model.cache.of_arrival(
                incoming.block_names,
                incoming.block_tokens,
                incoming.prompt_tokens + incoming.output_tokens,
                at.model_s,
            ),
            incoming.block_names,
            incoming.session_id,
            incoming.admitted,
        )
        self._placements += 1
        policy = self.active.name
        placement = self._without_foreign_pull(self.runner.place(arrival, incoming.model, at))
        if isinstance(placement, Place):
            self.model.place(
                arrival, placement.instance_id, incoming.frontend_id, at.model_s, placement.pull_from
            )
            self.model.hot.arrived(arrival, incoming.block_tokens, at.model_s)
            if placement.also:
                self._executor.submit(placement.also, policy)
        return arrival, placement

    def reported(self, report: monitor_pb2.WorkerReport, at: Moment, *, deciding: bool) -> None:
        """Apply a report and decide on what it tells; a standby, which does not decide, keeps the lengths,
        too: it may lead in a moment."""
        if self.model.tap is not None:
            self.model.tap(Reported(report.SerializeToString(), deciding, at.model_s, at.policy_s))
        self.model.keep_lengths(self.active.policy.lengths_period_s, at.model_s)
        changes = self.model.apply(report, at.model_s)
        if not deciding:
            return
        for change in changes:
            self._phase_changed(change, at)
        view = self.model.view()
        if view.stages:
            self._check_lengths(view, report.instance_id, at)
        elif self._outgrown:
            self._outgrown.clear()

    def tick(self, at: Moment) -> None:
        """One tick."""
        if self.model.tap is not None:
            self.model.tap(Ticked(at.model_s, at.policy_s))
        self.runner.tick(at)

    def forget_ticks(self) -> None:
        """Another scheduler leads and ticks: when, is not known here."""
        if self.model.tap is not None:
            self.model.tap(TicksForgotten())
        self.runner.last_tick_s = None

    # ---- recordings

    def state(self, now_s: float) -> list[Event]:
        """All that is known, as the first lines of a recording."""
        model, instances = self.model.state()
        active = self.active
        # Asked under another policy: that counts no longer.
        outgrown = self._outgrown if self._asked is active.policy else {}
        started = Started(
            format=FORMAT,
            version=__version__,
            now_s=now_s,
            policy=_recorded(active.record),
            default=_recorded(active.default),
            slo=active.slo,
            placements=self._placements,
            outgrown=dict(outgrown),
            last_tick_s=self.runner.last_tick_s,
            model=model,
        )
        return [started, *instances]

    @staticmethod
    def restored(
        started: Started, instances: Sequence[InstanceKnown], executor: Executor, calls: Calls
    ) -> LiveControl:
        """Go on from there. Raises UnknownPolicyError, UnusablePolicyError, ParameterError."""
        policy, default = (
            PolicyRecord(name=record.name, parameters=record.parameters)
            for record in (started.policy, started.default)
        )
        control = LiveControl(ReportedCluster(), ActivePolicy(default, started.slo), executor, calls)
        control.active.switch(policy, started.slo)
        control.model.count_fresh_by(control.active.quantum_tokens)
        control.model.restore(started.model, instances, started.now_s)
        control._placements = started.placements
        control._asked, control._outgrown = control.active.policy, dict(started.outgrown)
        control.runner.last_tick_s = started.last_tick_s
        return control

    # ---- inside

    def _without_foreign_pull(self, placement: Place | Refuse) -> Place | Refuse:
        """What another model, or another layout, has computed is refused by the worker that asks for it: it
        need not ask. Blocks are named by their tokens alone."""
        if isinstance(placement, Refuse) or not placement.pull_from:
            return placement
        if self.model.can_exchange_kv(placement.instance_id, placement.pull_from):
            return placement
        return replace(placement, pull_from="")

    def _phase_changed(self, change: PhaseChange, at: Moment) -> None:
        point = _LEFT.get(change.left)
        if point is not None:
            self.runner.request_changed(point, change.request, at)

    def _check_lengths(self, view: ClusterView, instance_id: str, at: Moment) -> None:
        if self._asked is not self.active.policy:
            # Another policy decides now, and has not been asked about any.
            self._asked = self.active.policy
            self._outgrown.clear()
        instance = view.instances.get(instance_id)
        bound = length_bounds(view.stages).get(instance_id)
        if instance is None:
            return
        for request in instance.requests:
            if bound is None or request.context_tokens < bound:
                continue
            if self._outgrown.get(request.request_id) == instance_id:
                continue
            self._outgrown[request.request_id] = instance_id
            # What was decided about the one before counts in the view for this one.
            self.runner.request_changed(Point.LENGTH_BOUNDARY, request, at)
        here = {request.request_id for request in instance.requests}
        for request_id, where in list(self._outgrown.items()):
            # Gone from here, or here itself is gone.
            if where not in view.instances or (where == instance_id and request_id not in here):
                del self._outgrown[request_id]


def _recorded(record: PolicyRecord) -> RecordedPolicy:
    return RecordedPolicy(record.name, dict(record.parameters))
