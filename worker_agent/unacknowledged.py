"""Reports that a monitor has not acknowledged yet."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

_POLL_S: Final = 0.25


class Unacknowledged:
    """Their numbers, and when each was written, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._written: deque[tuple[int, float]] = deque()

    def wrote(self, seq: int) -> None:
        """A report is on its way; numbers grow."""
        self._written.append((seq, time.monotonic()))

    def acknowledged(self, seq: int) -> None:
        """The monitor has this report, and all before it."""
        while self._written and self._written[0][0] <= seq:
            self._written.popleft()

    def waiting_s(self, now_s: float) -> float:
        """For how long the oldest has waited; 0 when there is none."""
        return now_s - self._written[0][1] if self._written else 0.0

    async def overdue(self, limit_s: Callable[[], float]) -> None:
        """Until one has waited longer than the limit.

        Time in which this process itself stood still does not count: the answer may lie in its socket.
        """
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(_POLL_S)
            now_s = time.monotonic()
            stood_still_s = now_s - looked_s - _POLL_S
            looked_s = now_s
            if stood_still_s > _POLL_S:
                self._written = deque((seq, at_s + stood_still_s) for seq, at_s in self._written)
            elif self.waiting_s(now_s) > limit_s():
                return
