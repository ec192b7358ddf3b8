"""Exports as the transport knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from worker_agent.kv.address import KvTransferError
from worker_agent.kv.ticket import Ticket


class Session:
    """The blocks of one export that may be read: those that its target has been told of."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        # Made for this export, and given to its target alone.
        self.ticket = Ticket.fresh()
        self._hashes: list[bytes] = []
        self._readers = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.closed = False
        # The target has committed: it has all that it wanted, and reads no more.
        self.taken = False

    def announce(self, first_block: int, hashes: Sequence[bytes]) -> None:
        """These blocks may be read from now on. They follow those announced before, or come in their place.

        Raises KvTransferError when there would be blocks between that nobody named.
        """
        if first_block > len(self._hashes):
            raise KvTransferError(f"block {first_block} announced after {len(self._hashes)} blocks")
        self._hashes[first_block:] = hashes

    def hashes(self, first_block: int, num_blocks: int) -> list[bytes]:
        """Names of blocks; fewer than asked for when not all were announced."""
        return self._hashes[first_block : first_block + num_blocks]

    def may_read(self, first_block: int, num_blocks: int) -> bool:
        """Whether all of these may be read now."""
        return not self.closed and len(self.hashes(first_block, num_blocks)) == num_blocks

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
