"""Exports as the transport knows them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from worker_agent.kv.wire import migration_digest


class Session:
    """The blocks of one export that may be read: those that its target has been told of."""

    def __init__(self, number: int, request_id: str, migration_id: str) -> None:
        self.number = number
        self.request_id = request_id
        self.migration = migration_digest(migration_id)
        self._hashes: list[bytes] = []
        self._readers = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.closed = False

    def announce(self, first_block: int, hashes: Sequence[bytes]) -> None:
        """These blocks may be read from now on."""
        self._hashes[first_block:] = hashes

    def hashes(self, first_block: int, num_blocks: int) -> list[bytes]:
        """Names of blocks; fewer than asked for when not all were announced."""
        return self._hashes[first_block : first_block + num_blocks]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The engine is reading this request's blocks."""
        self._readers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._idle.set()

    async def drained(self) -> None:
        """Until the engine reads no block of it; reads are short."""
        await self._idle.wait()


class Sessions:
    """All exports of one worker."""

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, request_id: str, migration_id: str) -> Session:
        """A session with a number that cannot be guessed."""
        number = secrets.randbits(64)
        session = self._sessions[number] = Session(number, request_id, migration_id)
        return session

    def find(self, number: int, migration: bytes) -> Session | None:
        """The session, for whoever knows its number and its migration."""
        session = self._sessions.get(number)
        return session if session is not None and session.migration == migration else None

    async def close(self, session: Session) -> None:
        """Nothing of it can be read any more, nor is being read when this returns."""
        session.closed = True
        self._sessions.pop(session.number, None)
        await session.drained()
