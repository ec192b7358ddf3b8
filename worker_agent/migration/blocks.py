"""What exports and imports need of the KV transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker_agent.kv.address import KvAddress
from worker_agent.kv.client import Deliver
from worker_agent.kv.sessions import Session
from worker_agent.kv.ticket import Ticket


class BlockSource(Protocol):
    """The part of KvServer that exports use."""

    @property
    def address(self) -> KvAddress:
        """Where targets find it."""

    async def open(self, request_id: str, target: KvAddress) -> Session:
        """Let this target read the blocks that the session announces. Raises KvTransferError."""

    async def end(self, session: Session) -> None:
        """Nothing of it is read any more when this returns."""


class BlockTransfer(Protocol):
    """The part of KvTransfer that imports use."""

    async def pull(self, first_block: int, hashes: Sequence[bytes], deliver: Deliver) -> int:
        """Fetch blocks, deliver them, say how many bytes."""

    async def close(self) -> None:
        """Nothing more is wanted. May be called again."""


class BlockPuller(Protocol):
    """The part of KvClient that imports use."""

    @property
    def address(self) -> KvAddress:
        """Where sources send blocks."""

    async def connect(self, source: KvAddress, ticket: Ticket) -> BlockTransfer:
        """Begin a transfer. Raises KvTransferError."""
