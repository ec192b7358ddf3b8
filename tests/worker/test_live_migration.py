"""Live migration: simulated workers in separate processes, a scripted front end, real gRPC, UCX and etcd."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import grpc
import psutil
import pytest
import pytest_asyncio

from tailrace.store.store import Store
from tailrace.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    profile_pb2,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.waiting import WAIT_S
from tests.worker.scripted_front_end import ScriptedFrontEnd, Stream
from tests.worker.simulated import Fleet
from tests.worker.worker_processes import (
    ENDLESS,
    ENDLESS_ENGINE,
    PATIENT,
    WorkerProcess,
    committed,
    migrate,
    worker_process,
)
from worker_agent.engine.simulated import SimulatedSettings
from worker_agent.faults import Faults
from worker_agent.kv.address import KvTransferError
from worker_agent.migration.copying import Copying, ImportPlan
from worker_agent.migration.export_call import SourceFailed

pytestmark = [pytest.mark.fleet, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [72, 101, 108, 108, 111, 32] * 50
OPTIONS: Final[Mapping[str, Any]] = {"engine": ENDLESS_ENGINE, "deadlines": PATIENT}
LONG = {"max_tokens": 300, "ignore_eos": True, "min_tokens": 300}


class Pair:
    """Two workers and a front end attached to both."""

    def __init__(
        self,
        store: Store,
        etcd: str,
        cluster: str,
        workers: list[WorkerProcess],
        front_end: ScriptedFrontEnd,
    ) -> None:
        self.store = store
        self.etcd = etcd
        self.cluster = cluster
        self.workers: list[WorkerProcess] = []
        self.channels: list[grpc.aio.Channel] = []
        self.front_end = front_end
        for worker in workers:
            self.add(worker)

    def add(self, worker: WorkerProcess) -> None:
        self.workers.append(worker)
        self.channels.append(grpc.aio.insecure_channel(worker.address))

    async def remove_last(self) -> None:
        """Remove the worker that was added last."""
        self.workers.pop()
        await self.channels.pop().close()

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()

    def id(self, number: int) -> str:
        return self.workers[number].instance_id

    async def move(
        self, stream: Stream, source: int, target: int, **options: object
    ) -> list[worker_pb2.ImportEvent]:
        return await migrate(
            self.channels[target],
            stream.request_id,
            self.workers[source].address,
            stream.epoch,
            **options,  # type: ignore[arg-type]
        )

    async def submit(self, number: int, **sampling: object) -> Stream:
        return await self.front_end.submit(self.id(number), PROMPT, **sampling)

    async def metric(self, number: int, name: str) -> float:
        return await self.workers[number].metric(name)

    async def wait_drained(self, number: int) -> None:
        """Wait until the worker has no used KV block."""
        await self.workers[number].until_metric("kv_blocks_used", 0)

    async def goes_on(self, stream: Stream, undisturbed: list[int]) -> None:
        """Check that an endless stream goes on, unchanged, and end it."""
        await stream.until(len(stream.tokens) + 20)
        assert not stream.finished
        assert stream.tokens == undisturbed[: len(stream.tokens)]
        await self.front_end.abort(stream)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(etcd: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    cluster = f"test-{uuid.uuid4().hex[:8]}"
    folder = tmp_path_factory.mktemp("workers")
    store = await Store.connect([etcd], cluster)
    front_end = ScriptedFrontEnd()
    async with (
        worker_process(store, etcd, cluster, folder, "left", **OPTIONS) as left,
        worker_process(store, etcd, cluster, folder, "right", **OPTIONS) as right,
    ):
        pair = Pair(store, etcd, cluster, [left, right], front_end)
        for worker in (left, right):
            await front_end.attach(worker.stream_address)
        yield pair
        for number in (0, 1):
            await pair.wait_drained(number)
        await front_end.close()
        await pair.close()
    assert await store.get_prefix("instances/") == {}, "a stopped worker withdraws its registration"
    await store.close()


@asynccontextmanager
async def faulty_worker(pair: Pair, folder: Path, **faults: object) -> AsyncIterator[int]:
    """Add a worker with these faults and yield its number."""
    async with extra_worker(pair, folder, "faulty", faults=faults) as number:
        yield number


@asynccontextmanager
async def extra_worker(
    pair: Pair,
    folder: Path,
    kind: str,
    engine: Mapping[str, object] = MappingProxyType({}),
    deadlines: Mapping[str, float] = MappingProxyType({}),
    **options: object,
) -> AsyncIterator[int]:
    """Add a worker with these options of worker_process and yield its number."""
    name = f"{kind}-{uuid.uuid4().hex[:4]}"
    async with worker_process(
        pair.store,
        pair.etcd,
        pair.cluster,
        folder,
        name,
        engine={**ENDLESS_ENGINE, **engine},
        deadlines={**PATIENT, **deadlines},
        **options,  # type: ignore[arg-type]
    ) as worker:
        await pair.front_end.attach(worker.stream_address)
        pair.add(worker)
        yield len(pair.workers) - 1
        await pair.remove_last()
    await pair.front_end.detach(name)
    await pair.store.delete(f"instances/{name}")


@pytest.fixture(scope="module")
def undisturbed() -> list[int]:
    """The tokens of the endless request without disturbance, from an engine on a virtual clock."""
    fleet = Fleet(SimulatedSettings(**ENDLESS_ENGINE))  # type: ignore[arg-type]
    stream = fleet.submit(0, PROMPT, **ENDLESS)
    fleet.clock.drain()
    assert len(stream.tokens) == ENDLESS["max_tokens"]
    return stream.tokens


async def test_stream_moved_three_times_is_unchanged(pair: Pair, undisturbed: list[int]) -> None:
    adoptions = pair.front_end.adoptions
    stream = await pair.submit(0, **ENDLESS)
    for turn, (source, target) in enumerate([(0, 1), (1, 0), (0, 1)]):
        await stream.until(20 + 60 * turn)
        events = await pair.move(stream, source, target)
        commit = committed(events)
        rounds = [event.round for event in events if event.HasField("round")]
        assert events[0].state == types_pb2.MIGRATION_STATE_OPEN
        assert sum(each.blocks for each in rounds) >= len(PROMPT) // 16
        assert sum(each.bytes for each in rounds) == sum(each.blocks for each in rounds) * 16 * 4096
        assert commit.pause_ms > 0 and commit.pause_steps > 0 and commit.tokens >= 20 + 60 * turn
    await pair.goes_on(stream, undisturbed)
    assert stream.epoch == 3 and pair.front_end.adoptions == adoptions + 3


async def test_moved_stream_ends_where_it_would_have_ended(pair: Pair, undisturbed: list[int]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            stream = await pair.submit(0, **LONG)
            await stream.until(20)
            last = (await pair.move(stream, 0, 1))[-1]
            assert await stream.end() == undisturbed[: LONG["max_tokens"]]
            if last.state == types_pb2.MIGRATION_STATE_COMMITTED:
                break
            # On a busy machine it can end before it has moved.
            assert stream.owner == pair.id(0)
    assert stream.owner == pair.id(1) and not stream.failed


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"replay_reason": "a draft model"}, "a draft model"),
        ({"block_tokens": 32}, "KV blocks of 16 tokens against 32 (block_size)"),
    ],
)
async def test_stream_is_recomputed_to_and_from_an_incompatible_worker(
    pair: Pair, undisturbed: list[int], tmp_path: Path, engine: dict[str, object], reason: str
) -> None:
    async with extra_worker(pair, tmp_path, "unlike", engine=engine) as other:
        stream = await pair.submit(0, **ENDLESS)
        await stream.until(20)
        forth = await pair.move(stream, 0, other)
        await stream.until(100)
        back = await pair.move(stream, other, 0)
        for events in (forth, back):
            committed(events)
            assert events[0].way == types_pb2.WAY_REPLAY
            assert not any(event.HasField("round") for event in events)
        assert reason in forth[0].way_reason
        await pair.goes_on(stream, undisturbed)
        assert stream.epoch == 2
        await pair.wait_drained(other)


async def test_worker_with_another_model_gets_no_request(
    pair: Pair, undisturbed: list[int], tmp_path: Path
) -> None:
    async with extra_worker(pair, tmp_path, "other", engine={"weights_seed": 1}) as other:
        stream = await pair.submit(0, **ENDLESS)
        await stream.until(20)
        (end,) = await pair.move(stream, 0, other)
        assert end.state == types_pb2.MIGRATION_STATE_ABORTED
        assert "different weights (--model, --revision)" in end.reason
        await pair.goes_on(stream, undisturbed)


async def test_many_streams_move_in_both_directions(pair: Pair, undisturbed: list[int]) -> None:
    streams = [await pair.submit(number % 2, **ENDLESS) for number in range(12)]
    await asyncio.gather(*(stream.until(10) for stream in streams))
    results = await asyncio.gather(
        *(pair.move(stream, number % 2, 1 - number % 2) for number, stream in enumerate(streams))
    )
    for events in results:
        committed(events)
    for stream in streams:
        await pair.goes_on(stream, undisturbed)


async def test_blocks_cached_at_the_target_are_not_copied(
    pair: Pair, undisturbed: list[int], tmp_path: Path
) -> None:
    async with extra_worker(pair, tmp_path, "keeps", engine={"prefix_caching": True}) as keeps:
        stream = await pair.submit(0, **ENDLESS)
        await stream.until(20)
        first = await pair.move(stream, 0, keeps)
        committed(first)
        await stream.until(60)
        committed(await pair.move(stream, keeps, 0))
        # Its blocks are free there now, but still cached.
        await pair.wait_drained(keeps)
        await stream.until(100)
        again = await pair.move(stream, 0, keeps)
        tokens = committed(again).tokens
        await pair.goes_on(stream, undisturbed)
        held = again[0].held_blocks
        assert (first[0].held_blocks, first[0].held_bytes) == (0, 0)
        assert held >= (len(PROMPT) + 60) // 16 - 1
        assert again[0].held_bytes == held * 16 * 4096
        copied = sum(event.round.blocks for event in again)
        assert held + copied <= (len(PROMPT) + tokens) // 16 + 1
        assert await pair.metric(keeps, "kv_held_blocks") == held


async def test_stop_and_copy_has_one_round(pair: Pair, undisturbed: list[int]) -> None:
    stream = await pair.submit(0, **ENDLESS)
    await stream.until(30)
    events = await pair.move(stream, 0, 1, mode=worker_pb2.COPY_MODE_STOP_AND_COPY)
    committed(events)
    rounds = [event for event in events if event.HasField("round")]
    assert [event.state for event in rounds] == [types_pb2.MIGRATION_STATE_STOP_AND_COPY]
    await pair.goes_on(stream, undisturbed)


async def test_worker_listens_only_on_its_given_address(pair: Pair) -> None:
    """Including KV transfer."""
    stream = await pair.submit(0, **ENDLESS)
    await stream.until(5)
    committed(await pair.move(stream, 0, 1))
    for worker in pair.workers:
        sockets = psutil.Process(worker.process.pid).net_connections()
        assert {
            each.laddr.ip.removeprefix("::ffff:") for each in sockets if each.status == psutil.CONN_LISTEN
        } == {"127.0.0.1"}
    await pair.front_end.abort(stream)


async def test_refused_adoption_leaves_the_stream_at_its_source(pair: Pair, undisturbed: list[int]) -> None:
    stream = await pair.submit(0, **ENDLESS)
    await stream.until(30)
    pair.front_end.refuse = "not today"
    events = await pair.move(stream, 0, 1)
    pair.front_end.refuse = ""
    assert events[-1].state == types_pb2.MIGRATION_STATE_ABORTED and "not today" in events[-1].reason
    assert stream.owner == pair.id(0) and stream.epoch == 0
    await pair.goes_on(stream, undisturbed)


async def test_impossible_imports_state_the_reason(pair: Pair) -> None:
    stream = await pair.submit(0, **ENDLESS)
    await stream.until(5)
    wrong = await migrate(pair.channels[1], "no-such-request", pair.workers[0].address, 0)
    assert wrong[-1].state == types_pb2.MIGRATION_STATE_GONE and "no-such-request" in wrong[-1].reason
    stale = await migrate(pair.channels[1], stream.request_id, pair.workers[0].address, 7)
    assert stale[-1].state == types_pb2.MIGRATION_STATE_ABORTED and "epoch" in stale[-1].reason
    nobody = await migrate(pair.channels[1], stream.request_id, "127.0.0.1:9", 0)
    assert nobody[-1].state == types_pb2.MIGRATION_STATE_ABORTED
    itself = await migrate(pair.channels[0], stream.request_id, pair.workers[0].address, 0)
    assert itself[-1].state == types_pb2.MIGRATION_STATE_ABORTED
    tokens_before = len(stream.tokens)
    await stream.until(tokens_before + 5)
    await pair.front_end.abort(stream)
    await pair.wait_drained(0)


async def test_broken_attach_stream_frees_everything(pair: Pair) -> None:
    other = ScriptedFrontEnd("other")
    for worker in pair.workers:
        await other.attach(worker.stream_address)
    before = await pair.metric(0, "generated_tokens")
    streams = [await other.submit(pair.id(0), PROMPT, **ENDLESS) for _ in range(5)]
    await asyncio.gather(*(stream.until(3) for stream in streams))
    assert await pair.metric(0, "kv_blocks_used") > 0
    await other.detach(pair.id(0))
    await pair.wait_drained(0)
    # None of them ended by itself.
    assert await pair.metric(0, "generated_tokens") - before < ENDLESS["max_tokens"]
    await other.close()


async def test_abort_of_a_request_ends_its_migration(pair: Pair) -> None:
    stream = await pair.submit(0, **ENDLESS)
    await stream.until(5)
    moving = asyncio.create_task(pair.move(stream, 0, 1))
    await pair.front_end.abort(stream)
    events = await moving
    assert events[-1].state == types_pb2.MIGRATION_STATE_GONE
    for number in (0, 1):
        await pair.wait_drained(number)


async def test_a_request_that_ends_before_its_target_connects_is_gone(pair: Pair, tmp_path: Path) -> None:
    """The source then knows no ticket of it, and does not answer the target's transfer."""
    faults = tmp_path / "faults"
    faults.write_text(json.dumps({"hold": "import:open", "seconds": WAIT_S}))
    # The source never answers it.
    deadlines = {"worker_agent.kv.client._CONNECT_S": 0.5}
    async with extra_worker(pair, tmp_path, "faulty", faults=faults, deadlines=deadlines) as target:
        stream = await pair.submit(0, **ENDLESS)
        await stream.until(5)
        moving = asyncio.create_task(pair.move(stream, 0, target))
        await pair.workers[target].logged("fault: holding at import:open")
        await pair.front_end.abort(stream)
        await pair.wait_drained(0)
        faults.unlink()
        events = await moving
        assert events[-1].state == types_pb2.MIGRATION_STATE_GONE, events[-1].reason
        await pair.wait_drained(0)
        await pair.wait_drained(target)


