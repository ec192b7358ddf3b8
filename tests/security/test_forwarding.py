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
from tailrace.v1 import admin_pb2, admin_pb2_grpc, migration_pb2
from tests.security.conftest import transport
from tests.security.test_audit import AuditSink
from tests.static_members import StaticMembers
from tests.waiting import WAIT_S


class Admin:
    """The methods used by these tests."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def SetShadow(
        self,
        request: admin_pb2.SetShadowRequest,
        context: grpc.aio.ServicerContext[admin_pb2.SetShadowRequest, admin_pb2.SetShadowReply],
    ) -> admin_pb2.SetShadowReply:
        if request.name == "none":
            raise AdminError(grpc.StatusCode.NOT_FOUND, f"{self._name} has no such instance")
        if request.name == "unstored":
            raise StoreUnavailable(f"{self._name} has no etcd")
        return admin_pb2.SetShadowReply(previous="before")

    async def Migrate(
        self,
        request: admin_pb2.AdminMigrateRequest,
        context: grpc.aio.ServicerContext[admin_pb2.AdminMigrateRequest, migration_pb2.MigrationRecord],
    ) -> AsyncIterator[migration_pb2.MigrationRecord]:
        yield migration_pb2.MigrationRecord(reason=self._name)
        if request.request_id == "none":
            raise AdminError(grpc.StatusCode.NOT_FOUND, f"{self._name} has no such instance")
        yield migration_pb2.MigrationRecord(reason=self._name, bytes=1)

    async def ListServices(
        self,
        request: admin_pb2.ListServicesRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ListServicesRequest, admin_pb2.ListServicesReply],
    ) -> admin_pb2.ListServicesReply:
        return admin_pb2.ListServicesReply(services=[admin_pb2.ServiceInfo(kind=self._name)])


@dataclass
class Pair:
    """A client of the standby's admin API, and the leader with its audit log."""

    admin: admin_pb2_grpc.AdminAsyncStub
    members: StaticMembers
    leader: GrpcServer
    audit: AuditSink


@asynccontextmanager
async def scheduler(
    name: str, own: Transport, members: StaticMembers, audit: AuditSink, leads: bool
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
    members, audit = StaticMembers(), AuditSink()
    own = transport(authority, Role.SCHEDULER, "leads")
    other = transport(authority, Role.SCHEDULER, "stands-by")
    client = transport(authority, caller, "alice")
    async with (
        asyncio.timeout(WAIT_S),
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
    call: grpc.aio.UnaryUnaryCall[admin_pb2.SetShadowRequest, admin_pb2.SetShadowReply],
) -> tuple[grpc.StatusCode, str, bool]:
    """Return the status, its details, and whether the server itself set it."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value.code(), failure.value.details() or "", is_server_status(failure.value)


async def test_leader_executes_forwarded_calls_for_the_caller(authority: Authority) -> None:
    async with pair(authority, Role.ADMIN) as both:
        reply = await both.admin.SetShadow(admin_pb2.SetShadowRequest(name="w"), timeout=WAIT_S)
        events = [
            e async for e in both.admin.Migrate(admin_pb2.AdminMigrateRequest(request_id="w"), timeout=WAIT_S)
        ]
        services = (await both.admin.ListServices(admin_pb2.ListServicesRequest(), timeout=WAIT_S)).services

    assert reply.previous == "before"
    assert [(e.reason, e.bytes) for e in events] == [("leads", 0), ("leads", 1)]
    # The standby itself answers what any scheduler can.
    assert [s.kind for s in services] == ["stands-by"]
    assert both.audit.summaries() == [
        ("scheduler/stands-by", "admin/alice", "SetShadow", "OK", ""),
        ("scheduler/stands-by", "admin/alice", "Migrate", "begun", ""),
        ("scheduler/stands-by", "admin/alice", "Migrate", "OK", ""),
    ]


async def test_viewer_cannot_make_changes_through_the_standby(authority: Authority) -> None:
    async with pair(authority, Role.VIEWER) as both:
        code, _, _ = await refused(both.admin.SetShadow(admin_pb2.SetShadowRequest(name="w"), timeout=WAIT_S))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in both.admin.Migrate(admin_pb2.AdminMigrateRequest(request_id="w"), timeout=WAIT_S):
                pass

    assert code is failure.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert both.audit.summaries() == []


async def test_refusals_of_the_leader_are_returned_unchanged(authority: Authority) -> None:
    async with pair(authority, Role.ADMIN) as both:
        missing = await refused(both.admin.SetShadow(admin_pb2.SetShadowRequest(name="none"), timeout=WAIT_S))
        unstored = await refused(
            both.admin.SetShadow(admin_pb2.SetShadowRequest(name="unstored"), timeout=WAIT_S)
        )
        seen = []
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for event in both.admin.Migrate(
                admin_pb2.AdminMigrateRequest(request_id="none"), timeout=WAIT_S
            ):
                seen += [event.reason]

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
        request = admin_pb2.SetShadowRequest(name="w")
        unreachable = await refused(both.admin.SetShadow(request, timeout=WAIT_S))
        # etcd showed it as the leader before it stopped answering.
        both.members.leaders["scheduler"] = ServiceRecord(
            kind="scheduler", service_id="stands-by", incarnation="1", address="127.0.0.1:1"
        )
        unconfirmed = await refused(both.admin.SetShadow(request, timeout=WAIT_S))
        both.members.leaders.clear()
        no_leader = await refused(both.admin.SetShadow(request, timeout=WAIT_S))

    assert (
        (unreachable[0], unreachable[2])
        == (no_leader[0], no_leader[2])
        == (grpc.StatusCode.UNAVAILABLE, True)
    )
    assert unconfirmed[0] is grpc.StatusCode.UNAVAILABLE and unconfirmed[2]
    assert "etcd does not answer, or takes too long; try again when it does" in unconfirmed[1]
    assert unreachable[1].startswith("the leading scheduler does not respond; another one will lead")
    assert no_leader[1].startswith("scheduler stands-by does not lead (known leader: none)")
