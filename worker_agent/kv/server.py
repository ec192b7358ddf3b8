"""The source's side of the KV transport: a session per export, in which it answers its target's requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from tailrace.service.channels import format_error
from tailrace.service.tasks import cancel, run_to_completion, task_error
from worker_agent.engine.base import KvShape, Staging
from worker_agent.engine.errors import EngineRefusal
from worker_agent.faults import Faults
from worker_agent.kv.address import KvAddress, KvTransferError, Ticket
from worker_agent.kv.memory import NO_SEGMENT, KvMemory, Segment, Segments, StagingPool
from worker_agent.kv.ucx import Channel, own_address
from worker_agent.kv.wire import (
    ENDED,
    REQUEST_BYTES,
    UNREADABLE,
    WINDOW,
    Request,
    RequestKind,
    Seal,
    decode_request,
    encode_header,
    encode_refusal,
    host_bytes,
)
from worker_agent.metrics import WorkerMetrics

log = logging.getLogger(__name__)


class KvSession:
    """The BlockSession of an engine with one device, or of one rank."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        # Created for this export, and given only to its target.
        self.ticket = Ticket.fresh()
        # Answers its target, once it is open.
        self.conversation: asyncio.Task[None] | None = None
        self._hashes: list[bytes] = []
        self._readers = 0
        self.requested()
        self._idle = asyncio.Event()
        self._idle.set()
        self.closed = False
        self.taken = False

    @property
    def tickets(self) -> Sequence[Ticket]:
        """BlockSession.tickets."""
        return [self.ticket]

    async def announce(self, first_block: int, hashes: Sequence[bytes]) -> None:
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

    def requested(self) -> None:
        """Note that the target has sent a request."""
        self._requested_s = asyncio.get_running_loop().time()

    async def quiet_s(self) -> float:
        """BlockSession.quiet_s."""
        return asyncio.get_running_loop().time() - self._requested_s

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

    async def end(self) -> None:
        """BlockSession.end. Reads are short."""
        self.closed = True
        if self.conversation is not None:
            self.conversation.cancel()
        await self._idle.wait()


# Limit on the size of chunks, which the target chooses.
_CHUNK_BYTES_MAX: Final = 64 << 20
# Timeout for sending one chunk, in seconds.
_SEND_S: Final = 10.0
_GOODBYE_S: Final = 1.0


class _Goodbye(Exception):
    """The target has said goodbye."""


class _Chunk:
    """A chunk being sent: its buffer, and the messages that still use it."""

    def __init__(
        self, staging: Staging | None, num_blocks: int, messages: list[asyncio.Task[object]]
    ) -> None:
        """`staging`: a buffer of the pool; None if the chunk is in shared memory."""
        self.staging = staging
        self.num_blocks = num_blocks
        self.messages = messages

    @property
    def done(self) -> bool:
        return all(message.done() for message in self.messages)


class _Expected:
    """A posted receive for the target's next request."""

    def __init__(self, channel: Channel, tag: int) -> None:
        self.buffer: npt.NDArray[np.uint8] = np.zeros(REQUEST_BYTES, np.uint8)
        self.message = channel.receive(self.buffer, tag)


class Slots:
    """The parts of a segment, each for one chunk, used in turn.

    By a request the target confirms that it has read the chunk of WINDOW requests before.
    """

    def __init__(self, segment: Segment, stagings: Sequence[Staging]) -> None:
        self.segment = segment
        self._stagings: Sequence[Staging] = stagings
        self._used = 0

    @classmethod
    def create(cls, segments: Segments, size: int, memory: KvMemory) -> Slots | None:
        """Create the slots; return None if the KV is not in host memory. Raise OSError."""
        segment = segments.take(size)
        stagings = [memory.staging_over(part) for part in np.split(segment.memory, WINDOW)]
        buffers = [staging for staging in stagings if staging is not None]
        if len(buffers) < WINDOW:
            segments.give_back(segment)
            return None
        return cls(segment, buffers)

    def drop(self) -> Segment:
        """Return the segment, to which nothing here refers any more."""
        self._stagings = []
        return self.segment

    def next(self) -> Staging:
        """Return the slot for the next chunk."""
        self._used += 1
        return self._stagings[(self._used - 1) % WINDOW]