async def test_utilities_are_answered(pair: Pair) -> None:
    frames = [b"\x94\x00\x07\xb3get_supported_tasks\x90"]
    await pair.front_end.send(pair.id(1), utility=worker_pb2.UtilityCall(call_id=7, frames=frames))
    async with asyncio.timeout(WAIT_S):
        result = await pair.front_end.utilities.get()
    assert result.call_id == 7 and b"generate" in b"".join(result.frames)


async def test_block_corrupted_in_transit_aborts_and_is_counted(
    pair: Pair, tmp_path: Path, undisturbed: list[int]
) -> None:
    async with faulty_worker(pair, tmp_path, corrupt="kv") as source:
        before = await pair.metric(1, "kv_checksum_failures")
        stream = await pair.submit(source, **ENDLESS)
        await stream.until(30)
        events = await pair.move(stream, source, 1)
        assert events[-1].state == types_pb2.MIGRATION_STATE_ABORTED and "corrupted" in events[-1].reason
        assert await pair.metric(1, "kv_checksum_failures") == before + 1
        assert stream.owner == pair.id(source)
        # The next migration, without corruption, is committed.
        committed(await pair.move(stream, source, 1, migration_id="again"))
        await pair.goes_on(stream, undisturbed)


@pytest.mark.parametrize("point", ["import:open", "import:pre_copy", "import:paused", "import:adopt"])
async def test_death_of_the_target_leaves_the_stream_at_its_source(
    pair: Pair, tmp_path: Path, undisturbed: list[int], point: str
) -> None:
    async with faulty_worker(pair, tmp_path, hold=point, seconds=WAIT_S) as target:
        stream = await pair.submit(0, **ENDLESS)
        await stream.until(5)
        moving = asyncio.create_task(pair.move(stream, 0, target, timeout_s=WAIT_S))
        await pair.workers[target].logged(f"fault: holding at {point}")
        pair.workers[target].kill()
        assert isinstance((await asyncio.gather(moving, return_exceptions=True))[0], grpc.aio.AioRpcError)
        await pair.goes_on(stream, undisturbed)
        assert stream.owner == pair.id(0)
        await pair.wait_drained(0)


