"""Elections with a real etcd."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from tailrace.records import ServiceRecord
from tailrace.store.election import Election
from tailrace.store.store import Store
from tests.harness.local_etcd import local_etcd
from tests.store.waiting import until
from tests.waiting import WAIT_S


def record(name: str) -> ServiceRecord:
    """Return the record of a candidate."""
    return ServiceRecord(kind="scheduler", service_id=name, incarnation=name, address="127.0.0.1:1")


async def wait_until_leading(election: Election) -> None:
    """Wait until the candidate leads."""
    async with asyncio.timeout(WAIT_S):
        await election.leading.wait()


async def test_one_candidate_leads_and_hands_over(store: Store) -> None:
    first, second = Election(store, record("a")), Election(store, record("b"))
    first.start()
    await wait_until_leading(first)
    second.start()
    leader = await store.get("leader/scheduler")
    assert leader is not None and msgspec.json.decode(leader, type=ServiceRecord) == record("a")
    await first.close()
    await wait_until_leading(second)
    assert not first.leading.is_set()
    await second.close()
    assert await store.get("leader/scheduler") is None


async def test_a_value_without_a_lease_is_no_leader(store: Store) -> None:
    """Neither before an election, nor in place of the leader's."""
    await store.put("leader/scheduler", b"\xff")
    election = Election(store, record("a"))
    election.start()
    for stray in (b"7", msgspec.json.encode(record("b"))):
        await wait_until_leading(election)
        await store.put("leader/scheduler", stray)
        async with asyncio.timeout(WAIT_S):
            await election.following.wait()
    await wait_until_leading(election)
    assert await store.get("leader/scheduler") == msgspec.json.encode(record("a"))
    await election.close()


async def test_takeover_when_the_leader_is_killed(etcd: str, store: Store, cluster: str) -> None:
    """A killed process no longer renews its lease: the test closes its connection."""
    doomed = await Store.connect([etcd], cluster)
    first = Election(doomed, record("a"), ttl_s=2)
    second = Election(store, record("b"), ttl_s=2)
    first.start()
    await wait_until_leading(first)
    second.start()
    await doomed._client.close()
    await wait_until_leading(second)
    assert not first.leading.is_set()
    await first.close()
    await second.close()


async def test_a_leader_steps_down_before_its_lease_can_expire(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd:
        store = await Store.connect([etcd.endpoint], "c")
        election = Election(store, record("a"), ttl_s=2)
        election.start()
        await wait_until_leading(election)
        loop = asyncio.get_running_loop()
        etcd.freeze()
        frozen_s = loop.time()
        async with asyncio.timeout(WAIT_S):
            await election.following.wait()
        assert loop.time() - frozen_s < 2.0
        etcd.thaw()
        await wait_until_leading(election)
        await election.close()
        await store.close()


async def test_etcd_killed_and_restarted(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd:
        store = await Store.connect([etcd.endpoint], "c")
        candidates = [Election(store, record(name), ttl_s=2) for name in "ab"]
        for candidate in candidates:
            candidate.start()
        await asyncio.wait(
            [asyncio.create_task(wait_until_leading(c)) for c in candidates], return_when="FIRST_COMPLETED"
        )
        etcd.kill()
        await etcd.start()
        # The leader may have survived the restart, or another one may have won: exactly one leads.
        await until(store.watch_prefix("leader/"), bool)
        await asyncio.wait(
            [asyncio.create_task(wait_until_leading(c)) for c in candidates], return_when="FIRST_COMPLETED"
        )
        assert sum(c.leading.is_set() for c in candidates) == 1
        for candidate in candidates:
            await candidate.close()
        await store.close()


async def test_a_leader_whose_lease_is_revoked_steps_down_at_once(store: Store) -> None:
    """Before 3.5.13, etcd can revoke a live lease; the next renewal would be in a quarter of an hour."""
    election = Election(store, record("a"), ttl_s=3600)
    election.start()
    await wait_until_leading(election)
    assert election._lease is not None
    await store.revoke_lease(election._lease)
    async with asyncio.timeout(WAIT_S):
        await election.following.wait()
    await wait_until_leading(election)
    await election.close()
