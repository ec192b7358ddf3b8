"""The middleware that keeps answers: requests and responses, without vLLM and without a fleet."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence

import httpx
import msgspec
import pytest

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
)
from frontend_svc.api_server.kept_answers import FrontendCalls, KeepAnswers, call_of_task
from frontend_svc.api_server.middleware import Message, Receive, Send
from frontend_svc.api_server.tenants import read_body

CHAT = "/v1/chat/completions"
STREAM = {"model": "m", "stream": True, "messages": []}


class Frontend:
    """Stand-in for `frontend_svc` that replies as the test sets."""

    def __init__(self) -> None:
        self.reply: Callable[[OpenCall], OpenReply] = lambda call: OpenReply(
            opened=accepted_reply(body=call.body)
        )
        self.opened: list[OpenCall] = []
        self.notes: list[bytes] = []
        self.closed: list[CloseCall] = []
        self.broken = False

    async def __call__(self, method: str, *arguments: object) -> object:
        (argument,) = arguments
        if self.broken:
            raise Exception("broken")
        if method == OPEN:
            call = msgspec.convert(argument, OpenCall, builtin_types=(bytes,))
            self.opened.append(call)
            # Encoded and decoded, as over the wire.
            return msgspec.msgpack.decode(msgspec.msgpack.encode(self.reply(call)))
        if method == NOTE:
            self.notes.append(msgspec.convert(argument, NoteCall, builtin_types=(bytes,)).note)
        else:
            assert method == CLOSE
            self.closed.append(msgspec.convert(argument, CloseCall, builtin_types=(bytes,)))
        return None


def accepted_reply(
    skip: int = 0,
    skip_tokens: int = UNLIMITED,
    notes: Sequence[bytes] = (),
    body: bytes = b"{}",
    run: int = 1,
    request_name: str = "name",
) -> OpenedAnswer:
    return OpenedAnswer(
        answer_id="a",
        run=run,
        skip=skip,
        skip_tokens=skip_tokens,
        tokens=0,
        notes=list(notes),
        body=body,
        request_name=request_name,
        created_s=1_700_000_000,
    )


class App:
    """ASGI app that streams the given pieces, or sends `whole` as one response."""

    def __init__(self, pieces: Sequence[bytes] = (), whole: bytes | None = None, status: int = 200) -> None:
        self.pieces = pieces
        self.whole = whole
        self.status = status
        self.bodies: list[bytes] = []
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.bodies.append(await read_body(receive, 1 << 20) or b"")
        self.headers = dict(scope["headers"])
        kind = b"application/json" if self.whole is not None else b"text/event-stream; charset=utf-8"
        headers = [(b"content-type", kind)]
        if self.whole is not None:
            headers.append((b"content-length", str(len(self.whole)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        if self.whole is not None:
            await send({"type": "http.response.body", "body": self.whole})
            return
        for piece in self.pieces:
            if (call := call_of_task.get()) is not None:
                call.tokens += piece.count(b'"t"')
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


PostRequest = Callable[..., Awaitable[httpx.Response]]


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Frontend:
    stub = Frontend()
    monkeypatch.setattr(KeepAnswers, "frontend", FrontendCalls(stub))
    return stub


async def ask(app: App, body: object = STREAM, path: str = CHAT, **headers: str) -> httpx.Response:
    http_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    transport = httpx.ASGITransport(KeepAnswers(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=content, headers=http_headers)


def events(count: int, created: int = 5) -> list[bytes]:
    chunks = [
        b'data: {"id":"x","created":%d,"n":%d,"t":1}\n\n' % (created, number) for number in range(count)
    ]
    return [*chunks, b"data: [DONE]\n\n"]


def error_of(answer: httpx.Response) -> tuple[int, str]:
    body = answer.json()["error"]
    assert body.keys() == {"message", "type", "param", "code"} and body["code"] == answer.status_code
    return answer.status_code, body["type"]


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_events_get_ids_however_they_are_split(frontend: Frontend, size: int) -> None:
    text = b"".join(events(2))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    answer = await ask(App(pieces))
    assert answer.text == (
        'id: a.1.1\ndata: {"id":"x","created":1700000000,"n":0,"t":1}\n\n'
        'id: a.1.2\ndata: {"id":"x","created":1700000000,"n":1,"t":1}\n\n'
        "id: a.1.3\ndata: [DONE]\n\n"
    )
    assert frontend.closed == [CloseCall(answer_id="a", run=1, complete=True, begun=True)]


async def test_resumed_request_is_run_again_unchanged(frontend: Frontend) -> None:
    frontend.reply = lambda call: OpenReply(
        opened=accepted_reply(skip=2, skip_tokens=2, body=b'{"old": 1}', run=3)
    )
    app = App(events(3))
    answer = await ask(app, b"", last_event_id="a.1.2", x_request_id="other")
    assert app.bodies == [b'{"old": 1}']
    assert (app.headers[b"x-request-id"], app.headers[b"content-length"]) == (b"name", b"10")
    assert answer.text.startswith("id: a.3.3\n") and answer.text.count("id: ") == 2
    assert frontend.opened[0].last_event_id == "a.1.2"


@pytest.mark.parametrize(("skip", "tokens"), [(3, 1), (9, UNLIMITED), (9, 4)])
async def test_resume_beyond_the_end_of_the_log_is_refused(
    frontend: Frontend, skip: int, tokens: int
) -> None:
    frontend.reply = lambda call: OpenReply(opened=accepted_reply(skip=skip, skip_tokens=tokens))
    answer = await ask(App(events(4)), last_event_id="a.1.9")
    assert error_of(answer) == (409, "ConflictError")
    assert not frontend.closed[0].complete


async def test_error_event_is_not_part_of_the_answer(frontend: Frontend) -> None:
    pieces = [*events(1)[:1], b'data: {"error": {"code": 503}}\n\n', b"data: [DONE]\n\n"]
    answer = await ask(App(pieces))
    assert answer.text.count("id: ") == 1 and answer.text.endswith("data: [DONE]\n\n")
    assert not frontend.closed[0].complete


async def test_unstreamed_answer(frontend: Frontend) -> None:
    app = App(whole=b'{"id":"x","created":7,"choices":[]}')
    answer = await ask(app, {"model": "m"}, idempotency_key="k")
    assert answer.json() == {"id": "x", "created": 1_700_000_000, "choices": []}
    assert frontend.opened[0].key == "k" and not frontend.opened[0].streams
    assert frontend.closed == [CloseCall(answer_id="a", run=1, complete=True, begun=True)]


def tool_calls_of(*ids: str) -> list[dict[str, object]]:
    return [{"index": 0, "id": each, "function": {"arguments": "{}"}} for each in ids]


async def test_ids_of_tool_calls_are_preserved(frontend: Frontend) -> None:
    frontend.reply = lambda call: OpenReply(opened=accepted_reply(notes=[b'"first"']))
    pieces = [
        b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"tool_calls": tool_calls_of(name)}}]}).encode()
        for name in ("drawn", "again")
    ]
    answer = await ask(App([*pieces, b"data: [DONE]\n\n"]))
    assert '"first"' in answer.text and "drawn" not in answer.text and '"again"' in answer.text
    assert frontend.notes == [b'"again"']
    whole = App(
        whole=json.dumps({"choices": [{"message": {"tool_calls": tool_calls_of("drawn", "two")}}]}).encode()
    )
    reply = (await ask(whole, {"model": "m"}, idempotency_key="k")).json()
    assert [call["id"] for call in reply["choices"][0]["message"]["tool_calls"]] == ["first", "two"]


async def test_answer_is_incomplete_if_the_client_has_disconnected(frontend: Frontend) -> None:
    sent: list[Message] = []
    incoming: list[Message] = [
        {"type": "http.request", "body": b'{"model": "m"}'},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return incoming.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await read_body(receive, 100)
        assert (await receive())["type"] == "http.disconnect"
        # As vLLM does after a disconnect.
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"null"})

    headers = [(b"idempotency-key", b"k")]
    await KeepAnswers(app)(
        {"type": "http", "method": "POST", "path": CHAT, "headers": headers}, receive, send
    )
    assert frontend.closed == [CloseCall(answer_id="a", run=1, complete=False, begun=True)]


async def test_truncated_stream_is_incomplete(frontend: Frontend) -> None:
    await ask(App(events(3)[:2]))
    assert not frontend.closed[0].complete


async def test_refused_request_begins_no_run(frontend: Frontend) -> None:
    answer = await ask(App(whole=b'{"error": {}}', status=400), idempotency_key="k")
    assert answer.status_code == 400
    assert frontend.closed == [CloseCall(answer_id="a", run=1, complete=False, begun=False)]


async def test_run_is_closed_before_a_refusal_of_a_key_is_sent(frontend: Frontend) -> None:
    sent: list[tuple[str, int]] = []

    async def observe(scope: Message, receive: Receive, send: Send) -> None:
        async def observed(message: Message) -> None:
            sent.append((message["type"], len(frontend.closed)))
            await send(message)

        await KeepAnswers(App(whole=b'{"error": {}}', status=400))(scope, receive, observed)

    keys: list[tuple[dict[str, str], int]] = [({"idempotency-key": "k"}, 1), ({}, 0)]
    for key, closed in keys:
        frontend.closed.clear()
        sent.clear()
        transport = httpx.ASGITransport(observe)
        async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
            await client.post(CHAT, json=STREAM, headers=key)
        assert sent == [("http.response.start", closed), ("http.response.body", closed)]
        assert len(frontend.closed) == 1


async def test_denied_request_is_not_run(frontend: Frontend) -> None:
    denied = Denial(status=422, kind="UnprocessableEntityError", message="no")
    frontend.reply = lambda call: OpenReply(denied=denied)
    app = App(events(1))
    assert error_of(await ask(app, idempotency_key="k")) == (422, "UnprocessableEntityError")
    assert app.bodies == []


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True, "prompt": ["a", "b"]},
        {"stream": True, "prompt": [[1], [2]]},
        {"use_beam_search": True},
        {"stream": True, "request_id": "имя"},
        {"stream": True, "request_id": "two\r\nlines: 1"},
        b"no json",
    ],
)
async def test_unkeepable_request_is_refused_only_if_it_has_a_key(frontend: Frontend, body: object) -> None:
    app = App(events(1))
    assert error_of(await ask(app, body, idempotency_key="k")) == (400, "BadRequestError")
    assert (await ask(app, body)).status_code == 200
    assert frontend.opened == [] and len(app.bodies) == 1


async def test_request_id_is_preserved(frontend: Frontend) -> None:
    await ask(App(events(1)), {"stream": True, "request_id": "näme"})
    assert frontend.opened[0].request_name == "näme"
    frontend.reply = lambda call: OpenReply(opened=accepted_reply(request_name=call.request_name))
    app = App(events(1))
    await ask(app, {"stream": True, "request_id": "näme"})
    assert app.headers[b"x-request-id"] == "näme".encode("latin-1")


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2, 3], [[1, 2]]])
async def test_request_with_a_single_prompt_is_kept(frontend: Frontend, prompt: object) -> None:
    await ask(App(events(1)), {"stream": True, "prompt": prompt}, path="/v1/completions")
    assert len(frontend.opened) == 1


async def test_other_requests_are_passed_through(frontend: Frontend) -> None:
    app = App(events(1))
    assert "id: " not in (await ask(app, path="/v1/responses", idempotency_key="k")).text
    await ask(app, {"model": "m"})
    assert frontend.opened == []
    # An answer for which the front end has no room.
    frontend.reply = lambda call: OpenReply()
    assert "id: " not in (await ask(app)).text


async def test_only_requests_with_a_key_fail_without_the_front_end(frontend: Frontend) -> None:
    frontend.broken = True
    app = App(events(1))
    refused = await ask(app, idempotency_key="k")
    assert error_of(refused) == (503, "ServiceUnavailableError") and refused.headers["retry-after"]
    assert (await ask(app)).status_code == 200


async def test_equal_json_has_the_same_digest(frontend: Frontend) -> None:
    for body in (b'{"a": 1, "stream": true}', b'{"stream":true,"a":1}', b'{"stream":true,"a":2}'):
        await ask(App(events(1)), body)
    first, same, other = (call.digest for call in frontend.opened)
    assert first == same != other
