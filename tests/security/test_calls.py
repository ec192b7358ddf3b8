"""gRPC between processes with certificates: which role may call what, and the errors of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tailrace.security.authority import Authority
from tailrace.security.credentials import read_credentials
from tailrace.security.diagnosis import handshake_problem
from tailrace.security.roles import Identity, Role, server_name
from tailrace.security.transport import PLAIN, Transport
from tailrace.service.channels import Channels
from tailrace.service.probe import Unhealthy, check_grpc
from tailrace.service.server import Servicer, serve_grpc
from tailrace.v1 import profile_pb2, worker_pb2, worker_pb2_grpc
from tests.security.conftest import EXPIRED_DAYS, transport
from tests.waiting import WAIT_S


class Worker(worker_pb2_grpc.WorkerServicer):
    """One method of each kind, in both styles of implementation."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.go_on = asyncio.Event()

    async def CancelImport(
        self,
        request: worker_pb2.CancelImportRequest,
        context: grpc.aio.ServicerContext[worker_pb2.CancelImportRequest, worker_pb2.CancelImportReply],
    ) -> worker_pb2.CancelImportReply:
        self.calls.append("CancelImport")
        return worker_pb2.CancelImportReply()

    async def Import(  # type: ignore[override]
        self,
        request: worker_pb2.ImportRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ImportRequest, worker_pb2.ImportEvent],
    ) -> None:
        self.calls.append("Import")
        await context.write(worker_pb2.ImportEvent())
        await self.go_on.wait()
        await context.write(worker_pb2.ImportEvent())

    async def Export(
        self,
        request_iterator: AsyncIterator[worker_pb2.ExportCommand],
        context: grpc.aio.ServicerContext[worker_pb2.ExportCommand, worker_pb2.ExportEvent],
    ) -> AsyncIterator[worker_pb2.ExportEvent]:
        self.calls.append("Export")
        async for _ in request_iterator:
            yield worker_pb2.ExportEvent()

    async def HandBackPrompts(
        self,
        request: worker_pb2.HandBackPromptsRequest,
        context: grpc.aio.ServicerContext[worker_pb2.HandBackPromptsRequest, worker_pb2.HandBackPromptsReply],
    ) -> worker_pb2.HandBackPromptsReply:
        raise NotImplementedError

    def Profile(
        self,
        request: profile_pb2.ProfileRequest,
        context: grpc.aio.ServicerContext[profile_pb2.ProfileRequest, profile_pb2.ProfileEvent],
    ) -> AsyncIterator[profile_pb2.ProfileEvent]:
        raise NotImplementedError


@asynccontextmanager
async def serving(own: Transport) -> AsyncIterator[tuple[Worker, str]]:
    worker = Worker()
    servicer = Servicer(worker_pb2_grpc.add_WorkerServicer_to_server, worker, "tailrace.v1.Worker")
    async with asyncio.timeout(WAIT_S), serve_grpc("127.0.0.1:0", [servicer], own) as server:
        yield worker, server.address


async def call_all(channels: Channels, address: str) -> list[str]:
    """Make each kind of call and return their outcomes."""
    worker = worker_pb2_grpc.WorkerStub(channels.get(address, Role.WORKER))
    ends: list[str] = []
    try:
        await worker.CancelImport(worker_pb2.CancelImportRequest(), timeout=WAIT_S)
        ends.append("OK")
    except grpc.aio.AioRpcError as error:
        ends.append(f"{error.code().name}: {error.details()}")
    ends.append(await first_reply(worker.Import(worker_pb2.ImportRequest(), timeout=WAIT_S)))
    for _ in range(5):
        end = await first_reply(worker.Export(iter([worker_pb2.ExportCommand()]), timeout=WAIT_S))
        # A write that fails before the refusal has been read hides it: grpc.aio gives its own status.
        if end != "INTERNAL: Internal error from Core":
            break
    ends.append(end)
    return ends


async def first_reply(call: grpc.aio.UnaryStreamCall[Any, Any] | grpc.aio.StreamStreamCall[Any, Any]) -> str:
    """Return OK if there is one, else the status."""
    try:
        assert await call.read() is not grpc.aio.EOF
        return "OK"
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    finally:
        call.cancel()


@pytest.mark.parametrize(
    ("role", "permitted"),
    [
        (Role.MIGRATION, [True, True, False]),
        (Role.WORKER, [False, False, True]),
        *((role, [False] * 3) for role in (Role.FRONTEND, Role.MONITOR, Role.ADMIN)),
    ],
)
async def test_each_method_is_for_its_roles(authority: Authority, role: Role, permitted: list[bool]) -> None:
    channels = Channels(transport(authority, role, "caller"))
    async with serving(transport(authority, Role.WORKER)) as (worker, address):
        ends = await call_all(channels, address)
        for end, allowed, name, required in zip(
            ends,
            permitted,
            ("CancelImport", "Import", "Export"),
            ("migration", "migration", "worker"),
            strict=True,
        ):
            if allowed:
                assert end == "OK" and name in worker.calls
            else:
                assert end == (
                    f"PERMISSION_DENIED: the certificate of caller has role {role.value}; "
                    f"/tailrace.v1.Worker/{name} requires {required}"
                )
                assert name not in worker.calls
        # Every role may check its health.
        reply = await HealthStub(channels.get(address, Role.WORKER)).Check(
            HealthCheckRequest(), timeout=WAIT_S
        )
        assert reply.status == HealthCheckResponse.SERVING
        await channels.close()


