"""What reaches an export: its target's commands, and what its front end says meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

from tailrace.v1 import worker_pb2

# The target waits for each answer before it asks again.
_COMMANDS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Broken:
    """The target is gone, or the stream to it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """The front end has accepted the target: the request is not ours any more."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is over here: aborted, or its front end is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Owned:
    """Answer to an OwnershipQuery: whether the request is still ours."""

    current: bool


Signal = Broken | Released | Ended | Owned
Item = Signal | worker_pb2.ExportCommand


class Inbox:
    """One reader; what the front end says goes before what the target says."""

    def __init__(self) -> None:
        self._signals: deque[Signal] = deque()
        self._commands: deque[worker_pb2.ExportCommand] = deque()
        self._filled = asyncio.Event()

    @property
    def released(self) -> bool:
        """Whether a release waits to be read."""
        return any(isinstance(item, Released) for item in self._signals)

    def signal(self, item: Signal) -> None:
        """At most a few come in an export's life: one of each, and an answer a question."""
        self._signals.append(item)
        self._filled.set()

    def command(self, item: worker_pb2.ExportCommand) -> None:
        """A target that does not wait for answers is treated as broken."""
        if len(self._commands) >= _COMMANDS_MAX:
            self.signal(Broken("the target does not keep to the protocol"))
            return
        self._commands.append(item)
        self._filled.set()

    async def next(self, timeout_s: float) -> Item | None:
        """The next item; None when none came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._signals and not self._commands:
                    self._filled.clear()
                    await self._filled.wait()
        except TimeoutError:
            return None
        # What the target sent before its stream broke comes first: it may say that it is committed.
        if self._signals and not (isinstance(self._signals[0], Broken) and self._commands):
            return self._signals.popleft()
        return self._commands.popleft()
