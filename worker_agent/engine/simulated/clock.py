"""The clock that drives an engine's steps: the event loop's, or a virtual one in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from worker_agent.engine.errors import EngineRefusal, raised_anew


class Timer(Protocol):
    """A pending call."""

    def cancel(self) -> None:
        """Cancel the call."""


class Clock(Protocol):
    """The part of an asyncio event loop that an engine uses."""

    def time(self) -> float:
        """Return the monotonic time in seconds."""

    def call_at(self, at_s: float, callback: Callable[[], object]) -> Timer:
        """Call `callback` once, at `at_s` or soon after."""


class WatchedClock:
    """A clock that reports how late its calls are, which shows how a busy machine delays an engine's
    steps."""

    def __init__(self, clock: Clock, on_delay: Callable[[float], None]) -> None:
        """`on_delay` gets the seconds from when each call was due until it began."""
        self._clock = clock
        self._on_delay = on_delay

    def time(self) -> float:
        return self._clock.time()

    def call_at(self, at_s: float, callback: Callable[[], object]) -> Timer:

        def call() -> None:
            self._on_delay(self._clock.time() - at_s)
            callback()

        return self._clock.call_at(at_s, call)


T = TypeVar("T")


class Boundary:
    """Calls deferred to the end of the current step, in order."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    async def call(self, function: Callable[[], T]) -> T:
        """Call `function` at the end of the step and return its result. Raise its EngineRefusal."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            if result.cancelled():
                return
            try:
                result.set_result(function())
            except EngineRefusal as refusal:
                result.set_exception(refusal)

        self._pending.append(run)
        try:
            return await result
        except EngineRefusal as refusal:
            raise raised_anew(refusal) from None

    def run_pending(self) -> None:
        """Run the deferred calls, because the step has ended or the engine stops."""
        pending, self._pending = self._pending, []
        for run in pending:
            run()
