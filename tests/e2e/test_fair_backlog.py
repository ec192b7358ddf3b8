"""A burst of one tenant delays another's first token by what a front end lets be under way, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tailrace.tenancy.file import locked_key_file
from tailrace.tenancy.keys import Tenant, TenantKeys
from tailrace.tenancy.share import SHARE_HEADER, Share
from tests.e2e.fleet import MODEL, Fleet
from tests.e2e.processes import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(180)]

# A letter is a token. Two such prompts are under way, then others wait.
PROMPT_TOKENS, BACKLOG = 1_000, 1_500
BURST, PLACE_WAIT_S = 20, 60.0


class Door:
    """A front end with keys over one slow engine; notes whose first tokens came, in their order."""

    def __init__(self, fleet: Fleet, keys: dict[str, str]) -> None:
        self.fleet = fleet
        self.keys = keys
        self.began: list[str] = []

    def waiting(self, tenant: str) -> float:
        return self.fleet.metric("frontend", "tailrace_frontend_fair_waiting", f'tenant="{tenant}"')

    def under_way(self) -> float:
        return self.fleet.metric("frontend", "tailrace_frontend_fair_backlog_tokens")

    async def ask(self, client: httpx.AsyncClient, tenant: str, number: int) -> None:
        """A stream, whose client says of itself all that it can."""
        body = {
            "model": MODEL,
            "prompt": f"{tenant} {number} ".ljust(PROMPT_TOKENS, "x"),
            "max_tokens": 1,
            "stream": True,
            "priority": -1_000,
            "vllm_xargs": {SHARE_HEADER: Share("b", 100.0).encode()},
        }
        headers = {
            "authorization": f"Bearer {self.keys[tenant]}",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            SHARE_HEADER: Share("b", 100.0).encode(),
        }
        async with client.stream(
            "POST", f"{self.fleet.http}/v1/completions", json=body, headers=headers
        ) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    assert '"error"' not in line, line
                    self.began.append(tenant)
                    return


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    root = tmp_path_factory.mktemp("fair")
    book, keys = TenantKeys(), {}
    for tenant in "ab":
        book, keys[tenant] = book.with_tenant(Tenant(name=tenant)).with_key(tenant, "now")
    file: Path = root / "keys.json"
    with locked_key_file(file) as replace:
        replace(book)
    fleet = Fleet(root, "simulated")
    try:
        # Without a scheduler: nobody else holds anything back.
        fleet.start_etcd()
        slow = ["--engine-arg", "speed=0.1", "--engine-arg", "max_num_batched_tokens=1024"]
        fleet.start_worker("w0", slow, wait=False)
        options = ["--api-keys", str(file), "--fair-backlog", str(BACKLOG), "--place-wait", str(PLACE_WAIT_S)]
        fleet.start_frontend(options=options, wait=False)
        wait_until(lambda: _answers(fleet, keys["a"]), "the API server", 120)
        yield Door(fleet, keys)
    finally:
        fleet.close()


def _answers(fleet: Fleet, key: str) -> bool:
    try:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{fleet.http}/v1/models", headers=headers).status_code == 200
    except httpx.TransportError:
        return False


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what, 30)


@pytest.mark.slow
async def test_a_burst_delays_another_tenant_by_the_backlog(door: Door) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client, asyncio.TaskGroup() as group:
        for number in range(BURST):
            group.create_task(door.ask(client, "a", number))
        await until(lambda: door.waiting("a") >= BURST / 2, "the burst to wait")
        # Whatever its clients say, it is tenant a that asks.
        assert await asyncio.to_thread(door.waiting, "b") == 0
        other = group.create_task(door.ask(client, "b", 0))
        await until(lambda: other.done() or door.waiting("b") == 1, "the other one to wait")
        began = len(door.began)
        await other
    between = door.began.index("b") - began
    # Two prompts were under way; at most one more of tenant a has its turn first. One for how the events of
    # two streams reach their clients.
    assert between <= 2 + 1 + 1
    assert door.began.index("b") < BURST - 2
    await until(lambda: door.under_way() == 0, "all prompts to be computed")


@pytest.mark.slow
async def test_who_leaves_while_it_waits_leaves_nothing(door: Door) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        asking = [asyncio.create_task(door.ask(client, "a", number)) for number in range(8)]
        await until(lambda: door.waiting("a") >= 3, "requests to wait")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    await until(lambda: door.waiting("a") == 0 and door.under_way() == 0, "the gate to be empty")
