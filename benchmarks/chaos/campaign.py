"""One fault after the other, and after each all that must hold."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Sequence
from typing import Final

from benchmarks.chaos.cluster import Cluster, Member
from benchmarks.chaos.faults import Faults
from benchmarks.chaos.load import Load
from benchmarks.chaos.schedule import ROLLOUTS, Fault, Kind, Tier
from benchmarks.chaos.timeline import Timeline
from benchmarks.chaos.watch import Watch

# What lasts longer goes on during the next faults.
_HOLD_S: Final = 2.0
_LASTING: Final = 4
_ROOM_S: Final = 180.0
_POLL_S: Final = 0.05
# No one process alone.
_NEEDS_TARGET: Final = frozenset({Kind.SLOW_READER, Kind.HUGE_BODY, Kind.POISON, Kind.CORRUPT_KV})


class Campaign:
    """Of one cluster under one load."""

    def __init__(
        self, cluster: Cluster, load: Load, faults: Faults, watch: Watch, timeline: Timeline
    ) -> None:
        self._cluster = cluster
        self._load = load
        self._faults = faults
        self._watch = watch
        self._timeline = timeline
        self._lasting: set[asyncio.Task[None]] = set()
        self._rolling = False
        self.done: collections.Counter[str] = collections.Counter()

    async def run(self, schedule: Sequence[Fault]) -> None:
        """All of it. Whatever breaks is in the timeline."""
        began_s = time.monotonic()
        try:
            for number, fault in enumerate(schedule, 1):
                await self._one(fault, f"fault {number} of {len(schedule)}", began_s)
            if self._lasting:
                await asyncio.wait(self._lasting)
            self._load.let_in()
            await self._load.flowing()
            await self._watch.replaced()
            await self._still()
        finally:
            for task in self._lasting:
                task.cancel()
            await asyncio.gather(*self._lasting, return_exceptions=True)

    async def _one(self, fault: Fault, which: str, began_s: float) -> None:
        await self._room(fault)
        self._load.let_in()
        await self._load.flowing()
        if self._cluster.shape.keeps_answers and self._strikes_front_end(fault):
            await self._one_front_end_at_a_time()
        self._timeline.note(f"{which}, after {time.monotonic() - began_s:.0f} s: {fault}")
        self.done[fault.kind] += 1
        task = asyncio.create_task(self._carry_out(fault, which), name=str(fault))
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)
        await asyncio.wait([task], timeout=_HOLD_S)
        await self._still()

    def _strikes_front_end(self, fault: Fault) -> bool:
        names = [member.name for member in self._cluster.of(Tier.FRONTEND)]
        return fault.kind not in _NEEDS_TARGET and bool({fault.target, fault.other} & {*names})

    async def _one_front_end_at_a_time(self) -> None:
        """What is kept must be with both before the next one is struck (docs/kept-answers.md)."""
        if not await self._watch.copied():
            self._timeline.broken("front ends that are well have not copied their answers to each other")

    async def _still(self) -> None:
        """Let everything end, and look."""
        self._load.keep_out()
        for stream in await self._load.ended():
            self._timeline.broken(f"{stream.name} on {stream.front.name} does not end")
        for wrong in await self._watch.settled():
            self._timeline.broken(wrong)

    async def _carry_out(self, fault: Fault, which: str) -> None:
        began_s = time.monotonic()
        self._rolling = self._rolling or fault.kind in ROLLOUTS
        try:
            await self._faults.carry_out(fault)
        except (OSError, RuntimeError, TimeoutError) as error:
            self._timeline.broken(f"{which}, {fault}: {type(error).__name__}: {error}")
        if fault.kind is Kind.ROTATE:
            self._watch.rotated()
        if fault.kind in ROLLOUTS:
            self._rolling = False
        if time.monotonic() - began_s > _HOLD_S:
            self._timeline.note(f"{which} is over")

    async def _room(self, fault: Fault) -> None:
        """Until the fault leaves half of each tier alone, and its targets are well."""
        until_s = time.monotonic() + _ROOM_S
        while not self._fits(fault) and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def _fits(self, fault: Fault) -> bool:
        if len(self._lasting) >= _LASTING:
            return False
        if fault.kind in ROLLOUTS:
            return not self._rolling
        if fault.kind is Kind.POISON:
            # It takes two engines, where nothing else does.
            return all(member.well for member in self._cluster.of(Tier.WORKER)) and self._well(fault.target)
        targets = [name for name in (fault.target, fault.other) if name in self._cluster.members]
        if not all(map(self._well, targets)):
            return False
        # Whom it does not hear serves others.
        struck = [] if fault.kind in _NEEDS_TARGET else targets[:1]
        return all(self._leaves_half(self._cluster.members[name]) for name in struck)

    def _well(self, name: str) -> bool:
        return self._cluster.members[name].well

    def _leaves_half(self, one: Member) -> bool:
        """Of those that can do what one does."""
        members = [each for each in self._cluster.of(one.tier) if each.version is one.version]
        ill = [member for member in members if not member.well or member is one]
        return len(ill) <= max(1, len(members) // 2)
