"""Migrations against a scripted worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from migration_svc.admission import Admission
from migration_svc.journal import Journal
from migration_svc.metrics import MigrationMetrics
from migration_svc.migration import CopyRules
from migration_svc.runs import History, InvalidMigration, Runs, Stopping, UnknownInstance
from migration_svc.traces import MigrationTraces
from tailrace.records import InstanceRecord
from tailrace.service.channels import Channels
from tailrace.service.server import Servicer, serve_grpc
from tailrace.telemetry.tracing import Tracing
from tailrace.v1 import migration_pb2, worker_pb2, worker_pb2_grpc
from tests.migration.scripted_worker import ABORTED, COMMITTED, ScriptedWorker, commit


def instance(name: str, address: str) -> InstanceRecord:
    return InstanceRecord(
        instance_id=name,
        incarnation="1",
        address=address,
        stream_address=address,
        engine="simulated",
        model="m",
        model_fingerprint="f",
        block_tokens=16,
        kv_blocks_total=100,
        max_model_len=1000,
        max_num_seqs=10,
        kv_bytes_per_token=1,
        started_s=0.0,
    )


class Bench:
    """The parts of a migration service around one scripted worker."""

    def __init__(self, address: str, journal: Path | None = None, timeout_s: float = 10.0) -> None:
        self.worker = ScriptedWorker()
        self.history, self.journal = History(), Journal(journal)
        self.channels = Channels()
        self.instances = {name: instance(name, address) for name in ("a", "b", "c")}
        admission = Admission()
        metrics = MigrationMetrics(CollectorRegistry(), lambda: 0, lambda: 0)
        self.runs = Runs(
            self.channels,
            admission,
            self.journal,
            self.history,
            metrics,
            MigrationTraces(Tracing(None)),
            CopyRules(timeout_s=timeout_s),
        )

    async def migrate(self, **changes: object) -> list[migration_pb2.MigrationRecord]:
        """Run one migration and return the records of all its states."""
        return [record async for record in self.start(**changes)]

    def start(self, **changes: object) -> AsyncIterator[migration_pb2.MigrationRecord]:
        request = migration_pb2.MigrateRequest(
            request_id="r", source_instance_id="a", target_instance_id="b", from_epoch=3, reason="test"
        )
        for field, value in changes.items():
            setattr(request, field, value)
        return self.runs.start(request, self.instances)


@asynccontextmanager
async def bench(journal: Path | None = None, timeout_s: float = 10.0) -> AsyncIterator[Bench]:
    worker = ScriptedWorker()
    servicers = [Servicer(worker_pb2_grpc.add_WorkerServicer_to_server, worker, "tailrace.v1.Worker")]
    async with serve_grpc("127.0.0.1:0", servicers) as server:
        rig = Bench(server.address, journal, timeout_s)
        rig.worker = worker
        try:
            yield rig
        finally:
            await rig.runs.close()
            await rig.channels.close()
            rig.journal.close()


async def test_committed_migration_is_recorded_with_its_cost() -> None:
    async with bench() as b:
        b.worker.script = commit(rounds=3)
        last = (await b.migrate())[-1]
        assert last.state == COMMITTED
        assert (last.bytes, len(last.rounds), last.pause_ms, last.epoch) == (3000, 3, 4.0, 4)
        request = await b.worker.imports.get()
        assert (request.from_epoch, request.epoch, request.source_address) == (3, 4, b.instances["a"].address)
        assert (request.target_instance_id, request.target_incarnation) == ("b", "1")
        assert b.history.list("r", 0) == [last]


async def test_only_requested_migrations_wait_for_room() -> None:
    async with bench() as b:
        b.worker.script = commit()
        for wait, room_wait_s in ((False, 0.0), (True, CopyRules().room_wait_s)):
            assert (await b.migrate(wait_for_room=wait))[-1].state == COMMITTED
            assert (await b.worker.imports.get()).room_wait_s == room_wait_s


async def test_request_can_be_moved_again_after_the_final_record() -> None:
    async with bench() as b:
        # The target reports the outcome before it releases the source.
        b.worker.script = [*commit(), "linger"]
        for _ in range(3):
            ended = [record async for record in b.start() if record.state in (COMMITTED, ABORTED)]
            assert [(record.state, record.error) for record in ended] == [(COMMITTED, "")]


async def test_abort_by_the_target_states_the_reason() -> None:
    async with bench() as b:
        b.worker.script = [worker_pb2.ImportEvent(state=ABORTED, reason="no room")]
        last = (await b.migrate())[-1]
        assert (last.state, last.error) == (ABORTED, "no room")


async def test_target_without_an_outcome_is_given_up() -> None:
    async with bench() as b:
        b.worker.script = []
        assert "without an outcome" in (await b.migrate())[-1].error


async def test_hung_target_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("migration_svc.migration._GRACE_S", 0.1)
    async with bench(timeout_s=0.1) as b:
        b.worker.script = ["hang"]
        last = (await b.migrate())[-1]
        assert last.state == ABORTED and "DEADLINE_EXCEEDED" in last.error
        await asyncio.wait_for(b.worker.cancelled_calls.wait(), 5)


async def test_unreachable_target_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        b.instances["b"] = instance("b", "127.0.0.1:1")
        last = (await b.migrate())[-1]
        assert last.state == ABORTED and "target b" in last.error


async def test_migration_continues_without_a_watcher() -> None:
    async with bench() as b:
        b.worker.script = commit()
        b.start()
        await asyncio.wait_for(b.worker.imports.get(), 5)
        await b.runs.wait()
        assert b.history.list("", 0)[0].state == COMMITTED


async def test_close_aborts_open_migrations(tmp_path: Path) -> None:
    async with bench(tmp_path / "journal") as b:
        b.worker.script = ["hang"]
        b.start()
        await asyncio.wait_for(b.worker.imports.get(), 5)
        await b.runs.close()
        await asyncio.wait_for(b.worker.cancelled_calls.wait(), 5)
        assert b.history.list("", 0)[0].state == ABORTED
    assert Journal(tmp_path / "journal").unfinished == []


async def test_restart_cancels_unfinished_migrations(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    async with bench(path) as b:
        b.worker.script = ["hang"]
        b.start()
        await asyncio.wait_for(b.worker.imports.get(), 5)
        # As after SIGKILL: the journal stays as it is now.
        journal_bytes = path.read_bytes()
    path.write_bytes(journal_bytes)
    async with bench(path) as b:
        # The address in the journal belongs to the first worker, which has ended.
        await b.runs.clean_up()
        record = b.history.list("", 0)[0]
        assert record.state == ABORTED and "restarted" in record.error
    assert Journal(path).unfinished == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"request_id": ""}, InvalidMigration, "request_id: must not be empty"),
        ({"target_instance_id": "a"}, InvalidMigration, "target_instance_id: the request is on a already"),
        ({"target_instance_id": "nowhere"}, UnknownInstance, "target_instance_id: no instance 'nowhere'"),
    ],
)
async def test_invalid_request_names_the_field(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    async with bench() as b:
        with pytest.raises(error, match=message):
            b.start(**changes)


async def test_stopping_service_finishes_migrations_and_admits_none(tmp_path: Path) -> None:
    async with bench(tmp_path / "journal") as b:
        b.worker.script = commit()
        b.start()
        b.runs.stop_admitting()
        with pytest.raises(Stopping):
            b.start()
        await asyncio.wait_for(b.runs.wait(), 5)
        assert b.history.list("", 0)[0].state == COMMITTED
