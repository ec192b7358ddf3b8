"""The answer of a client that reconnects for the rest of it: what it has received over all connections."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping

from tests.harness.loadgen import StreamResult, decode_body

_DONE = b"[DONE]"
# Front ends send this to an older request: a later one has the answer (frontend_svc/answers/opening.py).
_OVERTAKEN = b"being resumed by a later request"
_RETRY_STATUSES = frozenset({0, 429, 503})


class ResumeHeader(enum.StrEnum):
    """The header with which a client reconnects."""

    EVENT = "Last-Event-ID"
    KEY = "Idempotency-Key"


class ReceivedAnswer:
    """Events of one answer: each must arrive exactly once, in order."""

    def __init__(self, header: ResumeHeader, key: str) -> None:
        """`key`: unique to this request."""
        self._way = header
        self._key = key
        self._last_id = ""
        self.events: list[bytes] = []
        # Arrival times of new events, in seconds of time.perf_counter.
        self.times: list[float] = []
        # Connections that delivered events.
        self.connections = 0
        # Connections that ended because a later one had the answer.
        self.overtaken = 0
        # The first violation; empty: none.
        self.violation = ""

    @property
    def whole(self) -> bool:
        """Whether the last event has arrived."""
        return self.events[-1:] == [_DONE]

    @property
    def ended(self) -> bool:
        """Whether there is nothing to reconnect for."""
        return self.whole or bool(self.violation)

    def headers(self) -> Mapping[str, str]:
        """Return the headers of the next request."""
        if self._way is ResumeHeader.KEY:
            return {self._way: self._key}
        return {self._way: self._last_id} if self._last_id else {}

    def add_connection(self, result: StreamResult) -> None:
        """Add the events of a connection that has ended."""
        if result.status != 200:
            self._refused(result)
            return
        known = len(self.events)
        first = 0 if self._way is ResumeHeader.KEY else known
        number = first
        for number, (event_id, data) in enumerate(_whole_events(result.body), first + 1):
            if self.violation or not self._check_event(event_id, data):
                break
            self._add(number, event_id, data)
        self.connections += number > first
        self.times += result.event_times[known - first :]

    def result(self) -> StreamResult:
        """Return the answer as if it had been received over one connection."""
        lines = b"".join(b"data: %b\n\n" % event for event in self.events)
        result = StreamResult(0.0, list(self.times), status=200, body=b"HTTP/1.1 200 OK\r\n\r\n" + lines)
        result.tokens = next((_completion_tokens(event) for event in reversed(self.events[:-1])), 0)
        result.error = self.violation
        return result

    def _refused(self, result: StreamResult) -> None:
        if _OVERTAKEN in result.body:
            self.overtaken += 1
        elif result.status not in _RETRY_STATUSES:
            body_end = result.body[-300:].decode(errors="replace")
            self.violation = f"after {len(self.events)} events: HTTP {result.status}: {body_end}"

    def _check_event(self, event_id: str, data: bytes) -> bool:
        """Return whether it is an event of the answer. Errors have no ID; one that asks to retry may come
        first."""
        if event_id:
            return True
        if _OVERTAKEN in data:
            self.overtaken += 1
        elif self.events or _error_code(data) not in _RETRY_STATUSES:
            self.violation = (
                f"after {len(self.events)} events, an event without an ID: {data.decode(errors='replace')}"
            )
        return False

    def _add(self, number: int, event_id: str, data: bytes) -> None:
        if event_id.rpartition(".")[2] != str(number):
            self.violation = f"event {number} has the ID {event_id}"
        elif number > len(self.events):
            self.events.append(data)
            self._last_id = event_id
        elif self.events[number - 1] != data:
            old = self.events[number - 1]
            self.violation = f"event {number} was {old!r} and is now {data!r}"


def _whole_events(body: bytes) -> Iterator[tuple[str, bytes]]:
    """Return ID and data of each complete event."""
    for event in decode_body(body).split(b"\n\n")[:-1]:
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