@pytest.mark.parametrize("point", ["export:open", "export:pre_copy", "export:paused"])
async def test_death_of_the_source_frees_the_target_for_the_stream(
    pair: Pair, tmp_path: Path, undisturbed: list[int], point: str
) -> None:
    async with faulty_worker(pair, tmp_path, hold=point, seconds=WAIT_S) as source:
        stream = await pair.submit(source, **ENDLESS)
        await stream.until(5)
        moving = asyncio.create_task(pair.move(stream, source, 1, timeout_s=WAIT_S))
        await pair.workers[source].logged(f"fault: holding at {point}")
        pair.workers[source].kill()
        events = await moving
        assert events[-1].state == types_pb2.MIGRATION_STATE_ABORTED
        await pair.wait_drained(1)
        stream.owner, stream.epoch = pair.id(1), stream.epoch + 1
        await pair.front_end.resubmit(stream)
        await pair.goes_on(stream, undisturbed)


async def test_stream_is_recovered_if_the_target_dies_right_after_the_commit(
    pair: Pair, tmp_path: Path, undisturbed: list[int]
) -> None:
    async with faulty_worker(pair, tmp_path, hold="import:adopted", seconds=WAIT_S) as target:
        stream = await pair.submit(0, **ENDLESS)
        await stream.until(5)
        moving = asyncio.create_task(pair.move(stream, 0, target, timeout_s=WAIT_S))
        await pair.workers[target].logged("fault: holding at import:adopted")
        # The front end has accepted the target, so the source has released it, even if the target dies.
        assert stream.owner == pair.id(target)
        await pair.wait_drained(0)
        pair.workers[target].kill()
        assert isinstance((await asyncio.gather(moving, return_exceptions=True))[0], grpc.aio.AioRpcError)
        stream.owner, stream.epoch = pair.id(0), stream.epoch + 1
        await pair.front_end.resubmit(stream)
        await pair.goes_on(stream, undisturbed)


