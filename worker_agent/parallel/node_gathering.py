"""The worker's end: wait for the engine's other nodes, and notice when one of them is gone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from tailrace import __version__ as tailrace_version
from tailrace.service.tasks import cancel, supervise
from worker_agent.engine.errors import EngineSettingError
from worker_agent.parallel.node_messages import Join, Loaded, NodeStream, Refused, Start, Stopped
from worker_agent.parallel.node_span import ADDRESS, PORT, NodeSpan

log = logging.getLogger(__name__)

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
