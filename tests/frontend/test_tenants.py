"""Admission of requests at vLLM's Python app: keys, routes, models, and limits with and without keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_svc.api_server.large_lane import LARGE_BYTES
from frontend_svc.api_server.middleware import Message, Receive, RequireApiKey, Send
from frontend_svc.api_server.request_limits import Account, RequestLimits, account_of_task
from frontend_svc.api_server.spec import DEFAULT_BODY_LIMITS
from frontend_svc.api_server.tenants import TenantAdmission, Tenants, read_body, tenant_of_call
from tailrace.tenancy.body import LimitRefusal
from tailrace.tenancy.file import KeyFile, locked_key_file
from tailrace.tenancy.keys import Tenant, TenantKeys
from tailrace.tenancy.meter import Bodies, Meter
from tests.waiting import WAIT_S

CHAT = "/v1/chat/completions"


class App:
    """ASGI app that replies with the tenant and body it received, or with `answer`; holds requests until
    `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.entered = asyncio.Semaphore(0)
        self.accounts: list[Account | None] = []
        self.answer: Sequence[bytes] = ()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        body = await read_body(receive, 1 << 20)
        self.accounts.append(account_of_task.get())
        self.entered.release()
        await self.go_on.wait()
        tenant = tenant_of_call.get()
        if self.answer:
            length = str(sum(map(len, self.answer))).encode()
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
            )
            for part in self.answer:
                more = part is not self.answer[-1]
                await send({"type": "http.response.body", "body": part, "more_body": more})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        received = {"tenant": None if tenant is None else tenant.name, "body": (body or b"").decode()}
        await send({"type": "http.response.body", "body": json.dumps(received).encode()})


class AdmissionClient:
    def __init__(self, tenants: Tenants, keys: dict[str, str]) -> None:
        self.tenants = tenants
        self.keys = keys
        self.app = App()
        self.now_s = 0.0

    async def ask(
        self,
        tenant: str = "",
        path: str = CHAT,
        body: object = None,
        method: str = "POST",
        last_event_id: str = "",
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys.get(tenant, tenant)}"} if tenant else {}
        if last_event_id:
            headers["last-event-id"] = last_event_id
        transport = httpx.ASGITransport(TenantAdmission(RequestLimits(self.app)))
        async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
            content = (
                body
                if isinstance(body, AsyncIterator | bytes)
                else json.dumps({"model": "m"} if body is None else body)
            )
            return await client.request(method, path, headers=headers, content=content)


def set_limits(monkeypatch: pytest.MonkeyPatch, has_tenants: bool = True, **limits: float) -> None:
    """Set the limits of request bodies for this test."""
    for name in ("limits", "bodies", "lane"):
        monkeypatch.setattr(RequestLimits, name, getattr(RequestLimits, name))
    defaults = replace(DEFAULT_BODY_LIMITS, max_text_bytes=1 << 20)
    RequestLimits.configure(replace(defaults, **limits), has_tenants)  # type: ignore[arg-type]


@pytest.fixture
def admission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdmissionClient]:
    tenant_keys, keys = TenantKeys(), {}
    for tenant in (
        Tenant(name="free"),
        Tenant(name="limited", models=("m", "adapter")),
        Tenant(name="slow", requests_per_minute=2.0),
        Tenant(name="slow with models", models=("m",), requests_per_minute=1.0),
        Tenant(name="narrow", concurrency=1),
        Tenant(name="five", concurrency=5),
    ):
        tenant_keys, keys[tenant.name] = tenant_keys.with_tenant(tenant).with_key(tenant.name, "now")
    path = tmp_path / "keys.json"
    with locked_key_file(path) as replace:
        replace(tenant_keys)
    set_limits(monkeypatch, has_tenants=True)
    doors: list[AdmissionClient] = []
    tenants = Tenants(KeyFile(path), lambda: doors[0].now_s)
    doors.append(AdmissionClient(tenants, keys))
    monkeypatch.setattr(TenantAdmission, "tenants", tenants)
    yield doors[0]


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """Return the status and the type of OpenAI's error object, which must be complete."""
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code and error["message"]
    return answer.status_code, error["type"]


async def test_a_preflight_needs_no_key(admission: AdmissionClient) -> None:
    asks = {"origin": "http://page", "access-control-request-method": "POST"}
    transport = httpx.ASGITransport(TenantAdmission(RequestLimits(admission.app)))
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
        assert (await client.options(CHAT, headers=asks)).status_code == 200
        for headers in ({}, {"origin": "http://page"}):
            assert error_of(await client.options(CHAT, headers=headers)) == (401, "AuthenticationError")
        assert error_of(await client.post(CHAT, headers=asks)) == (401, "AuthenticationError")


async def test_valid_key_is_admitted(admission: AdmissionClient) -> None:
    answer = await admission.ask("free", body={"model": "x", "n": 1})
    assert answer.json() == {"tenant": "free", "body": '{"model": "x", "n": 1}'}
    assert tenant_of_call.get() is None


@pytest.mark.parametrize("key", ["", "wrong", "sk-tailrace-000000000000-x"])
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/invocations", "/metrics", "/"])
async def test_requests_without_a_valid_key_are_refused(
    admission: AdmissionClient, key: str, path: str
) -> None:
    assert error_of(await admission.ask(key, path)) == (401, "AuthenticationError")


@pytest.mark.parametrize(
    "path",
    ["/invocations", "/sleep", "/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/docs", "/x"],
)
async def test_unlisted_routes_are_not_served(admission: AdmissionClient, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE"):
        assert error_of(await admission.ask("free", path, method=method)) == (404, "NotFoundError")


async def test_tenant_probes_need_no_key(admission: AdmissionClient) -> None:
    assert (await admission.ask(path="/health", body=b"", method="GET")).status_code == 200
    assert (await admission.ask(path="/health", method="POST")).status_code == 401


async def test_list_of_models_has_those_of_the_key(admission: AdmissionClient) -> None:
    cards = [
        {"id": "m", "root": "/models/m", "parent": None},
        *({"id": name, "root": f"/secret/{name}", "parent": "m"} for name in ("adapter", "another")),
    ]
    # In parts, as larger answers may come.
    body = json.dumps({"object": "list", "data": cards}).encode()
    admission.app.answer = body[:50], body[50:]
    for tenant, names in (("free", ["m", "adapter", "another"]), ("limited", ["m", "adapter"])):
        answer = await admission.ask(tenant, "/v1/models", method="GET")
        assert int(answer.headers["content-length"]) == len(answer.content)
        data = answer.json()["data"]
        assert [card["id"] for card in data] == names
        assert [card["root"] for card in data] == ["/models/m", *names[1:]]


async def test_key_is_limited_to_its_models(admission: AdmissionClient) -> None:
    assert (await admission.ask("limited", body={"model": "adapter"})).status_code == 200
    for body in ({"model": "other"}, {"model": 3}, {}):
        assert error_of(await admission.ask("limited", body=body)) == (403, "PermissionDeniedError")


async def test_resume_need_not_name_the_model(admission: AdmissionClient) -> None:
    answer = await admission.ask("limited", body=b"", last_event_id="a.1.2")
    assert answer.json() == {"tenant": "limited", "body": ""}
    assert error_of(await admission.ask("limited", body=b"")) == (403, "PermissionDeniedError")
    for body in (b"{}", b'{"model": "other"}'):
        refused = await admission.ask("limited", body=body, last_event_id="a.1.2")
        assert error_of(refused) == (403, "PermissionDeniedError")


async def test_rate_limited_requests_get_retry_after(admission: AdmissionClient) -> None:
    assert [(await admission.ask("slow")).status_code for _ in range(2)] == [200, 200]
    refused = await admission.ask("slow")
    assert error_of(refused) == (429, "RateLimitError")
    admission.now_s += float(refused.headers["retry-after"])
    assert (await admission.ask("slow")).status_code == 200
    # Other tenants are not affected.
    assert (await admission.ask("free")).status_code == 200


async def test_concurrency_limit(admission: AdmissionClient) -> None:
    admission.app.go_on.clear()
    async with asyncio.timeout(WAIT_S):
        first = asyncio.create_task(admission.ask("narrow"))
        await admission.app.entered.acquire()
        assert error_of(await admission.ask("narrow")) == (429, "RateLimitError")
        admission.app.go_on.set()
        assert (await first).status_code == 200
    assert (await admission.ask("narrow")).status_code == 200


async def _unreadable() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")
    yield b""


@pytest.mark.parametrize("tenant", ["slow", "slow with models"])
async def test_rate_limited_request_is_refused_without_reading_its_body(
    admission: AdmissionClient, tenant: str
) -> None:
    while (await admission.ask(tenant)).status_code == 200:
        pass
    refused = await admission.ask(tenant, body=_unreadable())
    assert error_of(refused) == (429, "RateLimitError") and int(refused.headers["retry-after"]) > 0


async def test_body_of_a_request_without_a_valid_key_is_not_read(admission: AdmissionClient) -> None:
    assert error_of(await admission.ask("wrong", body=_unreadable())) == (401, "AuthenticationError")


async def test_request_for_a_forbidden_model_does_not_count(admission: AdmissionClient) -> None:
    for _ in range(3):
        assert (await admission.ask("slow with models", body={"model": "other"})).status_code == 403
    assert (await admission.ask("slow with models")).status_code == 200


async def test_limit_holds_for_bodies_that_arrive_concurrently(admission: AdmissionClient) -> None:
    both_read = asyncio.Barrier(2)

    async def slow_body() -> AsyncIterator[bytes]:
        yield b'{"model": '
        await both_read.wait()
        yield b'"m"}'

    async with asyncio.timeout(WAIT_S):
        answers = await asyncio.gather(
            *(admission.ask("slow with models", body=slow_body()) for _ in range(2)),
        )
    assert sorted(answer.status_code for answer in answers) == [200, 429]


async def test_tokens_are_counted(admission: AdmissionClient) -> None:
    own = Tenant(name="slow", tokens_per_minute=10.0)
    admission.tenants.meter.begin(own, 0.0)
    admission.tenants.meter.charge(own, 11, 0.0)
    assert admission.tenants.meter.begin(own, 0.0) is not None


async def test_large_body_is_refused_without_reading_it(
    admission: AdmissionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, max_body_bytes=100)
    assert error_of(await admission.ask("free", body={"model": "m" * 100})) == (413, "BadRequestError")

    async def chunks(count: int) -> AsyncIterator[bytes]:
        yield b'{"a":"'
        for _ in range(count):
            yield b"x" * 30
        yield b'"}'

    assert error_of(await admission.ask("free", body=chunks(4))) == (413, "BadRequestError")
    assert len((await admission.ask("free", body=chunks(3))).json()["body"]) == 98
    assert RequestLimits.bodies.bytes == 0


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("GET", "/version"), ("POST", "/ping"), ("OPTIONS", CHAT)]
)
async def test_body_of_a_request_that_needs_no_key_is_not_read(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    """1,024 bodies that do not arrive would keep out those of all who have keys."""
    set_limits(monkeypatch)
    monkeypatch.setattr(RequireApiKey, "keys", ["right"])

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    transport = httpx.ASGITransport(RequireApiKey(RequestLimits(App())))
    asks = {"origin": "http://page", "access-control-request-method": "POST"}
    async with (
        asyncio.timeout(WAIT_S),
        httpx.AsyncClient(transport=transport, base_url="http://fleet", headers=asks) as client,
    ):
        for headers in ({}, {"content-length": "1000"}):
            refused = await client.request(method, path, content=endless(), headers=headers)
            assert error_of(refused) == (413, "BadRequestError")
        assert (await client.request(method, path)).status_code == 200
    assert RequestLimits.bodies.bytes == RequestLimits.bodies.arriving == 0


async def test_requests_are_admitted_without_a_key_file(
    admission: AdmissionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TenantAdmission, "tenants", None)
    assert (await admission.ask(path="/invocations")).json()["tenant"] is None


async def test_sequences_count_and_not_requests(admission: AdmissionClient) -> None:
    three = {"model": "m", "prompt": ["a", "b", "c"]}
    admission.app.go_on.clear()
    async with asyncio.timeout(WAIT_S):
        first = asyncio.create_task(admission.ask("five", body=three))
        await admission.app.entered.acquire()
        refused = await admission.ask("five", body=three)
        assert error_of(refused) == (429, "RateLimitError") and int(refused.headers["retry-after"]) > 0
        assert "3 of 5 sequences" in refused.json()["error"]["message"]
        admission.app.go_on.set()
        assert (await first).status_code == 200
    assert (await admission.ask("five", body={**three, "n": "1"})).status_code == 200
    # More than is ever allowed: it is of no use to try again.
    never = await admission.ask("five", body={**three, "n": 2})
    assert error_of(never) == (400, "BadRequestError") and "6 sequences of 5" in never.text
    assert error_of(await admission.ask("slow", body=three)) == (400, "BadRequestError")
    assert (await admission.ask("slow", body={"n": 2})).status_code == 200
    assert error_of(await admission.ask("slow")) == (429, "RateLimitError")
    assert admission.tenants.meter.running(Tenant(name="five")) == 0


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize(
    ("limits", "body", "status", "named"),
    [
        ({"max_sequences": 8}, {"prompt": ["a"] * 3, "n": 3}, 400, "8 sequences"),
        ({"max_messages": 2}, {"messages": [{"role": "user", "content": "a"}] * 3}, 400, "2 messages"),
        ({"max_text_bytes": 60}, {"prompt": "x" * 60}, 413, "60 bytes"),
        ({"max_text_bytes": 60}, {"prompt": [0] * 62}, 413, "60 bytes"),
        ({"max_body_bytes": 60}, {"prompt": "x" * 60}, 413, "60 bytes"),
        ({"max_bodies_bytes": 60}, {"prompt": "x" * 60}, 429, "bytes of request bodies"),
        ({}, b'{"n": NaN}', 400, "JSON"),
        ({"max_sequences": 8}, {"query": "q", "documents": ["a"] * 9}, 400, "queries and documents"),
        ({"max_text_bytes": 2_000}, {"query": "x" * 1_000, "documents": ["a"] * 150}, 413, "its documents"),
        ({}, {"bad_words": ["a" * 5_000] * 2}, 400, "bad_words may have at most 8192 bytes"),
    ],
)
async def test_request_is_judged_before_the_app_sees_it(
    admission: AdmissionClient,
    monkeypatch: pytest.MonkeyPatch,
    keys: bool,
    limits: dict[str, float],
    body: object,
    status: int,
    named: str,
) -> None:
    set_limits(monkeypatch, keys, **limits)
    if not keys:
        monkeypatch.setattr(TenantAdmission, "tenants", None)
    refused = await admission.ask("free" if keys else "", body=body)
    assert error_of(refused)[0] == status and named in refused.json()["error"]["message"]
    assert ("retry-after" in refused.headers) == (status == 429)
    assert admission.app.entered.locked()
    assert (await admission.ask("free" if keys else "", body=b'{"model":"m"}')).status_code == 200
    assert RequestLimits.bodies.bytes == 0


async def test_form_without_files_is_small(
    admission: AdmissionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is read on the event loop."""
    monkeypatch.setattr(TenantAdmission, "tenants", None)
    path, kind = "/v1/audio/transcriptions", "application/x-www-form-urlencoded"
    transport = httpx.ASGITransport(RequestLimits(admission.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:

        async def ask(kind: str, size: int) -> httpx.Response:
            return await client.post(path, content=b"&" * size, headers={"content-type": kind})

        for each in (kind, f"{kind.upper()}; charset=utf-8"):
            assert (await ask(each, 65_536)).status_code == 200
            refused = await ask(each, 65_537)
            assert error_of(refused) == (413, "BadRequestError") and f"65536 bytes as {kind}" in refused.text
        assert (await ask("multipart/form-data; boundary=b", 65_537)).status_code == 200


async def test_media_is_no_text_for_a_model_that_takes_it(
    admission: AdmissionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, max_text_bytes=300)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "x" * 400}}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    assert (await admission.ask("free", body=body)).status_code == 200
    monkeypatch.setattr(RequestLimits, "takes_media", False)
    assert error_of(await admission.ask("free", body=body))[0] == 413


async def test_body_that_does_not_arrive_is_given_up(
    admission: AdmissionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, body_timeout_s=0.05)
    seen: list[tuple[int, int]] = []

    async def endless() -> AsyncIterator[bytes]:
        yield b'{"model": '
        yield b'"m'
        seen.append((RequestLimits.bodies.bytes, RequestLimits.bodies.arriving))
        await asyncio.Event().wait()

    async with asyncio.timeout(WAIT_S):
        refused = await admission.ask("free", body=endless())
    assert error_of(refused) == (400, "BadRequestError")
    assert "0.05 s" in refused.text and "12 bytes have" in refused.text
    assert seen == [(12, 1)] and RequestLimits.bodies.bytes == RequestLimits.bodies.arriving == 0


async def test_bodies_that_arrive_are_limited_by_tenant(
    admission: AdmissionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestLimits, "bodies", Bodies(1 << 20, 2, has_tenants=True))
    arriving, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"model": '
        yield b'"m'
        arriving.set()
        await go_on.wait()
        yield b'"}'

    async with asyncio.timeout(WAIT_S):
        first = asyncio.create_task(admission.ask("free", body=slow()))
        await arriving.wait()
        refused = await admission.ask("free", body=slow())
        assert error_of(refused) == (429, "RateLimitError") and "still arriving" in refused.text
        go_on.set()
        assert (await admission.ask("five", body=slow())).status_code == 200
        assert (await first).status_code == 200
    assert RequestLimits.bodies.arriving == 0


async def test_large_request_has_its_turn_until_its_prompt_is_submitted(admission: AdmissionClient) -> None:
    large = {"model": "m", "prompt": "x" * LARGE_BYTES}
    admission.app.go_on.clear()
    async with asyncio.timeout(WAIT_S):
        first = asyncio.create_task(admission.ask("free", body=large))
        await admission.app.entered.acquire()
        second = asyncio.create_task(admission.ask("five", body=large))
        while not len(RequestLimits.lane):  # noqa: ASYNC110
            await asyncio.sleep(0)
        # A small one passes.
        small = asyncio.create_task(admission.ask("free"))
        await admission.app.entered.acquire()
        assert len(RequestLimits.lane) == 1
        # Its prompt goes to the engine, and the answer is far from its end.
        account = admission.app.accounts[0]
        assert account is not None
        account.submit(1, LARGE_BYTES)
        assert len(RequestLimits.lane) == 1
        account.count_sent()
        await admission.app.entered.acquire()
        admission.app.go_on.set()
        answers = await asyncio.gather(first, second, small)
    assert [answer.status_code for answer in answers] == [200] * 3


async def test_client_that_reads_slowly_holds_up_no_large_request(admission: AdmissionClient) -> None:
    body = json.dumps({"prompt": "x" * LARGE_BYTES}).encode()
    reads, began = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        if not began.is_set():
            began.set()
            return {"type": "http.request", "body": body}
        await reads.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await reads.wait()

    scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": []}
    async with asyncio.timeout(WAIT_S):
        slow = asyncio.create_task(RequestLimits(admission.app)(scope, receive, send))
        await admission.app.entered.acquire()
        assert (await admission.ask("free", body=body)).status_code == 200
        reads.set()
        await slow


async def test_client_that_leaves_while_it_waits_gives_up_its_turn(admission: AdmissionClient) -> None:
    turn = await RequestLimits.lane.enter("", 1.0, 0.0)
    gone = asyncio.Event()
    body = json.dumps({"prompt": "x" * LARGE_BYTES}).encode()
    messages = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    async with asyncio.timeout(WAIT_S):
        request = asyncio.create_task(RequestLimits(admission.app)(scope, receive, send))
        while not len(RequestLimits.lane):  # noqa: ASYNC110
            await asyncio.sleep(0)
        gone.set()
        await request
    assert len(RequestLimits.lane) == 0 and RequestLimits.bodies.bytes == 0
    turn.end()
    (await RequestLimits.lane.enter("", 1.0, 0.0)).end()


async def test_steps_of_a_beam_search_are_no_sequences(admission: AdmissionClient) -> None:
    admission.app.go_on.clear()
    async with asyncio.timeout(WAIT_S):
        beams = asyncio.create_task(admission.ask("five", body={"n": 5, "use_beam_search": True}))
        await admission.app.entered.acquire()
        account = admission.app.accounts[0]
        assert account is not None
        for _ in range(100):
            account.submit(1, 10)
        assert account.reserved == 5
        admission.app.go_on.set()
        assert (await beams).status_code == 200


async def test_what_vllm_begins_counts_if_it_is_more_than_the_body_told(admission: AdmissionClient) -> None:
    admission.app.go_on.clear()
    async with asyncio.timeout(WAIT_S):
        request = asyncio.create_task(admission.ask("five"))
        await admission.app.entered.acquire()
        account = admission.app.accounts[0]
        assert account is not None
        account.submit(3, 10)
        assert admission.tenants.meter.running(Tenant(name="five")) == 3
        with pytest.raises(LimitRefusal):
            account.submit(3, 10)
        admission.app.go_on.set()
        assert (await request).status_code == 200
    assert admission.tenants.meter.running(Tenant(name="five")) == 0


class State:
    """vLLM's state of an engine's request, as far as accounts read it."""

    def __init__(self, tokens: int) -> None:
        self.detokenizer = self
        self.tokens = tokens

    def num_output_tokens(self) -> int:
        return self.tokens


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("reserve"), st.integers(1, 6)),
            st.tuples(st.just("submit"), st.integers(1, 6)),
            st.tuples(st.just("watch"), st.integers(0, 9)),
            st.tuples(st.just("close"), st.just(0)),
        ),
        max_size=30,
    )
)
def test_account_gives_back_what_it_reserved_and_charges_what_was_made_once(
    events: list[tuple[str, int]],
) -> None:
    """In every order, and whatever was refused in between."""
    tenant = Tenant(name="t", concurrency=8, tokens_per_minute=60_000.0)
    tenants = Tenants.__new__(Tenants)
    tenants.meter, tenants._clock = Meter(), lambda: 0.0
    ledger = Bodies(100, 1, has_tenants=True)
    account = Account(tenant, tenants, 10, ledger.open("t"))
    account.body.grow(20)
    prompts = made = reserved = begun = 0
    closed = False
    for event, number in [*events, ("close", 0), ("close", 0)]:
        if closed and event != "close":
            continue
        try:
            if event == "reserve":
                account.reserve(number)
                reserved = max(reserved, number)
            elif event == "submit":
                begun += number
                account.submit(number, 5)
                prompts += 5
                reserved = max(reserved, begun)
            elif event == "watch":
                account.watch(State(number))
                made += number
            else:
                account.close()
                closed, reserved = True, 0
        except LimitRefusal:
            assert max(number, begun) > 8
        assert tenants.meter.running(tenant) == reserved
    assert ledger.bytes == 0
    # A charge of nothing, to read the level.
    tenants.meter.charge(tenant, 0, 0.0)
    bucket = tenants.meter._by_tenant["t"].tokens
    assert bucket is not None and 60_000 - bucket.level == prompts + made