async def test_migration_of_a_request_that_has_ended_is_no_failure(pair: Pair) -> None:
    finished = await pair.submit(0, max_tokens=3)
    await finished.end()
    last = (await pair.move(finished, 0, 1))[-1]
    assert last.state == types_pb2.MIGRATION_STATE_GONE and "not on this engine" in last.reason


async def test_source_is_asked_why_its_blocks_cannot_be_read() -> None:
    """Mostly the request has ended, of which the transfer alone says nothing."""
    commands: list[str | None] = []

    class Transfer:
        async def pull(self, first_block: int, hashes: Sequence[bytes]) -> int:
            raise KvTransferError("the source cannot read the blocks")

    class Source:
        async def ask(self, command: worker_pb2.ExportCommand) -> worker_pb2.ExportEvent:
            commands.append(command.WhichOneof("body"))
            if command.HasField("pause"):
                return worker_pb2.ExportEvent(paused=worker_pb2.ExportPaused())
            raise SourceFailed("request r has finished", gone=True)

        async def failure(self) -> None:
            raise SourceFailed("the request was aborted", gone=True)

    class Reserving:
        async def import_reserve(self, request_id: str, blocks: int) -> None: ...

    opened = worker_pb2.ExportOpened(blocks=[worker_pb2.BlockIdentity(hash=b"1" * 16)])
    for rounds, reason in ((1, "has finished"), (0, "was aborted")):
        copying = Copying(
            Reserving(),  # type: ignore[arg-type]
            Transfer(),  # type: ignore[arg-type]
            Source(),  # type: ignore[arg-type]
            Faults(),
            "r",
            lambda done: None,
            None,
        )
        with pytest.raises(SourceFailed, match=reason) as caught:
            await copying.run(opened, ImportPlan(rounds, 2, 0.0, 10.0))
        assert caught.value.gone
    assert commands == ["more", "pause"]


