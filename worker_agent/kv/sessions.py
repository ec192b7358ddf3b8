"""The transport's record of an export: which of its blocks may be read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from worker_agent.kv.address import KvTransferError
from worker_agent.kv.ticket import Ticket


class Session:
    """The blocks of one export that its target may read: those that were announced to it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        # Created for this export, and given only to its target.
        self.ticket = Ticket.fresh()
        self._hashes: list[bytes] = []
        self._readers = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.closed = False
        # Whether the target has committed, so that it reads no more blocks.
        self.taken = False

    def announce(self, first_block: int, hashes: Sequence[bytes]) -> None:
        """Allow these blocks to be read. They follow or replace the blocks announced before.

        Raise KvTransferError if there would be a gap.
        """
        if first_block > len(self._hashes):
            raise KvTransferError(f"block {first_block} announced after {len(self._hashes)} blocks")
        self._hashes[first_block:] = hashes

    def hashes(self, first_block: int, num_blocks: int) -> list[bytes]:
        """Return the hashes of blocks; fewer than `num_blocks` if not all were announced."""
        return self._hashes[first_block : first_block + num_blocks]

    def may_read(self, first_block: int, num_blocks: int) -> bool:
        """Return whether all of these blocks may be read now."""
        return not self.closed and len(self.hashes(first_block, num_blocks)) == num_blocks

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Mark the session as being read by the engine."""
        self._readers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._idle.set()

    async def drained(self) -> None:
        """Wait until the engine reads no block of this export; reads are short."""
        await self._idle.wait()