@pytest.mark.parametrize("role", [Role.ETCD, Role.ETCD_ROOT])
async def test_etcds_certificates_are_not_of_the_clusters_authority(authority: Authority, role: Role) -> None:
    channels = Channels(transport(authority, role, "caller"))
    async with serving(transport(authority, Role.WORKER)) as (worker, address):
        ends = await call_all(channels, address)
        await channels.close()
    assert all(end.startswith("UNAVAILABLE") for end in ends) and not worker.calls


async def test_grpc_negotiates_tls_1_3(authority: Authority) -> None:
    own = transport(authority, Role.MIGRATION).folder.current().client_context
    async with serving(transport(authority, Role.WORKER)) as (_, address):
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(
            host, int(port), ssl=own, server_hostname=server_name(Role.WORKER)
        )
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        writer.close()


async def test_calls_without_a_certificate_fail(authority: Authority) -> None:
    async with serving(transport(authority, Role.WORKER)) as (worker, address):
        channels = Channels(PLAIN)
        ends = await call_all(channels, address)
        assert all(end.startswith("UNAVAILABLE") for end in ends) and not worker.calls
        await channels.close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no handshake be given up because this machine is busy."""
    monkeypatch.setattr("tailrace.security.diagnosis._CONNECT_S", WAIT_S)


async def test_server_with_another_role_is_not_called(authority: Authority, patience: None) -> None:
    """As when another process has taken over a worker's address."""
    async with serving(transport(authority, Role.FRONTEND)) as (worker, address):
        own_transport = transport(authority, Role.MIGRATION)
        channels = Channels(own_transport)
        ends = await call_all(channels, address)
        assert all(end.startswith("UNAVAILABLE") for end in ends) and not worker.calls
        problem = await asyncio.to_thread(
            handshake_problem, address, Role.WORKER, own_transport.folder.current()
        )
        assert problem.startswith("the certificate has another role")
        await channels.close()


async def test_handshake_problem_is_explained(
    authority: Authority, foreign: Authority, patience: None
) -> None:
    good = transport(authority, Role.ADMIN, "good").folder.current()
    expired_folder = authority.issue(Identity(Role.ADMIN, "late"), days=EXPIRED_DAYS).folder
    stranger = read_credentials(foreign.issue(Identity(Role.ADMIN, "stranger")).folder)
    expired = replace(
        good,
        certificate=(expired_folder / "tls.crt").read_bytes(),
        key=(expired_folder / "tls.key").read_bytes(),
    )
    cases = {
        "": good,
        "the server rejects our certificate": expired,
        "rejects our certificate": replace(stranger, authorities=good.authorities),
        "the certificate is not signed by an authority trusted here": stranger,
    }
    async with serving(transport(authority, Role.SCHEDULER)) as (_, address):
        for expected, credentials in cases.items():
            problem = await asyncio.to_thread(handshake_problem, address, Role.SCHEDULER, credentials)
            assert expected in problem and bool(expected) == bool(problem)


async def test_health_probe_uses_a_certificate(authority: Authority) -> None:
    own = transport(authority, Role.WORKER)
    async with serving(own) as (_, address):
        await asyncio.to_thread(check_grpc, address, "", WAIT_S, own, Role.WORKER)
        with pytest.raises(Unhealthy, match="UNAVAILABLE"):
            await asyncio.to_thread(check_grpc, address, "", WAIT_S)


async def test_certificate_rotation_interrupts_no_call(authority: Authority) -> None:
    """Certificates of server, client and authority are replaced while a stream is open."""
    server, client = transport(authority, Role.WORKER), transport(authority, Role.MIGRATION)
    channels = Channels(client)
    async with serving(server) as (worker, address):
        stub = worker_pb2_grpc.WorkerStub(channels.get(address, Role.WORKER))
        stream = stub.Import(worker_pb2.ImportRequest(), timeout=WAIT_S)
        await stream.read()
        first = channels.get(address, Role.WORKER)
        authority.supersede()
        authority.rotate()
        authority.retire()
        second = channels.get(address, Role.WORKER)
        assert second is not first
        # The server gives a handshake up that takes seconds.
        await worker_pb2_grpc.WorkerStub(second).CancelImport(
            worker_pb2.CancelImportRequest(), timeout=WAIT_S, wait_for_ready=True
        )
        worker.go_on.set()
        assert await stream.read() is not grpc.aio.EOF
        assert await stream.read() is grpc.aio.EOF
        await channels.close()
