"""The connections between a worker and its engine's other nodes, and the worker's end of them: wait for the
nodes, and notice when one of them is gone.

Messages are msgpack over TCP, prefixed with their length.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Mapping
from functools import partial
from typing import Final, TypeAlias

import msgspec

from tailrace import __version__ as tailrace_version
from tailrace.service.sockets import probe_when_idle
from tailrace.service.tasks import cancel, supervise
from worker_agent.engine.errors import EngineSettingError
from worker_agent.parallel.node_span import ADDRESS, PORT, NodeSpan
from worker_agent.parallel.rank_messages import encode, read_frame

log = logging.getLogger(__name__)

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
    """Every node has joined: start the ranks. `settings`: the worker's EngineOptions, as JSON.

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


_JOIN_S: Final = 10.0


class Nodes:
    """The worker's connections to the other nodes of its engine. Event loop only."""

    def __init__(self, span: NodeSpan, vllm_version: str) -> None:
        self._span = span
        self._vllm_version = vllm_version
        self._joined: dict[int, NodeStream] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._complete = asyncio.Event()
        self._started = False
        # Gets which node is gone, once `start` was called.
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def gather(self, seconds: float) -> None:
        """Wait until every node has joined, and free the port again.

        Raises EngineSettingError if the worker cannot listen where the settings say, and RuntimeError naming
        the nodes that have not joined within `seconds`.
        """
        span = self._span
        try:
            server = await asyncio.start_server(self._accept, span.address, span.port)
        except OSError as error:
            raise EngineSettingError(_listen_error(span, error)) from error
        log.info("waiting for nodes %s at %s", _numbers(self._missing()), span.meeting)
        try:
            async with asyncio.timeout(seconds):
                await self._complete.wait()
        except TimeoutError:
            missing = _numbers(self._missing())
            await self.close()
            raise RuntimeError(
                f"nodes {missing} of {span.nodes} did not join at {span.meeting} within {seconds:g} s: run "
                f"`tailrace serve ranks --worker {span.meeting} --node N` on each"
            ) from None
        finally:
            server.close()

    @property
    def address(self) -> str:
        """This machine's address, as the other nodes reach it; empty if all have left."""
        return next((stream.own for stream in self._joined.values()), "")

    def start(self, settings: bytes, model: str) -> None:
        """Tell the nodes to start their ranks; from now on, `lost` tells if one leaves.

        See node_messages.Start for the arguments.
        """
        self._started = True
        for stream in self._joined.values():
            stream.send(Start(settings, model))
        for node in self._missing():
            # Left after `gather` had returned.
            self._report_lost(node, "")

    def loaded(self, meetings: Mapping[int, str]) -> None:
        """Tell the nodes that the engine runs. `meetings`: Loaded.meeting, by node."""
        for node, stream in self._joined.items():
            stream.send(Loaded(meetings[node]))

    async def stop(self) -> None:
        """Tell the nodes that the engine has stopped, and disconnect."""
        for stream in self._joined.values():
            stream.send(Stopped())
        await self.close()

    async def close(self) -> None:
        """Disconnect."""
        await cancel(*self._watching)
        for stream in self._joined.values():
            stream.close()

    def _missing(self) -> list[int]:
        return [node for node in range(1, self._span.nodes) if node not in self._joined]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = NodeStream(reader, writer)
        join: Join | None = None
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, OSError, ValueError):
            async with asyncio.timeout(_JOIN_S):
                join = await stream.read_join()
        if join is None:
            log.warning(
                "%s connected to %s but is no `tailrace serve ranks`", stream.peer, self._span.meeting
            )
            stream.close()
        elif reason := self._refusal(join):
            log.warning("node %d at %s was refused: %s", join.node, stream.peer, reason)
            stream.send(Refused(reason))
            stream.close()
        else:
            self._joined[join.node] = stream
            log.info("node %d of %d joined from %s", join.node, self._span.nodes, stream.peer)
            watching = supervise("nodes", partial(self._watch, join.node, stream), f"node {join.node}")
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
            if not self._missing():
                self._complete.set()

    def _refusal(self, join: Join) -> str:
        """Return why this node cannot take part; empty if it can."""
        nodes = self._span.nodes
        if self._complete.is_set():
            return "the engine is starting already"
        if not 0 < join.node < nodes:
            return f"--node {join.node}: with nnodes {nodes}, nodes besides the worker are 1 to {nodes - 1}"
        if join.node in self._joined:
            return f"--node {join.node}: has joined from {self._joined[join.node].peer} already"
        for name, theirs, ours in (
            ("tailrace", join.tailrace, tailrace_version),
            ("vllm", join.vllm, self._vllm_version),
        ):
            if theirs != ours:
                return f"{name} {theirs} there, {ours} here"
        return ""

    async def _watch(self, node: int, stream: NodeStream) -> None:
        await stream.wait_closed()
        self._joined.pop(node, None)
        stream.close()
        if self._started:
            self._report_lost(node, f" ({stream.peer})")
        else:
            # It may come back.
            log.warning("node %d at %s left again", node, stream.peer)

    def _report_lost(self, node: int, where: str) -> None:
        if not self.lost.done():
            self.lost.set_result(f"node {node} of {self._span.nodes}{where} is gone")


def _listen_error(span: NodeSpan, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{PORT} {span.port}: in use on {span.address}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{ADDRESS} {span.address}: not an address of this machine, and the worker is node 0"
    return f"{ADDRESS} {span.address}, {PORT} {span.port}: {error.strerror or error}"


def _numbers(nodes: list[int]) -> str:
    return ", ".join(map(str, nodes))
