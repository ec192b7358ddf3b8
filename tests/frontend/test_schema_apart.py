"""The schema at /openapi.json, whose building takes seconds for vLLM's routes, stops no stream."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
from fastapi import FastAPI

from frontend_svc.api_server.middleware import SchemaApart
from tests.waiting import WAIT_S


class SlowSchema(FastAPI):
    """An app whose schema is built only after its event loop has done something else meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.building = threading.Event()
        self.loop_went_on = threading.Event()
        self.built = 0

    def openapi(self) -> dict[str, Any]:
        """Return the schema; ask for it on the loop, and it is never there."""
        if self.openapi_schema is None:
            self.building.set()
            assert self.loop_went_on.wait(WAIT_S), "the event loop waited for the schema"
            self.built += 1
        return super().openapi()


async def test_loop_goes_on_while_the_schema_is_built_once() -> None:
    app = SlowSchema()
    app.add_middleware(SchemaApart)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
        asked = [asyncio.create_task(client.get("/openapi.json")) for _ in range(2)]
        assert await asyncio.to_thread(app.building.wait, WAIT_S)
        assert (await client.get("/other")).status_code == 404
        app.loop_went_on.set()
        replies = await asyncio.gather(*asked)
    assert [reply.json()["openapi"][0] for reply in replies] == ["3", "3"]
    assert app.built == 1
