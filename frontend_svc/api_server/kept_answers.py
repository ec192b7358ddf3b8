"""ASGI middleware for vLLM's Python app: clients can come back for the rest of their answers.

The events of a streamed answer get ids. A resumed request is run again from the log that `frontend_svc` keeps
(frontend_svc/answers): vLLM makes the same events of the same outputs, and those that the client has are
skipped. Values that vLLM does not derive from the request or the log (the time, the ids of tool calls) are
replaced by the original ones.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from typing import ClassVar, Final

import msgspec

from frontend_svc.answers.calls import (
    CLOSE,
    NOTE,
    OPEN,
    UNLIMITED,
    CloseCall,
    Denial,
    NoteCall,
    OpenCall,
    OpenedAnswer,
    OpenReply,
    run_name,
)
from frontend_svc.api_server.middleware import (
    HttpMiddleware,
    Message,
    Receive,
    Send,
    headers_of,
    path_of,
    send_error,
)
from frontend_svc.api_server.spec import DEFAULT_MAX_BODY_BYTES
from frontend_svc.api_server.tenants import read_body, replay_body, tenant_of_call

log = logging.getLogger(__name__)

PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths whose answers can be kept."""

# Seconds for a call of `frontend_svc`: longer than its own deadline.
_CALL_S: Final = 20.0
_KEY_LENGTH_MAX: Final = 255
_SEPARATOR: Final = b"\n\n"
_CREATED: Final = re.compile(rb'"created":\s*\d+')
# vLLM's form of an error in mid-stream; such an event is not part of the answer.
_ERROR: Final = re.compile(rb'data:\s*\{\s*"error"')
_DONE: Final = b"data: [DONE]"
_TOOL_CALLS: Final = b'"tool_calls":'


@dataclass(slots=True)
class Call:
    """The run that the current task serves."""

    opened: OpenedAnswer
    # Tokens that vLLM has received in this run.
    tokens: int = 0

    @property
    def name(self) -> str:
        """Return the run's name as the front end knows it."""
        return run_name(self.opened.answer_id, self.opened.run)


call_of_task: ContextVar[Call | None] = ContextVar("call_of_task", default=None)
"""The kept run that the current task serves; None if its answer is not kept."""


class _Body(msgspec.Struct):
    """The fields of a request that matter here; the rest is vLLM's."""

    stream: bool | None = None
    prompt: str | list[msgspec.Raw] | None = None
    use_beam_search: bool | None = None
    request_id: str | None = None


class _Function(msgspec.Struct):
    id: str | None = None


class _Message(msgspec.Struct):
    tool_calls: list[_Function] | None = None


class _Choice(msgspec.Struct):
    delta: _Message | None = None
    message: _Message | None = None


class _Response(msgspec.Struct):
    """The tool-call ids in a response or in one of its events."""

    choices: list[_Choice] = []

    def tool_ids(self) -> list[str]:
        """Return the ids in order."""
        messages = [
            message
            for choice in self.choices
            for message in (choice.delta, choice.message)
            if message is not None
        ]
        return [call.id for message in messages for call in message.tool_calls or () if call.id]


_bodies = msgspec.json.Decoder(_Body)
_responses = msgspec.json.Decoder(_Response)


class Unavailable(Exception):
    """`frontend_svc` does not answer."""


class FrontendCalls:
    """Call `frontend_svc`, which is the engine core to this process."""

    def __init__(self, call: Callable[..., Awaitable[object]]) -> None:
        """`call(method, *arguments)`: vLLM's utility call to an engine core."""
        self._call = call

    async def open(self, call: OpenCall) -> OpenReply:
        """Open an answer. Raise Unavailable."""
        return msgspec.convert(await self._invoke(OPEN, call), OpenReply, builtin_types=(bytes,))

    async def note(self, call: NoteCall) -> None:
        """Add a note; return once it is kept. Raise Unavailable."""
        await self._invoke(NOTE, call)

    async def close(self, call: CloseCall) -> None:
        """Close a run. Raise Unavailable."""
        await self._invoke(CLOSE, call)

    async def _invoke(self, method: str, call: msgspec.Struct) -> object:
        try:
            async with asyncio.timeout(_CALL_S):
                return await self._call(method, msgspec.to_builtins(call, builtin_types=(bytes,)))
        # vLLM raises a bare Exception with the failure message of a utility call.
        except Exception as error:
            raise Unavailable(str(error) or type(error).__name__) from error


