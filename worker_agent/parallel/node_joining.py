"""A further node's end: join the worker, and notice when it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tailrace import __version__ as tailrace_version
from tailrace.address import parse_address
from worker_agent.parallel.node_messages import Join, Loaded, NodeStream, Refused, Start, Stopped

_RETRY_S: Final = 0.5
_ATTEMPT_S: Final = 10.0


class NodeRefused(RuntimeError):
    """The worker does not take this node, or did not come; the message says why."""


async def join(worker: str, node: int, vllm_version: str, seconds: float) -> tuple[NodeStream, Start]:
    """Join the worker at HOST:PORT and wait until every node has.

    Before the worker listens, and while its last engine still runs, the port is closed or vLLM's: both are
    retried. Raises NodeRefused, after `seconds` at the latest.
    """
    try:
        async with asyncio.timeout(seconds):
            while True:
                stream = await _connect(worker)
                if stream is not None:
                    start = await _wait_for_start(stream, Join(node, tailrace_version, vllm_version))
                    if start is not None:
                        return stream, start
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise NodeRefused(
            f"no engine started at {worker} within {seconds:g} s: --worker is the worker's master_addr and "
            "master_port"
        ) from None


async def follow(stream: NodeStream, loaded: Callable[[str], None]) -> bool:
    """Follow the worker until it has stopped its engine in order (True) or is gone (False).

    `loaded` is called with Loaded.meeting once the engine runs.
    """
    try:
        while True:
            message = await stream.read()
            if isinstance(message, Loaded):
                loaded(message.meeting)
            elif isinstance(message, Stopped):
                return True
    except (asyncio.IncompleteReadError, OSError, ValueError):
        return False


async def _wait_for_start(stream: NodeStream, message: Join) -> Start | None:
    """Join the worker at the other end, or return None if there is none. Raises NodeRefused."""
    start: Start | None = None
    try:
        stream.send(message)
        answer = await stream.read()
        if isinstance(answer, Refused):
            raise NodeRefused(f"the worker at {stream.peer} refused: {answer.reason}")
        if isinstance(answer, Start):
            start = answer
    except (asyncio.IncompleteReadError, OSError, ValueError):
        return None
    finally:
        if start is None:
            stream.close()
    return start


async def _connect(worker: str) -> NodeStream | None:
    """Connect, or return None if nobody listens."""
    host, port = parse_address(worker)
    try:
        async with asyncio.timeout(_ATTEMPT_S):
            return NodeStream(*await asyncio.open_connection(host, port))
    except (OSError, TimeoutError):
        return None
