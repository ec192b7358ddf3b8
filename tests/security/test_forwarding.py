"""A standby forwards calls that only the leader can execute, with the permissions of the caller."""

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
from tests.security.test_audit import AuditSink


class Admin:
    """The methods used by these tests."""

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
    """Membership that knows only the leaders."""

    def __init__(self) -> None:
        self.leaders: dict[str, ServiceRecord] = {}


@dataclass
class Pair:
    """A client of the standby's admin API, and the leader with its audit log."""

    admin: admin_pb2_grpc.AdminAsyncStub
    members: Members
    leader: GrpcServer
    audit: AuditSink


@asynccontextmanager
async def scheduler(
    name: str, own: Transport, members: Members, audit: AuditSink, leads: bool
) -> AsyncIterator[GrpcServer]:
    """Serve a scheduler's admin API with the same layers as scheduler_svc."""
    leading = asyncio.Event()
    if leads:
        leading.set()
    channels = Channels(own)
    route = LeaderRoute(name, members, channels, leading)  # type: ignore[arg-type]
    admin = type("Whole", (Admin, admin_pb2_grpc.AdminServicer), {})(name)
    servicer = Servicer(admin_pb2_grpc.add_AdminServicer_to_server, admin, "tailrace.v1.Admin")
    layers = [AdminErrors(), LeaderForwarding(route)]
    try:
        async with serve_grpc("127.0.0.1:0", [servicer], own, [Auditing(audit)], layers) as server:
            yield server
    finally:
        await channels.close()


@asynccontextmanager
async def pair(authority: Authority, caller: Role) -> AsyncIterator[Pair]:
    """Serve a leader and a standby."""
    members, audit = Members(), AuditSink()
    own = transport(authority, Role.SCHEDULER, "leads")
    other = transport(authority, Role.SCHEDULER, "stands-by")
    client = transport(authority, caller, "alice")
    async with (
        asyncio.timeout(30),
        scheduler("leads", own, members, audit, leads=True) as leader,
        scheduler("stands-by", other, members, AuditSink(), leads=False) as standby,
        client.channel(standby.address, Role.SCHEDULER, ()) as channel,
    ):
        members.leaders["scheduler"] = ServiceRecord(
            kind="scheduler", service_id="leads", incarnation="1", address=leader.address
        )
        yield Pair(admin_pb2_grpc.AdminStub(channel), members, leader, audit)


def is_server_status(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the status was set by the server, not by gRPC."""
    return FROM_SERVER in tuple(error.trailing_metadata())


async def refused(
    call: grpc.aio.UnaryUnaryCall[admin_pb2.SetPoolRequest, admin_pb2.SetPoolReply],
) -> tuple[grpc.StatusCode, str, bool]:
    """Return the status, its details, and whether the server itself set it."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value.code(), failure.value.details() or "", is_server_status(failure.value)


async def test_leader_executes_forwarded_calls_for_the_caller(authority: Authority) -> None:
    async with pair(authority, Role.ADMIN) as both:
        reply = await both.admin.SetPool(admin_pb2.SetPoolRequest(instance_id="w"), timeout=10)
        events = [e async for e in both.admin.Drain(admin_pb2.DrainRequest(instance_id="w"), timeout=10)]
        services = (await both.admin.ListServices(admin_pb2.ListServicesRequest(), timeout=10)).services

    assert reply.previous == types_pb2.POOL_PREFILL
    assert [(e.message, e.done) for e in events] == [("leads", False), ("leads", True)]
    # The standby itself answers what any scheduler can.
    assert [s.kind for s in services] == ["stands-by"]
    assert both.audit.summaries() == [
        ("scheduler/stands-by", "admin/alice", "SetPool", "OK", ""),
        ("scheduler/stands-by", "admin/alice", "Drain", "begun", ""),
        ("scheduler/stands-by", "admin/alice", "Drain", "OK", ""),
    ]


async def test_viewer_cannot_make_changes_through_the_standby(authority: Authority) -> None:
    async with pair(authority, Role.VIEWER) as both:
        code, _, _ = await refused(both.admin.SetPool(admin_pb2.SetPoolRequest(instance_id="w"), timeout=10))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in both.admin.Drain(admin_pb2.DrainRequest(instance_id="w"), timeout=10):
                pass

    assert code is failure.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert both.audit.summaries() == []


async def test_refusals_of_the_leader_are_returned_unchanged(authority: Authority) -> None:
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
    assert is_server_status(failure.value)


async def test_unreachable_leader_is_named(authority: Authority) -> None:
    async with pair(authority, Role.ADMIN) as both:
        both.members.leaders["scheduler"] = ServiceRecord(
            kind="scheduler", service_id="leads", incarnation="1", address="127.0.0.1:1"
        )
        request = admin_pb2.SetPoolRequest(instance_id="w")
        unreachable = await refused(both.admin.SetPool(request, timeout=10))
        both.members.leaders.clear()
        no_leader = await refused(both.admin.SetPool(request, timeout=10))

    assert (
        (unreachable[0], unreachable[2])
        == (no_leader[0], no_leader[2])
        == (grpc.StatusCode.UNAVAILABLE, True)
    )
    assert unreachable[1].startswith("the leading scheduler does not respond; another one will lead")
    assert no_leader[1].startswith("scheduler stands-by does not lead (known leader: none)")
