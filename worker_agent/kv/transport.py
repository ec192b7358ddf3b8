"""This process's one UCX context, and messages over one endpoint.

Nothing listens by our doing: two processes tell each other their UCX worker addresses, and each makes an
endpoint of the other's. What UCX itself listens on for that is bounded by `binding.py`. A process that is
killed ends its peers' endpoints within milliseconds; one that only closes its endpoint is not noticed at the
other end, so that protocols must say goodbye.

Endpoints have error handling, without which a peer that is killed ends our process with it (UCX's cma calls
that fatal). UCX's shared-memory transports cannot handle a peer's failure and are not used then: what UCX
carries between two processes of one host goes over TCP on loopback. So blocks go another way there
(`segments.py`), and UCX carries requests and headers.

Chosen by measurement on a two-core machine that others used too, so that only comparisons count
(`benchmarks/transfer.py` sets the rate beside ucx_perftest's in one run).

- Progress mode "thread" with Python futures. In every other mode `ucxx` awaits by polling: an idle endpoint
  that waits for its next request would keep the event loop, which the engine's outputs pass through, busy for
  ever. A process with an idle endpoint uses about 1% of a core this way, against 25-50% ("blocking").
- Tag messages into a buffer of ours, at twice the rate of active messages, which arrive in memory that UCX
  allocates anew each time; page faults are the difference.
- Chunks of 8 MiB, four under way. Through shared memory 4 and 8 MiB were the fastest (1.8 to 2.6 GiB/s while
  others used both cores), 2 MiB gave 1.3, 1 MiB 0.3: each message costs up to half a millisecond of
  hand-overs between threads.
- Receives are posted before the request is sent, and the connection is made before the pause. So no message
  of ours ever arrives that nobody waits for, and whatever does can be thrown away (`strays.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from typing import Final

import numpy as np
import ucxx
from ucxx.types import Tag

from tailrace.service.channels import format_error
from worker_agent.kv.address import KvAddress, KvTransferError
from worker_agent.kv.binding import BindingError
from worker_agent.kv.segments import this_host

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 8 << 20
# Longest sleep of UCX's own thread; whatever concerns it wakes it up. ucxx's millisecond costs each idle
# worker 3% of a core.
_PROGRESS_MS: Final = 50
# Closing waits for UCX's own thread; nanoseconds.
_CLOSE_NS: Final = 200_000_000
# Messages that were under way end as soon as their endpoint is closed.
_DRAIN_S: Final = 2.0

_started = False
_options: Mapping[str, str] = {}


def start_ucx(options: Mapping[str, str]) -> None:
    """Set UCX up for this process, with these options (names without UCX_). May be called again.

    Raises BindingError when UCX cannot use the devices or ports that they name.
    """
    global _started, _options
    if not _started:
        _options = dict(options)
        try:
            ucxx.init(options=dict(options), progress_mode="thread", enable_python_future=True)
        except ucxx.exceptions.UCXError as error:
            raise BindingError(f"UCX did not start with {dict(options)}: {format_error(error)}") from error
        # Started anew before there is anything to wait for.
        worker = ucxx.core._get_ctx().worker
        worker.stop_progress_thread()
        worker.start_progress_thread(polling_mode=False, epoll_timeout=_PROGRESS_MS)
        _started = True


def ucx_started_with() -> Mapping[str, str]:
    """The options that start_ucx was given: for processes that belong to this one."""
    return _options


def own_address(sealed: bool) -> KvAddress:
    """Where peers reach this process's UCX, which must be started, and whether with encrypted KV alone."""
    version = ".".join(map(str, ucxx.get_ucx_version()))
    return KvAddress(ucxx.get_worker_address().tobytes(), version, this_host(os.environ), sealed)


def stop_ucx() -> None:
    """End UCX's threads, without which the process would not end. Takes a second. All channels should be
    closed."""
    global _started
    if _started:
        _started = False
        try:
            ucxx.reset()
        except ucxx.exceptions.UCXError as error:
            log.info("UCX: %s", format_error(error).partition("\n")[0])


class Channel:
    """One UCX endpoint. Messages are never abandoned under way: UCX would go on writing into their buffers.

    A failure of any kind ends the channel.
    """

    def __init__(self, endpoint: ucxx.Endpoint) -> None:
        self._endpoint = endpoint
        self._under_way: set[asyncio.Task[object]] = set()
        self._closed = False

    @classmethod
    async def connect(cls, peer: KvAddress) -> Channel:
        """Make an endpoint; whether the peer is there shows with the first message.

        Raises KvTransferError.
        """
        try:
            address = ucxx.get_ucx_address_from_buffer(peer.worker)
            return cls(await ucxx.create_endpoint_from_worker_address(address))
        except (OSError, RuntimeError, ucxx.exceptions.UCXError) as error:
            raise KvTransferError(f"cannot connect to the peer's UCX: {format_error(error)}") from error

    @property
    def alive(self) -> bool:
        """Whether it can be used (again)."""
        return not self._closed and not self._endpoint.closed

    def send(self, buffer: object, tag: int) -> asyncio.Task[object]:
        """Send a buffer, whole; `wait` for it before the buffer is used for anything else."""
        return self._begin(self._endpoint.send(buffer, Tag(tag), force_tag=True))

    def receive(self, buffer: object, tag: int) -> asyncio.Task[object]:
        """Receive the message with this tag, of exactly this size. It is expected from the event loop's next
        turn on."""
        return self._begin(self._endpoint.recv(buffer, Tag(tag), force_tag=True))

    async def wait(self, message: asyncio.Task[object]) -> None:
        """Until it is through. A caller that gives up must close the channel. Raises KvTransferError."""
        await asyncio.wait({message})
        if message.cancelled():
            raise KvTransferError("the connection was closed")
        error = message.exception()
        if error is not None:
            raise KvTransferError(f"the connection broke: {format_error(error)}") from error
        if self._closed:
            raise KvTransferError("the connection was closed")

    async def send_bytes(self, data: bytes, tag: int) -> None:
        """Send a small message. Raises KvTransferError."""
        await self.wait(self.send(np.frombuffer(data, np.uint8), tag))

    async def close(self) -> None:
        """Close the endpoint and see every message under way end. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            self._endpoint.abort(period=_CLOSE_NS)
        except ucxx.exceptions.UCXError as error:
            log.warning("closing a KV connection: %s", format_error(error))
        if self._under_way:
            _, left = await asyncio.wait(self._under_way, timeout=_DRAIN_S)
            for message in left:
                log.warning("a KV message did not complete with its connection")
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
