"""The Export call between a migration's target and source: both ends of its stream, and what they say.

The target holds a `SourceLink`, the source a `Lease` with an `Inbox`; the functions below convert between the
engine's types and the call's messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.message import Message

from tailrace.cluster import Phase
from tailrace.messages import PHASES
from tailrace.service.channels import format_error
from tailrace.service.tasks import run_to_completion, task_error
from tailrace.v1 import worker_pb2, worker_pb2_grpc
from worker_agent.engine.base import Exported, ExportedPause, RequestKey
from worker_agent.kv.address import KvTransferError, Ticket

log = logging.getLogger(__name__)


class SourceLost(Exception):
    """The stream to the source broke, or the source violated the protocol."""


class SourceFailed(Exception):
    """The source reports that it cannot export; the message says why.

    `gone`: the request is not there (any more).
    """

    def __init__(self, reason: str, gone: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone


class SourceLink:
    """The target's end: send commands to the source, with one reply each.

    A cancelled read would cancel the call, and with it the chance to report how the import ended. So each
    reply is awaited in a task of its own, which `end` and `drop` clean up.
    """

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        """`timeout_s`: for the whole export."""
        self._call = worker_pb2_grpc.WorkerStub(channel).Export(timeout=timeout_s)
        self._reading: asyncio.Task[object] | None = None

    async def ask(self, command: worker_pb2.ExportCommand) -> worker_pb2.ExportEvent:
        """Send a command and return the reply. Raise SourceLost or SourceFailed."""
        # Before the write: the source may have ended the export and said why, and after a write that fails
        # gRPC gives no message that has come.
        reading = self._read()
        try:
            await run_to_completion(self._call.write(command))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            await self._event(reading)
            raise SourceLost(format_error(error)) from error
        return await self._event(reading)

    async def failure(self) -> None:
        """Wait for an event that nobody asked for. Raise SourceLost or SourceFailed."""
        await self._event(self._read())
        raise SourceLost("the source sent an event that was not asked for")

    async def _event(self, reading: asyncio.Task[object]) -> worker_pb2.ExportEvent:
        try:
            event = await asyncio.shield(reading)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise SourceLost(format_error(error)) from error
        if not isinstance(event, worker_pb2.ExportEvent):
            raise SourceLost("the source closed the export")
        if event.HasField("failed"):
            raise SourceFailed(event.failed.reason, event.failed.gone)
        return event

    async def end(self, committed: bool, reason: str) -> None:
        """Tell the source how the import ended, and close. Errors are ignored."""
        end = worker_pb2.ExportEnd(committed=committed, reason=reason)
        try:
            await self._call.write(worker_pb2.ExportCommand(end=end))
            await self._call.done_writing()
            # The source closes once it has processed this.
            while isinstance(await self._read(), worker_pb2.ExportEvent):
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.debug("ending an export: %s", format_error(error))
        finally:
            self.drop()

    def drop(self) -> None:
        """Close without telling the source, which finds out by itself how it ended."""
        self._call.cancel()

    def _read(self) -> asyncio.Task[object]:
        """Return the pending read, or begin a new one."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_one(), name="export answer")
            self._reading.add_done_callback(self._read_ended)
        return self._reading

    async def _read_one(self) -> object:
        return await self._call.read()

    def _read_ended(self, task: asyncio.Task[object]) -> None:
        if self._reading is task:
            self._reading = None
        # Nobody may be waiting for it any more.
        task_error(task)


# The target waits for each reply before the next command.
_COMMANDS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Broken:
    """The target, or the stream to it, is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """The front end has accepted the target: the request does not belong to this instance any more."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has ended here: aborted, or its front end is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Owned:
    """The reply to an OwnershipQuery: whether this instance still owns the request."""

    current: bool


Signal = Broken | Released | Ended | Owned
Item = Signal | worker_pb2.ExportCommand


