"""What happened when, kept for whoever has to find out why a run failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """At so many seconds from the run's start."""

    at_s: float
    text: str
    # A rule was broken.
    broken: bool = False

    def __str__(self) -> str:
        return f"{self.at_s:8.2f} s  {'BROKEN: ' if self.broken else ''}{self.text}"


class Timeline:
    """Events, told as they come to whoever wants to know."""

    def __init__(self, told: Callable[[Event], None]) -> None:
        self._told = told
        self._began_s = time.perf_counter()
        self._events: list[Event] = []

    @property
    def now_s(self) -> float:
        """Seconds since the run's start."""
        return time.perf_counter() - self._began_s

    def note(self, text: str) -> None:
        """Something happened."""
        self._add(Event(self.now_s, text))

    def broken(self, text: str) -> None:
        """Something happened that must not."""
        self._add(Event(self.now_s, text, True))

    @property
    def breaches(self) -> list[Event]:
        """What must not have happened."""
        return [event for event in self._events if event.broken]

    def since(self, at_s: float) -> Iterator[Event]:
        """Events from then on."""
        return (event for event in self._events if event.at_s >= at_s)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._told(event)
