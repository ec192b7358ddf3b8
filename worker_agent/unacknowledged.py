"""Track reports that a monitor has not acknowledged yet."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

_POLL_S: Final = 0.25


class Unacknowledged:
    """The sequence number and sending time of each report, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._written: deque[tuple[int, float]] = deque()

    def sent(self, seq: int) -> None:
        """Add a report that is being sent; sequence numbers increase."""
        self._written.append((seq, time.monotonic()))

    def acknowledged(self, seq: int) -> None:
        """Remove this report and all before it."""
        while self._written and self._written[0][0] <= seq:
            self._written.popleft()

    def waiting_s(self, now_s: float) -> float:
        """Return the age of the oldest report in seconds; 0 if there is none."""
        return now_s - self._written[0][1] if self._written else 0.0

    async def overdue(self, limit_s: Callable[[], float]) -> None:
        """Wait until a report is older than the limit.

        Time for which this process itself was suspended does not count: the acknowledgement may be waiting in
        its socket.
        """
        checked_s = time.monotonic()
        while True:
            await asyncio.sleep(_POLL_S)
            now_s = time.monotonic()
            suspended_s = now_s - checked_s - _POLL_S
            checked_s = now_s
            if suspended_s > _POLL_S:
                self._written = deque((seq, at_s + suspended_s) for seq, at_s in self._written)
            elif self.waiting_s(now_s) > limit_s():
                return
