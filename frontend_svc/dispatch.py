"""Place streams on instances: new streams, streams that lost their instance, and streams handed back by one.

Each stream that is between instances has one task here, which asks placement.py where to go until the stream
is submitted, refused or out of time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from frontend_svc.links import Outbox, abort_message, request_bytes
from frontend_svc.observer import StreamObserver
from frontend_svc.placement import NoPlacement, Placed, Placement
from frontend_svc.settings import WaitLimits
from frontend_svc.streams import Stream, StreamTable
from tailrace.service.message_stream import MIN_MESSAGE_BYTES
from tailrace.service.tasks import cancel, task_error
from tailrace.telemetry.incidents import loop_failed, loop_named
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)

_PLACING: Final = loop_named("placing")
_RELOCATING: Final = loop_named("relocating")

# Seconds between attempts while no instance can take the stream and the fleet does not change.
_RETRY_S: Final = 0.5
# Seconds for which an instance gets no request after rejecting one as busy.
BUSY_S: Final = 0.5


def _none_forbidden() -> frozenset[str]:
    return frozenset()


class Dispatcher:
    """Run one placement task for each stream that is between instances."""

    def __init__(
        self,
        table: StreamTable,
        placement: Placement,
        outbox: Outbox,
        observer: StreamObserver,
        wait_limits: WaitLimits,
        on_unplaced: Callable[[Stream, str, float], None],
        on_refused: Callable[[Stream, str], None],
    ) -> None:
        """Place nothing yet. Both callbacks have to end the stream, for the reason that they are given.

        `on_unplaced(stream, reason, seconds)`: it found no instance within its wait limit;
        `on_refused(stream, reason)`: the scheduler refused it for good.
        """
        self._table = table
        self._placement = placement
        self._outbox = outbox
        self._observer = observer
        self._wait_limits = wait_limits
        self._on_unplaced = on_unplaced
        self._on_refused = on_refused
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        # Instances that rejected a request as busy, each with the monotonic time until which it gets none.
        self._busy: dict[str, float] = {}

    def __len__(self) -> int:
        """Count streams that are between instances."""
        return len(self._tasks)

    def start(
        self,
        stream: Stream,
        avoid: frozenset[str] = frozenset(),
        forbidden: Callable[[], frozenset[str]] = _none_forbidden,
    ) -> None:
        """Begin to place the stream; its wait limit starts now.

        `avoid`: instances to use only if there is no other. `forbidden`: returns instances that must not be
        used at the moment of the call; called before each attempt.
        """
        stream.placing_since_s = time.monotonic()
        self._begin(stream, avoid, forbidden)

    def start_after_wait(self, stream: Stream) -> None:
        """Place a stream that waited for its tenant's turn, within what is left of its wait limit."""
        self._begin(stream, frozenset(), _none_forbidden)

    def start_elsewhere(
        self, stream: Stream, busy: str, forbidden: Callable[[], frozenset[str]] = _none_forbidden
    ) -> None:
        """Place a stream that the instance `busy` rejected, within what is left of its wait limit."""
        self._busy[busy] = time.monotonic() + BUSY_S
        self._begin(stream, frozenset(), forbidden)

    def cancel(self, stream: Stream) -> None:
        """Stop placing a stream that was closed."""
        task = self._tasks.pop(stream.handle, None)
        if task is not None:
            task.cancel()

    def fleet_changed(self) -> None:
        """Have waiting streams try again now."""
        self._changed.set()

    async def close(self) -> None:
        """Cancel all placements."""
        await cancel(*self._tasks.values())

    def _begin(self, stream: Stream, avoid: frozenset[str], forbidden: Callable[[], frozenset[str]]) -> None:
        task = asyncio.create_task(self._run(stream, avoid, forbidden), name=f"place {stream.request_id}")
        self._tasks[stream.handle] = task
        task.add_done_callback(lambda done: self._done(stream, done))

    async def _run(
        self, stream: Stream, avoid: frozenset[str], forbidden: Callable[[], frozenset[str]]
    ) -> None:
        while True:
            self._changed.clear()
            chosen = await self._choose(stream, avoid, forbidden)
            if not self._table.is_live(stream) or stream.owner is not None:
                return
            placing_s = time.monotonic() - stream.placing_since_s
            if isinstance(chosen, Placed):
                if chosen.instance_id not in forbidden() and self.submit(
                    stream, chosen.instance_id, chosen.pull
                ):
                    self._observer.placed(stream, chosen, placing_s)
                    return
                reason = f"{chosen.instance_id} cannot take it now"
            elif chosen.final:
                self._on_refused(stream, chosen.reason)
                return
            else:
                reason = chosen.reason
            wait_s = self._wait_s(stream)
            if placing_s >= wait_s:
                self._on_unplaced(stream, reason, placing_s)
                return
            await self._wait(min(_RETRY_S, wait_s - placing_s))

    async def _choose(
        self, stream: Stream, avoid: frozenset[str], forbidden: Callable[[], frozenset[str]]
    ) -> Placed | NoPlacement:
        never = forbidden() | self._unsuitable(stream)
        chosen = await self._placement.choose(stream, avoid | never)
        if isinstance(chosen, NoPlacement) and not chosen.final and avoid - never:
            chosen = await self._placement.choose(stream, forbidden() | self._unsuitable(stream))
        if isinstance(chosen, NoPlacement) and not chosen.final:
            return self._placement.last_resort(stream, forbidden() | self._unsuitable(stream)) or chosen
        return chosen

    def _wait_s(self, stream: Stream) -> float:
        begun = stream.accepted or stream.left_engine
        return self._wait_limits.resume_s if begun else self._wait_limits.place_s

    def _unsuitable(self, stream: Stream) -> frozenset[str]:
        """Return instances that were busy a moment ago or whose message limit is below the request's size."""
        now_s = time.monotonic()
        self._busy = {instance: until_s for instance, until_s in self._busy.items() if until_s > now_s}
        size = request_bytes(stream.frames, stream.accepted)
        if size <= MIN_MESSAGE_BYTES:
            return frozenset(self._busy)
        outbox = self._outbox
        small = (
            instance_id for instance_id in outbox.attached() if outbox.max_message_bytes(instance_id) < size
        )
        return frozenset(self._busy).union(small)

    def submit(self, stream: Stream, instance_id: str, pull: worker_pb2.Pull | None = None) -> bool:
        """Submit an unowned stream to an instance; return False if it cannot be sent now. `pull`: see
        Placed."""
        submit = worker_pb2.Submit(
            handle=stream.handle,
            request_id=stream.request_id,
            epoch=stream.epoch,
            frames=stream.frames,
            output_token_ids=stream.token_ids,
            traceparent=stream.traceparent,
            suspect=time.monotonic() < stream.exclusive_until_s,
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
            # A bug here must not leave the client waiting forever.
            loop_failed(_PLACING, stream.request_id, error)
            self._on_unplaced(stream, "internal error", 0.0)


class Relocations:
    """Move streams that a draining instance hands back, by recomputing them on another instance.

    The instance hands back what it has no KV of, or no time to migrate. A stream stays with its owner until
    another instance is chosen; then it is taken from the owner in one step, so that late outputs carry an old
    epoch. There is at most one task per stream.
    """

    def __init__(
        self,
        table: StreamTable,
        placement: Placement,
        outbox: Outbox,
        dispatch: Dispatcher,
        observer: StreamObserver,
    ) -> None:
        self._table = table
        self._placement = placement
        self._outbox = outbox
        self._dispatch = dispatch
        self._observer = observer
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def hand_back(self, instance_id: str, message: worker_pb2.HandBack) -> None:
        """Begin to relocate the streams that an instance hands back; those that it does not own are
        ignored."""
        for handle, epoch in zip(message.handles, message.epochs, strict=False):
            stream = self._table.get(handle)
            if stream is None or handle in self._tasks or not _owns(instance_id, epoch, stream):
                continue
            task = asyncio.create_task(self._move(stream, instance_id), name=f"relocate {stream.request_id}")
            self._tasks[handle] = task
            task.add_done_callback(partial(self._done, handle))

    async def close(self) -> None:
        """Cancel all relocations."""
        await cancel(*self._tasks.values())

    async def _move(self, stream: Stream, instance_id: str) -> None:
        began_s, epoch, avoid = time.monotonic(), stream.epoch, frozenset({instance_id})
        chosen = await self._placement.choose(stream, avoid)
        if not self._table.is_live(stream) or not _owns(instance_id, epoch, stream):
            return
        if not isinstance(chosen, Placed) or chosen.instance_id == instance_id:
            log.debug("%s stays on %s, which hands it back", stream.request_id, instance_id)
            return
        self._table.orphan(stream)
        self._outbox.send(instance_id, abort_message([stream.handle]))
        self._observer.handed_back(stream, instance_id)
        if self._dispatch.submit(stream, chosen.instance_id, chosen.pull):
            self._observer.placed(stream, chosen, time.monotonic() - began_s)
        else:
            self._dispatch.start(stream, avoid)

    def _done(self, handle: int, task: asyncio.Task[None]) -> None:
        del self._tasks[handle]
        if (error := task_error(task)) is not None:
            # The stream is still on its instance, so logging is enough.
            loop_failed(_RELOCATING, str(handle), error)


def _owns(instance_id: str, epoch: int, stream: Stream) -> bool:
    return stream.owner == instance_id and stream.epoch == epoch
