"""The fourth part of `make bench-overload`: a client that sends the largest of each kind, as often as it may.

It has a key of its own, without limits, and runs in another process, at the lowest priority, since it stands
for another machine. The largest is found first: from what once stopped a front end, halved until no limit of
the API server refuses it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from tests.harness.loadgen import decode_body
from tests.harness.servers import MODEL

_CHAT, _COMPLETIONS, _TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
_TIMEOUT_S: Final = 120.0
# Statuses of a limit on size; a 400 is one if it says what is allowed at most.
_TOO_LARGE: Final = frozenset({413, 431})
_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Large:
    """One kind of large request. `body(size)`: of this size in `unit`; `largest`: where the search begins."""

    name: str
    unit: str
    largest: int
    body: Callable[[int], bytes]
    path: str = _COMPLETIONS
    # Connections of the client.
    connections: int = 4
    headers: Callable[[int], Mapping[str, str]] = field(default=lambda size: {})
    # Whether the last byte is never sent.
    unfinished: bool = False


def _json(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


def _completion(size: int) -> bytes:
    return _json(prompt="x" * size, max_tokens=1)


def _small(size: int) -> bytes:
    return _completion(1)


KINDS: Final = (
    # The case with nobody else once more: its ratio tells how much is noise.
    Large("nobody, again", "bytes", 0, _completion, connections=0),
    # What a flood of any requests costs, over as many connections as the kinds below have.
    Large("smallest, 4 at a time", "byte", 1, _small),
    Large("smallest, 32 at a time", "byte", 1, _small, connections=32),
    Large("longest text", "bytes", 4 << 20, _completion),
    Large("text to /tokenize", "bytes", 4 << 20, lambda size: _json(prompt="x" * size), _TOKENIZE),
    Large(
        "most messages",
        "messages",
        150_000,
        lambda size: _json(messages=[{"role": "user", "content": "hello"}] * size, max_tokens=1),
        _CHAT,
    ),
    Large("largest body", "bytes", 63 << 20, lambda size: _json(prompt="x", user="x" * size, max_tokens=1)),
    Large("prompts, n=30 each", "prompts", 300, lambda size: _json(prompt=["x"] * size, n=30, max_tokens=1)),
    Large("uploads never finished", "bytes", 60 << 20, _completion, connections=30, unfinished=True),
    Large(
        "many headers",
        "headers of 100 bytes",
        100_000,
        _small,
        headers=lambda size: {f"x-{number}": "x" * 90 for number in range(size)},
    ),
    Large(
        "long request id",
        "bytes",
        60_000,
        _small,
        connections=32,
        headers=lambda size: {"x-request-id": "x" * size},
    ),
)


@dataclass(slots=True)
class Sent:
    """What the client sent: the size that it found to be allowed, and answers by status (0: none)."""

    size: int = 0
    statuses: dict[int, int] = field(default_factory=dict)


def _request(url: str, key: str, kind: Large, size: int) -> bytes:
    body = kind.body(size)
    fields = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **kind.headers(size)}
    head = f"POST {kind.path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def _exchange(url: str, request: bytes, until_s: float) -> tuple[int, bytes]:
    """Send a request; return its status and body, 0 if the connection ended or time ran out."""
    parts = urlsplit(url)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(max(0.0, until_s - time.perf_counter())):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(request)
            answer = await reader.read()
    except (OSError, TimeoutError):
        return 0, b""
    finally:
        if writer is not None:
            writer.transport.abort()
    status = answer[9:12]
    return (int(status), decode_body(answer)) if status.isdigit() else (0, b"")


async def _largest(url: str, key: str, kind: Large) -> int:
    """Return the largest size that no limit refuses, to within a factor of two."""
    size = kind.largest
    while size > 1:
        until_s = time.perf_counter() + (5.0 if kind.unfinished else _TIMEOUT_S)
        request = _request(url, key, kind, size)
        status, body = await _exchange(url, request[:-1] if kind.unfinished else request, until_s)
        limited = status in _TOO_LARGE or (status == 400 and b" at most " in body)
        # Without an answer: the server cut a connection whose request was too large to be read.
        if not limited and (status or kind.unfinished):
            break
        size //= 2
    return size


async def _attack(url: str, key: str, kind: Large, size: int, seconds: float) -> Sent:
    """Send requests of this size over the kind's connections, each at once after the last one's answer."""
    request = _request(url, key, kind, size)
    sent, until_s = Sent(size), time.perf_counter() + seconds

    async def one() -> None:
        while time.perf_counter() < until_s:
            status, _ = await _exchange(url, request[:-1] if kind.unfinished else request, until_s)
            sent.statuses[status] = sent.statuses.get(status, 0) + 1
            if status in (0, 429):
                await asyncio.sleep(_PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(kind.connections):
            group.create_task(one())
    return sent


def _run(connection: multiprocessing.connection.Connection, url: str, key: str) -> None:
    """Serve orders until the other end closes: (kind, None) to find a size, (kind, size, s) to attack."""
    os.nice(19)
    while True:
        try:
            name, size, seconds = connection.recv()
        except EOFError:
            return
        kind = next(kind for kind in KINDS if kind.name == name)
        if size is None:
            connection.send(asyncio.run(_largest(url, key, kind)))
        else:
            connection.send(asyncio.run(_attack(url, key, kind, size, seconds)))


class LargeClient:
    """The client in its own process."""

    def __init__(self, url: str, key: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_run, args=(other, url, key), daemon=True)
        self._process.start()
        other.close()

    async def largest(self, kind: Large) -> int:
        """Return the largest size that is allowed."""
        size: int = await self._ask(kind.name, None, 0.0)
        return size

    async def attack(self, kind: Large, size: int, seconds: float) -> Sent:
        """Send requests of this size for so long."""
        sent: Sent = await self._ask(kind.name, size, seconds)
        return sent

    async def _ask(self, *order: object) -> Any:
        self._connection.send(order)
        return await asyncio.to_thread(self._connection.recv)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(timeout=10)
        self._process.kill()


def kinds_named(names: Sequence[str]) -> list[Large]:
    """Return the kinds whose names contain one of these, and that with nobody; all if there are none."""
    return [
        kind
        for kind in KINDS
        if not names or not kind.connections or any(name in kind.name for name in names)
    ]
