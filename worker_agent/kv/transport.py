"""This process's one UCX context, and messages over one endpoint.

Chosen by measurement: two processes on loopback, 1 GiB a run, on a two-core machine that others used too, so
that only the comparison counts (`benchmarks/transfer.py` sets the rate beside ucx_perftest's in one run).

- Progress mode "thread" with Python futures. In every other mode `ucxx` awaits by polling: an idle endpoint
  that waits for its next request would keep the event loop, which the engine's outputs pass through, busy for
  ever. A process with an idle endpoint uses about 1% of a core this way, against 25-50% ("blocking").
- Tag messages into a buffer of ours: 0.9 GiB/s. Active messages arrive in memory that UCX allocates anew each
  time, at half the rate; page faults are the difference.
- Chunks of 8 MiB, two under way. One at a time gave 0.6 GiB/s, chunks of 1 MiB 0.3 (each message costs up to
  half a millisecond of hand-overs between threads), chunks of 16 MiB 0.6 (they fall out of the cache).
- Receives are posted before the request is sent, and the connection is made before the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

import numpy as np
import ucxx

from tailrace.service.said import said
from worker_agent.kv.errors import KvTransferError

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 8 << 20
CONNECT_S: Final = 5.0
# Longest sleep of UCX's own thread; whatever concerns it wakes it up. ucxx's millisecond costs each idle
# worker 3% of a core.
_PROGRESS_MS: Final = 50
# Closing waits for UCX's own thread; nanoseconds.
_CLOSE_NS: Final = 200_000_000
# Messages that were under way end as soon as their endpoint is closed.
_DRAIN_S: Final = 2.0

_started = False


def start_ucx() -> None:
    """Set UCX up for this process. May be called again."""
    global _started
    if not _started:
        ucxx.init(progress_mode="thread", enable_python_future=True)
        # Started anew before there is anything to wait for.
        worker = ucxx.core._get_ctx().worker
        worker.stop_progress_thread()
        worker.start_progress_thread(polling_mode=False, epoll_timeout=_PROGRESS_MS)
        _started = True


def stop_ucx() -> None:
    """End UCX's threads, without which the process would not end. Takes a second. All channels and listeners
    should be closed."""
    global _started
    if _started:
        _started = False
        try:
            ucxx.reset()
        except ucxx.exceptions.UCXError as error:
            log.info("UCX: %s", said(error).partition("\n")[0])


class Channel:
    """One UCX endpoint. Messages are never abandoned under way: UCX would go on writing into their buffers.

    A failure of any kind ends the channel.
    """

    def __init__(self, endpoint: ucxx.Endpoint) -> None:
        self._endpoint = endpoint
        self._under_way: set[asyncio.Task[object]] = set()
        self._closed = False

    @classmethod
    async def connect(cls, host: str, port: int) -> Channel:
        """Raises KvTransferError."""
        try:
            async with asyncio.timeout(CONNECT_S):
                return cls(await ucxx.create_endpoint(host, port, connect_timeout=CONNECT_S))
        except (TimeoutError, OSError, RuntimeError, ucxx.exceptions.UCXError) as error:
            raise KvTransferError(f"no connection to {host}:{port}: {said(error)}") from error

    @property
    def alive(self) -> bool:
        """Whether it can be used (again)."""
        return not self._closed and not self._endpoint.closed

    def send(self, buffer: object) -> asyncio.Task[object]:
        """Send a buffer, whole; `wait` for it before the buffer is used for anything else."""
        return self._begin(self._endpoint.send(buffer))

    def receive(self, buffer: object) -> asyncio.Task[object]:
        """Receive a message of exactly this size."""
        return self._begin(self._endpoint.recv(buffer))

    async def wait(self, message: asyncio.Task[object]) -> None:
        """Until it is through. A caller that gives up must close the channel. Raises KvTransferError."""
        await asyncio.wait({message})
        if message.cancelled():
            raise KvTransferError("the connection was closed")
        error = message.exception()
        if error is not None:
            raise KvTransferError(f"the connection broke: {said(error)}") from error
        if self._closed:
            raise KvTransferError("the connection was closed")

    async def send_bytes(self, data: bytes) -> None:
        """Send a small message. Raises KvTransferError."""
        await self.wait(self.send(np.frombuffer(data, np.uint8)))

    async def receive_bytes(self, size: int) -> bytes:
        """Receive a small message. Raises KvTransferError."""
        buffer = np.zeros(size, np.uint8)
        await self.wait(self.receive(buffer))
        return buffer.tobytes()

    async def close(self) -> None:
        """Close the endpoint and see every message under way end. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            self._endpoint.abort(period=_CLOSE_NS)
        except ucxx.exceptions.UCXError as error:
            log.warning("closing a KV connection: %s", said(error))
        if self._under_way:
            _, left = await asyncio.wait(self._under_way, timeout=_DRAIN_S)
            for message in left:
                log.warning("a KV message did not end with its connection")
                message.cancel()

    def _begin(self, message: object) -> asyncio.Task[object]:
        task: asyncio.Task[object] = asyncio.ensure_future(message)  # type: ignore[call-overload]
        self._under_way.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[object]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            with contextlib.suppress(asyncio.InvalidStateError):
                # Looked at: nobody may be waiting for it any more.
                task.exception()
