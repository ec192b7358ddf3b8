"""How much of a worker's link the transfers may take that nobody waits for.

A token bucket of link time: a transfer under way spends it second by second, and it comes back at `share`
seconds a second. A share needs no number for the link's speed, which differs from fleet to fleet and from
pair to pair; and however fast the link is, the rest of its time is free for the handovers that users wait
for. One worker's incoming transfers share one budget, since their target drives them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

# Half. Rescheduling pays over thousands of steps, so that half the speed costs it little; and what a copy has
# to chase grows by a token a step, thousands of times slower than half of any link.
SHARE: Final = 0.5
# Seconds of link time that can be saved up: a small request moves at full speed.
_BURST_S: Final = 0.1


class Clock(Protocol):
    """The part of an event loop that is used here."""

    def time(self) -> float: ...


class LinkBudget:
    """Called on one event loop."""

    def __init__(self, share: float = SHARE, clock: Clock | None = None) -> None:
        """`share` in (0, 1]; 1: no limit. `clock`: the running event loop unless given."""
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a share of a link is above 0 and at most 1, not {share}")
        self._share = share
        self._clock = clock
        self._left_s = _BURST_S
        self._told_s: float | None = None
        self._under_way = 0

    def wait_s(self) -> float:
        """Seconds until another transfer may begin; 0.0: now."""
        if self._share >= 1.0:
            return 0.0
        self._tell()
        if self._left_s > 0.0:
            return 0.0
        # While others spend it, it does not come back; they end within a slice.
        return max(0.001, -self._left_s / self._share)

    async def turn(self) -> None:
        """Until a transfer may begin. The caller sets the deadline."""
        # Time is what is waited for.
        while (wait_s := self.wait_s()) > 0.0:  # noqa: ASYNC110
            await asyncio.sleep(wait_s)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """A transfer is under way in this block."""
        self._tell()
        self._under_way += 1
        try:
            yield
        finally:
            self._tell()
            self._under_way -= 1

    def _tell(self) -> None:
        """Bring what is left up to date."""
        if self._clock is None:
            self._clock = asyncio.get_running_loop()
        now_s = self._clock.time()
        passed_s = 0.0 if self._told_s is None else now_s - self._told_s
        self._told_s = now_s
        rate = self._share - (1.0 if self._under_way else 0.0)
        self._left_s = min(_BURST_S, self._left_s + rate * passed_s)
