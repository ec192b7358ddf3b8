"""uvicorn's HTTP protocol with bounds on what a connection may send before it has a complete request, and on
how many wait for another one.

uvicorn's own options for this (`h11_*`) apply to its slower protocol only. A client needs no key for any of
it: what is over a bound is answered with 400, 408 or 431 in OpenAI's error format, and the connection closed;
a request for a WebSocket, which would have none, with 403.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any, ClassVar, Final

from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from frontend_svc.api_server.middleware import SINGLE_HEADERS, Message, Receive, Send
from frontend_svc.api_server.request_limits import account_of_task
from frontend_svc.api_server.spec import DEFAULT_CONNECTION_LIMITS, DEFAULT_MAX_HEADER_BYTES, ConnectionLimits
from tailrace.service.openai_error import NO_WEB_SOCKETS, error_body
from tailrace.telemetry.incidents import loop_failed

# A refused client may go on sending for so long, and so much, while it is to read the answer.
_LINGER_S: Final = 1.0
_DISCARD_BYTES: Final = 64 << 20


class _OverBound(Exception):
    """The request is over a bound; the parser passes it on as its own error."""


class BoundedProtocol(HttpToolsProtocol):
    """One HTTP connection; see the module."""

    limits: ClassVar[ConnectionLimits] = DEFAULT_CONNECTION_LIMITS
    # Request line and header fields in all; one field may have a quarter of it.
    max_header_bytes: ClassVar[int] = DEFAULT_MAX_HEADER_BYTES
    max_header_fields: ClassVar[int] = 256
    # Connections whose header is not complete; first the one that has had most time.
    pending: ClassVar[dict[BoundedProtocol, asyncio.TimerHandle]] = {}

    # Answered connections that wait for another request, for as long as keep-alive allows; first the one that
    # has waited longest. They need no key either, and each takes one of the files that the process may open.
    idle: ClassVar[dict[BoundedProtocol, None]] = {}
    max_idle: ClassVar[int] = 1_000

    # Bytes since the last one of a body, or since the message began, and their header fields.
    _overhead_bytes = 0
    _fields = 0
    # Whether a request's body, or what may follow it, is not complete.
    _receiving = False
    # Why the header is refused, where the parser found it out.
    _status = HTTPStatus.BAD_REQUEST
    _problem = ""
    _refused = False
    _discarded_bytes = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """See uvicorn's."""
        super().__init__(*arguments, **named)
        self.app = _outlasting(self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a header."""
        super().connection_made(transport)
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_expecting()
        self.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; end the connection if it is over a bound."""
        if self._refused:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > _DISCARD_BYTES:
                self.transport.abort()
            return
        self.idle.pop(self, None)
        self._overhead_bytes += len(data)
        super().data_received(data)
        if self._overhead_bytes > self.max_header_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, self._too_large())

    def on_message_begin(self) -> None:
        """Begin to wait for the header of the next request."""
        self._fields = 0
        self._receiving = True
        super().on_message_begin()
        self._stop_expecting()
        self._expect_header()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a field. Raise _OverBound."""
        self._fields += 1
        if self._fields > self.max_header_fields:
            self._status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._problem = f"A request may have at most {self.max_header_fields} header fields."
            raise _OverBound
        if len(name) + len(value) > self.max_header_bytes // 4:
            self._status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._problem = f"A header field may have at most {self.max_header_bytes // 4} bytes."
            raise _OverBound
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin with the request, if the header is within its bounds. Raise _OverBound."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_header_bytes:
            self._status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._problem = self._too_large()
            raise _OverBound
        single = [name for name, _ in self.headers if name in SINGLE_HEADERS]
        if repeated := next((name for name in single if single.count(name) > 1), b""):
            self._problem = f"Only one {repeated.decode().title()} header is allowed."
            raise _OverBound
        if self.parser.should_upgrade() and self._get_upgrade() == b"websocket":
            # uvicorn would hand the connection to another protocol, which has no bounds.
            self._status = HTTPStatus.FORBIDDEN
            self._problem = NO_WEB_SOCKETS
            raise _OverBound
        self._overhead_bytes = 0
        self._stop_expecting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        self._overhead_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of a request; what follows is another one."""
        self._overhead_bytes = 0
        self._receiving = False
        if self.cycle is None or not self.cycle.response_complete:
            self._stop_expecting()
        # Else it was answered before: the body has ended uvicorn's wait for another request, ours goes on.
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request; the rest of this one, which nobody reads, has as long as a header."""
        super().on_response_complete()
        if self._receiving:
            self._unset_keepalive_if_required()
            self._expect_header()
        elif self.cycle.response_complete and not self.transport.is_closing():
            if len(self.idle) >= self.max_idle:
                oldest = next(iter(self.idle))
                del self.idle[oldest]
                oldest.transport.close()
            self.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed, or that is over a bound."""
        self._refuse(self._status, self._problem or msg)

    def _too_large(self) -> str:
        return f"The request line and header fields may have at most {self.max_header_bytes} bytes in all."

    def _expect_header(self) -> None:
        if self in self.pending or self._refused or self.transport.is_closing():
            return
        if len(self.pending) >= self.limits.max_pending:
            # The newest one may be a user's, who sends a header at once.
            next(iter(self.pending))._refuse(
                HTTPStatus.REQUEST_TIMEOUT, "Too many connections have sent no complete header."
            )
        self.pending[self] = self.loop.call_later(self.limits.header_timeout_s, self._header_late)

    def _stop_expecting(self) -> None:
        timer = self.pending.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _header_late(self) -> None:
        self._refuse(
            HTTPStatus.REQUEST_TIMEOUT,
            f"The header was not complete within {self.limits.header_timeout_s:g} s.",
        )

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """End the connection, with an error unless there was no request, or its response has begun."""
        self._stop_expecting()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        cycle = self.cycle
        with_app = cycle is not None and not (cycle.response_complete and cycle.scope is not self.scope)
        if self.headers is not None and not (with_app and cycle.response_started):
            body = error_body(status, "BadRequestError", message)
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
            if not with_app and self.transport.can_write_eof():
                # Closed at once, the connection would be reset while the client sends, and the answer lost.
                self.transport.write_eof()
                self.loop.call_later(_LINGER_S, self.transport.abort)
                return
        self.transport.close()


def _outlasting(app: Any) -> Any:
    """Return an app whose exceptions after a whole response are logged only.

    uvicorn would close the connection, on which a proxy may have sent another client's request already.
    vLLM's app raises what it has answered with 500.
    """

    async def call(scope: Message, receive: Receive, send: Send) -> None:
        is_whole = False

        async def watched(message: Message) -> None:
            nonlocal is_whole
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await app(scope, receive, watched)
        except Exception as error:
            if not is_whole:
                raise
            loop_failed("request", scope["path"], error)

    return call


class RequestIds(logging.Filter):
    """Give each line of the access log the id of its request: that of its first one in the engine. Drop the
    lines of probes: an edge's come each second.

    uvicorn logs a response when it begins, in the request's own context.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Set `request_id`; see logging.Filter."""
        account = account_of_task.get()
        record.request_id = "" if account is None else account.request_id
        # Client, method, path, version and status.
        arguments = record.args if isinstance(record.args, tuple) else ()
        return (*arguments[2:3], *arguments[4:5]) != ("/health", 200)


def show_request_ids() -> None:
    """Show the ids from now on, in text and in JSON, unless vLLM's arguments give a log configuration."""
    logging.getLogger("uvicorn.access").addFilter(RequestIds())
    access = LOGGING_CONFIG["formatters"]["access"]
    access["fmt"] += " %(request_id)s"
