"""Who comes in at vLLM's Python app, with what, and how much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from frontend_svc.api_server.middleware import Message, Receive, Send
from frontend_svc.api_server.tenants import (
    BodyLimit,
    TenantAdmission,
    TenantRequests,
    Tenants,
    read_body,
    tenant_of_call,
)
from tailrace.tenancy.file import KeyFile, locked_key_file
from tailrace.tenancy.keys import Tenant, TenantKeys

CHAT = "/v1/chat/completions"


class App:
    """Answers with the tenant and the body that it got; holds what it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.entered = asyncio.Semaphore(0)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        body = await read_body(receive, 1 << 20)
        self.entered.release()
        await self.go_on.wait()
        tenant = tenant_of_call.get()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        got = {"tenant": None if tenant is None else tenant.name, "body": (body or b"").decode()}
        await send({"type": "http.response.body", "body": json.dumps(got).encode()})


class Door:
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
        transport = httpx.ASGITransport(TenantAdmission(BodyLimit(TenantRequests(self.app))))
        async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
            content = (
                body
                if isinstance(body, AsyncIterator | bytes)
                else json.dumps({"model": "m"} if body is None else body)
            )
            return await client.request(method, path, headers=headers, content=content)


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    tenant_keys, keys = TenantKeys(), {}
    for tenant in (
        Tenant(name="free"),
        Tenant(name="limited", models=("m", "adapter")),
        Tenant(name="slow", requests_per_minute=2.0),
        Tenant(name="slow with models", models=("m",), requests_per_minute=1.0),
        Tenant(name="narrow", concurrency=1),
    ):
        tenant_keys, keys[tenant.name] = tenant_keys.with_tenant(tenant).with_key(tenant.name, "now")
    path = tmp_path / "keys.json"
    with locked_key_file(path) as replace:
        replace(tenant_keys)
    made: list[Door] = []
    tenants = Tenants(KeyFile(path), lambda: made[0].now_s)
    made.append(Door(tenants, keys))
    monkeypatch.setattr(TenantAdmission, "tenants", tenants)
    yield made[0]


def shape(answer: httpx.Response) -> tuple[int, str]:
    """Status, and the kind in OpenAI's error object, which must be whole."""
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code and error["message"]
    return answer.status_code, error["type"]


async def test_a_key_opens_the_door(door: Door) -> None:
    answer = await door.ask("free", body={"model": "x", "n": 1})
    assert answer.json() == {"tenant": "free", "body": '{"model": "x", "n": 1}'}
    assert tenant_of_call.get() is None


@pytest.mark.parametrize("key", ["", "wrong", "sk-tailrace-000000000000-x"])
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/invocations", "/metrics", "/"])
async def test_nobody_else_comes_in(door: Door, key: str, path: str) -> None:
    assert shape(await door.ask(key, path)) == (401, "AuthenticationError")


@pytest.mark.parametrize(
    "path", ["/invocations", "/sleep", "/metrics", "/v1/load_lora_adapter", "/docs", "/x"]
)
async def test_what_is_not_listed_is_not_served(door: Door, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE"):
        assert shape(await door.ask("free", path, method=method)) == (404, "NotFoundError")


async def test_probes_need_no_key(door: Door) -> None:
    assert (await door.ask(path="/health", method="GET")).status_code == 200
    assert (await door.ask(path="/health", method="POST")).status_code == 401


async def test_a_key_is_for_its_models(door: Door) -> None:
    assert (await door.ask("limited", body={"model": "adapter"})).status_code == 200
    for body in ({"model": "other"}, {"model": 3}, {}, ["m"]):
        assert shape(await door.ask("limited", body=body)) == (403, "PermissionDeniedError")


async def test_who_resumes_need_not_name_the_model_again(door: Door) -> None:
    answer = await door.ask("limited", body=b"", last_event_id="a.1.2")
    assert answer.json() == {"tenant": "limited", "body": ""}
    assert shape(await door.ask("limited", body=b"")) == (403, "PermissionDeniedError")
    for body in (b" ", b"{}", b'{"model": "other"}'):
        refused = await door.ask("limited", body=body, last_event_id="a.1.2")
        assert shape(refused) == (403, "PermissionDeniedError")


async def test_too_many_requests_are_told_when_to_come_back(door: Door) -> None:
    assert [(await door.ask("slow")).status_code for _ in range(2)] == [200, 200]
    refused = await door.ask("slow")
    assert shape(refused) == (429, "RateLimitError")
    door.now_s += float(refused.headers["retry-after"])
    assert (await door.ask("slow")).status_code == 200
    # Others are not concerned.
    assert (await door.ask("free")).status_code == 200


async def test_too_many_at_a_time(door: Door) -> None:
    door.app.go_on.clear()
    async with asyncio.timeout(20):
        first = asyncio.create_task(door.ask("narrow"))
        await door.app.entered.acquire()
        assert shape(await door.ask("narrow")) == (429, "RateLimitError")
        door.app.go_on.set()
        assert (await first).status_code == 200
    assert (await door.ask("narrow")).status_code == 200


async def _unreadable() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")
    yield b""


@pytest.mark.parametrize("tenant", ["slow", "slow with models"])
async def test_a_request_beyond_the_limit_is_refused_unread(door: Door, tenant: str) -> None:
    while (await door.ask(tenant)).status_code == 200:
        pass
    refused = await door.ask(tenant, body=_unreadable())
    assert shape(refused) == (429, "RateLimitError") and int(refused.headers["retry-after"]) > 0


async def test_a_body_without_a_valid_key_is_not_read(door: Door) -> None:
    assert shape(await door.ask("wrong", body=_unreadable())) == (401, "AuthenticationError")


async def test_a_request_of_another_model_does_not_count(door: Door) -> None:
    for _ in range(3):
        assert (await door.ask("slow with models", body={"model": "other"})).status_code == 403
    assert (await door.ask("slow with models")).status_code == 200


async def test_of_two_whose_bodies_arrive_together_only_one_is_within_the_limit(door: Door) -> None:
    both_read = asyncio.Barrier(2)

    async def slow_body() -> AsyncIterator[bytes]:
        yield b'{"model": '
        await both_read.wait()
        yield b'"m"}'

    async with asyncio.timeout(20):
        answers = await asyncio.gather(
            *(door.ask("slow with models", body=slow_body()) for _ in range(2)),
        )
    assert sorted(answer.status_code for answer in answers) == [200, 429]


async def test_tokens_are_counted(door: Door) -> None:
    own = Tenant(name="slow", tokens_per_minute=10.0)
    door.tenants.meter.begin(own, 0.0)
    door.tenants.meter.charge(own, 11, 0.0)
    assert door.tenants.meter.begin(own, 0.0) is not None


async def test_a_large_body_is_refused_unread(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BodyLimit, "max_bytes", 100)
    assert shape(await door.ask("free", body={"model": "m" * 100})) == (413, "BadRequestError")

    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"x" * 30

    assert shape(await door.ask("free", body=chunks(4))) == (413, "BadRequestError")
    assert (await door.ask("free", body=chunks(3))).json()["body"] == "x" * 90


async def test_without_a_file_nobody_is_asked(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TenantAdmission, "tenants", None)
    assert (await door.ask(path="/invocations")).json()["tenant"] is None