class Conversation:
    """Answer the requests of one session, one after the other."""

    def __init__(
        self,
        channel: Channel,
        session: KvSession,
        memory: KvMemory,
        shape: KvShape,
        pool: StagingPool,
        segments: Segments | None,
        faults: Faults,
        metrics: WorkerMetrics,
        sealed: bool,
    ) -> None:
        """`segments`: for a target that can share memory, else None. `sealed`: refuse to send blocks
        unencrypted."""
        self._channel = channel
        self._session = session
        self._ticket = session.ticket
        self._memory = memory
        self._shape = shape
        self._pool = pool
        self._faults = faults
        self._metrics = metrics
        self._sealed = sealed
        self._seal = Seal(session.ticket)
        self._slots: Slots | None = None
        self._segments = segments
        self._requests = 0
        self._answers = 0
        self._expected: deque[_Expected] = deque()
        self._in_flight: deque[_Chunk] = deque()
        self._claimed = self._refused = False
        for _ in range(WINDOW):
            self._expect()

    async def run(self, claim_s: float) -> None:
        """Run until the target says goodbye or the task is cancelled.

        `claim_s`: seconds within which the target must send its first request.
        """
        said_goodbye = False
        try:
            await self._run(claim_s)
        except _Goodbye:
            said_goodbye = True
        except TimeoutError:
            log.info("%s: its target does not claim or fetch its KV", self._session.request_id)
        except KvTransferError as error:
            log.debug("a KV session ended: %s", error)
        finally:
            self._session.closed = True
            await run_to_completion(self._end(said_goodbye))

    async def _run(self, claim_s: float) -> None:
        async with asyncio.timeout(claim_s):
            await self._channel.wait(self._expected[0].message)
        self._claimed = True
        while True:
            expected = self._expected.popleft()
            await self._channel.wait(expected.message)
            self._session.requested()
            # Post the next receive before the answer allows the target to send one more request.
            self._expect()
            await self._answer(decode_request(expected.buffer.tobytes()))

    def _expect(self) -> None:
        self._expected.append(_Expected(self._channel, self._ticket.request(self._requests)))
        self._requests += 1

    async def _end(self, said_goodbye: bool) -> None:
        if self._claimed and not said_goodbye and self._channel.alive:
            # Without a goodbye, a waiting target would notice the end only by its deadline.
            message = self._channel.send(np.ones(1, np.uint8), self._ticket.goodbye())
            await asyncio.wait({message}, timeout=_GOODBYE_S)
        try:
            # Buffers of chunks that are still in flight do not go back to the pool.
            self._in_flight = deque(chunk for chunk in self._in_flight if chunk.done)
            with contextlib.suppress(KvTransferError):
                await self._await_sent(0)
        finally:
            await self._channel.close()
            if self._segments is not None and self._slots is not None:
                # A segment that the target may still be reading must not be reused: the blocks would change
                # under it and fail verification.
                has_read = said_goodbye or self._session.taken
                slots, self._slots = self._slots, None
                (self._segments.give_back if has_read else Segment.close)(slots.drop())

    async def _answer(self, request: Request) -> None:
        match request.kind:
            case RequestKind.GOODBYE:
                raise _Goodbye
            case RequestKind.HELLO:
                await self._send_header(encode_header(self._shape, 0, [], []) + self._share())
            case _ if not self._refused:
                # Limits the buffers to as many chunks as the target may request at a time.
                await self._await_sent(WINDOW - 1)
                await self._send_blocks(request)

    def _share(self) -> bytes:
        """Return the encoded name of a segment for this target, or NO_SEGMENT."""
        if self._segments is None or self._slots is not None:
            return NO_SEGMENT
        try:
            size = WINDOW * self._pool.chunk_blocks * self._shape.block_bytes
            self._slots = Slots.create(self._segments, size, self._memory)
        except OSError as error:
            log.warning("no shared memory with a target: %s", format_error(error))
        return NO_SEGMENT if self._slots is None else self._slots.segment.name.encode()

    def _staging(self, request: Request) -> Staging:
        """Return the buffer for the blocks of a request."""
        if request.kind is not RequestKind.SHARED:
            return self._pool.take(request.num_blocks)
        if self._slots is None or request.num_blocks > self._pool.chunk_blocks:
            raise KvTransferError("more blocks than fit into the shared memory")
        return self._slots.next()

    async def _send_blocks(self, request: Request) -> None:
        """Read blocks into a buffer and begin to send them."""
        session, first, num_blocks = self._session, request.first_block, request.num_blocks
        if num_blocks * self._shape.block_bytes > max(_CHUNK_BYTES_MAX, self._shape.block_bytes):
            raise KvTransferError(f"chunks of {num_blocks} blocks are too large")
        if self._sealed and request.kind is RequestKind.BLOCKS:
            raise KvTransferError("the target requests unencrypted blocks")
        if not session.may_read(first, num_blocks):
            await self._refuse(ENDED, request)
            return
        try:
            staging = self._staging(request)
            with session.reading():
                checksums = await run_to_completion(
                    self._memory.read_blocks(session.request_id, first, num_blocks, staging)
                )
        except EngineRefusal as error:
            log.info("blocks %d+%d of %s: %s", first, num_blocks, session.request_id, error)
            await self._refuse(UNREADABLE, request)
            return
        self._faults.corrupt(staging, num_blocks * self._shape.block_bytes)
        header = encode_header(self._shape, first, session.hashes(first, num_blocks), checksums)
        chunk = self._answers
        data = None if request.kind is RequestKind.SHARED else staging.buffer
        if request.kind is RequestKind.SEALED:
            header = self._seal.seal_header(chunk, header)
            data = await run_to_completion(
                asyncio.to_thread(self._seal.seal_data, chunk, host_bytes(staging))
            )
        messages = [self._channel.send(np.frombuffer(header, np.uint8), self._header_tag())]
        if data is not None:
            messages.append(self._channel.send(data, self._ticket.data(chunk)))
        of_pool = None if request.kind is RequestKind.SHARED else staging
        self._in_flight.append(_Chunk(of_pool, num_blocks, messages))

    async def _await_sent(self, remaining: int) -> None:
        """Wait until at most `remaining` chunks are in flight; return the other buffers to the pool."""
        while self._in_flight and (len(self._in_flight) > remaining or self._in_flight[0].done):
            chunk = self._in_flight.popleft()
            async with asyncio.timeout(_SEND_S):
                for message in chunk.messages:
                    await self._channel.wait(message)
            if chunk.staging is not None:
                self._pool.give_back(chunk.staging, chunk.num_blocks)
            self._metrics.kv_sent_blocks += chunk.num_blocks
            self._metrics.kv_sent_bytes += chunk.num_blocks * self._shape.block_bytes

    async def _refuse(self, status: int, request: Request) -> None:
        """Refuse a request. The target then ends the transfer; its other requests are not answered."""
        self._refused = True
        header = encode_refusal(self._shape, status, request.first_block, request.num_blocks)
        if request.kind is RequestKind.SEALED:
            header = self._seal.seal_header(self._answers, header)
        await self._send_header(header)

    async def _send_header(self, header: bytes) -> None:
        async with asyncio.timeout(_SEND_S):
            await self._channel.send_bytes(header, self._header_tag())

    def _header_tag(self) -> int:
        """Return the tag of the next answer."""
        tag = self._ticket.header(self._answers)
        self._answers += 1
        return tag