async def test_death_of_the_source_right_after_the_commit_is_harmless(
    pair: Pair, tmp_path: Path, undisturbed: list[int]
) -> None:
    async with faulty_worker(pair, tmp_path, hold="export:adopt", seconds=WAIT_S) as source:
        stream = await pair.submit(source, **ENDLESS)
        await stream.until(5)
        moving = asyncio.create_task(pair.move(stream, source, 1, timeout_s=WAIT_S))
        await pair.workers[source].logged("fault: holding at export:adopt")
        pair.workers[source].kill()
        committed(await moving)
        await pair.goes_on(stream, undisturbed)
        assert stream.owner == pair.id(1)
        await pair.wait_drained(1)


async def test_imports_ended_during_the_pause_release_the_source(
    pair: Pair, tmp_path: Path, undisturbed: list[int]
) -> None:
    """The migration service disappears, cancels or allows too little time: the source continues."""
    async with faulty_worker(pair, tmp_path, hold="import:paused", seconds=WAIT_S) as target:
        queries = pair.front_end.queries
        stub = worker_pb2_grpc.WorkerStub(pair.channels[target])

        first = await pair.submit(0, **ENDLESS)
        await first.until(5)
        moving = asyncio.create_task(pair.move(first, 0, target, timeout_s=WAIT_S))
        await pair.workers[target].logged("fault: holding at import:paused")
        moving.cancel()
        await pair.goes_on(first, undisturbed)

        second = await pair.submit(0, **ENDLESS)
        await second.until(5)
        moving = asyncio.create_task(pair.move(second, 0, target, migration_id="m", timeout_s=WAIT_S))
        await pair.workers[target].logged("fault: holding at import:paused", times=2)
        cancel = worker_pb2.CancelImportRequest(migration_id="m")
        end = (await stub.CancelImport(cancel, timeout=WAIT_S)).end
        assert end.state == types_pb2.MIGRATION_STATE_ABORTED and "cancelled" in end.reason
        assert (await moving)[-1] == end
        # A migration service that comes late, or was restarted, is told the same.
        assert (await stub.CancelImport(cancel, timeout=WAIT_S)).end == end
        never = worker_pb2.CancelImportRequest(migration_id="never")
        assert not (await stub.CancelImport(never, timeout=WAIT_S)).HasField("end")
        await pair.goes_on(second, undisturbed)

        third = await pair.submit(0, **ENDLESS)
        await third.until(5)
        events = await pair.move(third, 0, target, timeout_s=1.0)
        assert events[-1].state == types_pb2.MIGRATION_STATE_ABORTED and "1 s" in events[-1].reason
        await pair.goes_on(third, undisturbed)

        assert pair.front_end.queries == queries, "no ownership query was needed"
        await pair.wait_drained(target)


