"""The calls by which vLLM's API server opens, annotates and closes kept answers at `frontend_svc`.

They travel as utility calls of vLLM's engine-core protocol, with msgpack maps as arguments and results.
"""

from __future__ import annotations

from typing import Final

import msgspec

OPEN: Final = "tailrace_open_answer"
NOTE: Final = "tailrace_note_answer"
CLOSE: Final = "tailrace_close_answer"
METHODS: Final = frozenset({OPEN, NOTE, CLOSE})

ANSWER_HEADER: Final = "tailrace-answer"
"""Key among a request's trace headers: the answer and run that it belongs to, formatted by `run_name`."""

UNLIMITED: Final = -1

# Digits of an event number: no answer has more events, and the number must fit into a message.
_DIGITS_MAX: Final = 9
_EVENT_ID_MAX: Final = 100


class OpenCall(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the answer of a new request, or resume a kept one."""

    # Empty if no API keys are required.
    tenant: str
    # Idempotency-Key and Last-Event-ID; empty if not sent.
    key: str
    last_event_id: str
    path: str
    # Empty: the body of the resumed answer.
    body: bytes
    digest: bytes
    # The request id that the client chose; empty if it did not.
    request_name: str
    streams: bool


class OpenedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How to run the request."""

    answer_id: str
    run: int
    # Number of events that the client has, and the most tokens that they may contain; if they contain more,
    # they come from a log that is lost.
    skip: int
    skip_tokens: int
    # Number of tokens in the log.
    tokens: int
    notes: list[bytes]
    body: bytes
    request_name: str
    created_s: int


class Denial(msgspec.Struct, frozen=True, kw_only=True):
    """Why the request is not run."""

    status: int
    kind: str
    message: str


class OpenReply(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two; neither: run the request as if answers were not kept."""

    opened: OpenedAnswer | None = None
    denied: Denial | None = None


class NoteCall(msgspec.Struct, frozen=True, kw_only=True):
    """Record a random value that the API server has drawn and a client is about to see."""

    answer_id: str
    run: int
    note: bytes


class CloseCall(msgspec.Struct, frozen=True, kw_only=True):
    """Report that the response has ended. `complete`: sent to its end; `begun`: its status was 200."""

    answer_id: str
    run: int
    complete: bool
    begun: bool


def run_name(answer_id: str, run: int) -> str:
    """Return the name of one run of an answer; followed by a dot and a number it is an event's id."""
    return f"{answer_id}.{run}"


def parse_run_name(name: str) -> tuple[str, int] | None:
    """Return the answer id and run number, or None if `name` is not a run name."""
    answer_id, dot, run = name.rpartition(".")
    return (answer_id, int(run)) if dot and answer_id and run.isascii() and run.isdigit() else None


def parse_event_id(event_id: str) -> tuple[str, int, int] | None:
    """Return the answer id, run and number of an event, or None if `event_id` is not one."""
    name, _, number = event_id.rpartition(".")
    run = parse_run_name(name) if len(event_id) <= _EVENT_ID_MAX else None
    if run is None or not (number.isascii() and number.isdigit() and len(number) <= _DIGITS_MAX):
        return None
    return (*run, int(number))
