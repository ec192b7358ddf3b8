"""A burst of one tenant delays another's first token by at most the front end's backlog."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tailrace.tenancy.file import locked_key_file
from tailrace.tenancy.keys import SHARE_HEADER, Share, Tenant, TenantKeys
from tests.harness.fleet import MODEL, Fleet
from tests.harness.processes import wait_until
from tests.harness.tries import TRIES
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

# A letter is a token. Two such prompts fill the backlog, further ones wait.
PROMPT_TOKENS, BACKLOG = 1_000, 1_500
BURST, PLACE_WAIT_S = 20, 60.0


class FairFrontEnd:
    """A front end with keys over one slow engine; `began` has the tenants in order of first tokens."""

    def __init__(self, fleet: Fleet, keys: dict[str, str]) -> None:
        self.fleet = fleet
        self.keys = keys
        self.began: list[str] = []

    def waiting(self, tenant: str) -> float:
        return self.fleet.metric("frontend", "tailrace_frontend_fair_waiting", f'tenant="{tenant}"')

    def backlog_tokens(self) -> float:
        return self.fleet.metric("frontend", "tailrace_frontend_fair_backlog_tokens")

    async def ask(self, client: httpx.AsyncClient, tenant: str, number: int) -> None:
        """Send a streamed request that claims another tenant's share and a high priority."""
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
def front_end(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FairFrontEnd]:
    root = tmp_path_factory.mktemp("fair")
    tenant_keys, keys = TenantKeys(), {}
    for tenant in "ab":
        tenant_keys, keys[tenant] = tenant_keys.with_tenant(Tenant(name=tenant)).with_key(tenant, "now")
    file: Path = root / "keys.json"
    with locked_key_file(file) as replace:
        replace(tenant_keys)
    fleet = Fleet(root, "simulated")
    try:
        # Without a scheduler, only the front end delays requests.
        fleet.start_etcd()
        slow = ["--sim", "speed=0.1", "--sim", "max_num_batched_tokens=1024"]
        fleet.start_worker("w0", slow, wait=False)
        options = ["--api-keys", str(file), "--fair-backlog", str(BACKLOG), "--place-wait", str(PLACE_WAIT_S)]
        fleet.start_frontend(options=options, wait=False)
        wait_until(lambda: _serves(fleet, keys["a"]), "the API server")
        yield FairFrontEnd(fleet, keys)
    finally:
        fleet.close()


def _serves(fleet: Fleet, key: str) -> bool:
    try:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{fleet.http}/v1/models", headers=headers, timeout=WAIT_S).status_code == 200
    except httpx.TransportError:
        return False


async def wait_for(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


async def burst(front_end: FairFrontEnd) -> int | None:
    """Send a burst, and another tenant's request as soon as most of it waits.

    Return how many had begun once that waits; None if most had, since this process did not run for a while.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=WAIT_S, limits=limits) as client, asyncio.TaskGroup() as group:
        for number in range(BURST):
            group.create_task(front_end.ask(client, "a", number))

        def waits() -> bool:
            return front_end.waiting("a") >= BURST / 2

        await wait_for(lambda: waits() or len(front_end.began) == BURST, "the burst to wait")
        # Whatever the clients claim, the requests belong to tenant a.
        assert await asyncio.to_thread(front_end.waiting, "b") == 0
        other = group.create_task(front_end.ask(client, "b", 0))
        await wait_for(
            lambda: other.done() or front_end.waiting("b") == 1, "the other tenant's request to wait"
        )
        began = len(front_end.began)
        await other
    return began if began < BURST - 6 else None


@pytest.mark.slow
async def test_burst_delays_another_tenant_by_at_most_the_backlog(front_end: FairFrontEnd) -> None:
    for _ in range(TRIES):
        front_end.began.clear()
        if (began := await burst(front_end)) is not None:
            break
    assert began is not None, "the burst was never seen to wait"
    between = front_end.began.index("b") - began
    # Two prompts were in the backlog, and at most one more of tenant a gets its turn first. One more allows
    # for the order in which the events of two streams reach their clients.
    assert between <= 2 + 1 + 1
    assert front_end.began.index("b") < BURST - 2
    await wait_for(lambda: front_end.backlog_tokens() == 0, "all prompts to be computed")


@pytest.mark.slow
async def test_cancelled_waiting_requests_leave_nothing_behind(front_end: FairFrontEnd) -> None:
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        for _ in range(TRIES):
            tasks = [asyncio.create_task(front_end.ask(client, "a", number)) for number in range(8)]

            def ended(tasks: list[asyncio.Task[None]] = tasks) -> bool:
                return all(task.done() for task in tasks)

            await wait_for(lambda: front_end.waiting("a") >= 3 or ended(), "requests to wait")
            waited = not ended()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if waited:
                break
    assert waited
    await wait_for(
        lambda: front_end.waiting("a") == 0 and front_end.backlog_tokens() == 0, "the gate to be empty"
    )
