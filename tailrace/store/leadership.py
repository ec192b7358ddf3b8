"""Whether this process leads, according to its lease and the clock."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
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
        self._on_end: list[Callable[[], None]] = []

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call back at the end of each term, before another one can begin. It must not block or raise."""
        self._on_end.append(callback)

    def clear(self) -> None:
        """Do not lead any more."""
        led = super().is_set()
        super().clear()
        if led:
            for callback in self._on_end:
                callback()

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
