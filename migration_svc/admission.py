"""How many migrations may be open at once, and who waits for whom.

At most a few per instance and direction: more would share one link and each take longer, while the source
goes on decoding what a slow copy has to chase. Those that must wait do so in order of arrival; one whose
instances are free does not wait behind one whose are not.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

LIMIT_PER_DIRECTION = 3
"""Open migrations an instance may send, and as many it may receive (CascadeInfer, section 5)."""


class NotAdmitted(Exception):
    """The migration may not begin; the message says why."""


@dataclass(eq=False, slots=True)
class _Waiting:
    source: str
    target: str
    admitted: asyncio.Future[None]


class Admission:
    """Grants places to migrations. All calls on one event loop."""

    def __init__(
        self, limit: int = LIMIT_PER_DIRECTION, queue_limit: int = 256, patience_s: float = 10.0
    ) -> None:
        """`queue_limit`: migrations that may wait; `patience_s`: for how long each may."""
        self._limit = limit
        self._queue_limit = queue_limit
        self.patience_s = patience_s
        self._sending: Counter[str] = Counter()
        self._receiving: Counter[str] = Counter()
        self._requests: set[str] = set()
        self._queue: deque[_Waiting] = deque()

    @property
    def waiting(self) -> int:
        """Migrations that wait for a place."""
        return len(self._queue)

    @asynccontextmanager
    async def place(self, request_id: str, source: str, target: str) -> AsyncIterator[None]:
        """Hold a place for one migration. Raises NotAdmitted."""
        if request_id in self._requests:
            raise NotAdmitted(f"request {request_id} is already being migrated")
        self._requests.add(request_id)
        try:
            await self._acquire(source, target)
            try:
                yield
            finally:
                self._leave(source, target)
        finally:
            self._requests.discard(request_id)

    async def _acquire(self, source: str, target: str) -> None:
        if len(self._queue) >= self._queue_limit:
            raise NotAdmitted(f"{len(self._queue)} migrations are waiting already")
        waiting = _Waiting(source, target, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._admit()
        try:
            async with asyncio.timeout(self.patience_s):
                await waiting.admitted
        except BaseException as error:
            if waiting in self._queue:
                self._queue.remove(waiting)
            elif waiting.admitted.done():
                # Admitted in the very moment of giving up: hand the place on.
                self._leave(source, target)
            if isinstance(error, TimeoutError):
                raise NotAdmitted(
                    f"{source} or {target} had {self._limit} migrations open for {self.patience_s:g} s"
                ) from error
            raise

    def _leave(self, source: str, target: str) -> None:
        """Give a place back. Who has none is forgotten: instances come and go for as long as this runs."""
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
