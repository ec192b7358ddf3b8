"""Many migrations over one stream: each gets its own end, whatever becomes of the stream and the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import pytest

from migration_svc.servicer import ManyMigrations, MigrationServicer
from scheduler_svc.admin.errors import AdminError
from scheduler_svc.migrations import Migrations, MigrationStream
from tailrace.records import ServiceRecord
from tailrace.service.channels import Channels
from tailrace.service.server import Servicer, serve_grpc
from tailrace.v1 import migration_pb2, migration_pb2_grpc, types_pb2
from tests.counting import failures_of, skipped
from tests.migration.scripted_worker import COMMITTED, PRE_COPY, STOP_AND_COPY, commit
from tests.migration.test_runs import QUEUED, Bench, bench
from tests.ports import free_port
from tests.raw_replies import UNDECODABLE, add_raw
from tests.waiting import WAIT_S

ADD = migration_pb2_grpc.add_MigrationServicer_to_server


@dataclass
class Services:
    """The migration services that are registered, the leader first."""

    services: dict[tuple[str, str], ServiceRecord] = field(default_factory=dict)
    leaders: dict[str, ServiceRecord] = field(default_factory=dict)

    def register(self, address: str) -> None:
        name = f"m{len(self.services)}"
        record = ServiceRecord(kind="migration", service_id=name, incarnation=name, address=address)
        self.services["migration", name] = record


@dataclass
class Caller:
    """A scheduler's side, and the services that it knows."""

    known: Services
    migrations: Migrations
    stack: AsyncExitStack

    async def serve(
        self, servicer: MigrationServicer, add: Callable[[Any, grpc.aio.Server], None] = ADD
    ) -> None:
        served = [Servicer(add, servicer, "tailrace.v1.Migration")]
        server = await self.stack.enter_async_context(serve_grpc("127.0.0.1:0", served))
        self.known.register(server.address)

    async def run(self, request_id: str = "r", target: str = "b") -> bool:
        async with asyncio.timeout(WAIT_S):
            end = await self.migrations.migrate(request(request_id, target))
        return end.state == types_pb2.MIGRATION_STATE_COMMITTED


@asynccontextmanager
async def caller() -> AsyncIterator[Caller]:
    async with AsyncExitStack() as stack:
        channels = Channels()
        stack.push_async_callback(channels.close)
        known = Services()
        migrations = Migrations(known, channels)  # type: ignore[arg-type]
        stack.push_async_callback(migrations.close)
        yield Caller(known, migrations, stack)


def request(request_id: str = "r", target: str = "b") -> migration_pb2.MigrateRequest:
    return migration_pb2.MigrateRequest(
        request_id=request_id, source_instance_id="a", target_instance_id=target, reason="test"
    )


def servicer(of: Bench) -> MigrationServicer:
    return MigrationServicer(of.runs, of.history, lambda: of.instances)


class Counting(MigrationServicer):
    """Counts the streams."""

    streams = 0

    async def Migrate(
        self,
        request_iterator: AsyncIterator[migration_pb2.MigrateManyRequest],
        context: grpc.aio.ServicerContext[migration_pb2.MigrateManyRequest, migration_pb2.MigrateManyReply],
    ) -> AsyncIterator[migration_pb2.MigrateManyReply]:
        self.streams += 1
        async for reply in super().Migrate(request_iterator, context):
            yield reply


async def test_many_migrations_share_a_stream_and_each_gets_its_own_end() -> None:
    async with bench() as b, caller() as c:
        b.worker.script = commit()
        counting = Counting(b.runs, b.history, lambda: b.instances)
        await c.serve(counting)
        several = await asyncio.gather(*(c.run(f"r{n}") for n in range(20)))
        assert several == [True] * 20
        with pytest.raises(AdminError, match="no instance 'z'") as unknown:
            await c.run(target="z")
        assert unknown.value.code is grpc.StatusCode.NOT_FOUND
        with pytest.raises(AdminError, match="on a already") as invalid:
            await c.run(target="a")
        assert invalid.value.code is grpc.StatusCode.INVALID_ARGUMENT
        b.worker.script = []
        assert await c.run() is False
        assert counting.streams == 1


