"""A light HTTP load: N streamed completions at once, with the times of every token.

One asyncio protocol a stream and no JSON parsing while it runs, so that on a small machine the load takes
little of what is being measured. Each SSE event that carries text counts as one token (vLLM sends one event
a step; when steps pile up in a slow reader an event may carry several, so token totals come from `usage`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import urlsplit


@dataclass(slots=True)
class StreamResult:
    """What one stream gave. Times are seconds of time.perf_counter."""

    started: float
    event_times: list[float] = field(default_factory=list)
    finished: float = 0.0
    tokens: int = 0
    status: int = 0
    error: str = ""
    body: bytes = b""

    @property
    def ttft(self) -> float:
        """Seconds to the first event that carries text."""
        return self.event_times[0] - self.started if self.event_times else float("inf")

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring events."""
        times = self.event_times
        return [b - a for a, b in itertools.pairwise(times)]


class _Stream(asyncio.Protocol):
    """Sends one request and notes when each `data:` event arrives."""

    def __init__(self, request: bytes, done: asyncio.Future[StreamResult]) -> None:
        self._request = request
        self._done = done
        self._received = bytearray()
        self._scanned = 0
        self._transport: asyncio.Transport | None = None
        self.result = StreamResult(started=time.perf_counter())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._received += data
        events = self._received.count(b"\ndata: {", self._scanned)
        # Keep a tail that may hold the start of an event split between two reads.
        if events:
            self._scanned = self._received.rfind(b"\ndata: {") + 1
            self.result.event_times.extend([now] * events)
        if b"data: [DONE]" in self._received[-64:]:
            self.finish("")

    def connection_lost(self, exc: Exception | None) -> None:
        self.finish(str(exc) if exc else "connection closed before [DONE]")

    def leave(self) -> None:
        """Close the connection, if it is open."""
        if self._transport is not None:
            self._transport.abort()

    def finish(self, error: str) -> None:
        """It is over; what came is the result."""
        if self._done.done():
            return
        result = self.result
        result.finished = time.perf_counter()
        body = bytes(self._received)
        result.body = body
        result.status = int(body[9:12] or b"0")
        result.error = error if result.status == 200 else f"HTTP {result.status} {error}".strip()
        result.tokens = _usage_tokens(body)
        self._done.set_result(result)


def _usage_tokens(body: bytes) -> int:
    """completion_tokens of the last usage block in an SSE body, 0 when there is none."""
    at = body.rfind(b'"completion_tokens":')
    if at < 0:
        return 0
    digits = body[at + 20 : at + 32].lstrip()
    end = 0
    while end < len(digits) and digits[end : end + 1].isdigit():
        end += 1
    return int(digits[:end] or b"0")


def completion_request(
    url: str,
    model: str,
    prompt: str,
    max_tokens: int,
    seed: int = 0,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """The bytes of a streamed /v1/completions request that always runs to max_tokens."""
    parts = urlsplit(url)
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        + f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def run_stream(
    url: str,
    request: bytes,
    timeout_s: float = 300.0,
    begun: Callable[[StreamResult], None] = lambda result: None,
    first_s: float = math.inf,
    quiet_s: float = math.inf,
) -> StreamResult:
    """Run one request; when it failed, its result has `error` set.

    `begun` is given the result while it grows. The client leaves when the first event takes more than
    `first_s`, or a later one more than `quiet_s`.
    """
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"{url} names no host and port")
    loop = asyncio.get_running_loop()
    done: asyncio.Future[StreamResult] = loop.create_future()
    protocol = _Stream(request, done)
    begun(protocol.result)

    def left_s() -> float:
        began_s, times = protocol.result.started, protocol.result.event_times
        until_s = min(began_s + timeout_s, times[-1] + quiet_s if times else began_s + first_s)
        return until_s - time.perf_counter()

    try:
        async with asyncio.timeout(left_s()):
            await loop.create_connection(lambda: protocol, parts.hostname, parts.port)
        while not done.done() and (wait_s := left_s()) > 0:
            await asyncio.wait([done], timeout=wait_s)
        protocol.finish("TimeoutError: nothing more came in time")
    except (TimeoutError, OSError) as failure:
        protocol.finish(f"{type(failure).__name__}: {failure}")
    finally:
        protocol.leave()
    return done.result()


async def run_streams(url: str, requests: Sequence[bytes], timeout_s: float = 300.0) -> list[StreamResult]:
    """Run all requests at once; every result, failed ones with `error` set."""
    return list(await asyncio.gather(*(run_stream(url, request, timeout_s) for request in requests)))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie; nan when there are none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
