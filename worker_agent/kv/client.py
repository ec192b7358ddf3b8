"""The target's side of the KV transport: pull blocks from a source; and both sides of an engine with one
device.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Final

import numpy as np

from tailrace.service.channels import format_error
from tailrace.service.tasks import run_to_completion
from worker_agent.engine.base import Engine, KvShape, Staging
from worker_agent.kv.address import KvAddress, KvIdentityError, KvTransferError, Ticket
from worker_agent.kv.memory import NAME_BYTES, Mappings, SegmentName, StagingPool
from worker_agent.kv.server import KvServer, KvSession
from worker_agent.kv.ucx import Channel, own_address
from worker_agent.kv.wire import (
    TAG_BYTES,
    WINDOW,
    Request,
    RequestKind,
    Seal,
    decode_header,
    header_bytes,
    host_bytes,
)
from worker_agent.metrics import WorkerMetrics

log = logging.getLogger(__name__)

_CONNECT_S: Final = 5.0
_GOODBYE_S: Final = 1.0

Deliver = Callable[[int, int, Staging, Sequence[int]], Coroutine[object, object, None]]
"""Takes (first block, number of blocks, their bytes, their checksums); the buffer is reused afterwards."""


class _Incoming:
    """A chunk that is being received."""

    def __init__(
        self,
        channel: Channel,
        ticket: Ticket,
        chunk: int,
        staging: Staging,
        kind: RequestKind,
        first: int,
        num_blocks: int,
    ) -> None:
        """For kind SHARED, `staging` is the source's memory, and only the header is received."""
        self.chunk = chunk
        self.staging = staging
        self.kind = kind
        self.first = first
        self.num_blocks = num_blocks
        tag_bytes = TAG_BYTES if kind is RequestKind.SEALED else 0
        self.header = np.zeros(header_bytes(num_blocks) + tag_bytes, np.uint8)
        self.header_message = channel.receive(self.header, ticket.header(chunk))
        # Sealed data is received here, and decrypted into the staging buffer.
        self.sealed = np.empty(host_bytes(staging).size + tag_bytes, np.uint8) if tag_bytes else None
        self.data_message: asyncio.Task[object] | None = None
        if kind is not RequestKind.SHARED:
            buffer = staging.buffer if self.sealed is None else self.sealed
            self.data_message = channel.receive(buffer, ticket.data(chunk))


class KvClient:
    """Open transfers from sources."""

    def __init__(
        self, shape: KvShape, pool: StagingPool, mappings: Mappings, metrics: WorkerMetrics, sealed: bool
    ) -> None:
        """UCX must be started. `sealed`: request encrypted blocks even if the source does not require it."""
        self._shape = shape
        self._pool = pool
        self._metrics = metrics
        self._address = own_address(sealed)
        self._mappings = mappings

    @property
    def address(self) -> KvAddress:
        """Return the address to which sources send blocks."""
        return self._address

    async def connect(self, source: KvAddress, ticket: Ticket, deliver: Deliver) -> KvTransfer:
        """Connect to a source and greet it in advance, so that pulls during a pause are faster.

        A ticket is valid for one connection. `deliver` takes what arrives. Raise KvTransferError.
        """
        channel = await Channel.connect(source)
        mappings = self._mappings if source.shares_memory(self.address) else None
        sealed = self.address.sealed or source.sealed
        transfer = KvTransfer(
            channel, ticket, self._shape, self._pool, mappings, self._metrics, sealed, deliver
        )
        try:
            async with asyncio.timeout(_CONNECT_S):
                await transfer.greet()
        except TimeoutError as error:
            await run_to_completion(transfer.close())
            raise KvTransferError(f"the source did not answer within {_CONNECT_S:g} s") from error
        except BaseException:
            await run_to_completion(transfer.close())
            raise
        return transfer


