"""The event queue: a heap by time, first in first out at equal times."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

Action = Callable[[float], None]


class EventQueue:
    """Pending events. Background events (reports, ticks, samples) alone do not keep a simulation alive."""

    __slots__ = ("_heap", "_sequence", "foreground", "now", "processed")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, Action]] = []
        self._sequence = 0
        # Events pending that are not background.
        self.foreground = 0
        self.processed = 0
        # The time of the event that is being carried out.
        self.now = 0.0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def at(self, time_s: float, action: Action) -> None:
        """Call `action(time_s)` then."""
        self.foreground += 1
        self._push(time_s, True, action)

    def background(self, time_s: float, action: Action) -> None:
        """The same, for an event that something else must be there for."""
        self._push(time_s, False, action)

    def _push(self, time_s: float, foreground: bool, action: Action) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, self._sequence, foreground, action))

    def step(self) -> float:
        """Carry out the next event; its time."""
        time_s, _, foreground, action = heapq.heappop(self._heap)
        if foreground:
            self.foreground -= 1
        self.processed += 1
        self.now = time_s
        action(time_s)
        return time_s


NEVER: Final = 1 << 60