def told(records: Iterable[migration_pb2.MigrationRecord]) -> list[tuple[int, int]]:
    """Return the state and the number of copy rounds of each record."""
    return [(record.state, len(record.rounds)) for record in records]


async def test_a_watched_migration_tells_its_states() -> None:
    async with bench() as b, caller() as c:
        b.worker.script = commit(rounds=3)
        await c.serve(servicer(b))
        states: list[migration_pb2.MigrationRecord] = []
        async with asyncio.timeout(WAIT_S):
            end = await c.migrations.migrate(request(), states.append)
        assert told(states) == [(QUEUED, 0), (PRE_COPY, 1), (PRE_COPY, 2), (STOP_AND_COPY, 3)]
        assert end == b.history.list("r", 0)[0] and told([end]) == [(COMMITTED, 3)]


async def test_a_slow_reader_misses_states_but_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("migration_svc.servicer._CHANGED_MAX", 2)

    async def requests() -> AsyncIterator[migration_pb2.MigrateManyRequest]:
        for n, watched in enumerate((True, False)):
            yield migration_pb2.MigrateManyRequest(
                migrations=[
                    migration_pb2.NumberedMigration(number=n, request=request(f"r{n}"), watched=watched)
                ]
            )

    async with bench() as b:
        b.worker.script = commit(rounds=5)
        many = ManyMigrations(b.runs, lambda: b.instances)
        await many.read(requests())
        await b.runs.wait()
        async with asyncio.timeout(WAIT_S):
            replies = [reply async for reply in many.replies()]
        changed = [change for reply in replies for change in reply.changed]
        assert told(change.record for change in changed) == [(PRE_COPY, 4), (STOP_AND_COPY, 5)]
        assert {change.number for change in changed} == {0}
        ended = [end for reply in replies for end in reply.ended]
        assert {end.number for end in ended} == {0, 1}
        assert told(end.record for end in ended) == [(COMMITTED, 5)] * 2


async def test_a_migration_goes_on_when_its_stream_breaks_and_is_not_begun_again() -> None:
    async with bench() as b, bench() as other, caller() as c:
        b.worker.script = ["hang"]
        async with serve_grpc("127.0.0.1:0", [Servicer(ADD, servicer(b), "tailrace.v1.Migration")]) as first:
            c.known.register(first.address)
            await c.serve(servicer(other))
            running = asyncio.create_task(c.run())
            async with asyncio.timeout(WAIT_S):
                await b.worker.imports.get()
        with pytest.raises(AdminError, match="m0") as lost:
            await running
        assert lost.value.code is grpc.StatusCode.UNAVAILABLE
        assert [r.state for r in b.history.list("r", 0)] == [types_pb2.MIGRATION_STATE_QUEUED]
        assert not other.history.list("", 0)
        # What comes later is for the service that answers.
        other.worker.script = commit()
        assert await c.run("later")


async def test_a_service_that_is_not_reached_or_stops_is_passed_over() -> None:
    async with bench() as stopping, bench() as b, caller() as c:
        b.worker.script = commit()
        c.known.register(f"127.0.0.1:{free_port()}")
        with pytest.raises(AdminError, match="no migration service responds"):
            await c.run()
        stopping.runs.stop_admitting()
        await c.serve(servicer(stopping))
        with pytest.raises(AdminError, match="this migration service is stopping"):
            await c.run()
        await c.serve(servicer(b))
        assert await c.run()
        assert not stopping.history.list("", 0)


async def test_ends_are_sent_before_the_stream_ends() -> None:
    async with bench() as b, caller() as c:
        b.worker.script = commit()
        await c.serve(servicer(b))
        [(_, record)] = c.known.services.items()
        async with grpc.aio.insecure_channel(record.address) as channel, asyncio.timeout(WAIT_S):
            stub = migration_pb2_grpc.MigrationStub(channel)
            several = [migration_pb2.NumberedMigration(number=n, request=request(f"r{n}")) for n in range(5)]
            replies = [
                reply
                async for reply in stub.Migrate(iter([migration_pb2.MigrateManyRequest(migrations=several)]))
            ]
        assert not replies[0].ended
        ended = [end for reply in replies for end in reply.ended]
        assert sorted(end.number for end in ended) == [0, 1, 2, 3, 4]
        assert {end.record.state for end in ended} == {types_pb2.MIGRATION_STATE_COMMITTED}