class Inbox:
    """A queue with one reader; the front end's messages precede the target's."""

    def __init__(self) -> None:
        self._signals: deque[Signal] = deque()
        self._commands: deque[worker_pb2.ExportCommand] = deque()
        self._filled = asyncio.Event()

    @property
    def released(self) -> bool:
        """Return whether a release waits to be read."""
        return any(isinstance(item, Released) for item in self._signals)

    def signal(self, item: Signal) -> None:
        """Add a message of the front end; there are only a few in an export's life."""
        self._signals.append(item)
        self._filled.set()

    def command(self, item: worker_pb2.ExportCommand) -> None:
        """Add a command; a target that does not wait for replies is treated as broken."""
        if len(self._commands) >= _COMMANDS_MAX:
            self.signal(Broken("the target violates the protocol"))
            return
        self._commands.append(item)
        self._filled.set()

    async def next(self, timeout_s: float) -> Item | None:
        """Return the next item, or None after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._signals and not self._commands:
                    self._filled.clear()
                    await self._filled.wait()
        except TimeoutError:
            return None
        # Commands sent before the stream broke come first: one may report the commit.
        if self._signals and not (isinstance(self._signals[0], Broken) and self._commands):
            return self._signals.popleft()
        return self._commands.popleft()


class Lease:
    """Connect an export to its stream: commands come in and events go out until either end closes it."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        # One per reply; the target waits for each.
        self._events: deque[worker_pb2.ExportEvent] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self._broken = False

    def send(self, event: worker_pb2.ExportEvent) -> None:
        """Send to the target if it is still there."""
        if not self._broken and not self._closed:
            self._events.append(event)
            self._changed.set()

    def close(self) -> None:
        """Close after the remaining events have been sent."""
        self._closed = True
        self._changed.set()

    def break_off(self, reason: str) -> None:
        """Record that the target's end of the stream is gone."""
        if not self._broken:
            self._broken = True
            self.inbox.signal(Broken(reason))
            self._changed.set()

    async def next_event(self) -> worker_pb2.ExportEvent | None:
        """Return the next event to write, or None at the end."""
        while not self._events:
            if self._closed or self._broken:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()


def block_identities(hashes: Iterable[bytes]) -> list[worker_pb2.BlockIdentity]:
    """Return block hashes as messages."""
    return [worker_pb2.BlockIdentity(hash=name) for name in hashes]


def block_hashes(blocks: Sequence[worker_pb2.BlockIdentity]) -> list[bytes]:
    """Return the block hashes of messages."""
    return [block.hash for block in blocks]


def exported_of(opened: worker_pb2.ExportOpened, key: RequestKey) -> Exported:
    """Return the snapshot for the target's engine; `key` identifies the request on the target."""
    return Exported(
        key=key,
        frontend_id=opened.frontend_id,
        epoch=opened.epoch,
        frames=list(opened.frames),
        output_token_ids=list(opened.output_token_ids),
        phase=PHASES.get(opened.phase, Phase.PREFILL),
        traceparent=opened.traceparent,
        block_hashes=block_hashes(opened.blocks),
        adapter_version=opened.adapter_version,
    )


# More than any time, length or sum of times of a request; numbers beyond it would overflow.
_NUMBER_MAX: Final = 1e12


def _check_numbers(message: Message) -> None:
    """Raise SourceLost for a fraction that is negative, too large or not a number."""
    for field, value in message.ListFields():
        if isinstance(value, Message):
            _check_numbers(value)
        elif isinstance(value, float) and not 0.0 <= value <= _NUMBER_MAX:
            raise SourceLost(f"the source sent {field.name}={value:g}")


def pause_of(paused: worker_pb2.ExportPaused) -> ExportedPause:
    """Return the remaining state for the target's engine. Raise SourceLost if a number in the message, also
    one that is not part of it, is impossible."""
    _check_numbers(paused)
    return ExportedPause(
        new_output_token_ids=list(paused.new_output_token_ids),
        computed_tokens=paused.computed_tokens,
        block_hashes=block_hashes(paused.blocks),
        sampling_state=paused.sampling_state,
        token_interval_ms=paused.token_interval_ms,
        predicted_remaining_tokens=(
            paused.predicted_remaining_tokens if paused.HasField("predicted_remaining_tokens") else None
        ),
        waited_s=paused.waited_s,
        answering_for_s=paused.answer_pace.since_first_s,
    )


def tickets_of(opened: worker_pb2.ExportOpened) -> list[Ticket]:
    """Return the tickets for the source's blocks, one per endpoint. Raise KvTransferError."""
    try:
        return [Ticket(secret) for secret in opened.kv_tickets]
    except ValueError as error:
        raise KvTransferError(f"the source gave no ticket: {error}") from error
