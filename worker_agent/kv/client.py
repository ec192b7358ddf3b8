"""The target's end of the KV transport."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from worker_agent.engine.base import KvShape, Staging
from worker_agent.kv.errors import KvIdentityError
from worker_agent.kv.staging import StagingPool
from worker_agent.kv.transport import Channel
from worker_agent.kv.wire import BlockRequest, decode_header, header_bytes
from worker_agent.metrics import WorkerMetrics
from worker_agent.unbroken import unbroken

_IDLE_S: Final = 60.0
_KEPT_PER_PEER: Final = 3

Deliver = Callable[[int, int, Staging, Sequence[int]], Awaitable[None]]
"""Takes (first block, blocks, their bytes, their checksums); the buffer is used again afterwards."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A source's listener."""

    host: str
    port: int


@dataclass(slots=True)
class _Kept:
    channel: Channel
    since_s: float


class _Incoming:
    """A chunk whose header and data are being received."""

    def __init__(self, channel: Channel, staging: Staging, first: int, num_blocks: int) -> None:
        self.staging = staging
        self.first = first
        self.num_blocks = num_blocks
        self.header = np.zeros(header_bytes(num_blocks), np.uint8)
        self.header_message = channel.receive(self.header)
        self.data_message = channel.receive(staging.buffer)


class KvClient:
    """Pulls blocks; keeps connections for later. One transfer at a time uses a connection, and one that
    failed in any way is closed with all its buffers."""

    def __init__(self, shape: KvShape, pool: StagingPool, metrics: WorkerMetrics) -> None:
        """UCX must be started."""
        self._shape = shape
        self._pool = pool
        self._metrics = metrics
        self._kept: dict[Peer, list[_Kept]] = {}

    async def prepare(self, peer: Peer) -> None:
        """Connect, so that a pull under a pause need not. Raises KvTransferError."""
        self._keep(peer, await self._channel(peer))

    async def pull(
        self,
        peer: Peer,
        session: int,
        migration_id: str,
        first_block: int,
        hashes: Sequence[bytes],
        deliver: Deliver,
    ) -> int:
        """Fetch the blocks that `hashes` names and deliver them chunk by chunk; the bytes received.

        While one chunk is delivered the next is on the wire. The caller sets the deadline. Raises
        KvTransferError, KvIdentityError for other blocks than those named, and what `deliver` raises.
        """
        if not hashes:
            return 0
        channel = await self._channel(peer)
        try:
            await self._transfer(channel, session, migration_id, first_block, hashes, deliver)
        except BaseException:
            await unbroken(channel.close())
            raise
        self._keep(peer, channel)
        size = len(hashes) * self._shape.block_bytes
        self._metrics.kv_received_blocks += len(hashes)
        self._metrics.kv_received_bytes += size
        return size

    async def close(self) -> None:
        """Close the connections that are kept."""
        kept, self._kept = self._kept, {}
        for each in (each for some in kept.values() for each in some):
            await each.channel.close()

    async def _transfer(
        self,
        channel: Channel,
        session: int,
        migration_id: str,
        first_block: int,
        hashes: Sequence[bytes],
        deliver: Deliver,
    ) -> None:
        chunk_blocks = self._pool.chunk_blocks
        request = BlockRequest(session, migration_id, first_block, len(hashes), chunk_blocks)
        end = first_block + len(hashes)
        # Receives are posted before they are asked for: then the bytes go straight to their place.
        following = self._expect(channel, first_block, end)
        await channel.send_bytes(request.encode())
        while following is not None:
            chunk = following
            await channel.wait(chunk.header_message)
            header = decode_header(chunk.header.tobytes(), self._shape, chunk.first, chunk.num_blocks)
            start = chunk.first - first_block
            if list(header.hashes) != list(hashes[start : start + chunk.num_blocks]):
                raise KvIdentityError(f"blocks {chunk.first}+{chunk.num_blocks} are not those asked for")
            await channel.wait(chunk.data_message)
            following = self._expect(channel, chunk.first + chunk.num_blocks, end)
            await unbroken(_run(deliver, chunk, header.checksums))
            self._pool.give_back(chunk.staging, chunk.num_blocks)

    def _expect(self, channel: Channel, first: int, end: int) -> _Incoming | None:
        if first >= end:
            return None
        num_blocks = min(self._pool.chunk_blocks, end - first)
        return _Incoming(channel, self._pool.take(num_blocks), first, num_blocks)

    async def _channel(self, peer: Peer) -> Channel:
        kept = self._kept.get(peer, [])
        while kept:
            each = kept.pop()
            if each.channel.alive and time.monotonic() - each.since_s < _IDLE_S:
                return each.channel
            await each.channel.close()
        self._kept.pop(peer, None)
        return await Channel.connect(peer.host, peer.port)

    def _keep(self, peer: Peer, channel: Channel) -> None:
        kept = self._kept.setdefault(peer, [])
        kept.append(_Kept(channel, time.monotonic()))

    async def trim(self) -> None:
        """Close connections that nobody has used for a while, and more of them than a peer needs."""
        now_s = time.monotonic()
        for peer, kept in list(self._kept.items()):
            old = [each for each in kept[:-_KEPT_PER_PEER]]
            old += [each for each in kept[-_KEPT_PER_PEER:] if now_s - each.since_s > _IDLE_S]
            self._kept[peer] = [each for each in kept if each not in old]
            if not self._kept[peer]:
                del self._kept[peer]
            for each in old:
                await each.channel.close()


async def _run(deliver: Deliver, chunk: _Incoming, checksums: Sequence[int]) -> None:
    await deliver(chunk.first, chunk.num_blocks, chunk.staging, checksums)
