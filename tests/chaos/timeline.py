"""A log of events with times, to find out why a run failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """An event, in seconds since the start of the run."""

    at_s: float
    text: str
    # An invariant was violated.
    is_violation: bool = False

    def __str__(self) -> str:
        return f"{self.at_s:8.2f} s  {'VIOLATION: ' if self.is_violation else ''}{self.text}"


class Timeline:
    """Records events, and passes each to a callback."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._began_s = time.perf_counter()
        self._events: list[Event] = []

    @property
    def now_s(self) -> float:
        """Seconds since the run's start."""
        return time.perf_counter() - self._began_s

    def note(self, text: str) -> None:
        """Record an event."""
        self._add(Event(self.now_s, text))

    def violation(self, text: str) -> None:
        """Record the violation of an invariant."""
        self._add(Event(self.now_s, text, True))

    @property
    def violations(self) -> list[Event]:
        """The violations so far."""
        return [event for event in self._events if event.is_violation]

    def since(self, at_s: float) -> Iterator[Event]:
        """Return events from then on."""
        return (event for event in self._events if event.at_s >= at_s)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._on_event(event)
