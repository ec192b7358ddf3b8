"""The interfaces of the KV transport used by exports and imports.

An engine has one endpoint, or one per rank: addresses and tickets are lists in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker_agent.kv.address import KvAddress
from worker_agent.kv.ticket import Ticket


class BlockSession(Protocol):
    """The readable blocks of one export: those announced to its target."""

    # The target has committed and reads no more.
    taken: bool

    @property
    def tickets(self) -> Sequence[Ticket]:
        """Return the tickets that permit reading, one per endpoint."""

    async def announce(self, first_block: int, hashes: Sequence[bytes]) -> None:
        """Allow these blocks to be read from now on. Raise KvTransferError."""

    async def end(self) -> None:
        """Revoke access; when this returns nothing is being read any more."""


class BlockSource(Protocol):
    """The source's end of the transport."""

    @property
    def addresses(self) -> Sequence[KvAddress]:
        """Return the source's addresses."""

    async def open(self, request_id: str, targets: Sequence[KvAddress]) -> BlockSession:
        """Allow this target, which has as many endpoints, to read what is announced. Raise
        KvTransferError."""


class BlockTransfer(Protocol):
    """All pulls of one migration, one after the other."""

    async def pull(self, first_block: int, hashes: Sequence[bytes]) -> int:
        """Fetch blocks, verify them and write them into the import's reservation; return the bytes received.

        Raise KvTransferError, KvCorrupt or EngineRefusal; then nothing is written any more.
        """

    async def close(self) -> None:
        """End the transfer. May be called again."""


class BlockPuller(Protocol):
    """The target's end of the transport."""

    @property
    def addresses(self) -> Sequence[KvAddress]:
        """Return the addresses to which sources send blocks."""

    async def connect(
        self, request_id: str, sources: Sequence[KvAddress], tickets: Sequence[Ticket]
    ) -> BlockTransfer:
        """Begin a transfer from a source with as many endpoints. Raise KvTransferError."""
