"""Admission of tenants at vLLM's Python app: keys, routes, models and limits."""

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
    """ASGI app that replies with the tenant and body it received; holds requests until `go_on` is set."""

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
        transport = httpx.ASGITransport(TenantAdmission(BodyLimit(TenantRequests(self.app))))
        async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
            content = (
                body
                if isinstance(body, AsyncIterator | bytes)
                else json.dumps({"model": "m"} if body is None else body)
            )
            return await client.request(method, path, headers=headers, content=content)


@pytest.fixture
def admission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdmissionClient]:
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
    "path", ["/invocations", "/sleep", "/metrics", "/v1/load_lora_adapter", "/docs", "/x"]
)
async def test_unlisted_routes_are_not_served(admission: AdmissionClient, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE"):
        assert error_of(await admission.ask("free", path, method=method)) == (404, "NotFoundError")


async def test_tenant_probes_need_no_key(admission: AdmissionClient) -> None:
    assert (await admission.ask(path="/health", method="GET")).status_code == 200
    assert (await admission.ask(path="/health", method="POST")).status_code == 401


async def test_key_is_limited_to_its_models(admission: AdmissionClient) -> None:
    assert (await admission.ask("limited", body={"model": "adapter"})).status_code == 200
    for body in ({"model": "other"}, {"model": 3}, {}, ["m"]):
        assert error_of(await admission.ask("limited", body=body)) == (403, "PermissionDeniedError")


async def test_resume_need_not_name_the_model(admission: AdmissionClient) -> None:
    answer = await admission.ask("limited", body=b"", last_event_id="a.1.2")
    assert answer.json() == {"tenant": "limited", "body": ""}
    assert error_of(await admission.ask("limited", body=b"")) == (403, "PermissionDeniedError")
    for body in (b" ", b"{}", b'{"model": "other"}'):
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
    async with asyncio.timeout(20):
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

    async with asyncio.timeout(20):
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
    monkeypatch.setattr(BodyLimit, "max_bytes", 100)
    assert error_of(await admission.ask("free", body={"model": "m" * 100})) == (413, "BadRequestError")

    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"x" * 30

    assert error_of(await admission.ask("free", body=chunks(4))) == (413, "BadRequestError")
    assert (await admission.ask("free", body=chunks(3))).json()["body"] == "x" * 90


async def test_requests_are_admitted_without_a_key_file(
    admission: AdmissionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TenantAdmission, "tenants", None)
    assert (await admission.ask(path="/invocations")).json()["tenant"] is None
