"""Drains and pools of instances that no longer exist."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import msgspec
import pytest

from scheduler_svc.orphans import OrphanedRecords, UnservedRollouts, remove_orphaned_records
from scheduler_svc.settings import Settings
from tailrace.cluster import Pool
from tailrace.records import ServiceRecord
from tailrace.rollout.record import RolloutRecord, RolloutState
from tailrace.store.membership import Membership
from tailrace.store.registration import register
from tailrace.store.store import Store
from tailrace.v1 import admin_pb2, types_pb2
from tests.scheduler.conftest import Control
from tests.scheduler.facts import instance
from tests.static_members import StaticMembers
from tests.store.waiting import until
from tests.streamed import read_message
from tests.waiting import WAIT_S


def test_a_restarted_instance_keeps_its_drain_and_pool() -> None:
    orphans = OrphanedRecords(keep_s=600)
    gone = StaticMembers(drained=frozenset({"a"}), pools={"a": Pool.DECODE})
    there = StaticMembers(instances={"a": instance("a")}, drained=gone.drained, pools=gone.pools)
    assert orphans.due(gone, 0) == []
    assert orphans.due(gone, 599) == []
    assert orphans.due(there, 599.5) == []
    assert orphans.due(gone, 1_000) == [], "the time starts again after its return"
    assert orphans.due(gone, 1_599) == []
    assert orphans.due(gone, 1_600) == ["a"]


def test_only_records_of_missing_instances_are_due() -> None:
    orphans = OrphanedRecords(keep_s=0)
    fleet = StaticMembers(
        instances={"a": instance("a")},
        drained=frozenset({"a", "b"}),
        pools={"a": Pool.DECODE, "c": Pool.PREFILL},
    )
    assert orphans.due(fleet, 1) == ["b", "c"]


def test_a_finished_rollout_without_front_ends_is_reported_once() -> None:
    def rollout(state: RolloutState) -> RolloutRecord:
        return RolloutRecord(model="chat", before="t:a", new="t:b", state=state, begun_s=1.0)

    front = ServiceRecord(
        kind="frontend", service_id="f0", incarnation="1", address="127.0.0.1:1", model_name="chat"
    )
    unserved = UnservedRollouts(keep_s=600)
    over = StaticMembers(rollouts={"chat": rollout(RolloutState.DONE)})
    assert unserved.due(over, 0) == []
    served = StaticMembers(services={("frontend", "f0"): front}, rollouts=over.rollouts)
    assert unserved.due(served, 599) == []
    assert unserved.due(over, 700) == []
    assert unserved.due(StaticMembers(rollouts={"chat": rollout(RolloutState.DRAINING)}), 800) == []
    assert unserved.due(over, 900) == []
    assert unserved.due(over, 1_500) == ["chat"]
    assert unserved.due(over, 1_600) == []


async def test_etcd_decides_whether_an_instance_exists(store: Store) -> None:
    """A scheduler that has not heard of a new instance does not remove its records."""
    await store.put("drains/a", b"1")
    await store.put("pools/a", b"decode")
    await store.put("instances/a", msgspec.json.encode(instance("a")))
    assert not await Settings(store).delete_orphaned_records("a")
    assert await store.get("drains/a") == b"1"
    await store.delete("instances/a")
    assert await Settings(store).delete_orphaned_records("a")
    assert await store.get_prefix("") == {}


async def test_only_the_leader_removes_orphaned_records(store: Store) -> None:
    await store.put("drains/gone", b"1")
    await store.put("pools/gone", b"decode")
    registration = await register(store, "instances/here", msgspec.json.encode(instance("here")))
    await store.put("drains/here", b"1")
    members = await Membership.start(store)
    leading = asyncio.Event()
    removing = asyncio.create_task(
        remove_orphaned_records(
            members, Settings(store).delete_orphaned_records, leading, keep_s=0, poll_s=0.01
        )
    )
    try:
        await store.put("policy", b"seen by members after the rest")
        assert await store.get("drains/gone") == b"1"
        leading.set()
        await until(
            store.watch_prefix(""), lambda found: {"drains/gone", "pools/gone"}.isdisjoint(found.keys())
        )
        assert await store.get("drains/here") == b"1"
    finally:
        removing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await removing
        await members.close()
        await registration.withdraw()


async def test_undrain_works_for_a_missing_instance(control: Control) -> None:
    admin = await control.admin()
    await control.store.put("drains/gone", b"1")
    await control.store.put("pools/gone", b"decode")
    await control.wait_for_members(lambda members: "gone" in members.drained)

    async def undrain(name: str) -> bool:
        """Do the same as `tailrace drain NAME --undrain`."""
        request = admin_pb2.DrainRequest(instance_id=name, undrain=True)
        return bool((await read_message(admin.Drain(request, timeout=WAIT_S), admin_pb2.DrainEvent)).done)

    async with asyncio.timeout(WAIT_S):
        # The scheduler's watch can be behind this one.
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert await undrain("gone")
                break
    assert await control.store.get("drains/gone") is None
    with pytest.raises(grpc.aio.AioRpcError, match=r"no instance 'never-was'.*drained: "):
        await undrain("never-was")
    taken_out = admin_pb2.SetPoolRequest(instance_id="gone", pool=types_pb2.POOL_UNSPECIFIED)
    assert (await admin.SetPool(taken_out, timeout=WAIT_S)).previous == types_pb2.POOL_DECODE
    assert await control.store.get("pools/gone") is None
