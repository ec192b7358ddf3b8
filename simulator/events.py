"""The event queue: a heap by time, first in first out at equal times."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

Action = Callable[[float], None]


class EventQueue:
    """Pending events. Background events (reports, ticks, samples) alone do not keep a simulation running."""

    __slots__ = ("_heap", "_sequence", "foreground", "now", "processed")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, Action]] = []
        self._sequence = 0
        # Pending events that are not background events.
        self.foreground = 0
        self.processed = 0
        # Time of the event being executed.
        self.now = 0.0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def schedule(self, time_s: float, action: Action) -> None:
        """Schedule `action(time_s)`."""
        self.foreground += 1
        self._push(time_s, True, action)

    def schedule_background(self, time_s: float, action: Action) -> None:
        """Schedule `action(time_s)` without keeping the simulation running for it."""
        self._push(time_s, False, action)

    def _push(self, time_s: float, foreground: bool, action: Action) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, self._sequence, foreground, action))

    def step(self) -> float:
        """Execute the next event and return its time."""
        time_s, _, foreground, action = heapq.heappop(self._heap)
        if foreground:
            self.foreground -= 1
        self.processed += 1
        self.now = time_s
        action(time_s)
        return time_s


NEVER: Final = 1 << 60
