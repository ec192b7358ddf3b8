"""The clock that an engine steps by: the event loop's, or a virtual one in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A pending call."""

    def cancel(self) -> None:
        """Do not call."""


class Clock(Protocol):
    """The part of an asyncio event loop that an engine uses."""

    def time(self) -> float:
        """Seconds, never going back."""

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call back once, at `when` or soon after."""
