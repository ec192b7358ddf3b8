"""Who changed what, when, and with which outcome."""

from __future__ import annotations

import asyncio
import datetime
import errno
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import grpc
import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from tailrace.security.access import CHANGES
from tailrace.security.guard import caller
from tailrace.security.handlers import Context, Handler, wrap_handler
from tailrace.security.roles import NoIdentity, Role

log = logging.getLogger(__name__)

ON_BEHALF_OF: Final = "tailrace-on-behalf-of"
"""Metadata of a call that a scheduler passes on: who called it, as ROLE/NAME."""

# Stages of a thousand instances are the largest of requests.
_REQUEST_BYTES_MAX: Final = 65_536
_BEGUN: Final = "begun"


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line. Times are UTC, ISO 8601."""

    time: str
    # ROLE/NAME by its certificate; empty: the connection is in the clear.
    who: str
    # Where from, as gRPC writes it.
    peer: str
    # Whom a scheduler did it for; empty: the caller itself.
    on_behalf_of: str
    # Name of the admin API's method.
    what: str
    request: dict[str, object]
    # A gRPC status, or `begun` of a change that takes its time.
    outcome: str
    details: str
    seconds: float


class AuditSink(Protocol):
    """Where entries go."""

    def write(self, entry: AuditEntry) -> None:
        """Keep it; never raises, and never waits for a network."""


class AuditFile:
    """JSON lines, appended to a file, or to the log of the process."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError when the file cannot be appended to."""
        self._file: int | None = None
        # The file ends in the middle of a line.
        self._torn = False
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def write(self, entry: AuditEntry) -> None:
        """One line, in one write: several schedulers may share a file."""
        line = msgspec.json.encode(entry)
        if self._file is None:
            log.info("%s", line.decode())
            return
        whole = (b"\n" if self._torn else b"") + line + b"\n"
        try:
            # A disk that fills up takes a part of the line, and that is no error yet.
            written = os.write(self._file, whole)
            if written < len(whole):
                self._torn = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._torn = False
        except OSError as error:
            # What the operator asked for goes on; that it was asked is in this log then.
            log.error("the audit log cannot be written (%s): %s", error.strerror, line.decode())

    def close(self) -> None:
        """Nothing is written after."""
        if self._file is not None:
            os.close(self._file)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call, as it began."""

    who: str
    peer: str
    on_behalf_of: str
    what: str
    request: object


class Auditing(grpc.aio.ServerInterceptor):
    """Records every call that changes something, refused ones included."""

    def __init__(self, *sinks: AuditSink) -> None:
        self._sinks = sinks

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method not in CHANGES:
            return handler
        takes_time = bool(handler.response_streaming)

        @asynccontextmanager
        async def recorded(request: object, context: Context) -> AsyncIterator[None]:
            began_s = time.monotonic()
            # Asked of gRPC once the call is gone, it ends the process.
            who, on_behalf_of = caller_name(context), _on_behalf_of(context)
            asked = _Asked(who, context.peer(), on_behalf_of, method.rpartition("/")[2], request)
            if takes_time:
                self._write(asked, _BEGUN, "", 0.0)
            outcome, details = grpc.StatusCode.UNKNOWN.name, ""
            try:
                yield
                outcome = grpc.StatusCode.OK.name
            except asyncio.CancelledError:
                outcome, details = grpc.StatusCode.CANCELLED.name, "the caller is gone"
                raise
            except grpc.aio.AbortError:
                outcome, details = context.code().name, context.details()
                raise
            except Exception as error:
                details = str(error)
                raise
            finally:
                self._write(asked, outcome, details, time.monotonic() - began_s)

        return wrap_handler(handler, recorded)

    def _write(self, asked: _Asked, outcome: str, details: str, seconds: float) -> None:
        entry = AuditEntry(
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            who=asked.who,
            peer=asked.peer,
            on_behalf_of=asked.on_behalf_of,
            what=asked.what,
            request=_plain(asked.request),
            outcome=outcome,
            details=details,
            seconds=round(seconds, 3),
        )
        for sink in self._sinks:
            sink.write(entry)


def caller_name(context: Context) -> str:
    """ROLE/NAME; empty in the clear."""
    try:
        return str(caller(context))
    except NoIdentity:
        return ""


def _on_behalf_of(context: Context) -> str:
    """A scheduler alone is believed."""
    try:
        if caller(context).role is not Role.SCHEDULER:
            return ""
    except NoIdentity:
        return ""
    found = [value for key, value in context.invocation_metadata() or () if key == ON_BEHALF_OF]
    return str(found[-1]) if found else ""


def _plain(request: object) -> dict[str, object]:
    if not isinstance(request, Message):
        return {}
    if request.ByteSize() > _REQUEST_BYTES_MAX:
        return {"bytes": request.ByteSize()}
    return dict(MessageToDict(request, preserving_proto_field_name=True))
