"""The audit log: every change with its caller and outcome, including refused ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc

from tailrace.security.access import CHANGES
from tailrace.security.audit import ON_BEHALF_OF, AuditEntry, AuditFile, Auditing
from tailrace.security.authority import Authority
from tailrace.security.roles import Role
from tailrace.security.transport import PLAIN, Transport
from tailrace.service.server import Servicer, serve_grpc
from tailrace.telemetry.audit import LOGS_ENDPOINT, audit_export
from tailrace.v1 import admin_pb2, admin_pb2_grpc
from tests.full_disk import files_end_at
from tests.security.conftest import transport
from tests.waiting import WAIT_S


class Admin(admin_pb2_grpc.AdminServicer):
    """The methods used by these tests."""

    async def SetPool(
        self,
        request: admin_pb2.SetPoolRequest,
        context: grpc.aio.ServicerContext[admin_pb2.SetPoolRequest, admin_pb2.SetPoolReply],
    ) -> admin_pb2.SetPoolReply:
        if request.instance_id == "none":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such instance")
        return admin_pb2.SetPoolReply()

    async def Drain(
        self,
        request: admin_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[admin_pb2.DrainRequest, admin_pb2.DrainEvent],
    ) -> AsyncIterator[admin_pb2.DrainEvent]:
        yield admin_pb2.DrainEvent(message="on it")
        if request.instance_id == "slow":
            await asyncio.Event().wait()
        while request.instance_id == "more than is read":
            yield admin_pb2.DrainEvent(message="still on it " * 5000)

    async def GetSlo(
        self,
        request: admin_pb2.GetSloRequest,
        context: grpc.aio.ServicerContext[admin_pb2.GetSloRequest, admin_pb2.GetSloReply],
    ) -> admin_pb2.GetSloReply:
        return admin_pb2.GetSloReply()


def _admin() -> admin_pb2_grpc.AdminServicer:
    """Return a complete servicer, whose other methods answer UNIMPLEMENTED."""
    servicer: admin_pb2_grpc.AdminServicer = type("Whole", (Admin, admin_pb2_grpc.AdminServicer), {})()
    return servicer


class AuditSink:
    def __init__(self) -> None:
        self.entries: list[AuditEntry] = []

    def write(self, entry: AuditEntry) -> None:
        self.entries.append(entry)

    def summaries(self) -> list[tuple[str, str, str, str, str]]:
        return [(e.who, e.on_behalf_of, e.what, e.outcome, e.details) for e in self.entries]


@asynccontextmanager
async def admin(
    server: Transport, client: Transport, *sinks: AuditSink | AuditFile
) -> AsyncIterator[admin_pb2_grpc.AdminAsyncStub]:
    servicer = Servicer(admin_pb2_grpc.add_AdminServicer_to_server, _admin(), "tailrace.v1.Admin")
    async with (
        asyncio.timeout(WAIT_S),
        serve_grpc("127.0.0.1:0", [servicer], server, [Auditing(*sinks)]) as running,
        client.channel(running.address, Role.SCHEDULER, ()) as channel,
    ):
        yield admin_pb2_grpc.AdminStub(channel)


async def test_changes_are_logged_and_reads_are_not(authority: Authority) -> None:
    audit = AuditSink()
    own = transport(authority, Role.ADMIN, "alice")
    async with admin(transport(authority, Role.SCHEDULER), own, audit) as stub:
        await stub.GetSlo(admin_pb2.GetSloRequest(), timeout=WAIT_S)
        forged = ((ON_BEHALF_OF, "admin/bob"),)
        await stub.SetPool(admin_pb2.SetPoolRequest(instance_id="w"), timeout=WAIT_S, metadata=forged)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.SetPool(admin_pb2.SetPoolRequest(instance_id="none"), timeout=WAIT_S)
        async for _ in stub.Drain(admin_pb2.DrainRequest(instance_id="w"), timeout=WAIT_S):
            pass
    assert audit.summaries() == [
        ("admin/alice", "", "SetPool", "OK", ""),
        ("admin/alice", "", "SetPool", "NOT_FOUND", "no such instance"),
        ("admin/alice", "", "Drain", "begun", ""),
        ("admin/alice", "", "Drain", "OK", ""),
    ]
    assert audit.entries[0].request == {"instance_id": "w"}
    assert audit.entries[0].peer.startswith("ipv4:127.0.0.1:")


async def test_refused_calls_are_logged(authority: Authority) -> None:
    audit = AuditSink()
    own = transport(authority, Role.VIEWER, "eve")
    async with admin(transport(authority, Role.SCHEDULER), own, audit) as stub:
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.SetPool(admin_pb2.SetPoolRequest(instance_id="w"), timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Rollout(admin_pb2.RolloutRequest(model="chat", to="9f2c"), timeout=WAIT_S)
    for (who, _, what, outcome, details), expected_method in zip(
        audit.summaries(), ("SetPool", "Rollout"), strict=True
    ):
        assert (who, what, outcome) == ("viewer/eve", expected_method, "PERMISSION_DENIED")
        assert "requires admin" in details
    assert audit.entries[1].request == {"model": "chat", "to": "9f2c"}


async def test_forwarded_call_logs_the_original_caller(authority: Authority) -> None:
    audit = AuditSink()
    own = transport(authority, Role.SCHEDULER, "standby")
    async with admin(transport(authority, Role.SCHEDULER), own, audit) as stub:
        passed_on = ((ON_BEHALF_OF, "admin/alice"),)
        await stub.SetPool(admin_pb2.SetPoolRequest(instance_id="w"), timeout=WAIT_S, metadata=passed_on)
    assert audit.summaries() == [("scheduler/standby", "admin/alice", "SetPool", "OK", "")]


@pytest.mark.parametrize("instance_id", ["slow", "more than is read"])
async def test_cancelled_call_is_logged(instance_id: str) -> None:
    """Also while the server is sending: gRPC must not be queried about a call that has ended."""
    audit = AuditSink()
    async with admin(PLAIN, PLAIN, audit) as stub:
        call = stub.Drain(admin_pb2.DrainRequest(instance_id=instance_id), timeout=WAIT_S)
        async for _ in call:
            call.cancel()
            break
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await call.code()
        # The end of the block has stopped the server and all its calls.
    assert [entry[3] for entry in audit.summaries()] == ["begun", "CANCELLED"]
    assert audit.summaries()[0][0] == ""


async def test_lines_are_json_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        file = AuditFile(path)
        async with admin(PLAIN, PLAIN, file) as stub:
            await stub.SetPool(admin_pb2.SetPoolRequest(instance_id="w"), timeout=WAIT_S)
        file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["what"] for line in lines] == ["SetPool", "SetPool"]
    assert {"time", "who", "peer", "request", "outcome", "seconds"} <= lines[0].keys()
    assert path.stat().st_mode & 0o007 == 0


def _entry(what: str) -> AuditEntry:
    return AuditEntry(
        time="",
        who="",
        peer="",
        on_behalf_of="",
        what=what,
        request={},
        outcome="OK",
        details="",
        seconds=0.0,
    )


def _what(line: str) -> str:
    """Return `what` of an entry, or an empty string if the line is not one."""
    try:
        return str(json.loads(line)["what"])
    except ValueError:
        return ""


@pytest.mark.parametrize("room", [0, 1, 40])
def test_full_disk_damages_only_its_own_line(
    tmp_path: Path, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.jsonl"
    file = AuditFile(path)
    file.write(_entry("before"))
    with files_end_at(path.stat().st_size + room):
        file.write(_entry("within"))
    file.write(_entry("after"))
    file.close()
    read = [_what(line) for line in path.read_text().splitlines()]
    assert [what for what in read if what] == ["before", "after"]
    # The entry that the file lacks is in the process's log.
    assert '"within"' in caplog.text


async def test_entries_are_exported_as_opentelemetry_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Logs(logs_service_pb2_grpc.LogsServiceServicer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.received: asyncio.Queue[logs_service_pb2.ExportLogsServiceRequest] = asyncio.Queue()

        async def Export(
            self, request: logs_service_pb2.ExportLogsServiceRequest, context: object
        ) -> logs_service_pb2.ExportLogsServiceResponse:
            self.received.put_nowait(request)
            return logs_service_pb2.ExportLogsServiceResponse()

    logs, server = Logs(), grpc.aio.server()
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(logs, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert audit_export("scheduler", "s") is None
    monkeypatch.setenv(LOGS_ENDPOINT, f"http://127.0.0.1:{port}")
    export = audit_export("scheduler", "s")
    assert export is not None
    audit = AuditSink()
    async with admin(PLAIN, PLAIN, audit) as stub:
        await stub.SetPool(admin_pb2.SetPoolRequest(instance_id="w"), timeout=WAIT_S)
    export.write(audit.entries[0])
    async with asyncio.timeout(WAIT_S):
        request = await logs.received.get()
    (record,) = request.resource_logs[0].scope_logs[0].log_records
    values = {each.key: each.value.string_value for each in record.attributes}
    assert (values["tailrace.audit.what"], values["tailrace.audit.outcome"]) == ("SetPool", "OK")
    await export.close()
    await server.stop(None)


def test_list_of_changing_methods() -> None:
    assert {method.rpartition("/")[2] for method in CHANGES} == {
        "SetPolicy",
        "SetSlo",
        "SetPool",
        "SetStages",
        "Migrate",
        "Drain",
        "Rollout",
        "UndoRollout",
        "ForgetRollout",
        "Profile",
        "Record",
        "SetShadow",
    }
