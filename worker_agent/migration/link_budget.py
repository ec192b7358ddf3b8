"""Limit the share of a worker's link that background transfers use.

A token bucket of link time: an active transfer spends it second by second, and it refills at `share` seconds
per second. A share needs no figure for the link's speed, which differs between fleets and between pairs of
hosts; and however fast the link is, the rest of its time stays free for the handovers that users wait for.
One worker's incoming transfers share one budget, since their target drives them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

# Half. Rescheduling pays off over thousands of steps, so half the speed costs it little; and what a copy has
# to chase grows by a token per step, thousands of times slower than half of any link.
SHARE: Final = 0.5
# Largest accumulated budget in seconds of link time: a small request moves at full speed.
_BURST_S: Final = 0.1


class Clock(Protocol):
    """The used part of an event loop."""

    def time(self) -> float: ...


class LinkBudget:
    """Account for link time. Called on one event loop."""

    def __init__(self, share: float = SHARE, clock: Clock | None = None) -> None:
        """`share` in (0, 1]; 1: no limit. `clock`: the running event loop by default. Raise ValueError."""
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a share of a link is above 0 and at most 1, not {share}")
        self._share = share
        self._clock = clock
        self._budget_s = _BURST_S
        self._updated_s: float | None = None
        self._active = 0

    def wait_s(self) -> float:
        """Return the seconds until another transfer may begin; 0.0: now."""
        if self._share >= 1.0:
            return 0.0
        self._update()
        if self._budget_s > 0.0:
            return 0.0
        # It does not refill while others spend it; they end within a slice.
        return max(0.001, -self._budget_s / self._share)

    async def wait_for_budget(self) -> None:
        """Wait until a transfer may begin. The caller sets the deadline."""
        # Waits for time to pass, so there is no event.
        while (wait_s := self.wait_s()) > 0.0:  # noqa: ASYNC110
            await asyncio.sleep(wait_s)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Account for a transfer that is active during the block."""
        self._update()
        self._active += 1
        try:
            yield
        finally:
            self._update()
            self._active -= 1

    def _update(self) -> None:
        """Update the budget to the present."""
        if self._clock is None:
            self._clock = asyncio.get_running_loop()
        now_s = self._clock.time()
        passed_s = 0.0 if self._updated_s is None else now_s - self._updated_s
        self._updated_s = now_s
        rate = self._share - (1.0 if self._active else 0.0)
        self._budget_s = min(_BURST_S, self._budget_s + rate * passed_s)
