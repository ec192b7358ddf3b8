"""Brings streams onto instances: new ones, and those that lost theirs."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final, Protocol

from frontend_svc.outbox import Outbox
from frontend_svc.placement import Placed, Placement, Refused
from frontend_svc.streams import Stream, StreamTable
from tailrace.service.failure import failure
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)

# Seconds between two looks at a fleet that can take nothing, if nothing changes in it.
_LOOK_AGAIN_S: Final = 0.5


class DispatchSink(Protocol):
    """What becomes of a stream that is being brought somewhere."""

    def on_placed(self, stream: Stream, placed: Placed, seconds: float) -> None:
        """It was submitted to an instance, `seconds` after placement began."""

    def on_unplaced(self, stream: Stream, reason: str, seconds: float) -> None:
        """It found no instance in time and is over."""


class Dispatch:
    """One task a stream that is between instances."""

    def __init__(
        self, table: StreamTable, placement: Placement, outbox: Outbox, sink: DispatchSink, wait_s: float
    ) -> None:
        """`wait_s`: for how long a stream may wait for an instance."""
        self._table = table
        self._placement = placement
        self._outbox = outbox
        self._sink = sink
        self._wait_s = wait_s
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def start(self, stream: Stream, avoid: frozenset[str] = frozenset()) -> None:
        """Find an instance for the stream; `avoid` only if there is no other."""
        task = asyncio.create_task(self._run(stream, avoid), name=f"place {stream.request_id}")
        self._tasks[stream.handle] = task
        task.add_done_callback(lambda done: self._done(stream, done))

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

    async def _run(self, stream: Stream, avoid: frozenset[str]) -> None:
        began_s = time.monotonic()
        while True:
            self._changed.clear()
            chosen = await self._choose(stream, avoid)
            if not self._table.is_live(stream) or stream.owner is not None:
                return
            if isinstance(chosen, Placed) and self.submit(stream, chosen.instance_id):
                self._sink.on_placed(stream, chosen, time.monotonic() - began_s)
                return
            waited_s = time.monotonic() - began_s
            if waited_s >= self._wait_s:
                reason = chosen.reason if isinstance(chosen, Refused) else f"{chosen.instance_id} went away"
                self._sink.on_unplaced(stream, reason, waited_s)
                return
            await self._wait(min(_LOOK_AGAIN_S, self._wait_s - waited_s))

    async def _choose(self, stream: Stream, avoid: frozenset[str]) -> Placed | Refused:
        chosen = await self._placement.choose(stream, avoid)
        if isinstance(chosen, Refused) and avoid:
            return await self._placement.choose(stream, frozenset())
        return chosen

    def submit(self, stream: Stream, instance_id: str) -> bool:
        """Give an orphan to an instance; False when that does not answer now."""
        submit = worker_pb2.Submit(
            handle=stream.handle,
            request_id=stream.request_id,
            epoch=stream.epoch,
            frames=stream.frames,
            output_token_ids=stream.token_ids,
            traceparent=stream.traceparent,
        )
        if stream.first_answer_s is not None:
            submit.answer_tokens = stream.accepted - stream.first_answer_index
            submit.answering_s = time.monotonic() - stream.first_answer_s
        if not self._outbox.send(instance_id, worker_pb2.AttachUp(submit=submit)):
            return False
        self._table.assign(stream, instance_id)
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
        if (error := failure(task)) is not None:
            # A fault of ours; its user must not wait for ever.
            log.error("placing %s failed", stream.request_id, exc_info=error)
            self._sink.on_unplaced(stream, "internal error", 0.0)
