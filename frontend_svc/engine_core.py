"""The ZMQ side: to vLLM's front half, this process is engine core 0.

The front half binds a ROUTER (requests to us) and a PULL (outputs from us); an engine core connects a DEALER
and a PUSH, and first says that it is ready (tailrace/wire/ready.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec
import zmq
import zmq.asyncio

from tailrace.wire import RequestType, UtilityCall, engine_identity, read_abort, read_utility

log = logging.getLogger(__name__)

# Messages that may wait for the front half. It reads them in a thread that does nothing else; so many unread
# ones mean that the process does not run.
_UNREAD_LIMIT: Final = 100_000


class EngineCoreSink(Protocol):
    """What the front half asks for; called on the event loop, must not block."""

    def on_add(self, frames: Sequence[bytes]) -> None:
        """A request: vLLM's EngineCoreRequest."""

    def on_abort(self, request_ids: Sequence[str]) -> None:
        """The clients of these requests are gone, or the front half has seen a stop string."""

    def on_utility(self, call: UtilityCall, frames: Sequence[bytes]) -> None:
        """A call of one of the engine core's methods; to be answered by an output message."""


class EngineCoreSocket:
    """Engine core 0's two sockets."""

    def __init__(self, input_address: str, output_address: str, on_stuck: Callable[[], None]) -> None:
        """`on_stuck` is called when the front half does not read any more; outputs are lost from then on."""
        self._on_stuck = on_stuck
        self._context = zmq.asyncio.Context(io_threads=1)
        self._input = self._context.socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, engine_identity(0))
        self._input.setsockopt(zmq.RCVHWM, 0)
        self._input.connect(input_address)
        # Outputs are sent from plain calls: a PUSH to a unix socket takes a message without waiting.
        self._output: zmq.Socket[bytes] = zmq.Context(self._context).socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, _UNREAD_LIMIT)
        self._output.connect(output_address)

    async def announce(self, ready_response: bytes) -> None:
        """Tell the front half that its engine is ready. `ready_response`: vLLM's EngineCoreReadyResponse."""
        await self._input.send(ready_response)

    def send(self, frames: Sequence[bytes]) -> None:
        """Outputs to the front half; never waits."""
        try:
            if len(frames) == 1:
                self._output.send(frames[0], zmq.NOBLOCK)
            else:
                self._output.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._on_stuck()

    async def receive(self, sink: EngineCoreSink) -> None:
        """Hand every message of the front half to `sink`, until cancelled."""
        while True:
            kind, *frames = await self._input.recv_multipart()
            try:
                self._dispatch(kind, frames, sink)
            except msgspec.DecodeError:
                log.exception("cannot read a message of the front half")

    def close(self) -> None:
        """Close both sockets; unsent outputs are dropped."""
        self._input.close(linger=0)
        self._output.close(linger=0)
        self._context.term()

    @staticmethod
    def _dispatch(kind: bytes, frames: list[bytes], sink: EngineCoreSink) -> None:
        match kind:
            case RequestType.ADD:
                sink.on_add(frames)
            case RequestType.ABORT:
                sink.on_abort(read_abort(frames))
            case RequestType.UTILITY:
                sink.on_utility(read_utility(frames), frames)
            case _:
                log.warning("message of unknown kind %r from the front half", kind)