class KeepAnswers(HttpMiddleware):
    """Keep answers and resume kept ones; see the module."""

    frontend: ClassVar[FrontendCalls | None] = None
    max_bytes: ClassVar[int] = DEFAULT_MAX_BODY_BYTES

    async def handle(self, scope: Message, receive: Receive, send: Send) -> None:
        frontend = self.frontend
        if frontend is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        path = path_of(scope)
        if path not in PATHS:
            await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        key = headers.get(b"idempotency-key", b"").decode("latin-1").strip()
        event_id = headers.get(b"last-event-id", b"").decode("latin-1").strip()
        body = await read_body(receive, self.max_bytes)
        if body is None:
            await _send_denial(
                send, Denial(status=400, kind="BadRequestError", message="The request body is incomplete.")
            )
            return
        parsed = _parse_body(body)
        streams = parsed is not None and bool(parsed.stream)
        problem = _denial_reason(key, event_id, parsed, bool(body))
        if problem is None and (key or event_id or streams):
            tenant = tenant_of_call.get()
            call = OpenCall(
                tenant="" if tenant is None else tenant.name,
                key=key,
                last_event_id=event_id,
                path=path,
                body=body,
                digest=_digest(body),
                request_name=_request_name(headers, parsed),
                streams=streams,
            )
            await self._keep(frontend, call, scope, receive, send)
        elif problem is not None and (key or event_id):
            await _send_denial(send, problem)
        else:
            await self._app(scope, replay_body(body, receive), send)

    async def _keep(
        self, frontend: FrontendCalls, call: OpenCall, scope: Message, receive: Receive, send: Send
    ) -> None:
        """Open the answer and run the request accordingly. `receive`: what follows the body."""
        try:
            reply = await frontend.open(call)
        except Unavailable as error:
            log.warning("cannot keep or resume answers now: %s", error)
            if call.key or call.last_event_id:
                message = "Answers cannot be kept or resumed now; try again later."
                await _send_denial(send, Denial(status=503, kind="ServiceUnavailableError", message=message))
                return
            reply = OpenReply()
        if reply.denied is not None:
            await _send_denial(send, reply.denied)
        elif reply.opened is None:
            await self._app(scope, replay_body(call.body, receive), send)
        else:
            await self._run(frontend, reply.opened, bool(call.key), scope, receive, send)

    async def _run(
        self,
        frontend: FrontendCalls,
        opened: OpenedAnswer,
        has_key: bool,
        scope: Message,
        receive: Receive,
        send: Send,
    ) -> None:
        call = Call(opened)
        connection = _ClientConnection(receive)
        response = _KeptResponse(call, frontend, has_key, send, connection)
        client_headers = [(name, value) for name, value in scope["headers"] if name not in _OURS]
        own_headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(opened.body)).encode()),
            (b"x-request-id", opened.request_name.encode("latin-1")),
        ]
        token = call_of_task.set(call)
        try:
            receive_body = replay_body(opened.body, connection.receive)
            await self._app(
                {**scope, "headers": [*client_headers, *own_headers]}, receive_body, response.send
            )
        finally:
            call_of_task.reset(token)
            await response.close_run()


_OURS: Final = frozenset({b"content-type", b"content-length", b"transfer-encoding", b"x-request-id"})


