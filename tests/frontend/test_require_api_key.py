"""With an API key set, no route that computes is open; probes are."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import httpx
import pytest

from frontend_svc.admission import NO_INSTANCE, AdmissionFlag, AdmissionState
from frontend_svc.api_server.middleware import Message, Ready, Receive, RequireApiKey, Send, api_keys


async def _app(scope: Message, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"computed"})


async def _status(path: str, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(RequireApiKey(_app))
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
        return (await client.post(path, headers=headers)).status_code


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/tokenize", "/pooling", "/new_route"])
async def test_routes_require_the_key(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequireApiKey, "keys", ["right", "other"])
    assert [await _status(path, key) for key in (None, "wrong", "right", "other")] == [401, 401, 200, 200]


async def test_probes_require_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequireApiKey, "keys", ["right"])
    assert [await _status(path, None) for path in ("/health", "/metrics")] == [200, 200]


async def test_only_preflight_requests_need_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequireApiKey, "keys", ["right"])
    transport = httpx.ASGITransport(RequireApiKey(_app))
    asks = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
        found = [
            (await client.options("/metrics/x", headers=headers)).status_code
            for headers in ({}, {"Origin": "http://page"}, asks)
        ]
        assert (await client.post("/metrics/x", headers=asks)).status_code == 401
    assert found == [401, 401, 200]


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (AdmissionState.OPEN, 200),
        (AdmissionState.FULL, 200),
        (AdmissionState.WAITING, 503),
        (AdmissionState.NO_INSTANCE, 503),
    ],
)
async def test_readiness_requires_no_key(
    state: AdmissionState, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequireApiKey, "keys", ["right"])
    flag = AdmissionFlag(tmp_path / "admission")
    monkeypatch.setattr(Ready, "admission", flag, raising=False)
    flag.set(state)
    transport = httpx.ASGITransport(Ready(RequireApiKey(_app)))
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
        reply = await client.get("/ready")
        assert (await client.head("/ready")).status_code == reply.status_code == status
        assert (await client.post("/ready")).status_code == 401
    if status == 503:
        assert reply.json()["error"]["message"] == NO_INSTANCE.message
        assert reply.headers["retry-after"]


async def test_without_a_key_everything_is_open() -> None:
    assert await _status("/invocations", None) == 200


@pytest.mark.parametrize(
    ("argument", "environment", "keys"),
    [(None, "", []), (None, "e", ["e"]), (["a", "b"], "e", ["a", "b"]), ([""], "", [])],
)
def test_keys_are_read_from_the_same_sources_as_in_vllm(
    argument: list[str] | None, environment: str, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", environment)
    assert api_keys(Namespace(api_key=argument)) == keys
