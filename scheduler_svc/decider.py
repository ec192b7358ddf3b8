"""Brings phase changes, lengths and ticks to the policy's decision points. Only the leader decides."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from scheduler_svc.active_policy import ActivePolicy
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.state import ClusterState, PhaseChange
from tailrace.actions import Action
from tailrace.cluster import ClusterView, Phase, RequestView, Stage
from tailrace.policy.base import Policy
from tailrace.policy.when_full import WhenFull
from tailrace.v1 import monitor_pb2

log = logging.getLogger(__name__)

# How soon a policy with another tick, set meanwhile, is noticed.
_LOOK_S: Final = 1.0


class Hands(Protocol):
    """What carries decisions out."""

    def submit(
        self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE
    ) -> None: ...


class Decider:
    """Feeds reports to the state and asks the policy about what they tell."""

    def __init__(
        self,
        state: ClusterState,
        active: ActivePolicy,
        hands: Hands,
        leading: asyncio.Event,
        metrics: SchedulerMetrics,
    ) -> None:
        self._state = state
        self._active = active
        self._hands = hands
        self._leading = leading
        self._metrics = metrics
        # Requests that have outgrown the stage of their instance: a policy is asked once about each.
        self._outgrown: dict[str, str] = {}
        self._asked: Policy = active.policy
        # When the last tick was, and whose.
        self._ticked: tuple[Policy, float] | None = None

    def take(self, report: monitor_pb2.WorkerReport, now_s: float) -> None:
        """Apply a report and decide on what it tells."""
        # A standby keeps them, too: it may lead in a moment.
        self._state.keep_lengths(self._active.policy.lengths_period_s, now_s)
        changes = self._state.apply(report, now_s)
        if not self._leading.is_set():
            return
        for change in changes:
            self._phase_changed(change)
        view = self._state.view()
        if view.stages:
            self._check_lengths(view, report.instance_id)
        elif self._outgrown:
            self._outgrown.clear()

    async def run_ticks(self) -> None:
        """Call on_tick as often as the policy wants, while leading; until cancelled."""
        ticked_s = time.monotonic()
        while True:
            if not self._leading.is_set():
                # Another scheduler ticks meanwhile, and when is not known here.
                self._ticked = None
                await self._leading.wait()
            interval_s = self._active.policy.tick_interval_s
            if interval_s is None:
                await asyncio.sleep(_LOOK_S)
                continue
            left_s = ticked_s + interval_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(min(left_s, _LOOK_S))
                continue
            ticked_s = time.monotonic()
            self.tick()

    def tick(self) -> None:
        """One tick."""
        policy, monotonic_s = self._active.policy, time.monotonic()
        last_s = self._ticked[1] if self._ticked is not None and self._ticked[0] is policy else None
        view = dataclasses.replace(
            self._state.view(), last_tick_s=last_s, lengths=self._state.lengths(monotonic_s)
        )

        def ask(now_s: float) -> Sequence[Action]:
            self._ticked = policy, now_s
            return policy.on_tick(view, now_s)

        self._decide("tick", ask)

    def _phase_changed(self, change: PhaseChange) -> None:
        policy, request = self._active.policy, change.request
        view = self._state.view_of_kv(request.instance_id)
        if change.left is Phase.PREFILL:
            self._decide("prefill_done", lambda now_s: policy.on_prefill_done(view, request, now_s))
        elif change.left is Phase.REASONING:
            self._decide("reasoning_ended", lambda now_s: policy.on_reasoning_ended(view, request, now_s))

    def _check_lengths(self, view: ClusterView, instance_id: str) -> None:
        if self._asked is not self._active.policy:
            # Another policy decides now, and has not been asked about any.
            self._asked = self._active.policy
            self._outgrown.clear()
        instance = view.instances.get(instance_id)
        stage = _stage_of(view.stages, instance_id)
        if instance is None or stage is None:
            return
        for request in instance.requests:
            if request.context_tokens < stage.hi or self._outgrown.get(request.request_id) == instance_id:
                continue
            self._outgrown[request.request_id] = instance_id
            self._outgrew(request)
        here = {request.request_id for request in instance.requests}
        for request_id, where in list(self._outgrown.items()):
            # Gone from here, or here itself is gone.
            if where not in view.instances or (where == instance_id and request_id not in here):
                del self._outgrown[request_id]

    def _outgrew(self, request: RequestView) -> None:
        # What was decided about the one before counts.
        policy, view = self._active.policy, self._state.view_of_kv(request.instance_id)
        self._decide("length_boundary", lambda now_s: policy.on_length_boundary(view, request, now_s))

    def _decide(self, point: str, ask: Callable[[float], Sequence[Action]]) -> None:
        began_s = time.perf_counter()
        try:
            actions = ask(time.time())
        except Exception:
            log.exception("policy %s failed at %s", self._active.name, point)
            self._metrics.policy_errors.labels(self._active.name, point).inc()
            return
        finally:
            self._metrics.decision_seconds.labels(point).observe(time.perf_counter() - began_s)
        if actions:
            self._hands.submit(actions, self._active.name, self._active.policy.when_full)


def _stage_of(stages: Sequence[Stage], instance_id: str) -> Stage | None:
    """The last stage that an instance serves."""
    return next((stage for stage in reversed(stages) if instance_id in stage.instance_ids), None)
