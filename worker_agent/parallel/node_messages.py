"""Messages between the worker and its engine's other nodes: msgpack over TCP, prefixed with their length."""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias

import msgspec

from tailrace.service.sockets import probe_when_idle
from worker_agent.parallel.rank_messages import encode, read_frame

# A peer whose machine or network fails silently is lost after 20 s. The kernels exchange these probes, so
# that a process which is busy loading a model is not taken for dead.
_PROBE_AFTER_S: Final = 5
_PROBE_EVERY_S: Final = 5
_PROBES: Final = 3


class Join(msgspec.Struct, frozen=True, tag=True):
    """A node's first message. Every node must run the same versions."""

    node: int
    tailrace: str
    vllm: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The worker does not take this node."""

    reason: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """Every node has joined: start the ranks. `settings`: the worker's VllmSettings, as JSON.

    `model`: key of the model's identity if it is a folder, else empty.
    """

    settings: bytes
    model: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The engine runs. `meeting`: name of the files that this node's ranks share, removed at the end."""

    meeting: str


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The worker has stopped its engine in order."""


ToNode: TypeAlias = Refused | Start | Loaded | Stopped
_TO_NODE: Final[msgspec.msgpack.Decoder[ToNode]] = msgspec.msgpack.Decoder(ToNode)


class NodeStream:
    """One connection between a worker and a node."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # Of the other end, and of this one.
        self.peer: str = writer.get_extra_info("peername")[0]
        self.own: str = writer.get_extra_info("sockname")[0]
        probe_when_idle(writer.get_extra_info("socket"), _PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES)

    async def read_join(self) -> Join:
        """Read a node's first message. Raises as `read_frame` does, and ValueError for anything else."""
        return msgspec.msgpack.decode(await read_frame(self._reader), type=Join)

    async def read(self) -> ToNode:
        """Read the worker's next message. Raises as `read_join` does."""
        return _TO_NODE.decode(await read_frame(self._reader))

    async def wait_closed(self) -> None:
        """Return once the other end is gone; a node says nothing after it has joined."""
        try:
            await self._reader.read(1)
        except OSError:
            return

    def send(self, message: Join | ToNode) -> None:
        """Send a message. What does not arrive is found by the reader."""
        self._writer.write(encode(message))

    def close(self) -> None:
        """Close the connection after what was sent."""
        self._writer.close()
