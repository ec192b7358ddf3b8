"""A standby passes on what is the leader's, and nothing that the caller may not do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from scheduler_svc.admin.errors import AdminError, AdminErrors
from scheduler_svc.admin.forward import LeaderForwarding, LeaderRoute
from tailrace.records import ServiceRecord
from tailrace.security.audit import Auditing
from tailrace.security.authority import Authority
from tailrace.security.roles import Role
from tailrace.security.transport import Transport
from tailrace.service.channels import FROM_SERVER, Channels
from tailrace.service.server import GrpcServer, Servicer, serve_grpc
from tailrace.store.client import StoreUnavailable
from tailrace.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from tests.security.conftest import transport
from tests.security.test_audit import Kept


class Admin:
    """The methods that are called here."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def SetPool(
        self,
        request: admin_pb2.SetPoolRequest,
        context: grpc.aio.ServicerContext[admin_pb2.SetPoolRequest, admin_pb2.SetPoolReply],
    ) -> admin_pb2.SetPoolReply:
        if request.instance_id == "none":
            raise AdminError(grpc.StatusCode.NOT_FOUND, f"{self._name} has no such instance")
        if request.instance_id == "unstored":
            raise StoreUnavailable(f"{self._name} has no etcd")
        return admin_pb2.SetPoolReply(previous=types_pb2.POOL_PREFILL)

    async def Drain(
        self,
        request: admin_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[admin_pb2.DrainRequest, admin_pb2.DrainEvent],
    ) -> AsyncIterator[admin_pb2.DrainEvent]:
        yield admin_pb2.DrainEvent(message=self._name)
        if request.instance_id == "none":
            raise AdminError(grpc.StatusCode.NOT_FOUND, f"{self._name} has no such instance")
        yield admin_pb2.DrainEvent(message=self._name, done=True)

    async def ListServices(
        self,
        request: admin_pb2.ListServicesRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ListServicesRequest, admin_pb2.ListServicesReply],
    ) -> admin_pb2.ListServicesReply:
        return admin_pb2.ListServicesReply(services=[admin_pb2.ServiceInfo(kind=self._name)])


class Members:
    """Who leads."""

    def __init__(self) -> None:
        self.leaders: dict[str, ServiceRecord] = {}


@dataclass
class Pair:
    """The admin API of a standby, as its caller has it; what the leader's audit log has."""

    admin: admin_pb2_grpc.AdminAsyncStub
    members: Members
    leader: GrpcServer
    kept: Kept


@asynccontextmanager
async def scheduler(
    name: str, own: Transport, members: Members, kept: Kept, leads: bool
) -> AsyncIterator[GrpcServer]:
    """Its admin API, with the layers that scheduler_svc puts around it."""
    leading = asyncio.Event()
    if leads:
        leading.set()
    channels = Channels(own)
    route = LeaderRoute(name, members, channels, leading)  # type: ignore[arg-type]
    admin = type("Whole", (Admin, admin_pb2_grpc.AdminServicer), {})(name)
    servicer = Servicer(admin_pb2_grpc.add_AdminServicer_to_server, admin, "tailrace.v1.Admin")
    layers = [AdminErrors(), LeaderForwarding(route)]
    try:
        async with serve_grpc("127.0.0.1:0", [servicer], own, [Auditing(kept)], layers) as server:
            yield server
    finally:
        await channels.close()


@asynccontextmanager
async def pair(authority: Authority, caller: Role) -> AsyncIterator[Pair]:
    """A leader and a standby."""
    members, kept = Members(), Kept()
    own = transport(authority, Role.SCHEDULER, "leads")
    other = transport(authority, Role.SCHEDULER, "stands-by")
    client = transport(authority, caller, "alice")
    async with (
        asyncio.timeout(30),
        scheduler("leads", own, members, kept, leads=True) as leader,
        scheduler("stands-by", other, members, Kept(), leads=False) as standby,
        client.channel(standby.address, Role.SCHEDULER, ()) as channel,
    ):
        members.leaders["scheduler"] = ServiceRecord(
            kind="scheduler", service_id="leads", incarnation="1", address=leader.address
        )
        yield Pair(admin_pb2_grpc.AdminStub(channel), members, leader, kept)


