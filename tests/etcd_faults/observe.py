"""Observe etcd as services do while a member fails: leadership, views, writes. Times in seconds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from tailrace.records import ServiceRecord
from tailrace.store.election import Election
from tailrace.store.registration import register
from tailrace.store.store import Store, StoreUnavailable
from tests.waiting import WAIT_S

CANDIDATES: Final = 2
VIEWS: Final = 12
_CLUSTER: Final = "observed"
_KEY: Final = "counter"
_WRITE_S: Final = 0.1
_SAMPLE_S: Final = 0.02


@dataclass(slots=True)
class Observed:
    """Observations during one fault."""

    # In total, without a leading candidate; and with two.
    without_leader_s: float = 0.0
    two_leaders_s: float = 0.0
    leadership_changes: int = 0
    # From the acknowledgement of a write until a view shows it: the maximum over all views, and how many of
    # them were ever behind by more than a second.
    view_stale_max_s: float = 0.0
    views_behind: int = 0
    # Longest time between two successful writes; writes that failed did not succeed within the store's
    # deadline.
    write_gap_max_s: float = 0.0
    writes: int = 0
    writes_failed: int = 0


class _View:
    """A watcher of the counter, with its own connection."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Writes that were acknowledged but are not yet visible: number, and time of acknowledgement.
        self._waiting: deque[tuple[int, float]] = deque()
        self._shown = -1
        self.worst_s = 0.0

    def record_write(self, number: int, now_s: float) -> None:
        """Record that the write with this number succeeded."""
        if number > self._shown:
            self._waiting.append((number, now_s))

    def update(self, now_s: float) -> None:
        """Update the maximum staleness."""
        if self._waiting:
            self.worst_s = max(self.worst_s, now_s - self._waiting[0][1])

    async def follow(self) -> None:
        """Follow the counter until cancelled."""
        async with aclosing(self._store.watch_prefix(_KEY)) as changes:
            async for mapping in changes:
                self._shown = int(mapping.get(_KEY, b"-1"))
                now_s = time.monotonic()
                self.update(now_s)
                while self._waiting and self._waiting[0][0] <= self._shown:
                    self._waiting.popleft()


class Observer:
    """Candidates, views and a writer on an etcd cluster, each with its own store."""

    def __init__(self, elections: list[Election], views: list[_View], writer: Store) -> None:
        self._elections = elections
        self._views = views
        self._writer = writer
        self._number = 0
        self._observed = Observed()
        self._written_s = time.monotonic()

    def start_recording(self) -> Observed:
        """Start new observations; return them, to be filled from now on."""
        self._observed = Observed()
        self._written_s = time.monotonic()
        for view in self._views:
            view.worst_s = 0.0
        return self._observed

    async def run(self) -> None:
        """Observe until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for view in self._views:
                tasks.create_task(view.follow())
            tasks.create_task(self._write())
            tasks.create_task(self._sample())

    async def wait_for_leader(self) -> None:
        """Wait until a candidate leads."""
        waits = [asyncio.create_task(election.leading.wait()) for election in self._elections]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def _write(self) -> None:
        while True:
            self._number += 1
            try:
                await self._writer.put(_KEY, str(self._number).encode())
            except StoreUnavailable:
                self._observed.writes_failed += 1
            else:
                now_s = time.monotonic()
                self._observed.writes += 1
                self._gap(now_s)
                self._written_s = now_s
                for view in self._views:
                    view.record_write(self._number, now_s)
            await asyncio.sleep(_WRITE_S)

    def _gap(self, now_s: float) -> None:
        self._observed.write_gap_max_s = max(self._observed.write_gap_max_s, now_s - self._written_s)

    async def _sample(self) -> None:
        before_s = time.monotonic()
        leader: int | None = None
        while True:
            await asyncio.sleep(_SAMPLE_S)
            now_s = time.monotonic()
            seen = self._observed
            leading = [n for n, election in enumerate(self._elections) if election.leading.is_set()]
            if len(leading) > 1:
                seen.two_leaders_s += now_s - before_s
            if not leading:
                seen.without_leader_s += now_s - before_s
            elif leader is not None and leading[0] != leader:
                seen.leadership_changes += 1
            leader = leading[0] if leading else leader
            for view in self._views:
                view.update(now_s)
            seen.view_stale_max_s = max(view.worst_s for view in self._views)
            seen.views_behind = sum(view.worst_s > 1.0 for view in self._views)
            self._gap(now_s)
            before_s = now_s


@asynccontextmanager
async def observe(endpoints: list[str]) -> AsyncIterator[Observer]:
    """Run an observer for the block."""
    async with AsyncExitStack() as stack:

        async def connect() -> Store:
            store = await Store.connect(endpoints, _CLUSTER)
            stack.push_async_callback(store.close)
            return store

        elections = []
        for number in range(CANDIDATES):
            record = ServiceRecord(
                kind="scheduler", service_id=f"s{number}", incarnation=str(number), address=f"h:{number}"
            )
            store = await connect()
            await register(store, f"services/scheduler/s{number}", msgspec.json.encode(record))
            election = Election(store, record)
            election.start()
            stack.push_async_callback(election.close)
            elections.append(election)
        views = [_View(await connect()) for _ in range(VIEWS)]
        observer = Observer(elections, views, await connect())
        running = asyncio.create_task(observer.run())
        stack.push_async_callback(_stop, running)
        async with asyncio.timeout(WAIT_S):
            await observer.wait_for_leader()
        yield observer


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
