"""Advance rollouts while this scheduler leads; the records in etcd are the whole state."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from scheduler_svc.admin.errors import AdminError
from tailrace.cluster import InstanceState
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.control.reported_instance import ReportedInstance
from tailrace.records import InstanceRecord
from tailrace.rollout.facts import FleetFacts, InstanceFacts
from tailrace.rollout.progress import advance, describe
from tailrace.rollout.record import RolloutRecord, RolloutState
from tailrace.store.client import StoreUnavailable
from tailrace.store.membership import Membership, front_end_facts
from tailrace.telemetry.incidents import guarded

log = logging.getLogger(__name__)

_POLL_S: Final = 0.25


class Rollouts:
    """Collect the facts that rollouts depend on, and take the next step of each."""

    def __init__(
        self,
        members: Membership,
        state: ReportedCluster,
        swap: Callable[[str, RolloutRecord | None, RolloutRecord], Awaitable[None]],
        leading: asyncio.Event,
    ) -> None:
        """`swap(model, expected, record)` replaces a record by compare-and-swap; it raises Conflict or
        StoreUnavailable."""
        self._members = members
        self._state = state
        self._swap = swap
        self._leading = leading
        # Since when each instance has been draining, by this scheduler's monotonic clock.
        self._draining_since: dict[str, float] = {}
        # The current step of each rollout by name, and since when this scheduler has known it.
        self._steps: dict[str, tuple[tuple[float, RolloutState, float], float]] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            if not self._leading.is_set():
                # The previous leader measured with its own clock; each step gets its full time again.
                self._steps.clear()
                await self._leading.wait()
            for record in list(self._members.rollouts.values()):
                if record.under_way:
                    # One that cannot go on must not hold up the others.
                    with guarded("rollouts", record.model):
                        await self._step(record)
            await asyncio.sleep(_POLL_S)

    def facts(self) -> FleetFacts:
        """Return the state of the fleet now."""
        now_s = time.monotonic()
        draining = self._members.draining
        self._draining_since = {name: self._draining_since.get(name, now_s) for name in draining}
        instances = {name: self._instance(name, record) for name, record in self._members.instances.items()}
        return FleetFacts(instances, front_end_facts(self._members.services), self._members.rollouts)

    async def _step(self, record: RolloutRecord) -> None:
        following = advance(record, self.facts(), time.time(), self._step_duration_s(record))
        if following == record:
            return
        try:
            await self._swap(record.model, record, following)
        except (AdminError, StoreUnavailable) as error:
            # Another writer was faster, its record is a later version's, or etcd is unreachable: decide again
            # from what is there next time.
            log.debug("rollout of %s: %s", record.model, error)
            return
        if following.state is not record.state:
            log.info("rollout of %s: %s", record.model, describe(following, self.facts()))

    def _step_duration_s(self, record: RolloutRecord) -> float:
        """Return for how many seconds the rollout has been at its current step, as seen by this leader."""
        now_s = time.monotonic()
        step, since_s = self._steps.get(record.model, (record.step, now_s))
        if step != record.step:
            step, since_s = record.step, now_s
        self._steps[record.model] = (step, since_s)
        return now_s - since_s

    def _instance(self, name: str, record: InstanceRecord) -> InstanceFacts:
        tracked = self._state.tracked(name)
        requests = self._state.requests_on(name)
        return InstanceFacts(
            instance_id=name,
            key=record.model_identity.key,
            model=record.model,
            unavailable=self._unavailable(name, record, tracked),
            requests=len(requests),
            moving=sum(request.migrating for request in requests),
            takes_adapters=record.takes_adapters,
            empty=not requests and tracked is not None and self._is_drained(name, tracked),
        )

    def _is_drained(self, name: str, tracked: ReportedInstance) -> bool:
        since_s = self._draining_since.get(name)
        return (
            since_s is not None
            and tracked.shows_placed_before(since_s)
            and name not in self._members.suspects
        )

    def _unavailable(self, name: str, record: InstanceRecord, tracked: ReportedInstance | None) -> str:
        view = self._state.view().instances.get(name)
        if view is not None and view.state is InstanceState.SUSPECT:
            return "is suspect"
        if record.draining:
            return "stops"
        if name in self._members.drained:
            return "is drained by an operator"
        if tracked is None or tracked.load is None:
            return "has not reported yet"
        return ""
