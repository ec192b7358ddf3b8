"""The process's UCX context, and messages over one endpoint.

There is no listener of our own: two processes exchange their UCX worker addresses, and each creates an
endpoint to the other. `worker_agent/network.py` limits what UCX itself listens on for that. If a process is
killed, its peers' endpoints fail within milliseconds; if it only closes its endpoint, the other end does not
notice, so protocols must say goodbye.

Endpoints use error handling, since otherwise a killed peer ends our process too (UCX's cma treats that as
fatal). UCX's shared-memory transports cannot handle a peer's failure and are disabled by that, so that UCX
uses TCP on loopback between processes of one host. Blocks therefore go through our own shared memory there
(`memory.py`), and UCX carries only requests and headers.

The following was chosen by measurement on a shared two-core machine, so only comparisons are meaningful
(`benchmarks/transfer.py` measures the rate together with ucx_perftest's in one run).

- Progress mode "thread" with Python futures. In every other mode `ucxx` awaits by polling: an idle endpoint
  waiting for its next request would keep the event loop, which also carries the engine's outputs, busy
  forever. A process with an idle endpoint uses about 1% of a core, compared to 25-50% with "blocking".
- Tag messages into our own buffers, at twice the rate of active messages, which arrive in memory that UCX
  allocates each time; the difference is due to page faults.
- Chunks of 8 MiB of KV in host memory, four in flight. Through shared memory 4 and 8 MiB were the fastest
  (1.8 to 2.6 GiB/s while others used both cores); 2 MiB reached 1.3 GiB/s, 1 MiB 0.3 GiB/s: each message
  costs up to half a millisecond of handovers between threads.
- Receives are posted before the request is sent, and the connection is made before the pause. So every
  expected message has a receive when it arrives, and all others can be discarded (`discard_strays`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final

import numpy as np
import ucxx
from ucxx._lib.arr import Array
from ucxx._lib_async import continuous_ucx_progress
from ucxx.types import Tag, TagMask

from tailrace.service.channels import format_error
from tailrace.service.tasks import cancel, supervise
from worker_agent.kv.address import KvAddress, KvTransferError
from worker_agent.kv.memory import this_host
from worker_agent.network import BindingError

log = logging.getLogger(__name__)

# Timeout for closing an endpoint, which waits for UCX's progress thread; nanoseconds.
_CLOSE_NS: Final = 200_000_000
# Timeout for messages in flight when their endpoint is closed, which ends them.
_DRAIN_S: Final = 2.0

_started = False
_options: Mapping[str, str] = {}


def start_ucx(options: Mapping[str, str]) -> None:
    """Initialize UCX for this process with these options (names without UCX_). Idempotent.

    Raise BindingError if UCX cannot use the given devices or ports.
    """
    global _started, _options
    if not _started:
        _options = dict(options)
        if not _has_cuda():
            # ucxx looks for CUDA's driver at each start of its thread, for which it imports cuda.core.
            continuous_ucx_progress._create_context = _nothing
        try:
            ucxx.init(options=dict(options), progress_mode="thread", enable_python_future=True)
        except ucxx.exceptions.UCXError as error:
            hint = "; are the ports of --kv-ports taken?" if "TCP_PORT_RANGE" in options else ""
            raise BindingError(
                f"UCX did not start with {dict(options)}: {format_error(error)}{hint}"
            ) from error
        # Restart the progress thread with our polling interval.
        with progress_paused():
            pass
        _started = True


def _has_cuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _nothing() -> None:
    pass


def ucx_started_with() -> Mapping[str, str]:
    """Return the options given to `start_ucx`, for child processes."""
    return _options


def own_address(sealed: bool) -> KvAddress:
    """Return the UCX address of this process; UCX must be started. `sealed`: only encrypted KV is allowed."""
    version = ".".join(map(str, ucxx.get_ucx_version()))
    return KvAddress(ucxx.get_worker_address().tobytes(), version, this_host(os.environ), sealed)


def stop_ucx() -> None:
    """Stop UCX's threads, which would keep the process from exiting. All channels should be closed.

    This takes about a second.
    """
    global _started
    if _started:
        _started = False
        try:
            ucxx.core._get_ctx().worker.stop_progress_thread()
            ucxx.reset()
        except ucxx.exceptions.UCXError as error:
            log.info("UCX: %s", format_error(error).partition("\n")[0])


class Channel:
    """One UCX endpoint. Messages in flight are never abandoned: UCX would continue to write to their buffers.

    Any failure ends the channel.
    """

    def __init__(self, endpoint: ucxx.Endpoint) -> None:
        self._endpoint = endpoint
        self._under_way: set[asyncio.Task[object]] = set()
        self._closed = False

    @classmethod
    async def connect(cls, peer: KvAddress) -> Channel:
        """Create an endpoint; a peer that is unreachable shows only with the first message.

        Raise KvTransferError.
        """
        try:
            address = ucxx.get_ucx_address_from_buffer(peer.worker)
            # It does not suspend.
            with progress_paused():
                endpoint = await ucxx.create_endpoint_from_worker_address(address)
        except (OSError, RuntimeError, ucxx.exceptions.UCXError) as error:
            raise KvTransferError(f"cannot connect to the peer's UCX: {format_error(error)}") from error
        return cls(endpoint)

    @property
    def alive(self) -> bool:
        """Return whether the channel can still be used."""
        return not self._closed and not self._endpoint.closed

    def send(self, buffer: object, tag: int) -> asyncio.Task[object]:
        """Begin to send a buffer; `wait` for the message before reusing the buffer."""
        return self._begin(self._endpoint.send(buffer, Tag(tag), force_tag=True))

    def receive(self, buffer: object, tag: int) -> asyncio.Task[object]:
        """Post a receive for the message with this tag, of exactly the buffer's size.

        It takes effect on the next iteration of the event loop.
        """
        return self._begin(self._receive(buffer, Tag(tag)))

    async def wait(self, message: asyncio.Task[object]) -> None:
        """Wait until a message is complete. A caller that gives up must close the channel.

        Raise KvTransferError.
        """
        await asyncio.wait({message})
        if message.cancelled():
            raise KvTransferError("the connection was closed")
        error = message.exception()
        if error is not None:
            raise KvTransferError(f"the connection broke: {format_error(error)}") from error
        if self._closed:
            raise KvTransferError("the connection was closed")

    async def send_bytes(self, data: bytes, tag: int) -> None:
        """Send a small message. Raise KvTransferError."""
        await self.wait(self.send(np.frombuffer(data, np.uint8), tag))

    async def close(self) -> None:
        """Close the endpoint and wait until all messages in flight have ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            with progress_paused():
                self._endpoint.abort(period=_CLOSE_NS)
        except ucxx.exceptions.UCXError as error:
            log.warning("closing a KV connection: %s", format_error(error))
        if self._under_way:
            _, pending = await asyncio.wait(self._under_way, timeout=_DRAIN_S)
            for message in pending:
                log.warning("a KV message did not complete with its connection")
                message.cancel()

    async def _receive(self, buffer: object, tag: Tag) -> object:
        # On a closed endpoint, ucxx would look for the message while the progress thread runs.
        if not self.alive:
            raise ucxx.exceptions.UCXCloseError("Endpoint closed")
        return await self._endpoint.recv(buffer, tag, force_tag=True)

    def _begin(self, message: object) -> asyncio.Task[object]:
        task: asyncio.Task[object] = asyncio.ensure_future(message)  # type: ignore[call-overload]
        self._under_way.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[object]) -> None:
        self._under_way.discard(task)
        if task.cancelled():
            return
        with contextlib.suppress(asyncio.InvalidStateError):
            # Retrieve the exception, since there may be no waiter left to do so.
            if (error := task.exception()) is not None:
                # UCX's endpoint keeps it as the end of a message, and its frames have the endpoint and the
                # buffer. That circle runs through C++, where the garbage collector sees nothing.
                error.__traceback__ = None


