"""A client that comes back for the rest of its answer: what it has of it, over all its connections."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping

from benchmarks.chaos.answers import unchunked
from benchmarks.loadgen import StreamResult

_DONE = b"[DONE]"
# What front ends tell whoever is late: a later request has the answer (frontend_svc/answers/coordinator.py).
_OVERTAKEN = b"being resumed by a later request"
_AGAIN = frozenset({0, 429, 503})


class Way(enum.StrEnum):
    """By what it comes back."""

    EVENT = "Last-Event-ID"
    KEY = "Idempotency-Key"


class Received:
    """Events of one answer: each exactly once, in their order."""

    def __init__(self, way: Way, key: str) -> None:
        """`key`: of this request alone."""
        self._way = way
        self._key = key
        self._last_id = ""
        self.events: list[bytes] = []
        # When events came that were new; seconds of time.perf_counter.
        self.times: list[float] = []
        # Connections that brought any.
        self.connections = 0
        # Of connections that ended because a later one had the answer.
        self.overtaken = 0
        # A rule that was broken; empty: none.
        self.wrong = ""

    @property
    def whole(self) -> bool:
        """The last event is there."""
        return self.events[-1:] == [_DONE]

    @property
    def ended(self) -> bool:
        """There is nothing to come back for."""
        return self.whole or bool(self.wrong)

    def headers(self) -> Mapping[str, str]:
        """Of the next request."""
        if self._way is Way.KEY:
            return {self._way: self._key}
        return {self._way: self._last_id} if self._last_id else {}

    def take(self, result: StreamResult) -> None:
        """A connection has ended."""
        if result.status != 200:
            self._refused(result)
            return
        known = len(self.events)
        first = 0 if self._way is Way.KEY else known
        number = first
        for number, (event_id, data) in enumerate(_whole_events(result.body), first + 1):
            if self.wrong or not self._is_event(event_id, data):
                break
            self._add(number, event_id, data)
        self.connections += number > first
        self.times += result.event_times[known - first :]

    def result(self) -> StreamResult:
        """As if it had come over one connection."""
        lines = b"".join(b"data: %b\n\n" % event for event in self.events)
        result = StreamResult(0.0, list(self.times), status=200, body=b"HTTP/1.1 200 OK\r\n\r\n" + lines)
        result.tokens = next((_completion_tokens(event) for event in reversed(self.events[:-1])), 0)
        result.error = self.wrong
        return result

    def _refused(self, result: StreamResult) -> None:
        if _OVERTAKEN in result.body:
            self.overtaken += 1
        elif result.status not in _AGAIN:
            said = result.body[-300:].decode(errors="replace")
            self.wrong = f"after {len(self.events)} events: HTTP {result.status}: {said}"

    def _is_event(self, event_id: str, data: bytes) -> bool:
        """Errors have no id; one that says to try again may come before anything else."""
        if event_id:
            return True
        if _OVERTAKEN in data:
            self.overtaken += 1
        elif self.events or _error_code(data) not in _AGAIN:
            self.wrong = f"after {len(self.events)} events one without an id: {data.decode(errors='replace')}"
        return False

    def _add(self, number: int, event_id: str, data: bytes) -> None:
        if event_id.rpartition(".")[2] != str(number):
            self.wrong = f"event {number} came as {event_id}"
        elif number > len(self.events):
            self.events.append(data)
            self._last_id = event_id
        elif self.events[number - 1] != data:
            before = self.events[number - 1]
            self.wrong = f"event {number} was {before!r} and is {data!r}"


def _whole_events(body: bytes) -> Iterator[tuple[str, bytes]]:
    """Id and data of each."""
    for event in unchunked(body).split(b"\n\n")[:-1]:
        event_id = data = b""
        for line in event.splitlines():
            if line.startswith(b"id: "):
                event_id = line.removeprefix(b"id: ")
            elif line.startswith(b"data: "):
                data = line.removeprefix(b"data: ")
        if data:
            yield event_id.decode(), data


def _error_code(event: bytes) -> int:
    try:
        return int(json.loads(event)["error"]["code"])
    except (ValueError, TypeError, KeyError):
        return -1


def _completion_tokens(event: bytes) -> int:
    usage = json.loads(event).get("usage") or {}
    return int(usage.get("completion_tokens", 0))