async def test_an_order_that_cannot_be_carried_out_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b, caller() as c:
        b.worker.script = commit()
        counting = Counting(b.runs, b.history, lambda: b.instances)
        await c.serve(counting)
        impossible = request("impossible")
        impossible.from_epoch = 2**32 - 1
        with pytest.raises(AdminError, match="from_epoch") as invalid:
            async with asyncio.timeout(WAIT_S):
                await c.migrations.migrate(impossible)
        assert invalid.value.code is grpc.StatusCode.INVALID_ARGUMENT
        begin, before = b.runs.begin, failures_of("requested migrations")

        def begin_or_fail(order: migration_pb2.MigrateRequest, *others: Any) -> None:
            if order.request_id == "poison":
                raise ValueError("nobody foresaw this")
            begin(order, *others)

        monkeypatch.setattr(b.runs, "begin", begin_or_fail)
        with pytest.raises(AdminError, match="has not begun: nobody foresaw this") as failed:
            await c.run("poison")
        assert failed.value.code is grpc.StatusCode.INTERNAL
        assert failures_of("requested migrations") == before + 1
        assert await c.run("next")
        assert counting.streams == 1


async def test_a_stream_that_fails_in_an_unforeseen_way_is_counted_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("nobody foresaw this")

    async with bench() as b, caller() as c:
        b.worker.script = commit()
        await c.serve(servicer(b))
        before = failures_of("stream of migrations")
        with monkeypatch.context() as patch:
            patch.setattr(MigrationStream, "_receive", fail)
            with pytest.raises(AdminError, match="the stream has ended"):
                await c.run()
        assert failures_of("stream of migrations") == before + 1
        assert await c.run("next")


class Undecodable(Counting):
    """Sends something that cannot be decoded before each reply."""

    async def Migrate(
        self,
        request_iterator: AsyncIterator[migration_pb2.MigrateManyRequest],
        context: grpc.aio.ServicerContext[migration_pb2.MigrateManyRequest, migration_pb2.MigrateManyReply],
    ) -> AsyncIterator[migration_pb2.MigrateManyReply]:
        async for reply in super().Migrate(request_iterator, context):
            yield cast(migration_pb2.MigrateManyReply, UNDECODABLE)
            yield reply


async def test_a_reply_that_cannot_be_decoded_costs_no_other_migration_its_end() -> None:
    async with bench() as b, caller() as c:
        b.worker.script = commit()
        service = Undecodable(b.runs, b.history, lambda: b.instances)
        await c.serve(service, add_raw(ADD))
        before = skipped("reply of a service")
        assert await c.run("one")
        assert await c.run("two")
        assert skipped("reply of a service") >= before + 2
        assert service.streams == 1


async def test_orders_after_one_that_cannot_be_decoded_go_over_another_stream() -> None:
    """The service tells the ends of those before, then ends the stream."""
    async with bench() as b, caller() as c:
        b.worker.script = commit()
        await c.serve(servicer(b))
        [(_, record)] = c.known.services.items()
        first = migration_pb2.MigrateManyRequest(
            migrations=[migration_pb2.NumberedMigration(number=1, request=request("before"))]
        )
        async with grpc.aio.insecure_channel(record.address) as channel, asyncio.timeout(WAIT_S):
            many: grpc.aio.StreamStreamMultiCallable[bytes, migration_pb2.MigrateManyReply] = (
                channel.stream_stream(
                    "/tailrace.v1.Migration/Migrate",
                    response_deserializer=migration_pb2.MigrateManyReply.FromString,
                )
            )
            call = many(iter([first.SerializeToString(), UNDECODABLE]))
            ended: list[int] = []
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for reply in call:
                    ended += [end.number for end in reply.ended]
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert ended == [1]
        assert await c.run("after")
