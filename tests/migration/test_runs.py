"""Migrations against a scripted worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from grpc import StatusCode
from prometheus_client import CollectorRegistry

from migration_svc.journal import Journal, JournalClosed
from migration_svc.metrics import MigrationMetrics
from migration_svc.migration import ENDED, CopyRules, cancel_or_ask_end
from migration_svc.runs import History, InvalidMigration, Runs, Stopping, UnknownInstance
from migration_svc.slots import MigrationSlots
from migration_svc.traces import MigrationTraces
from tailrace.model_identity import ModelIdentity
from tailrace.records import InstanceRecord
from tailrace.service.channels import Channels
from tailrace.service.server import Servicer, serve_grpc
from tailrace.telemetry.tracing import Tracing
from tailrace.v1 import migration_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from tests.counting import failures_of, skipped
from tests.migration.scripted_worker import (
    ABORTED,
    COMMITTED,
    GONE,
    PRE_COPY,
    STOP_AND_COPY,
    UNKNOWN,
    ScriptedWorker,
    commit,
)
from tests.raw_replies import UNDECODABLE, add_raw
from tests.waiting import WAIT_S

QUEUED = types_pb2.MIGRATION_STATE_QUEUED


def instance(name: str, address: str) -> InstanceRecord:
    return InstanceRecord(
        instance_id=name,
        incarnation="1",
        address=address,
        stream_address=address,
        engine="simulated",
        model="m",
        model_fingerprint="f",
        model_identity=ModelIdentity("t", "w"),
        block_tokens=16,
        kv_blocks_total=100,
        max_model_len=1000,
        max_num_seqs=10,
        kv_bytes_per_token=1,
        started_s=0.0,
    )


class Bench:
    """The parts of a migration service around one scripted worker."""

    def __init__(self, address: str, journal: Path | None = None, timeout_s: float = WAIT_S) -> None:
        self.worker = ScriptedWorker()
        self.history, self.journal = History(), Journal(journal)
        self.channels = Channels()
        self.instances = {name: instance(name, address) for name in ("a", "b", "c")}
        slots = MigrationSlots()
        metrics = MigrationMetrics(CollectorRegistry(), lambda: 0, lambda: 0)
        self.runs = Runs(
            self.channels,
            slots,
            self.journal,
            self.history,
            metrics,
            MigrationTraces(Tracing(None)),
            CopyRules(timeout_s=timeout_s),
        )

    async def migrate(self, **changes: object) -> list[migration_pb2.MigrationRecord]:
        """Run one migration and return the records of all its states."""
        records: list[migration_pb2.MigrationRecord] = []
        ended = asyncio.Event()

        def on_change(record: migration_pb2.MigrationRecord) -> None:
            records.append(copied := migration_pb2.MigrationRecord())
            copied.CopyFrom(record)
            if record.state in ENDED:
                ended.set()

        self.begin(on_change, **changes)
        await ended.wait()
        return records

    def begin(
        self,
        on_change: Callable[[migration_pb2.MigrationRecord], None] = lambda _: None,
        /,
        **changes: object,
    ) -> None:
        request = migration_pb2.MigrateRequest(
            request_id="r", source_instance_id="a", target_instance_id="b", from_epoch=3, reason="test"
        )
        for field, value in changes.items():
            setattr(request, field, value)
        self.runs.begin(request, self.instances, on_change)


@asynccontextmanager
async def bench(journal: Path | None = None, timeout_s: float = WAIT_S) -> AsyncIterator[Bench]:
    worker = ScriptedWorker()
    servicers = [
        Servicer(add_raw(worker_pb2_grpc.add_WorkerServicer_to_server), worker, "tailrace.v1.Worker")
    ]
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


async def test_each_state_is_told() -> None:
    async with bench() as b:
        b.worker.script = commit(rounds=3)
        told = [(record.state, len(record.rounds)) for record in await b.migrate()]
        assert told == [(QUEUED, 0), (PRE_COPY, 1), (PRE_COPY, 2), (STOP_AND_COPY, 3), (COMMITTED, 3)]


@pytest.mark.parametrize("epoch", [2**32 - 1, 2**32 - 2])
async def test_an_epoch_that_cannot_be_raised_is_refused_by_name(epoch: int) -> None:
    async with bench() as b:
        b.worker.script = commit()
        if epoch == 2**32 - 2:
            assert (await b.migrate(from_epoch=epoch))[-1].epoch == 2**32 - 1
            return
        with pytest.raises(InvalidMigration, match="from_epoch: must be at most 4294967294"):
            await b.migrate(from_epoch=epoch)
        assert not b.history.list("", 0)


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
            last = (await b.migrate())[-1]
            assert (last.state, last.error) == (COMMITTED, "")


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
    async def cancel_patiently(
        migration_id: str, target_address: str, channels: Channels
    ) -> worker_pb2.ImportEvent:
        with monkeypatch.context() as patch:
            patch.setattr("migration_svc.migration.SETTLE_S", WAIT_S)
            return await cancel_or_ask_end(migration_id, target_address, channels)

    monkeypatch.setattr("migration_svc.migration.SETTLE_S", 0.1)
    monkeypatch.setattr("migration_svc.migration.cancel_or_ask_end", cancel_patiently)
    async with bench(timeout_s=0.1) as b:
        b.worker.script = ["hang"]
        async with asyncio.timeout(WAIT_S):
            # On a busy machine the call's deadline can pass before the worker has it.
            while b.worker.imports.empty():
                last = (await b.migrate())[-1]
        assert last.state == ABORTED
        assert "DEADLINE_EXCEEDED" in last.error and last.error.endswith("; cancelled")
        await asyncio.wait_for(b.worker.cancelled_calls.wait(), WAIT_S)


@pytest.mark.parametrize(
    ("end", "state", "error"),
    [
        (commit()[-1], COMMITTED, ""),
        (worker_pb2.ImportEvent(state=ABORTED, reason="no room"), ABORTED, "without an outcome; no room"),
        (worker_pb2.ImportEvent(state=GONE, reason="finished"), GONE, "without an outcome; finished"),
        (None, UNKNOWN, "knows of no such migration"),
    ],
    ids=["committed", "aborted", "gone", "not known"],
)
async def test_target_whose_call_broke_is_asked_for_the_end(
    tmp_path: Path, end: worker_pb2.ImportEvent | None, state: int, error: str
) -> None:
    async with bench(tmp_path / "journal") as b:
        b.worker.script, b.worker.end = commit()[:-1], end
        last = (await b.migrate())[-1]
        assert last.state == state and error in last.error and bool(last.error) == bool(error)
        lines = (tmp_path / "journal").read_bytes().splitlines()
        assert msgspec.json.decode(lines[-1], type=JournalClosed).migration_id == last.migration_id


async def test_target_whose_event_cannot_be_decoded_is_asked_for_the_end(tmp_path: Path) -> None:
    async with bench(tmp_path / "journal") as b:
        before, failed = skipped("reply of a service"), failures_of("migrations")
        b.worker.script = [*commit()[:-1], UNDECODABLE]
        b.worker.end = worker_pb2.ImportEvent(state=COMMITTED)
        assert (await b.migrate())[-1].state == COMMITTED
        b.worker.end = None
        last = (await b.migrate())[-1]
        assert last.state == UNKNOWN and "a reply of b cannot be decoded" in last.error
        assert skipped("reply of a service") == before + 2
        assert failures_of("migrations") == failed


async def test_target_that_cannot_be_reached_at_first_is_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Like one that was restarted: a channel may still wait to connect to its address."""
    monkeypatch.setattr("migration_svc.migration._RETRY_S", 0.01)
    monkeypatch.setattr("migration_svc.migration._UNREACHABLE_S", WAIT_S)
    async with bench() as b:
        b.worker.script, b.worker.refusals = commit(), [StatusCode.UNAVAILABLE] * 2
        last = (await b.migrate())[-1]
        assert (last.state, last.error, len(last.rounds)) == (COMMITTED, "", 2)
        # It began the first time, and the reply was lost.
        b.worker.refusals = [StatusCode.UNAVAILABLE, StatusCode.FAILED_PRECONDITION]
        b.worker.end = worker_pb2.ImportEvent(state=COMMITTED)
        assert (await b.migrate())[-1].state == COMMITTED
        b.worker.refusals = [StatusCode.FAILED_PRECONDITION]
        assert (await b.migrate())[-1].state == ABORTED