# Seconds for a target to use its ticket: it may have to wait for room first.
CLAIM_S: Final = 30.0
# Maximum concurrent exports of a worker; the migration service admits far fewer.
SESSIONS_MAX: Final = 64


class KvServer:
    """Serve announced blocks to targets: one session per export, each with its own endpoint to the address
    that its target sent over gRPC."""

    def __init__(
        self,
        memory: KvMemory,
        shape: KvShape,
        pool: StagingPool,
        segments: Segments,
        faults: Faults,
        metrics: WorkerMetrics,
        sealed: bool,
        claim_s: float = CLAIM_S,
    ) -> None:
        """UCX must be started. `sealed`: blocks leave this host only encrypted. `claim_s`: seconds within
        which a session's target must send its first request."""
        self._memory = memory
        self._shape = shape
        self._pool = pool
        self._faults = faults
        self._metrics = metrics
        self._claim_s = claim_s
        self._address = own_address(sealed)
        self._segments = segments
        self._conversations: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Return the number of sessions whose endpoints are not closed yet."""
        return len(self._conversations)

    @property
    def address(self) -> KvAddress:
        """Return the address to which targets connect."""
        return self._address

    async def open(self, request_id: str, target: KvAddress) -> KvSession:
        """Open a session for an export's target. Raise KvTransferError."""
        if len(self._conversations) >= SESSIONS_MAX:
            raise KvTransferError(f"{SESSIONS_MAX} exports are open")
        session = KvSession(request_id)
        channel = await Channel.connect(target)
        segments = self._segments if target.shares_memory(self._address) else None
        conversation = Conversation(
            channel,
            session,
            self._memory,
            self._shape,
            self._pool,
            segments,
            self._faults,
            self._metrics,
            # `target.sealed` comes over the authenticated gRPC channel; the UCX link is not authenticated.
            self._address.sealed or target.sealed,
        )
        task = asyncio.create_task(conversation.run(self._claim_s), name=f"KV of {request_id}")
        session.conversation = task
        self._conversations.add(task)
        task.add_done_callback(partial(self._done, session))
        try:
            # Let the event loop post the first receives before the ticket is handed out.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            task.cancel()
            raise
        return session

    async def close(self) -> None:
        """End every session."""
        await cancel(*self._conversations)

    def _done(self, session: KvSession, task: asyncio.Task[None]) -> None:
        session.closed = True
        # A failed task's traceback leads to the session.
        session.conversation = None
        self._conversations.discard(task)
        if (error := task_error(task)) is not None:
            # The target only learns that the session has ended, so the reason is logged here.
            log.error("a KV session failed", exc_info=error)