class _ClientConnection:
    """The receive side of the client's connection, which the server can end as well."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._disconnected = asyncio.Event()
        # The app has been told of the disconnect: what it still sends is not the answer.
        self.disconnect_sent = False

    def disconnect(self) -> None:
        """Make the app see a disconnect."""
        self._disconnected.set()

    async def receive(self) -> Message:
        """Return the client's next message."""
        disconnected = asyncio.ensure_future(self._disconnected.wait())
        received = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((disconnected, received), return_when=asyncio.FIRST_COMPLETED)
            message: Message = received.result() if received.done() else {"type": "http.disconnect"}
            self.disconnect_sent = self.disconnect_sent or message["type"] == "http.disconnect"
            return message
        finally:
            disconnected.cancel()
            received.cancel()


class _PastLog(Exception):
    """The client has more events than the log contains."""


class _KeptResponse:
    """Rewrite one response on its way to the client."""

    def __init__(
        self, call: Call, frontend: FrontendCalls, has_key: bool, send: Send, client: _ClientConnection
    ) -> None:
        self._call = call
        self._frontend = frontend
        self._has_key = has_key
        self._send = send
        self._client = client
        # The response start, held until there is a body to send.
        self._start: Message | None = None
        self._status = 0
        self._streams = False
        self._rest = b""
        # Events so far.
        self._events = 0
        self._failed = False
        # Whether the last event was the end of the stream.
        self._ended = False
        self._denied = False
        self._tool_ids = 0
        self._complete = False
        self._closed = False

    @property
    def _begun(self) -> bool:
        """Whether the response is an answer, not an error."""
        return self._status == HTTPStatus.OK

    async def close_run(self) -> None:
        """Tell the front end, once, that the run has ended."""
        if self._closed:
            return
        opened = self._call.opened
        closing = CloseCall(
            answer_id=opened.answer_id, run=opened.run, complete=self._complete, begun=self._begun
        )
        try:
            await self._frontend.close(closing)
        except Unavailable as error:
            log.warning("an answer was not closed: %s", error)
        self._closed = True

    async def send(self, message: Message) -> None:
        """Handle one ASGI message of the app."""
        if self._denied:
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._streams = self._begun and kind.startswith(b"text/event-stream")
            self._start = message
            if not self._begun and self._has_key:
                # A client that has read a refusal may use its key again at once.
                await self.close_run()
            if not self._begun or (self._streams and not self._call.opened.skip):
                await self._send_start()
        elif message["type"] != "http.response.body" or not self._begun:
            await self._send(message)
        elif self._streams:
            await self._send_events(message)
        else:
            await self._send_whole(message)

    async def _send_start(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)

    async def _send_events(self, message: Message) -> None:
        more = message.get("more_body", False)
        *events, self._rest = (self._rest + message.get("body", b"")).split(_SEPARATOR)
        try:
            shown = [text for event in events if (text := await self._event(event)) is not None]
            if not more and self._events < self._call.opened.skip and not self._failed:
                raise _PastLog
        except _PastLog:
            self._denied = True
            message_text = "The events up to this Last-Event-ID were lost with the front end that sent them."
            await _send_denial(self._send, Denial(status=409, kind="ConflictError", message=message_text))
            self._client.disconnect()
            return
        if not more and self._rest:
            shown.append(self._rest)
        self._complete = not more and self._ended and not self._failed
        if shown or not more:
            await self._send_start()
            await self._send({**message, "body": b"".join(shown)})

    async def _event(self, event: bytes) -> bytes | None:
        """Return the event as sent to the client; None if the client has it already. Raise _PastLog."""
        opened = self._call.opened
        if self._failed or _ERROR.match(event):
            self._failed = True
            return event + _SEPARATOR
        if not event.startswith(b"data:"):
            return event + _SEPARATOR
        self._events += 1
        self._ended = event == _DONE
        event = await self._restore_original(event)
        if self._events > opened.skip:
            return b"id: %b.%d\n%b%b" % (self._call.name.encode(), self._events, event, _SEPARATOR)
        if opened.skip_tokens != UNLIMITED and self._call.tokens > opened.skip_tokens:
            raise _PastLog
        return None

    async def _send_whole(self, message: Message) -> None:
        self._rest += message.get("body", b"")
        if message.get("more_body", False):
            return
        body = await self._restore_original(self._rest)
        assert self._start is not None
        fields = [field for field in self._start["headers"] if field[0].lower() != b"content-length"]
        self._start["headers"] = [*fields, (b"content-length", str(len(body)).encode())]
        self._complete = not self._client.disconnect_sent
        await self._send_start()
        await self._send({**message, "body": body})

    async def _restore_original(self, text: bytes) -> bytes:
        """Replace values that differ between runs by those of the first run."""
        # The field precedes anything that a model or a client has written.
        text = _CREATED.sub(b'"created":%d' % self._call.opened.created_s, text, count=1)
        if _TOOL_CALLS not in text:
            return text
        try:
            response = _responses.decode(text.removeprefix(b"data:"))
        except msgspec.MsgspecError:
            return text
        opened = self._call.opened
        for drawn in response.tool_ids():
            number, self._tool_ids = self._tool_ids, self._tool_ids + 1
            if number < len(opened.notes):
                text = text.replace(msgspec.json.encode(drawn), opened.notes[number], 1)
                continue
            note = NoteCall(answer_id=opened.answer_id, run=opened.run, note=msgspec.json.encode(drawn))
            try:
                await self._frontend.note(note)
            except Unavailable as error:
                log.warning("cannot keep the id of a tool call: %s", error)
        return text


