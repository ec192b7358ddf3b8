"""Brings streams onto instances: new ones, those that lost theirs, and those that theirs hands back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from frontend_svc.links import Outbox, abort, request_bytes
from frontend_svc.placement import Placed, Placement, Refused
from frontend_svc.settings import Patience
from frontend_svc.streams import Stream, StreamTable
from tailrace.service.message_stream import MIN_MESSAGE_BYTES
from tailrace.service.tasks import task_error
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)


# Seconds between two looks at a fleet that can take nothing, if nothing changes in it.
_RETRY_S: Final = 0.5
# An instance that turned a request away is given no other for so long.
BUSY_S: Final = 0.5


class DispatchSink(Protocol):
    """What becomes of a stream that is being brought somewhere."""

    def on_placed(self, stream: Stream, placed: Placed, seconds: float) -> None:
        """It was submitted to an instance, `seconds` after placement began."""

    def on_unplaced(self, stream: Stream, reason: str, seconds: float) -> None:
        """It found no instance in time and is over."""

    def on_refused(self, stream: Stream, reason: str) -> None:
        """The scheduler will not have it, and it is over."""


def _nobody() -> frozenset[str]:
    return frozenset()


class Dispatch:
    """One task a stream that is between instances."""

    def __init__(
        self,
        table: StreamTable,
        placement: Placement,
        outbox: Outbox,
        sink: DispatchSink,
        patience: Patience,
    ) -> None:
        self._table = table
        self._placement = placement
        self._outbox = outbox
        self._sink = sink
        self._patience = patience
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        # Instances that turned a request away, and until when they get none.
        self._busy: dict[str, float] = {}

    def __len__(self) -> int:
        """Streams that are between instances."""
        return len(self._tasks)

    def start(
        self,
        stream: Stream,
        avoid: frozenset[str] = frozenset(),
        barred: Callable[[], frozenset[str]] = _nobody,
    ) -> None:
        """Find an instance for the stream. `avoid`: only if there is no other; `barred`: instances that
        it must not go to at that moment, asked for as long as it looks."""
        stream.placing_since_s = time.monotonic()
        self._begin(stream, avoid, barred)

    def start_waited(self, stream: Stream) -> None:
        """The stream has waited for its turn: find an instance in what is left of its time."""
        self._begin(stream, frozenset(), _nobody)

    def start_again(self, stream: Stream, busy: str, barred: Callable[[], frozenset[str]] = _nobody) -> None:
        """The instance turned the stream away: find another one in what is left of its time."""
        self._busy[busy] = time.monotonic() + BUSY_S
        self._begin(stream, frozenset(), barred)

    def cancel(self, stream: Stream) -> None:
        """The stream was closed."""
        task = self._tasks.pop(stream.handle, None)
        if task is not None:
            task.cancel()

    def fleet_changed(self) -> None:
        """Streams that wait for an instance look again."""
        self._changed.set()

    async def close(self) -> None:
        """Cancel everything under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, stream: Stream, avoid: frozenset[str], barred: Callable[[], frozenset[str]]) -> None:
        task = asyncio.create_task(self._run(stream, avoid, barred), name=f"place {stream.request_id}")
        self._tasks[stream.handle] = task
        task.add_done_callback(lambda done: self._done(stream, done))

    async def _run(self, stream: Stream, avoid: frozenset[str], barred: Callable[[], frozenset[str]]) -> None:
        while True:
            self._changed.clear()
            chosen = await self._choose(stream, avoid, barred)
            if not self._table.is_live(stream) or stream.owner is not None:
                return
            placing_s = time.monotonic() - stream.placing_since_s
            if isinstance(chosen, Placed):
                if chosen.instance_id not in barred() and self.submit(
                    stream, chosen.instance_id, chosen.pull
                ):
                    self._sink.on_placed(stream, chosen, placing_s)
                    return
                reason = f"{chosen.instance_id} cannot take it now"
            elif chosen.final:
                self._sink.on_refused(stream, chosen.reason)
                return
            else:
                reason = chosen.reason
            wait_s = self._patience.begun_s if stream.accepted else self._patience.new_s
            if placing_s >= wait_s:
                self._sink.on_unplaced(stream, reason, placing_s)
                return
            await self._wait(min(_RETRY_S, wait_s - placing_s))

    async def _choose(
        self, stream: Stream, avoid: frozenset[str], barred: Callable[[], frozenset[str]]
    ) -> Placed | Refused:
        never = barred() | self._unfit(stream)
        chosen = await self._placement.choose(stream, avoid | never)
        if isinstance(chosen, Refused) and not chosen.final and avoid - never:
            chosen = await self._placement.choose(stream, barred() | self._unfit(stream))
        if isinstance(chosen, Refused) and not chosen.final:
            return self._placement.last_resort(stream, barred() | self._unfit(stream)) or chosen
        return chosen

    def _unfit(self, stream: Stream) -> frozenset[str]:
        """Instances that turned somebody away a moment ago, or that take no message so large."""
        now_s = time.monotonic()
        self._busy = {instance: until_s for instance, until_s in self._busy.items() if until_s > now_s}
        size = request_bytes(stream.frames, stream.accepted)
        if size <= MIN_MESSAGE_BYTES:
            return frozenset(self._busy)
        outbox = self._outbox
        small = (each for each in outbox.attached() if outbox.max_message_bytes(each) < size)
        return frozenset(self._busy).union(small)

    def submit(self, stream: Stream, instance_id: str, pull: worker_pb2.Pull | None = None) -> bool:
        """Give an orphan to an instance; False when that does not answer now. `pull`: as in Placed."""
        submit = worker_pb2.Submit(
            handle=stream.handle,
            request_id=stream.request_id,
            epoch=stream.epoch,
            frames=stream.frames,
            output_token_ids=stream.token_ids,
            traceparent=stream.traceparent,
            suspect=time.monotonic() < stream.alone_until_s,
            pull=pull,
            adapter_version=stream.adapter_version,
        )
        if stream.first_answer_s is not None:
            submit.answer_tokens = stream.accepted - stream.first_answer_index
            submit.answering_s = time.monotonic() - stream.first_answer_s
        if not self._outbox.send(instance_id, worker_pb2.AttachUp(submit=submit)):
            return False
        self._table.assign(stream, instance_id)
        if not stream.accepted:
            stream.model = self._placement.model_of(instance_id)
        return True

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _done(self, stream: Stream, task: asyncio.Task[None]) -> None:
        if self._tasks.get(stream.handle) is task:
            del self._tasks[stream.handle]
        if (error := task_error(task)) is not None:
            # A fault of ours; its user must not wait for ever.
            log.error("placing %s failed", stream.request_id, exc_info=error)
            self._sink.on_unplaced(stream, "internal error", 0.0)