class KvTransfer:
    """The BlockTransfer of an engine with one device, or of one rank.

    A pull that fails in any way ends the transfer and discards its buffers.
    """

    def __init__(
        self,
        channel: Channel,
        ticket: Ticket,
        shape: KvShape,
        pool: StagingPool,
        mappings: Mappings | None,
        metrics: WorkerMetrics,
        sealed: bool,
        deliver: Deliver,
    ) -> None:
        """`mappings`: for a source that shares memory; None: it does not, regardless of what it sends."""
        self._channel = channel
        self._ticket = ticket
        self._seal = Seal(ticket)
        self._sealed = sealed
        self._shape = shape
        self._pool = pool
        self._mappings = mappings
        self._metrics = metrics
        self._deliver = deliver
        # The slots of the source's shared memory, used in turn; empty: none.
        self._slots: list[Staging] = []
        self._segment: SegmentName | None = None
        self._slots_used = 0
        self._requests = 0
        self._chunks = 0
        self._goodbye = channel.receive(np.zeros(1, np.uint8), ticket.goodbye())

    async def greet(self) -> None:
        """Greet the source and check that its KV has the same shape. Raise KvTransferError."""
        answer = np.zeros(header_bytes(0) + NAME_BYTES, np.uint8)
        message = self._channel.receive(answer, self._ticket.header(self._next_chunk()))
        self._send_request(Request(RequestKind.HELLO))
        await self._wait(message)
        data = answer.tobytes()
        decode_header(data[:-NAME_BYTES], self._shape, 0, 0)
        segment = SegmentName.decode(data[-NAME_BYTES:])
        if segment is not None and self._mappings is not None:
            self._slots = self._map_slots(segment, self._mappings)

    async def pull(self, first_block: int, hashes: Sequence[bytes]) -> int:
        """Fetch the blocks with these hashes and deliver them chunk by chunk; return the bytes received.

        While one chunk is delivered, the next ones are in flight. The caller sets the deadline. Raise
        KvTransferError, KvIdentityError for other blocks than those named, EngineRefusal if there is no
        memory to receive them, and what their delivery raises.
        """
        if not hashes:
            return 0
        try:
            await self._pull(first_block, hashes)
        except BaseException:
            await run_to_completion(self._channel.close())
            raise
        size = len(hashes) * self._shape.block_bytes
        self._metrics.kv_received_blocks += len(hashes)
        self._metrics.kv_received_bytes += size
        return size

    async def close(self) -> None:
        """Say goodbye to the source and close the connection. Idempotent."""
        if self._channel.alive and not self._goodbye.done():
            data = np.frombuffer(Request(RequestKind.GOODBYE).encode(), np.uint8)
            message = self._channel.send(data, self._ticket.request(self._requests))
            await asyncio.wait({message}, timeout=_GOODBYE_S)
        try:
            await self._channel.close()
        finally:
            self._slots.clear()
            segment, self._segment = self._segment, None
            if segment is not None and self._mappings is not None:
                self._mappings.release(segment)

    async def _pull(self, first_block: int, hashes: Sequence[bytes]) -> None:
        end = first_block + len(hashes)
        next_block = first_block
        in_flight: deque[_Incoming] = deque()
        while in_flight or next_block < end:
            while next_block < end and len(in_flight) < WINDOW:
                num_blocks = min(self._pool.chunk_blocks, end - next_block)
                # The receive is posted before the request, so that data arrives directly in its buffer.
                in_flight.append(self._expect(next_block, num_blocks))
                self._send_request(Request(self._kind, next_block, num_blocks))
                next_block += num_blocks
            chunk = in_flight.popleft()
            await self._wait(chunk.header_message)
            head = chunk.header.tobytes()
            if chunk.sealed is not None:
                head = self._seal.open_header(chunk.chunk, head)
            header = decode_header(head, self._shape, chunk.first, chunk.num_blocks)
            start = chunk.first - first_block
            if list(header.hashes) != list(hashes[start : start + chunk.num_blocks]):
                raise KvIdentityError(f"blocks {chunk.first}+{chunk.num_blocks} are not the requested ones")
            if chunk.data_message is not None:
                await self._wait(chunk.data_message)
            if chunk.sealed is not None:
                out = host_bytes(chunk.staging)
                opened = asyncio.to_thread(self._seal.open_data, chunk.chunk, chunk.sealed, out)
                await run_to_completion(opened)
            delivery = self._deliver(chunk.first, chunk.num_blocks, chunk.staging, header.checksums)
            await run_to_completion(delivery)
            if chunk.kind is not RequestKind.SHARED:
                self._pool.give_back(chunk.staging, chunk.num_blocks)

    def _expect(self, first: int, num_blocks: int) -> _Incoming:
        if self._slots:
            staging = self._slots[self._slots_used % WINDOW]
            self._slots_used += 1
        else:
            staging = self._pool.take(num_blocks)
        return _Incoming(
            self._channel, self._ticket, self._next_chunk(), staging, self._kind, first, num_blocks
        )

    @property
    def _kind(self) -> RequestKind:
        """Return the kind of request for blocks. Shared memory stays on the host, unencrypted."""
        if self._slots:
            return RequestKind.SHARED
        return RequestKind.SEALED if self._sealed else RequestKind.BLOCKS

    def _map_slots(self, segment: SegmentName, mappings: Mappings) -> list[Staging]:
        """Map the slots of the source's segment; return none if it cannot be used."""
        if segment.size != WINDOW * self._pool.chunk_blocks * self._shape.block_bytes:
            return []
        try:
            parts = np.split(mappings.map(segment), WINDOW)
        except OSError as error:
            log.info("a source's memory cannot be shared: %s", format_error(error))
            return []
        self._segment = segment
        slots = [self._pool.over(part) for part in parts]
        return [slot for slot in slots if slot is not None]

    def _next_chunk(self) -> int:
        self._chunks += 1
        return self._chunks - 1

    def _send_request(self, request: Request) -> None:
        """Begin to send a request; a failure shows when its reply is awaited."""
        tag = self._ticket.request(self._requests)
        self._requests += 1
        self._channel.send(np.frombuffer(request.encode(), np.uint8), tag)

    async def _wait(self, message: asyncio.Task[object]) -> None:
        """Wait until a message is complete. Raise KvTransferError, also if the source says goodbye."""
        await asyncio.wait({message, self._goodbye}, return_when=asyncio.FIRST_COMPLETED)
        # The source closes its end after the goodbye, so both may be done by now.
        if _succeeded(self._goodbye) and not _succeeded(message):
            raise KvTransferError("the export has ended")
        await self._channel.wait(message)


def _succeeded(message: asyncio.Task[object]) -> bool:
    return message.done() and not message.cancelled() and message.exception() is None


class SingleTransport:
    """BlockSource and BlockPuller over one endpoint."""

    def __init__(self, engine: Engine, server: KvServer, client: KvClient) -> None:
        self._engine = engine
        self._server = server
        self._client = client
        self.addresses = [server.address]

    async def open(self, request_id: str, targets: Sequence[KvAddress]) -> KvSession:
        """BlockSource.open."""
        (target,) = targets
        return await self._server.open(request_id, target)

    async def connect(
        self, request_id: str, sources: Sequence[KvAddress], tickets: Sequence[Ticket]
    ) -> KvTransfer:
        """BlockPuller.connect."""
        if len(tickets) != 1:
            raise KvTransferError(f"{len(tickets)} tickets for one device")
        return await self._client.connect(
            sources[0], tickets[0], partial(self._engine.write_blocks, request_id)
        )

    async def close(self) -> None:
        """End every session."""
        await self._server.close()
