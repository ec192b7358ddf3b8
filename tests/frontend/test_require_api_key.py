"""With an API key set, no route that computes is open."""

from __future__ import annotations

from argparse import Namespace

import httpx
import pytest

from frontend_svc.api_server.middleware import Message, Receive, RequireApiKey, Send, api_keys


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
