"""Whether this process leads, by what etcd granted and by the clock."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Literal


def lease_clock() -> float:
    """Seconds that go on while this process or the whole machine is suspended: leases expire meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leadership(asyncio.Event):
    """Set while this process leads.

    Whoever asks after the process stood still (SIGSTOP, a suspended machine) learns that the time is over
    even before the election's own task has run again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._until_s = -math.inf

    def hold_until(self, until_s: float) -> None:
        """Lead until then (lease_clock), or until `clear`."""
        self._until_s = until_s
        self.set()

    def is_set(self) -> bool:
        """Whether it leads at this moment."""
        return super().is_set() and lease_clock() < self._until_s

    async def wait(self) -> Literal[True]:
        """Until it leads."""
        while not self.is_set():
            self.clear()
            await super().wait()
        return True