async def test_end_of_a_migration_to_an_unreachable_target_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("migration_svc.migration._UNREACHABLE_S", 0.0)
    async with bench() as b:
        b.instances["b"] = instance("b", "127.0.0.1:1")
        last = (await b.migrate())[-1]
        assert last.state == UNKNOWN and "target b" in last.error


async def test_migration_continues_without_a_watcher() -> None:
    async with bench() as b:
        b.worker.script = commit()
        b.begin()
        await asyncio.wait_for(b.worker.imports.get(), WAIT_S)
        await b.runs.wait()
        assert b.history.list("", 0)[0].state == COMMITTED


async def test_close_aborts_open_migrations(tmp_path: Path) -> None:
    async with bench(tmp_path / "journal") as b:
        b.worker.script = ["hang"]
        b.begin()
        await asyncio.wait_for(b.worker.imports.get(), WAIT_S)
        await b.runs.close()
        await asyncio.wait_for(b.worker.cancelled_calls.wait(), WAIT_S)
        assert b.history.list("", 0)[0].state == UNKNOWN
    # The next run asks how it ended.
    assert len(Journal(tmp_path / "journal").unfinished) == 1


@pytest.mark.parametrize("state", [COMMITTED, ABORTED, UNKNOWN], ids=["committed", "aborted", "unknown"])
async def test_restart_learns_the_ends_of_unfinished_migrations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: types_pb2.MigrationState.ValueType
) -> None:
    monkeypatch.setattr("migration_svc.migration._UNREACHABLE_S", 0.0)
    path = tmp_path / "journal"
    async with bench(path) as b:
        b.worker.script = ["hang"]
        b.begin()
        await asyncio.wait_for(b.worker.imports.get(), WAIT_S)
        # As after SIGKILL: the journal stays as it is now.
        journal_bytes = path.read_bytes()
    # Unknown: the address in the journal belongs to the first worker, which has ended.
    path.write_bytes(journal_bytes)
    async with bench(path) as b:
        if state != UNKNOWN:
            b.worker.end = worker_pb2.ImportEvent(state=state)
            entry = b.journal.unfinished[0]
            address = b.instances["a"].address
            b.journal.unfinished[0] = msgspec.structs.replace(entry, target_address=address)
        await b.runs.clean_up()
        record = b.history.list("", 0)[0]
        assert record.state == state and ("restarted" in record.error) == (state == UNKNOWN)
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
            b.begin(**changes)


async def test_stopping_service_finishes_migrations_and_admits_none(tmp_path: Path) -> None:
    async with bench(tmp_path / "journal") as b:
        b.worker.script = commit()
        b.begin()
        b.runs.stop_admitting()
        with pytest.raises(Stopping):
            b.begin()
        await asyncio.wait_for(b.runs.wait(), WAIT_S)
        assert b.history.list("", 0)[0].state == COMMITTED
