"""What exports and imports need of the KV transport. An engine has one endpoint, or one a rank: addresses and
tickets are lists, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker_agent.kv.address import KvAddress
from worker_agent.kv.ticket import Ticket


class BlockSession(Protocol):
    """The blocks of one export that may be read: those that its target has been told of."""

    # The target has committed: it has all that it wanted, and reads no more.
    taken: bool

    @property
    def tickets(self) -> Sequence[Ticket]:
        """The right to read, one an endpoint."""

    async def announce(self, first_block: int, hashes: Sequence[bytes]) -> None:
        """These blocks may be read from now on. Raises KvTransferError."""

    async def end(self) -> None:
        """Nothing of it is read any more when this returns."""


class BlockSource(Protocol):
    """The source's end."""

    @property
    def addresses(self) -> Sequence[KvAddress]:
        """Where targets find it."""

    async def open(self, request_id: str, targets: Sequence[KvAddress]) -> BlockSession:
        """Let this target, which has as many endpoints, read what is announced. Raises KvTransferError."""


class BlockTransfer(Protocol):
    """All pulls of one migration, one after the other."""

    async def pull(self, first_block: int, hashes: Sequence[bytes]) -> int:
        """Fetch blocks, check them and write them into the import's reservation; the bytes received.

        Raises KvTransferError, KvCorrupt and EngineRefusal; nothing is written any more then.
        """

    async def close(self) -> None:
        """Nothing more is wanted. May be called again."""


class BlockPuller(Protocol):
    """The target's end."""

    @property
    def addresses(self) -> Sequence[KvAddress]:
        """Where sources send blocks."""

    async def connect(
        self, request_id: str, sources: Sequence[KvAddress], tickets: Sequence[Ticket]
    ) -> BlockTransfer:
        """Begin a transfer from a source with as many endpoints. Raises KvTransferError."""
