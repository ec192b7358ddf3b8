"""Whether this process leads, according to its lease and the clock."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Literal


def lease_clock() -> float:
    """Return seconds of a clock that also runs while the process or machine is suspended: leases expire
    meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leadership(asyncio.Event):
    """An event that is set while this process leads.

    After the process was suspended (SIGSTOP, a suspended machine), it is unset at once if the lease has
    expired, even before the election's task has run again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._until_s = -math.inf

    def hold_until(self, until_s: float) -> None:
        """Lead until `until_s` (lease_clock), or until `clear`."""
        self._until_s = until_s
        self.set()

    def is_set(self) -> bool:
        """Return whether this process leads now."""
        return super().is_set() and lease_clock() < self._until_s

    async def wait(self) -> Literal[True]:
        """Wait until this process leads."""
        while not self.is_set():
            self.clear()
            await super().wait()
        return True