# Longest sleep of the progress thread; events wake it up earlier. ucxx's default of a millisecond costs each
# idle worker 3% of a core.
_PROGRESS_MS: Final = 50


@contextmanager
def progress_paused() -> Iterator[None]:
    """Stop the progress thread for the block, which must be short and must not await.

    For creating and closing endpoints, and for looking for messages. UCX must be initialized.

    With a running progress thread, ucxx passes some calls to it and waits on a condition variable in its own
    stack frame. The thread sets a flag, releases the mutex and only then notifies (`CallbackNotifier::set` in
    ucxx 0.52). If the caller sees the flag before that, its frame is gone when the thread notifies, and glibc
    then changes what lies there: frames of whatever the caller calls next, which crashes. Without a progress
    thread, ucxx makes these calls itself. Stopping the thread is safe: ucxx waits until it has ended.
    """
    worker = ucxx.core._get_ctx().worker
    worker.stop_progress_thread()
    try:
        yield
    finally:
        worker.start_progress_thread(polling_mode=False, epoll_timeout=_PROGRESS_MS)


_SWEEP_S: Final = 0.5
# Maximum messages per call, so that a flood does not block the event loop.
_BATCH_MAX: Final = 256
_RECEIVE_S: Final = 5.0
# One receive buffer for all of them: its content is never read.
_SINK: Final = Array(np.zeros(1, np.uint8))


@asynccontextmanager
async def discarding_strays(count: Callable[[int], None]) -> AsyncIterator[None]:
    """Discard unexpected messages while the block runs, and `count` them. UCX must be started.

    Every receive is posted before its message is requested, and no tag is used twice, so an unexpected
    message is late or comes from a sender without a ticket. UCX stores such messages until they are received;
    they are received here and dropped.
    """
    task = supervise("stray KV messages", partial(_sweep, count))
    try:
        yield
    finally:
        await cancel(task)


async def _sweep(count: Callable[[int], None]) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        try:
            while dropped := await discard_strays():
                count(dropped)
                log.info("dropped %d unexpected KV messages", dropped)
        except TimeoutError:
            log.warning("an unexpected KV message cannot be dropped")


async def discard_strays() -> int:
    """Discard at most _BATCH_MAX of the messages received so far; return their number."""
    worker = ucxx.core._get_ctx().worker
    for dropped in range(_BATCH_MAX):
        # Any tag.
        with progress_paused():
            message = worker.tag_probe(Tag(0), TagMask(0), remove=True)
        if not message.matched:
            return dropped
        # Receiving into a buffer that is too small completes the message as truncated, also for its sender.
        # If the sender is gone, the receive is cancelled.
        request = worker.tag_recv_with_handle(_SINK, message)
        try:
            async with asyncio.timeout(_RECEIVE_S):
                await request.wait()
        except ucxx.exceptions.UCXError as error:
            # The request keeps it, and its frames have the request: see Channel._end.
            error.__traceback__ = None
    return _BATCH_MAX
