"""The inbox of an export: its target's commands, and its front end's messages."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

from tailrace.v1 import worker_pb2

# The target waits for each reply before the next command.
_COMMANDS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Broken:
    """The target, or the stream to it, is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """The front end has accepted the target: the request does not belong to this instance any more."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has ended here: aborted, or its front end is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Owned:
    """The reply to an OwnershipQuery: whether this instance still owns the request."""

    current: bool


Signal = Broken | Released | Ended | Owned
Item = Signal | worker_pb2.ExportCommand


class Inbox:
    """A queue with one reader; the front end's messages precede the target's."""

    def __init__(self) -> None:
        self._signals: deque[Signal] = deque()
        self._commands: deque[worker_pb2.ExportCommand] = deque()
        self._filled = asyncio.Event()

    @property
    def released(self) -> bool:
        """Return whether a release waits to be read."""
        return any(isinstance(item, Released) for item in self._signals)

    def signal(self, item: Signal) -> None:
        """Add a message of the front end; there are only a few in an export's life."""
        self._signals.append(item)
        self._filled.set()

    def command(self, item: worker_pb2.ExportCommand) -> None:
        """Add a command; a target that does not wait for replies is treated as broken."""
        if len(self._commands) >= _COMMANDS_MAX:
            self.signal(Broken("the target violates the protocol"))
            return
        self._commands.append(item)
        self._filled.set()

    async def next(self, timeout_s: float) -> Item | None:
        """Return the next item, or None after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._signals and not self._commands:
                    self._filled.clear()
                    await self._filled.wait()
        except TimeoutError:
            return None
        # Commands sent before the stream broke come first: one may report the commit.
        if self._signals and not (isinstance(self._signals[0], Broken) and self._commands):
            return self._signals.popleft()
        return self._commands.popleft()
