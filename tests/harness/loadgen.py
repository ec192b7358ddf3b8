"""A light HTTP load generator: N concurrent streamed completions, with the arrival times of all tokens.

It uses one asyncio protocol per stream and parses no JSON while streams run, so that on a small machine it
takes little CPU from what is measured. Run it by uvloop: it takes 11 us per token then, and 26 by asyncio's
own loop. Each SSE event with text counts as one token (vLLM sends one event per step; if a slow reader falls
behind, an event may carry several, so token totals come from `usage`).
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
from typing import cast
from urllib.parse import urlsplit


@dataclass(slots=True)
class StreamResult:
    """Result of one stream. Times are seconds of time.perf_counter."""

    started: float
    event_times: list[float] = field(default_factory=list)
    finished: float = 0.0
    tokens: int = 0
    status: int = 0
    error: str = ""
    body: bytes = b""

    @property
    def ttft(self) -> float:
        """Seconds to the first event with text; infinite without one."""
        return self.event_times[0] - self.started if self.event_times else float("inf")

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive events."""
        times = self.event_times
        return [b - a for a, b in itertools.pairwise(times)]


class _Stream(asyncio.Protocol):
    """Sends one request and records when each `data:` event arrives."""

    def __init__(self, request: bytes, done: asyncio.Future[StreamResult]) -> None:
        self._request = request
        self._done = done
        self._received = bytearray()
        self._scanned = 0
        self._transport: asyncio.Transport | None = None
        self.result = StreamResult(started=time.perf_counter())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

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

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self._transport is not None:
            self._transport.abort()

    def finish(self, error: str) -> None:
        """Complete the result with what was received, unless that has been done."""
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
    """Return completion_tokens of the last usage block in an SSE body, 0 if there is none."""
    at = body.rfind(b'"completion_tokens":')
    if at < 0:
        return 0
    digits = body[at + 20 : at + 32].lstrip()
    end = 0
    while end < len(digits) and digits[end : end + 1].isdigit():
        end += 1
    return int(digits[:end] or b"0")


def post_request(
    url: str, path: str, body: Mapping[str, object], headers: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """Return the bytes of a POST request with a JSON body, after which the server closes the connection."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        + f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


def completion_request(
    url: str,
    model: str,
    prompt: str,
    max_tokens: int,
    seed: int = 0,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Return the bytes of a streamed /v1/completions request that always generates max_tokens."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return post_request(url, "/v1/completions", body, headers)


def decode_body(body: bytes) -> bytes:
    """Return the body of an HTTP answer, possibly truncated, without chunk headers."""
    head, _, data = body.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return data
    out = bytearray()
    while data:
        size, _, data = data.partition(b"\r\n")
        try:
            length = int(size.partition(b";")[0], 16)
        except ValueError:
            break
        out += data[:length]
        data = data[length + 2 :]
    return bytes(out)


async def run_stream(
    url: str,
    request: bytes,
    timeout_s: float = 300.0,
    on_start: Callable[[StreamResult], None] = lambda result: None,
    first_s: float = math.inf,
    quiet_s: float = math.inf,
) -> StreamResult:
    """Run one request; if it fails, the result has `error` set.

    `on_start` gets the result, which grows while the stream runs. The client closes the connection if the
    first event takes more than `first_s`, or a later one more than `quiet_s`.
    """
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"{url} has no host and port")
    loop = asyncio.get_running_loop()
    done: asyncio.Future[StreamResult] = loop.create_future()
    protocol = _Stream(request, done)
    on_start(protocol.result)

    def remaining_s() -> float:
        began_s, times = protocol.result.started, protocol.result.event_times
        until_s = min(began_s + timeout_s, times[-1] + quiet_s if times else began_s + first_s)
        return until_s - time.perf_counter()

    try:
        async with asyncio.timeout(remaining_s()):
            await loop.create_connection(lambda: protocol, parts.hostname, parts.port)
        while not done.done() and (wait_s := remaining_s()) > 0:
            await asyncio.wait([done], timeout=wait_s)
        protocol.finish("TimeoutError: nothing more received in time")
    except (TimeoutError, OSError) as failure:
        protocol.finish(f"{type(failure).__name__}: {failure}")
    finally:
        protocol.close()
    return done.result()


async def run_streams(url: str, requests: Sequence[bytes], timeout_s: float = 300.0) -> list[StreamResult]:
    """Run all requests concurrently; return all results, those of failed ones with `error` set."""
    return list(await asyncio.gather(*(run_stream(url, request, timeout_s) for request in requests)))


async def run_steadily(
    url: str,
    request: Callable[[float], bytes],
    streams: int,
    measured_s: float,
    on_steady: Callable[[], None],
    on_end: Callable[[], None],
) -> tuple[list[StreamResult], float]:
    """Keep `streams` streams running, each followed by another; return all results without their bodies, and
    when the measured time began, in seconds of time.perf_counter.

    `request(share)` makes the next request, of this share of a stream's length: the first ones have from
    nearly nothing to all of it, so that later ones begin evenly. `on_steady`, when all the first have ended,
    and `on_end`, `measured_s` later, are called; what runs then runs to its end. A stream that fails is
    followed by none.
    """
    results: list[StreamResult] = []
    first_ended = [asyncio.Event() for _ in range(streams)]
    stop = asyncio.Event()

    async def follow(number: int) -> None:
        share = (number + 1) / streams
        while not stop.is_set():
            result = await run_stream(url, request(share))
            result.body = b""
            results.append(result)
            first_ended[number].set()
            if result.error:
                return
            share = 1.0

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(follow(number))
        for each in first_ended:
            await each.wait()
        began = time.perf_counter()
        on_steady()
        await asyncio.sleep(measured_s)
        on_end()
        stop.set()
    return results, began


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0..1) of the values lie; NaN if there are none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
