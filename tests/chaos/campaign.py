"""Inject faults one by one, and check all invariants after each."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Sequence
from typing import Final

from tailrace.service.tasks import cancel
from tests.chaos.cluster import Cluster, Member
from tests.chaos.faults import Faults
from tests.chaos.invariants import InvariantChecker
from tests.chaos.load import Load
from tests.chaos.schedule import ROLLOUTS, Fault, Kind, Tier
from tests.chaos.timeline import Timeline

# Longer faults overlap with the next ones.
_OVERLAP_AFTER_S: Final = 2.0
_MAX_ACTIVE: Final = 4
_PRECONDITION_S: Final = 180.0
_POLL_S: Final = 0.05
# These faults do not make their target unhealthy.
_TARGET_STAYS_HEALTHY: Final = frozenset(
    {Kind.SLOW_READER, Kind.HUGE_BODY, Kind.LONG_IDS, Kind.POISON, Kind.CORRUPT_KV}
)


class Campaign:
    """Inject a schedule of faults into one cluster under one load."""

    def __init__(
        self, cluster: Cluster, load: Load, faults: Faults, invariants: InvariantChecker, timeline: Timeline
    ) -> None:
        self._cluster = cluster
        self._load = load
        self._faults = faults
        self._invariants = invariants
        self._timeline = timeline
        self._active: set[asyncio.Task[None]] = set()
        self._rollout_active = False
        self.injected: collections.Counter[str] = collections.Counter()

    async def run(self, schedule: Sequence[Fault]) -> None:
        """Inject all faults. Violations are recorded in the timeline."""
        began_s = time.monotonic()
        try:
            for number, fault in enumerate(schedule, 1):
                await self._inject(fault, f"fault {number} of {len(schedule)}", began_s)
            if self._active:
                await asyncio.wait(self._active)
            self._load.resume()
            await self._load.wait_streaming()
            await self._invariants.wait_connections_closed()
            await self._check_invariants()
        finally:
            await cancel(*self._active)

    async def _inject(self, fault: Fault, which: str, began_s: float) -> None:
        await self._wait_for_preconditions(fault)
        self._load.resume()
        await self._load.wait_streaming()
        if self._cluster.shape.keeps_answers and self._hits_front_end(fault):
            await self._wait_for_answer_copies()
        self._timeline.note(f"{which}, after {time.monotonic() - began_s:.0f} s: {fault}")
        self.injected[fault.kind] += 1
        task = asyncio.create_task(self._run_fault(fault, which), name=str(fault))
        self._active.add(task)
        task.add_done_callback(self._active.discard)
        await asyncio.wait([task], timeout=_OVERLAP_AFTER_S)
        await self._check_invariants()

    def _hits_front_end(self, fault: Fault) -> bool:
        names = [member.name for member in self._cluster.in_tier(Tier.FRONTEND)]
        return fault.kind not in _TARGET_STAYS_HEALTHY and bool({fault.target, fault.other} & {*names})

    async def _wait_for_answer_copies(self) -> None:
        """Wait until both front ends have all kept answers before the next one is hit
        (docs/kept-answers.md)."""
        if not await self._invariants.wait_answers_copied():
            self._timeline.violation("healthy front ends have not copied their answers to each other")

    async def _check_invariants(self) -> None:
        """Drain all streams, then check."""
        self._load.pause()
        for stream in await self._load.wait_drained():
            self._timeline.violation(f"{stream.name} on {stream.front.name} did not end")
        for violation in await self._invariants.wait_for_invariants():
            self._timeline.violation(violation)

    async def _run_fault(self, fault: Fault, which: str) -> None:
        began_s = time.monotonic()
        self._rollout_active = self._rollout_active or fault.kind in ROLLOUTS
        try:
            await self._faults.inject(fault)
        except (OSError, RuntimeError, TimeoutError) as error:
            self._timeline.violation(f"{which}, {fault}: {type(error).__name__}: {error}")
        if fault.kind is Kind.ROTATE:
            self._invariants.certificates_rotated()
        if fault.kind in ROLLOUTS:
            self._rollout_active = False
        if time.monotonic() - began_s > _OVERLAP_AFTER_S:
            self._timeline.note(f"{which} is over")

    async def _wait_for_preconditions(self, fault: Fault) -> None:
        """Wait until the fault leaves half of each tier healthy, and its targets are healthy."""
        until_s = time.monotonic() + _PRECONDITION_S
        while not self._preconditions_hold(fault) and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def _preconditions_hold(self, fault: Fault) -> bool:
        if len(self._active) >= _MAX_ACTIVE:
            return False
        if fault.kind in ROLLOUTS:
            return not self._rollout_active
        if fault.kind is Kind.POISON:
            # It kills two engines, so no other worker may be unhealthy.
            return all(member.healthy for member in self._cluster.in_tier(Tier.WORKER)) and self._is_healthy(
                fault.target
            )
        targets = [name for name in (fault.target, fault.other) if name in self._cluster.members]
        if not all(map(self._is_healthy, targets)):
            return False
        # `other`, whose packets the target does not receive, still serves everybody else.
        affected = [] if fault.kind in _TARGET_STAYS_HEALTHY else targets[:1]
        return all(self._leaves_half(self._cluster.members[name]) for name in affected)

    def _is_healthy(self, name: str) -> bool:
        return self._cluster.members[name].healthy

    def _leaves_half(self, one: Member) -> bool:
        """Return whether at least half of those with the role and version of `one` stay healthy."""
        members = [each for each in self._cluster.in_tier(one.tier) if each.version is one.version]
        unhealthy = [member for member in members if not member.healthy or member is one]
        return len(unhealthy) <= max(1, len(members) // 2)
