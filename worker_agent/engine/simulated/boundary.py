"""Calls that wait until the step under way is over, as all of vLLM's do: its engine runs them between two."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from worker_agent.engine.base import EngineRefusal

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
