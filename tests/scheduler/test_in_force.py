"""Settings are reported as changed once every scheduler goes by them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import pytest

from scheduler_svc.admin.errors import AdminError
from scheduler_svc.admin.in_force import InForce
from scheduler_svc.settings import Settings
from tailrace.cluster import Pool
from tailrace.records import ServiceRecord
from tailrace.service.channels import Channels
from tailrace.service.server import Servicer, serve_grpc
from tailrace.store.membership import Membership
from tailrace.store.store import Store
from tailrace.v1 import admin_pb2, admin_pb2_grpc


class Standby(admin_pb2_grpc.AdminServicer):
    """A scheduler that reads another revision of etcd each time it is asked."""

    def __init__(self, revisions: Iterator[int]) -> None:
        self.revisions = revisions
        self.asked: list[int] = []

    async def ListServices(self, request: Any, context: Any) -> admin_pb2.ListServicesReply:
        self.asked.append(next(self.revisions))
        return admin_pb2.ListServicesReply(revision=self.asked[-1])


@asynccontextmanager
async def standby(revisions: Iterator[int]) -> Any:
    """Yield what waits on scheduler `a`, which has followed up to revision 7, beside this standby and a dead
    one; and the members that `a` knows."""
    servicer = Standby(revisions)  # type: ignore[abstract]  # the other methods are not called
    channels = Channels()
    services = [Servicer(admin_pb2_grpc.add_AdminServicer_to_server, servicer, "tailrace.v1.Admin")]
    async with serve_grpc("127.0.0.1:0", services) as server:
        addresses = {"a": "127.0.0.1:1", "dead": "127.0.0.1:1", "standby": server.address}
        records = {
            ("scheduler", name): ServiceRecord(
                kind="scheduler", service_id=name, incarnation="1", address=address
            )
            for name, address in addresses.items()
        }
        members: Any = SimpleNamespace(services=records, revision=7)
        try:
            yield InForce("a", members, channels), servicer, members
        finally:
            await channels.close()


async def test_waits_for_this_scheduler_and_the_others() -> None:
    async with standby(iter([5, 6, 8])) as (in_force, other, members):
        members.revision = 6
        waiting = asyncio.create_task(in_force.wait("the drain of w", 7))
        await asyncio.sleep(0)
        assert not other.asked
        members.revision = 9
        await waiting
        assert other.asked == [5, 6, 8]


async def test_names_the_scheduler_that_does_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.admin.in_force.FOLLOW_S", 0.3)
    async with standby(iter(lambda: 5, 0)) as (in_force, _, members):
        # Until it is found dead, it is the one that lags.
        del members.services["scheduler", "dead"]
        for revision, lagging in ((8, "a"), (7, "standby")):
            with pytest.raises(AdminError, match=f"scheduler {lagging} has not followed") as caught:
                await in_force.wait("the drain of w", revision)
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_writes_of_another_cluster_hold_up_no_setting(etcd: str, cluster: str) -> None:
    """A scheduler that has read everything anew is at the revision of the last write of all clusters; the
    watches of the others show those of their own cluster."""
    async with AsyncExitStack() as stack:
        channels = Channels()
        stack.push_async_callback(channels.close)
        store, other = [await Store.connect([etcd], name) for name in (cluster, f"{cluster}-other")]
        stack.push_async_callback(store.close)
        stack.push_async_callback(other.close)
        await store.put("pools/w", b"decode")
        follower: Membership
        standby = Standby(iter(lambda: follower.revision, -1))  # type: ignore[abstract]
        services = [Servicer(admin_pb2_grpc.add_AdminServicer_to_server, standby, "tailrace.v1.Admin")]
        server = await stack.enter_async_context(serve_grpc("127.0.0.1:0", services))
        record = ServiceRecord(
            kind="scheduler", service_id="standby", incarnation="1", address=server.address
        )
        await store.put("services/scheduler/standby", msgspec.json.encode(record))
        follower = await Membership.start(store)
        stack.push_async_callback(follower.close)
        await other.put("pools/w", b"decode")
        members = await Membership.start(store)
        stack.push_async_callback(members.close)
        assert members.revision > follower.revision
        in_force = InForce("a", members, channels)
        for pool in (Pool.DECODE, Pool.PREFILL, Pool.PREFILL, None, None):
            _, revision = await Settings(store).set_pool("w", pool)
            await in_force.wait("the pool of w", revision)
            assert members.pools.get("w") is pool
