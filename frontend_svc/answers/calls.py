"""What vLLM's API server and `frontend_svc` tell each other of answers.

They are calls of engine-core methods, by vLLM's own protocol for them, with msgpack maps as arguments and
results.
"""

from __future__ import annotations

from typing import Final

import msgspec

OPEN: Final = "tailrace_open_answer"
NOTE: Final = "tailrace_note_answer"
CLOSE: Final = "tailrace_close_answer"
METHODS: Final = frozenset({OPEN, NOTE, CLOSE})

ANSWER_HEADER: Final = "tailrace-answer"
"""Among a request's trace headers: which run of which answer it belongs to, as `run_name` has it."""

UNLIMITED: Final = -1

# Of the number of an event: no answer has as many, and it must fit into a message.
_DIGITS_MAX: Final = 9
_LONGEST_ID: Final = 100


class OpenCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request has come that is to be kept, or resumed."""

    # Empty: no keys are asked for.
    tenant: str
    # Idempotency-Key and Last-Event-ID; empty: not given.
    key: str
    last_event_id: str
    path: str
    # Empty: that of the answer which is resumed.
    body: bytes
    digest: bytes
    # What the client wants it to be called; empty: it does not say.
    request_name: str
    streams: bool


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """How to run it."""

    answer_id: str
    run: int
    # Events that the client has, and how many tokens they may have at most; more are of a log that is lost.
    skip: int
    skip_tokens: int
    # Tokens that are in the log.
    tokens: int
    notes: list[bytes]
    body: bytes
    request_name: str
    created_s: int


class Denied(msgspec.Struct, frozen=True, kw_only=True):
    """Why it is not run."""

    status: int
    kind: str
    message: str


class OpenReply(msgspec.Struct, frozen=True, kw_only=True):
    """One of both; neither: it is to be run as if answers were not kept."""

    opened: Opened | None = None
    denied: Denied | None = None


class NoteCall(msgspec.Struct, frozen=True, kw_only=True):
    """The API server has drawn something at random that a client is about to see."""

    answer_id: str
    run: int
    note: bytes


class CloseCall(msgspec.Struct, frozen=True, kw_only=True):
    """The response has ended. `complete`: it was told to its end; `begun`: it was one (status 200)."""

    answer_id: str
    run: int
    complete: bool
    begun: bool


def run_name(answer_id: str, run: int) -> str:
    """One run of one answer; with a number of an event behind it, an event's id."""
    return f"{answer_id}.{run}"


def read_run_name(name: str) -> tuple[str, int] | None:
    """None: it is none."""
    answer_id, dot, run = name.rpartition(".")
    return (answer_id, int(run)) if dot and answer_id and run.isascii() and run.isdigit() else None


def read_event_id(event_id: str) -> tuple[str, int, int] | None:
    """Answer, run and number of an event. None: it is no id of ours."""
    name, _, number = event_id.rpartition(".")
    found = read_run_name(name) if len(event_id) <= _LONGEST_ID else None
    if found is None or not (number.isascii() and number.isdigit() and len(number) <= _DIGITS_MAX):
        return None
    return (*found, int(number))