class Submitter(Protocol):
    """What brings streams onto instances (dispatch.Dispatch)."""

    def submit(self, stream: Stream, instance_id: str, pull: worker_pb2.Pull | None = None) -> bool:
        """Give an orphan to an instance; False when that does not answer now. `pull`: as in Placed."""

    def start(self, stream: Stream, avoid: frozenset[str] = frozenset()) -> None:
        """Find an instance for an orphan."""


class RelocationSink(Protocol):
    """What is told of each stream that moves."""

    def on_handed_back(self, stream: Stream, instance_id: str) -> None:
        """It was taken from this instance."""

    def on_placed(self, stream: Stream, placed: Placed, seconds: float) -> None:
        """It was submitted to another one, `seconds` after it was handed back."""


class Relocations:
    """One task a stream that is handed back, and at most one for each: it goes on elsewhere, computed anew,
    once there is a place.

    The instance drains, and has no KV of it or no time left. Until another instance takes the stream it stays
    where it is; then it is taken from its owner in one step, and what that still sends has an old epoch.
    """

    def __init__(
        self,
        table: StreamTable,
        placement: Placement,
        outbox: Outbox,
        dispatch: Submitter,
        sink: RelocationSink,
    ) -> None:
        self._table = table
        self._placement = placement
        self._outbox = outbox
        self._dispatch = dispatch
        self._sink = sink
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def hand_back(self, instance_id: str, message: worker_pb2.HandBack) -> None:
        """An instance asks for streams to be placed elsewhere; those that it does not own are ignored."""
        for handle, epoch in zip(message.handles, message.epochs, strict=False):
            stream = self._table.get(handle)
            if stream is None or handle in self._tasks or not _owns(instance_id, epoch, stream):
                continue
            task = asyncio.create_task(self._move(stream, instance_id), name=f"relocate {stream.request_id}")
            self._tasks[handle] = task
            task.add_done_callback(partial(self._done, handle))

    async def close(self) -> None:
        """Cancel everything under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _move(self, stream: Stream, instance_id: str) -> None:
        began_s, epoch, avoid = time.monotonic(), stream.epoch, frozenset({instance_id})
        chosen = await self._placement.choose(stream, avoid)
        if not self._table.is_live(stream) or not _owns(instance_id, epoch, stream):
            return
        if not isinstance(chosen, Placed) or chosen.instance_id == instance_id:
            log.debug("%s stays on %s, which hands it back", stream.request_id, instance_id)
            return
        self._table.orphan(stream)
        self._outbox.send(instance_id, abort([stream.handle]))
        self._sink.on_handed_back(stream, instance_id)
        if self._dispatch.submit(stream, chosen.instance_id, chosen.pull):
            self._sink.on_placed(stream, chosen, time.monotonic() - began_s)
        else:
            self._dispatch.start(stream, avoid)

    def _done(self, handle: int, task: asyncio.Task[None]) -> None:
        del self._tasks[handle]
        if (error := task_error(task)) is not None:
            # The stream is where it was.
            log.error("relocating a stream failed", exc_info=error)


def _owns(instance_id: str, epoch: int, stream: Stream) -> bool:
    return stream.owner == instance_id and stream.epoch == epoch
