"""Elections with a real etcd."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tailrace.records import ServiceRecord
from tailrace.store.election import Election, Leadership, lease_clock
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
    first, second = (Election(store, record(name), ttl_s=WAIT_S) for name in "ab")
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
    election = Election(store, record("a"), ttl_s=WAIT_S)
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


async def test_a_leader_steps_down_before_its_lease_can_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[float] = []
    hold_until = Leadership.hold_until

    def hold(leading: Leadership, until_s: float) -> None:
        held.append(until_s)
        hold_until(leading, until_s)

    monkeypatch.setattr(Leadership, "hold_until", hold)
    async with local_etcd(tmp_path / "etcd") as etcd:
        store = await Store.connect([etcd.endpoint], "c")
        election = Election(store, record("a"), ttl_s=2)
        election.start()
        await wait_until_leading(election)
        etcd.freeze()
        # No later did etcd renew the lease.
        frozen_s = lease_clock()
        async with asyncio.timeout(WAIT_S):
            await election.following.wait()
        # Not when it noticed, which a busy machine delays: by the clock it led no longer.
        assert held[-1] < frozen_s + 2.0
        assert not election.leading.is_set()
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
        async with asyncio.timeout(WAIT_S):
            while not (leaders := [c for c in candidates if c.leading.is_set()]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(leaders) == 1
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
