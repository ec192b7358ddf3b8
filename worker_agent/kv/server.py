"""The source's end of the KV transport."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

import numpy as np
import ucxx

from tailrace.service.failure import failure
from worker_agent.engine.base import Engine, EngineRefusal, KvShape, Staging
from worker_agent.faults import Faults
from worker_agent.kv.errors import KvTransferError
from worker_agent.kv.sessions import Session, Sessions
from worker_agent.kv.staging import StagingPool
from worker_agent.kv.transport import Channel
from worker_agent.kv.wire import (
    NO_SESSION,
    REQUEST_BYTES,
    UNREADABLE,
    ReceivedRequest,
    decode_request,
    encode_header,
    encode_refusal,
)
from worker_agent.metrics import WorkerMetrics
from worker_agent.unbroken import unbroken

log = logging.getLogger(__name__)

# A connection that asks for nothing is closed; its client closes it sooner.
_IDLE_S: Final = 120.0
# The target chooses the size of chunks, within reason.
_CHUNK_BYTES_MAX: Final = 64 << 20
# One chunk to a client that does not take it.
_SEND_S: Final = 10.0


class _Refused(Exception):
    """The rest of a request cannot be answered."""


class _Chunk:
    """A chunk on its way out: its buffer, and the messages that still use it."""

    def __init__(self, staging: Staging, num_blocks: int, messages: list[asyncio.Task[object]]) -> None:
        self.staging = staging
        self.num_blocks = num_blocks
        self.messages = messages


class KvServer:
    """Listens on a port of UCX's choosing and answers requests for announced blocks."""

    def __init__(
        self,
        engine: Engine,
        shape: KvShape,
        sessions: Sessions,
        pool: StagingPool,
        faults: Faults,
        metrics: WorkerMetrics,
        connections_max: int = 64,
    ) -> None:
        """UCX must be started. `connections_max`: beyond it an idle one makes room for a new one."""
        self._engine = engine
        self._shape = shape
        self._sessions = sessions
        self._pool = pool
        self._faults = faults
        self._metrics = metrics
        self._connections_max = connections_max
        self._connections: dict[Channel, asyncio.Task[None]] = {}
        # Those that ask for nothing now, the longest idle first.
        self._idle: dict[Channel, None] = {}
        self._listener = ucxx.create_listener(self._accept)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.port)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        self._listener.close()
        connections = list(self._connections.values())
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, endpoint: ucxx.Endpoint) -> None:
        channel = Channel(endpoint)
        if len(self._connections) < self._connections_max or self._end_an_idle_one():
            task = asyncio.create_task(self._converse(channel), name="kv connection")
        else:
            log.warning("%d KV connections are busy; one more was refused", len(self._connections))
            task = asyncio.create_task(channel.close())
        self._connections[channel] = task
        task.add_done_callback(partial(self._done, channel))

    def _end_an_idle_one(self) -> bool:
        """Make room: peers keep connections for their next migration, a large fleet's more than there may be.
        False: all are busy."""
        idle = next(iter(self._idle), None)
        if idle is None:
            return False
        del self._idle[idle]
        self._connections[idle].cancel()
        return True

    def _done(self, channel: Channel, task: asyncio.Task[None]) -> None:
        self._idle.pop(channel, None)
        del self._connections[channel]
        if (error := failure(task)) is not None:
            # The target sees its connection end; why, only we know.
            log.error("a KV connection failed", exc_info=error)

    async def _converse(self, channel: Channel) -> None:
        """Answer one connection's requests, one after the other, until it ends."""
        try:
            while True:
                self._idle[channel] = None
                async with asyncio.timeout(_IDLE_S):
                    data = await channel.receive_bytes(REQUEST_BYTES)
                self._idle.pop(channel, None)
                await self._answer(channel, decode_request(data))
        except TimeoutError:
            log.info("closing a KV connection: idle, or its client does not read")
        except KvTransferError as error:
            log.debug("a KV connection ended: %s", error)
        finally:
            await unbroken(channel.close())

    async def _answer(self, channel: Channel, request: ReceivedRequest) -> None:
        """Send the chunks; while one is on the wire the next one is gathered."""
        session = self._sessions.find(request.session, request.migration)
        chunk_blocks = min(request.chunk_blocks, request.num_blocks)
        if chunk_blocks * self._shape.block_bytes > max(_CHUNK_BYTES_MAX, self._shape.block_bytes):
            raise KvTransferError(f"chunks of {chunk_blocks} blocks are too large")
        end = request.first_block + request.num_blocks
        before: _Chunk | None = None
        try:
            for first in range(request.first_block, end, chunk_blocks):
                num_blocks = min(chunk_blocks, end - first)
                try:
                    chunk = await self._gather(channel, session, first, num_blocks)
                except _Refused:
                    return
                before, done = chunk, before
                if done is not None:
                    await self._sent(channel, done)
            if before is not None:
                done, before = before, None
                await self._sent(channel, done)
        finally:
            if before is not None:
                # Failed under way: the buffer goes with the channel's close, never back to the pool.
                await unbroken(channel.close())

    async def _gather(self, channel: Channel, session: Session | None, first: int, num_blocks: int) -> _Chunk:
        """Read blocks into a buffer and begin to send it."""
        if session is None or session.closed or len(session.hashes(first, num_blocks)) != num_blocks:
            await self._refuse(channel, NO_SESSION, first, num_blocks)
            raise _Refused
        staging = self._pool.take(num_blocks)
        try:
            with session.reading():
                checksums = await unbroken(
                    self._engine.read_blocks(session.request_id, first, num_blocks, staging)
                )
        except EngineRefusal as error:
            log.info("blocks %d+%d of %s: %s", first, num_blocks, session.request_id, error)
            await self._refuse(channel, UNREADABLE, first, num_blocks)
            raise _Refused from error
        self._faults.corrupt(staging)
        header = encode_header(self._shape, first, session.hashes(first, num_blocks), checksums)
        messages = [channel.send(np.frombuffer(header, np.uint8)), channel.send(staging.buffer)]
        return _Chunk(staging, num_blocks, messages)

    async def _sent(self, channel: Channel, chunk: _Chunk) -> None:
        async with asyncio.timeout(_SEND_S):
            for message in chunk.messages:
                await channel.wait(message)
        self._pool.give_back(chunk.staging, chunk.num_blocks)
        self._metrics.kv_sent_blocks += chunk.num_blocks
        self._metrics.kv_sent_bytes += chunk.num_blocks * self._shape.block_bytes

    async def _refuse(self, channel: Channel, status: int, first: int, num_blocks: int) -> None:
        async with asyncio.timeout(_SEND_S):
            await channel.send_bytes(encode_refusal(self._shape, status, first, num_blocks))