async def test_calls_meant_for_another_instance_are_refused(pair: Pair, undisturbed: list[int]) -> None:
    """Another worker has got the address of one that stopped, or the same one was restarted there."""
    stream = await pair.submit(0, **ENDLESS)
    await stream.until(5)
    right = pair.workers[1].records[0]
    for named, message in (
        ({"target_instance_id": "gone"}, "this is right, not gone, which had this address before"),
        (
            {"target_instance_id": "right", "target_incarnation": "old"},
            f"right has been restarted: this is incarnation {right.incarnation}, not old",
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.move(stream, 0, 1, **named)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (caught.value.details() or "").startswith(message)
    events = await pair.move(stream, 0, 1, source_instance_id="gone")
    assert [event.state for event in events] == [types_pb2.MIGRATION_STATE_ABORTED]
    assert events[0].reason.startswith("source: this is left, not gone, which had this address before")

    worker = worker_pb2_grpc.WorkerStub(pair.channels[1])
    cache = cache_pb2_grpc.CacheStub(pair.channels[1])
    profile = worker.Profile(profile_pb2.ProfileRequest(instance_id="gone"), timeout=WAIT_S)
    copy = cache.Copy(cache_pb2.CopyRequest(request_id="r", target_instance_id="gone"), timeout=WAIT_S)
    for call in (profile.read(), copy):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "this is right, not gone" in (caught.value.details() or "")

    assert stream.owner == "left"
    committed(
        await pair.move(
            stream,
            0,
            1,
            source_instance_id="left",
            target_instance_id="right",
            target_incarnation=right.incarnation,
        )
    )
    await pair.goes_on(stream, undisturbed)
    assert stream.owner == "right"
