"""An instance ID belongs to one worker at a time, tested with separate processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tailrace.records import InstanceRecord
from tailrace.store.store import Store
from tests.scheduler.facts import instance
from tests.waiting import WAIT_S
from tests.worker.worker_processes import worker_process
from worker_agent.registration import IdInUse, wait_until_free

TTL_S = 1.0


@pytest.fixture
def listening() -> Iterator[str]:
    """HOST:PORT of a listener that never sends anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def put(store: Store, address: str, incarnation: str = "1") -> None:
    """Register a worker "a" without a lease."""
    await store.put("instances/a", msgspec.json.encode(instance("a", address, incarnation)))


async def test_unused_id_is_claimed(store: Store) -> None:
    await wait_until_free(store, "a", TTL_S)


async def test_id_of_a_crashed_worker_is_claimed_at_once(store: Store) -> None:
    await put(store, "127.0.0.1:1")
    await wait_until_free(store, "a", lease_ttl_s=3600)


async def test_worker_registered_at_our_address_is_dead(store: Store, listening: str) -> None:
    await put(store, listening)
    await wait_until_free(store, "a", 3600, own_address=listening)


async def test_id_of_a_hung_worker_is_claimed_after_its_lease(
    store: Store, listening: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sockets accept connections, as those of a stopped process do, but it does not renew its lease."""
    lease = await store.grant_lease(600)
    await store.put_leased("instances/a", msgspec.json.encode(instance("a", listening)), lease)
    claiming = asyncio.create_task(wait_until_free(store, "a", lease_ttl_s=3600))
    async with asyncio.timeout(WAIT_S):
        while "checking whether it is alive" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert not claiming.done()
        # As its end does.
        await store.revoke_lease(lease)
        await claiming


async def test_live_worker_keeps_its_id(store: Store, listening: str) -> None:
    await put(store, listening)
    with pytest.raises(IdInUse, match=f"'a' is in use: the worker at {listening} is alive; stop it"):
        await wait_until_free(store, "a", TTL_S)


async def test_worker_replaced_while_frozen_stops(
    store: Store, etcd: str, cluster: str, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    async with worker_process(store, etcd, cluster, tmp_path, "w") as first:
        first.process.send_signal(signal.SIGSTOP)
        try:
            # Revoke the lease, as its expiry would take ten seconds.
            held = await store.get_leased("instances/w")
            assert held is not None
            await store.revoke_lease(held.lease)
            async with worker_process(store, etcd, cluster, tmp_path / "second", "w") as second:
                assert second.records[0].incarnation != first.records[0].incarnation
                first.process.send_signal(signal.SIGCONT)
                assert await first.wait() == 1
                log = first.log.read_text()
                assert f"another worker, at {second.address}, has registered as 'w'" in log
                assert "Traceback" not in log
                value = await store.get("instances/w")
                assert value is not None
                assert msgspec.json.decode(value, type=InstanceRecord) == second.records[0]
                assert second.process.returncode is None
        finally:
            if first.process.returncode is None:
                os.kill(first.process.pid, signal.SIGCONT)
