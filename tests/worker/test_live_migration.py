"""Two simulated workers in processes of their own, and a scripted front end over real gRPC, UCX and etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tailrace.store.store import Store
from tailrace.v1 import types_pb2, worker_pb2
from tests.worker.scripted_front_end import ScriptedFrontEnd, Stream
from tests.worker.worker_processes import WorkerProcess, committed, migrate, worker_process

PROMPT = [72, 101, 108, 108, 111, 32] * 50
LONG = {"max_tokens": 300, "ignore_eos": True, "min_tokens": 300}


class Pair:
    """Two workers and a front end that is attached to both."""

    def __init__(self, workers: list[WorkerProcess], front_end: ScriptedFrontEnd) -> None:
        self.workers = workers
        self.front_end = front_end
        self.channels = [grpc.aio.insecure_channel(worker.address) for worker in workers]

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


@pytest.fixture
async def pair(store: Store, etcd: str, cluster: str, tmp_path: Path) -> AsyncIterator[Pair]:
    async with (
        worker_process(store, etcd, cluster, tmp_path, "left") as left,
        worker_process(store, etcd, cluster, tmp_path, "right") as right,
    ):
        front_end = ScriptedFrontEnd()
        for worker in (left, right):
            await front_end.attach(worker.address)
        pair = Pair([left, right], front_end)
        yield pair
        await front_end.close()
        for channel in pair.channels:
            await channel.close()


async def test_a_stream_that_moved_three_times_yields_what_an_undisturbed_one_yields(pair: Pair) -> None:
    undisturbed = await (await pair.front_end.submit(pair.id(0), PROMPT, **LONG)).end()
    stream = await pair.front_end.submit(pair.id(0), PROMPT, **LONG)
    for turn, (source, target) in enumerate([(0, 1), (1, 0), (0, 1)]):
        await stream.until(20 + 60 * turn)
        events = await pair.move(stream, source, target)
        done = committed(events)
        assert done.pause_ms > 0
        assert [e.state for e in events][0] == types_pb2.MIGRATION_STATE_OPEN
        rounds = [event.round for event in events if event.HasField("round")]
        assert sum(r.blocks for r in rounds) >= len(PROMPT) // 16
        print([(r.number, r.blocks, r.bytes, round(r.ms, 2)) for r in rounds], done.pause_ms, done.pause_steps)
    assert await stream.end() == undisturbed
    assert len(undisturbed) == 300
    assert stream.epoch == 3 and pair.front_end.adoptions == 3
