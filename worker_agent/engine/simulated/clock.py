"""The clock that an engine steps by: the event loop's, or a virtual one in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from worker_agent.engine.errors import EngineRefusal


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


class WatchedClock:
    """A clock that tells how late each of its calls came: what a busy machine does to an engine's steps."""

    def __init__(self, clock: Clock, tell: Callable[[float], None]) -> None:
        """`tell` gets the seconds from when a call was due to when it began."""
        self._clock = clock
        self._tell = tell

    def time(self) -> float:
        """Clock.time."""
        return self._clock.time()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Clock.call_at."""

        def call() -> None:
            self._tell(self._clock.time() - when)
            callback()

        return self._clock.call_at(when, call)


T = TypeVar("T")


class Boundary:
    """Made before the next step is planned, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    async def call(self, made: Callable[[], T]) -> T:
        """What `made` returns, or its EngineRefusal."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def make() -> None:
            if result.cancelled():
                return
            try:
                result.set_result(made())
            except EngineRefusal as refusal:
                result.set_exception(refusal)

        self._waiting.append(make)
        return await result

    def reached(self) -> None:
        """The step is over, or will never be."""
        waiting, self._waiting = self._waiting, []
        for make in waiting:
            make()
