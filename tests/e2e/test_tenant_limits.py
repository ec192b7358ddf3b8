"""Limits of tenants at a real front end: what is counted, charged and kept apart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tailrace.tenancy.file import locked_key_file
from tailrace.tenancy.keys import Tenant, TenantKeys
from tests.harness.fleet import MODEL, Fleet
from tests.harness.processes import wait_until
from tests.harness.tries import TRIES
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.fleet, pytest.mark.slow]

TOKENS = 3_000.0
# Of the model's context of 8,192 tokens; a character is a token.
LONG = 8_000
TENANTS = (
    Tenant(name="a"),
    Tenant(name="b"),
    Tenant(name="shared 1", shared_cache="both"),
    Tenant(name="shared 2", shared_cache="both"),
    Tenant(name="narrow", concurrency=4),
    Tenant(name="short", longest_prompt=100),
    *(
        Tenant(name=f"metered {number}.{attempt}", tokens_per_minute=TOKENS)
        for number in range(3)
        for attempt in range(TRIES)
    ),
)


class FrontEnd:
    """A front end with keys over one simulated engine."""

    def __init__(self, fleet: Fleet, keys: dict[str, str]) -> None:
        self._fleet = fleet
        self._keys = keys

    def client(self, tenant: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self._keys[tenant]}"}
        return httpx.AsyncClient(base_url=self._fleet.http, headers=headers, timeout=WAIT_S)

    def generated_tokens(self) -> float:
        return self._fleet.metric("frontend", "tailrace_frontend_tokens_total")

    def cached_tokens(self) -> float:
        return self._fleet.metric("w0", "tailrace_worker_cached_prompt_tokens_total")


async def complete(client: httpx.AsyncClient, **fields: object) -> httpx.Response:
    """Send a completion of one token, unless `fields` say otherwise."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "ignore_eos": True, **fields}
    return await client.post("/v1/completions", json=body)


@pytest.fixture(scope="module")
def front_end(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    root = tmp_path_factory.mktemp("limits")
    tenant_keys, keys = TenantKeys(), {}
    for tenant in TENANTS:
        tenant_keys, keys[tenant.name] = tenant_keys.with_tenant(tenant).with_key(tenant.name, "now")
    file = root / "keys.json"
    with locked_key_file(file) as replace:
        replace(tenant_keys)
    fleet = Fleet(root, "simulated")
    try:
        fleet.start_etcd()
        fleet.start_worker("w0", ["--sim", "prefix_caching=true", "--sim", "speed=5"], wait=False)
        fleet.start_frontend(options=["--api-keys", str(file)], wait=False)

        def serves() -> bool:
            try:
                headers = {"authorization": f"Bearer {keys['a']}"}
                return (
                    httpx.get(f"{fleet.http}/v1/models", headers=headers, timeout=WAIT_S).status_code == 200
                )
            except httpx.TransportError:
                return False

        wait_until(serves, "the API server")
        yield FrontEnd(fleet, keys)
    finally:
        fleet.close()


async def test_sequences_count(front_end: FrontEnd) -> None:
    async with front_end.client("narrow") as client:
        assert (await complete(client, prompt=["a", "b"], n=2)).status_code == 200
        refused = await complete(client, prompt=["a", "b", "c"], n=2)
        assert refused.status_code == 400 and "6 sequences of 4" in refused.text
        assert (await complete(client, use_beam_search=True, n=5)).status_code == 400
        # All of it was given back.
        assert (await complete(client, n=4)).status_code == 200


@pytest.mark.parametrize(("number", "stream", "n"), [(0, False, 3), (1, True, 1)])
async def test_aborted_request_is_charged_what_it_made(
    front_end: FrontEnd, number: int, stream: bool, n: int
) -> None:
    for attempt in range(TRIES):
        async with front_end.client(f"metered {number}.{attempt}") as client:
            before = await asyncio.to_thread(front_end.generated_tokens)
            request = asyncio.create_task(complete(client, max_tokens=8_000, n=n, stream=stream))

            def made_enough(before: float = before) -> bool:
                return front_end.generated_tokens() > before + 1.5 * TOKENS

            await asyncio.to_thread(wait_until, made_enough, "enough tokens")
            # On a busy machine it may make all of them before this is seen.
            aborted = not request.done()
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            if not aborted:
                continue
            # The server charges once it notices.
            async with asyncio.timeout(WAIT_S):
                while (refused := await complete(client)).status_code == 200:
                    pass
            assert refused.status_code == 429 and "tokens per minute" in refused.text
            return
    pytest.fail(f"none of {TRIES} requests was aborted before its end")


async def test_tokenizing_is_charged(front_end: FrontEnd) -> None:
    async with front_end.client("metered 2.0") as client:
        body = {"model": MODEL, "prompt": "x" * int(2 * TOKENS)}
        answer = await client.post("/tokenize", json=body)
        assert answer.status_code == 200 and answer.json()["count"] >= 2 * TOKENS
        assert (await client.post("/tokenize", json=body)).status_code == 429


async def test_too_long_prompt_is_refused_before_and_after_it_is_tokenized(front_end: FrontEnd) -> None:
    async with front_end.client("short") as client:
        for length in (101, LONG):
            refused = await complete(client, prompt="x" * length)
            assert refused.status_code == 400 and "prompts of 100 tokens" in refused.text
        assert (await complete(client, prompt="x" * 90)).status_code == 200


async def test_tenants_share_cached_prompts_by_choice_only(front_end: FrontEnd) -> None:
    async def cached(tenant: str, prompt: str) -> float:
        before = await asyncio.to_thread(front_end.cached_tokens)
        async with front_end.client(tenant) as client:
            assert (await complete(client, prompt=prompt)).status_code == 200
        return await asyncio.to_thread(front_end.cached_tokens) - before

    for first, second, shares in (("a", "b", False), ("shared 1", "shared 2", True)):
        prompt = first.ljust(2_000, "x")
        assert await cached(first, prompt) == 0
        assert await cached(first, prompt) > 1_000
        assert (await cached(second, prompt) > 0) is shares


async def test_large_texts_do_not_hold_up_small_ones(front_end: FrontEnd) -> None:
    async with front_end.client("a") as large_client, front_end.client("b") as client:
        body = {"model": MODEL, "prompt": "x" * ((1 << 20) - 200)}
        # This process may not run for a while, which the large ones use.
        for _ in range(TRIES):
            large = [asyncio.create_task(large_client.post("/tokenize", json=body)) for _ in range(4)]
            # The first of them is being tokenized when the small ones arrive, or has been.
            await asyncio.sleep(0)
            for _ in range(5):
                assert (await complete(client)).status_code == 200
            overtaken = not all(task.done() for task in large)
            # Some may have waited for too long.
            assert {(await task).status_code for task in large} <= {200, 429}
            if overtaken:
                break
        assert overtaken
        over = await large_client.post("/tokenize", json={**body, "prompt": "x" * (1 << 20)})
        assert over.status_code == 413 and "1048576 bytes" in over.text
