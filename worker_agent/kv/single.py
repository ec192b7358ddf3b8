"""The KV transport of a single-device engine: this process's own endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from worker_agent.engine.base import Engine
from worker_agent.kv.address import KvAddress, KvTransferError
from worker_agent.kv.client import Deliver, KvClient, KvTransfer
from worker_agent.kv.server import KvServer
from worker_agent.kv.sessions import Session
from worker_agent.kv.ticket import Ticket


class SingleSession:
    """The blocks of one export."""

    def __init__(self, session: Session, server: KvServer) -> None:
        self.tickets = [session.ticket]
        self.taken = False
        self._session = session
        self._server = server

    async def announce(self, first_block: int, hashes: Sequence[bytes]) -> None:
        """BlockSession.announce."""
        self._session.announce(first_block, hashes)

    async def end(self) -> None:
        """BlockSession.end."""
        self._session.taken = self.taken
        await self._server.end(self._session)


class SingleTransfer:
    """All pulls of one migration; the engine writes the blocks."""

    def __init__(self, transfer: KvTransfer, deliver: Deliver) -> None:
        self._transfer = transfer
        self._deliver = deliver

    async def pull(self, first_block: int, hashes: Sequence[bytes]) -> int:
        """BlockTransfer.pull."""
        return await self._transfer.pull(first_block, hashes, self._deliver)

    async def close(self) -> None:
        """BlockTransfer.close."""
        await self._transfer.close()


class SingleTransport:
    """BlockSource and BlockPuller over one endpoint."""

    def __init__(self, engine: Engine, server: KvServer, client: KvClient) -> None:
        self._engine = engine
        self._server = server
        self._client = client
        self.addresses = [server.address]

    async def open(self, request_id: str, targets: Sequence[KvAddress]) -> SingleSession:
        """BlockSource.open."""
        (target,) = targets
        return SingleSession(await self._server.open(request_id, target), self._server)

    async def connect(
        self, request_id: str, sources: Sequence[KvAddress], tickets: Sequence[Ticket]
    ) -> SingleTransfer:
        """BlockPuller.connect."""
        if len(tickets) != 1:
            raise KvTransferError(f"{len(tickets)} tickets for one device")
        transfer = await self._client.connect(sources[0], tickets[0])
        return SingleTransfer(transfer, partial(self._engine.write_blocks, request_id))

    async def close(self) -> None:
        """End every session."""
        await self._server.close()
