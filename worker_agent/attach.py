"""Serve the data path's streams, one per attached front end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Final

from tailrace.service.message_stream import MessageStream, StreamBroken
from tailrace.service.tasks import first_ended
from tailrace.v1 import worker_pb2
from worker_agent.dispatch import Dispatcher
from worker_agent.frontends import AttachRefused, Downstream, FrontEnd, FrontEnds

log = logging.getLogger(__name__)

_HELLO_S: Final = 5.0
# Time for a refused front end to close its end.
_REFUSED_S: Final = 1.0


class AttachStreams:
    """Serve the stream of each front end."""

    def __init__(self, front_ends: FrontEnds, dispatch: Dispatcher, hello: worker_pb2.WorkerHello) -> None:
        self._front_ends = front_ends
        self._dispatch = dispatch
        self._hello = hello

    async def serve_stream(self, stream: MessageStream[worker_pb2.AttachUp]) -> None:
        """Serve one connection until either end closes it."""
        try:
            await self.serve(_incoming(stream), stream)
        except (AttachRefused, StreamBroken) as error:
            log.warning("a stream was refused: %s", error)

    async def serve(self, messages: AsyncIterator[worker_pb2.AttachUp], down: Downstream) -> None:
        """Serve a front end from its hello until either end closes. Raise AttachRefused."""
        hello = await self._read_hello(messages)
        try:
            front_end = self._front_ends.attach(hello, down)
        except AttachRefused as refusal:
            down.send(refusal_message(str(refusal)))
            await _wait_closed(messages)
            raise
        front_end.send(worker_pb2.AttachDown(hello=self._hello))
        try:
            await first_ended(self._read(front_end, messages), front_end.wait_closed())
        except StreamBroken:
            pass
        finally:
            # Immediately, whatever the tasks are doing: the front end's requests must be freed now.
            self._front_ends.detach(front_end)

    async def _read_hello(self, messages: AsyncIterator[worker_pb2.AttachUp]) -> worker_pb2.FrontendHello:
        try:
            async with asyncio.timeout(_HELLO_S):
                first = await anext(messages)
        except (TimeoutError, StopAsyncIteration) as error:
            raise AttachRefused(f"no hello within {_HELLO_S:g} s") from error
        if not first.HasField("hello") or not first.hello.frontend_id:
            raise AttachRefused("the first message must be a hello that names the front end")
        return first.hello

    async def _read(self, front_end: FrontEnd, messages: AsyncIterator[worker_pb2.AttachUp]) -> None:
        async for message in messages:
            if front_end.closed.is_set():
                return
            front_end.last_received_s = time.monotonic()
            self._dispatch.handle(front_end, message)


def refusal_message(reason: str) -> worker_pb2.AttachDown:
    """Build the message for a front end that is refused."""
    return worker_pb2.AttachDown(refused=worker_pb2.AttachRefused(reason=reason))


async def _incoming(stream: MessageStream[worker_pb2.AttachUp]) -> AsyncIterator[worker_pb2.AttachUp]:
    while (message := await stream.read()) is not None:
        yield message


async def _wait_closed(messages: AsyncIterator[worker_pb2.AttachUp]) -> None:
    """Wait shortly for the front end to close, so that the last message is not lost."""
    try:
        async with asyncio.timeout(_REFUSED_S):
            async for _ in messages:
                pass
    except (TimeoutError, StreamBroken):
        pass
