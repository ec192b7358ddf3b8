"""The ZMQ side: to vLLM's API server, this process is engine core 0.

The API server binds a ROUTER (requests to us) and a PULL (outputs from us); an engine core connects a DEALER
and a PUSH, and first says that it is ready (tailrace/wire/ready.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from frontend_svc.push_socket import PushSocket
from tailrace.wire import RequestType, UtilityCall, engine_identity, read_abort, read_utility

log = logging.getLogger(__name__)


class EngineCoreSink(Protocol):
    """What the API server asks for; called on the event loop, must not block."""

    def on_add(self, frames: Sequence[bytes]) -> None:
        """A request: vLLM's EngineCoreRequest."""

    def on_abort(self, request_ids: Sequence[str]) -> None:
        """The clients of these requests are gone, or the API server has seen a stop string."""

    def on_utility(self, call: UtilityCall, frames: Sequence[bytes]) -> None:
        """A call of one of the engine core's methods; to be answered by an output message."""


class EngineCoreSocket:
    """Engine core 0's two sockets."""

    def __init__(self, input_path: Path, output_path: Path, on_stuck: Callable[[], None]) -> None:
        """Unix sockets. `on_stuck` is called when the API server does not read any more."""
        self._context = zmq.asyncio.Context(io_threads=1)
        self._input = self._context.socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, engine_identity(0))
        self._input.setsockopt(zmq.RCVHWM, 0)
        self._input.connect(f"ipc://{input_path}")
        self._output = PushSocket(str(output_path), on_stuck)
        self.send = self._output.send

    async def announce(self, ready_response: bytes) -> None:
        """Tell the API server that its engine is ready. `ready_response`: vLLM's EngineCoreReadyResponse.

        Waits until the API server has started. Raises OSError, HandshakeFailed.
        """
        await self._output.connect()
        await self._input.send(ready_response)

    async def receive(self, sink: EngineCoreSink) -> None:
        """Hand every message of the API server to `sink`, until cancelled."""
        while True:
            kind, *frames = await self._input.recv_multipart()
            try:
                self._dispatch(kind, frames, sink)
            except msgspec.DecodeError:
                log.exception("cannot read a message of the API server")

    def close(self) -> None:
        """Close both sockets; unsent outputs are dropped."""
        self._input.close(linger=0)
        self._output.close()
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
                log.warning("message of unknown kind %r from the API server", kind)