async def _send_denial(send: Send, denied: Denial) -> None:
    later = {"retry-after": "1"} if denied.status == HTTPStatus.SERVICE_UNAVAILABLE else None
    await send_error(send, HTTPStatus(denied.status), denied.kind, denied.message, later)


def _parse_body(body: bytes) -> _Body | None:
    """Parse the body; return None if it is invalid, which vLLM will report."""
    try:
        return _bodies.decode(body)
    except msgspec.MsgspecError:
        return None


def _denial_reason(key: str, event_id: str, parsed: _Body | None, has_body: bool) -> Denial | None:
    """Return why this request's answer cannot be kept, or None."""

    def invalid(message: str) -> Denial:
        return Denial(status=400, kind="BadRequestError", message=message)

    if len(key) > _KEY_LENGTH_MAX or not key.isprintable():
        return invalid(f"Idempotency-Key: at most {_KEY_LENGTH_MAX} printable characters are allowed.")
    if parsed is None:
        # A resuming client need not repeat the body.
        return (
            None
            if event_id and not has_body
            else invalid("The body is not a valid JSON object for this API.")
        )
    if parsed.request_id and not _is_header(parsed.request_id):
        return invalid("request_id: only printable Latin-1 characters are allowed if the answer is kept.")
    if parsed.use_beam_search:
        return invalid("A beam search cannot be resumed: send it without Idempotency-Key.")
    if parsed.stream and isinstance(parsed.prompt, list) and not _is_single_prompt(parsed.prompt):
        return invalid(
            "A stream of answers to several prompts cannot be resumed: send it without Idempotency-Key."
        )
    return None


def _is_single_prompt(prompt: list[msgspec.Raw]) -> bool:
    """Return whether the prompt is token ids, or one prompt in a list."""
    return len(prompt) == 1 or bytes(prompt[0])[:1].isdigit() if prompt else True


def _is_header(text: str) -> bool:
    """Return whether the text can be a header value: a request is run again with its id in X-Request-Id."""
    return text.isprintable() and text == text.encode("latin-1", "replace").decode("latin-1")


def _digest(body: bytes) -> bytes:
    """Return a digest that is equal for equal JSON values."""
    try:
        canonical = msgspec.json.encode(msgspec.json.decode(body), order="sorted")
    except msgspec.MsgspecError:
        canonical = body
    return sha256(canonical).digest()


def _request_name(headers: dict[bytes, bytes], parsed: _Body | None) -> str:
    """Return the request id that the client chose, or an empty string."""
    request_id = headers.get(b"x-request-id", b"").decode("latin-1")
    return request_id or (parsed.request_id if parsed is not None else None) or ""