def own_answer(error: grpc.aio.AioRpcError) -> bool:
    """Whether the server chose the status."""
    return FROM_SERVER in tuple(error.trailing_metadata())


async def refused(
    call: grpc.aio.UnaryUnaryCall[admin_pb2.SetPoolRequest, admin_pb2.SetPoolReply],
) -> tuple[grpc.StatusCode, str, bool]:
    """The status, and whether it is the server's own."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value.code(), failure.value.details() or "", own_answer(failure.value)


async def test_the_leader_carries_it_out_for_the_caller(authority: Authority) -> None:
    async with pair(authority, Role.ADMIN) as both:
        reply = await both.admin.SetPool(admin_pb2.SetPoolRequest(instance_id="w"), timeout=10)
        events = [e async for e in both.admin.Drain(admin_pb2.DrainRequest(instance_id="w"), timeout=10)]
        services = (await both.admin.ListServices(admin_pb2.ListServicesRequest(), timeout=10)).services

    assert reply.previous == types_pb2.POOL_PREFILL
    assert [(e.message, e.done) for e in events] == [("leads", False), ("leads", True)]
    # What any scheduler can answer, it answers.
    assert [s.kind for s in services] == ["stands-by"]
    assert both.kept.told() == [
        ("scheduler/stands-by", "admin/alice", "SetPool", "OK", ""),
        ("scheduler/stands-by", "admin/alice", "Drain", "begun", ""),
        ("scheduler/stands-by", "admin/alice", "Drain", "OK", ""),
    ]


async def test_a_viewer_gets_nothing_done_by_way_of_the_standby(authority: Authority) -> None:
    async with pair(authority, Role.VIEWER) as both:
        code, _, _ = await refused(both.admin.SetPool(admin_pb2.SetPoolRequest(instance_id="w"), timeout=10))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in both.admin.Drain(admin_pb2.DrainRequest(instance_id="w"), timeout=10):
                pass

    assert code is failure.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert both.kept.told() == []


async def test_the_leaders_refusals_come_back_as_they_are(authority: Authority) -> None:
    async with pair(authority, Role.ADMIN) as both:
        missing = await refused(both.admin.SetPool(admin_pb2.SetPoolRequest(instance_id="none"), timeout=10))
        unstored = await refused(
            both.admin.SetPool(admin_pb2.SetPoolRequest(instance_id="unstored"), timeout=10)
        )
        seen = []
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for event in both.admin.Drain(admin_pb2.DrainRequest(instance_id="none"), timeout=10):
                seen += [event.message]

    assert missing == (grpc.StatusCode.NOT_FOUND, "leads has no such instance", True)
    assert unstored[0] is grpc.StatusCode.UNAVAILABLE
    assert unstored[2]
    assert seen == ["leads"]
    assert (failure.value.code(), failure.value.details()) == missing[:2]
    assert own_answer(failure.value)


async def test_a_leader_that_is_gone_is_named(authority: Authority) -> None:
    async with pair(authority, Role.ADMIN) as both:
        both.members.leaders["scheduler"] = ServiceRecord(
            kind="scheduler", service_id="leads", incarnation="1", address="127.0.0.1:1"
        )
        asked = admin_pb2.SetPoolRequest(instance_id="w")
        gone = await refused(both.admin.SetPool(asked, timeout=10))
        both.members.leaders.clear()
        none = await refused(both.admin.SetPool(asked, timeout=10))

    assert (gone[0], gone[2]) == (none[0], none[2]) == (grpc.StatusCode.UNAVAILABLE, True)
    assert gone[1].startswith("the leading scheduler does not respond; another one will lead")
    assert none[1].startswith("scheduler stands-by does not lead (known leader: none)")
