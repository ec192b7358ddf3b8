"""The audit log: who changed what through the admin API, when, and with which outcome."""

from __future__ import annotations

import asyncio
import datetime
import logging
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

from tailrace.files import LineFile
from tailrace.security.access import CHANGES, caller
from tailrace.security.handlers import Context, Handler, wrap_handler
from tailrace.security.roles import NoIdentity, Role

log = logging.getLogger(__name__)

ON_BEHALF_OF: Final = "tailrace-on-behalf-of"
"""Metadata key of a call that a scheduler forwards: its original caller, as ROLE/NAME."""

# The largest legitimate request, a SetStages for a thousand instances, is smaller.
_REQUEST_BYTES_MAX: Final = 65_536
_BEGUN: Final = "begun"


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One audit record, written as a line of JSON. Times are UTC in ISO 8601."""

    time: str
    # ROLE/NAME from the caller's certificate; empty on an unencrypted connection.
    who: str
    # The caller's address as gRPC formats it.
    peer: str
    # The original caller when a scheduler forwarded the call; empty for a direct call.
    on_behalf_of: str
    # The method's name in the admin API.
    what: str
    request: dict[str, object]
    # A gRPC status name, or `begun` when a streaming call starts.
    outcome: str
    details: str
    seconds: float


class AuditSink(Protocol):
    """A destination for audit entries."""

    def write(self, entry: AuditEntry) -> None:
        """Store the entry. Must not raise, and must not wait for the network."""


class AuditFile:
    """Append entries as JSON lines to a file, or write them to the process's log when there is no file."""

    def __init__(self, path: Path | None) -> None:
        """Open `path` for appending; None selects the process's log. Raise OSError when it cannot be
        opened."""
        self._file = None if path is None else LineFile(path)

    def write(self, entry: AuditEntry) -> None:
        """Append the entry. Several schedulers may share the file."""
        line = msgspec.json.encode(entry)
        if self._file is None:
            log.info("%s", line.decode())
            return
        try:
            self._file.append(line)
        except OSError as error:
            # The operator's call must not fail because of the audit log, so the entry goes to this log
            # instead.
            log.error("the audit log cannot be written (%s): %s", error.strerror, line.decode())

    def close(self) -> None:
        """Close the file; the sink must not be used afterwards."""
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, slots=True)
class _Call:
    """A call's properties, read when it starts."""

    caller: str
    peer: str
    on_behalf_of: str
    method: str
    request: object


class Auditing(grpc.aio.ServerInterceptor):
    """Record every call that changes something, including calls that are refused."""

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
        streaming = bool(handler.response_streaming)

        @asynccontextmanager
        async def recorded(request: object, context: Context) -> AsyncIterator[None]:
            began_s = time.monotonic()
            # Read these now: reading them from gRPC after the call has ended crashes the process.
            name, on_behalf_of = caller_name(context), _on_behalf_of(context)
            call = _Call(name, context.peer(), on_behalf_of, method.rpartition("/")[2], request)
            if streaming:
                self._write(call, _BEGUN, "", 0.0)
            outcome, details = grpc.StatusCode.UNKNOWN.name, ""
            try:
                yield
                outcome = grpc.StatusCode.OK.name
            except asyncio.CancelledError:
                outcome, details = grpc.StatusCode.CANCELLED.name, "the caller disconnected"
                raise
            except grpc.aio.AbortError:
                outcome, details = context.code().name, context.details()
                raise
            except Exception as error:
                details = str(error)
                raise
            finally:
                self._write(call, outcome, details, time.monotonic() - began_s)

        return wrap_handler(handler, recorded)

    def _write(self, call: _Call, outcome: str, details: str, seconds: float) -> None:
        entry = AuditEntry(
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            who=call.caller,
            peer=call.peer,
            on_behalf_of=call.on_behalf_of,
            what=call.method,
            request=_request_fields(call.request),
            outcome=outcome,
            details=details,
            seconds=round(seconds, 3),
        )
        for sink in self._sinks:
            sink.write(entry)


def caller_name(context: Context) -> str:
    """Return the caller as ROLE/NAME, or an empty string on an unencrypted connection."""
    try:
        return str(caller(context))
    except NoIdentity:
        return ""


def _on_behalf_of(context: Context) -> str:
    """Return the original caller from the metadata. Only a scheduler may set it; for other callers return an
    empty string."""
    try:
        if caller(context).role is not Role.SCHEDULER:
            return ""
    except NoIdentity:
        return ""
    callers = [value for key, value in context.invocation_metadata() or () if key == ON_BEHALF_OF]
    return str(callers[-1]) if callers else ""


def _request_fields(request: object) -> dict[str, object]:
    if not isinstance(request, Message):
        return {}
    if request.ByteSize() > _REQUEST_BYTES_MAX:
        return {"bytes": request.ByteSize()}
    return dict(MessageToDict(request, preserving_proto_field_name=True))
