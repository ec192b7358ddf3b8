"""Limit how many migrations are open at once.

At most a few per instance and direction: more would share one link and each take longer, while the source
keeps decoding tokens that a slow copy has to chase. Waiting migrations are admitted in order of arrival,
except that one whose instances are free does not wait behind one whose instances are not. How many may wait
is limited per instance and direction, too: those that wait for one hot instance refuse none between others.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tailrace.handover import TRANSFERS


class NotAdmitted(Exception):
    """The migration may not begin; the message says why."""


@dataclass(eq=False, slots=True)
class _Waiting:
    source: str
    target: str
    admitted: asyncio.Future[None]


class MigrationSlots:
    """Grant slots to migrations. All calls on one event loop."""

    def __init__(self, limit: int = TRANSFERS, queue_limit: int = 64, max_wait_s: float = 10.0) -> None:
        """`queue_limit`: migrations that may wait for one instance's slots in one direction; `max_wait_s`:
        seconds for which each may."""
        self._limit = limit
        self._queue_limit = queue_limit
        self.max_wait_s = max_wait_s
        self._sending: Counter[str] = Counter()
        self._receiving: Counter[str] = Counter()
        self._requests: set[str] = set()
        self._queue: deque[_Waiting] = deque()

    @property
    def waiting(self) -> int:
        """Return the number of waiting migrations."""
        return len(self._queue)

    @asynccontextmanager
    async def hold(self, request_id: str, source: str, target: str) -> AsyncIterator[None]:
        """Hold a slot for one migration. Raise NotAdmitted."""
        if request_id in self._requests:
            raise NotAdmitted(f"request {request_id} is already being migrated")
        self._requests.add(request_id)
        try:
            await self._acquire(source, target)
            try:
                yield
            finally:
                self._release(source, target)
        finally:
            self._requests.discard(request_id)

    async def _acquire(self, source: str, target: str) -> None:
        for instance_id, occupied in ((source, self._sending), (target, self._receiving)):
            if occupied[instance_id] < self._limit:
                continue
            ahead = sum(
                instance_id == (w.source if occupied is self._sending else w.target) for w in self._queue
            )
            if ahead >= self._queue_limit:
                raise NotAdmitted(f"{ahead} migrations are already waiting for {instance_id}")
        waiting = _Waiting(source, target, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._admit()
        try:
            async with asyncio.timeout(self.max_wait_s):
                await waiting.admitted
        except BaseException as error:
            if waiting in self._queue:
                self._queue.remove(waiting)
            elif waiting.admitted.done():
                # Admitted at the moment of giving up: pass the slot on.
                self._release(source, target)
            if isinstance(error, TimeoutError):
                raise NotAdmitted(
                    f"{source} or {target} had {self._limit} migrations open for {self.max_wait_s:g} s"
                ) from error
            raise

    def _release(self, source: str, target: str) -> None:
        """Release a slot. Counters of instances without slots are deleted, because instances come and go."""
        for places, instance_id in ((self._sending, source), (self._receiving, target)):
            places[instance_id] -= 1
            if not places[instance_id]:
                del places[instance_id]
        self._admit()

    def _admit(self) -> None:
        for waiting in list(self._queue):
            free = (
                self._sending[waiting.source] < self._limit and self._receiving[waiting.target] < self._limit
            )
            if free and not waiting.admitted.done():
                self._queue.remove(waiting)
                self._sending[waiting.source] += 1
                self._receiving[waiting.target] += 1
                waiting.admitted.set_result(None)
