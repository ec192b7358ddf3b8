"""KV blocks between two processes over UCX."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from tests.worker.kv_peer import MIGRATION, BlockEngine, block, block_hash, checksums, shape
from worker_agent.engine.base import KvCorrupt, Staging
from worker_agent.kv.client import KvClient, Peer
from worker_agent.kv.errors import KvIdentityError, KvTransferError
from worker_agent.kv.staging import StagingPool
from worker_agent.kv.transport import start_ucx, stop_ucx
from worker_agent.metrics import WorkerHistograms, WorkerMetrics

# UCX is bound to one event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = 64 << 10
BLOCKS = 700


class Source:
    """A process that serves blocks."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, session: int) -> None:
        self.process = process
        self.peer = Peer("127.0.0.1", port)
        self.session = session


@asynccontextmanager
async def source_process(
    blocks: int = BLOCKS, faults: str = "[]", connections: int = 64
) -> AsyncIterator[Source]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.worker.kv_peer",
        str(blocks),
        str(SIZE),
        faults,
        str(connections),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(30):
            port, session = (await process.stdout.readline()).split()
        yield Source(process, int(port), int(session))
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            raise


class Receiver:
    """Checks and keeps what is delivered."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}

    async def deliver(self, first: int, num_blocks: int, received: Staging, sums: Sequence[int]) -> None:
        data = np.frombuffer(received.buffer, np.uint8)  # type: ignore[call-overload]
        if checksums(data, SIZE) != list(sums):
            raise KvCorrupt("damaged")
        for number in range(num_blocks):
            self.blocks[first + number] = data[number * SIZE : (number + 1) * SIZE].tobytes()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[KvClient]:
    start_ucx()
    metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
    engine = BlockEngine(1, SIZE)
    client = KvClient(shape(SIZE), StagingPool(engine, SIZE), metrics)  # type: ignore[arg-type]
    yield client
    await client.close()
    stop_ucx()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def source(client: KvClient) -> AsyncIterator[Source]:
    async with source_process() as source:
        yield source


def names(first: int, count: int) -> list[bytes]:
    return [block_hash(number) for number in range(first, first + count)]


async def test_many_blocks_arrive_as_they_are(client: KvClient, source: Source) -> None:
    receiver = Receiver()
    size = await client.pull(source.peer, source.session, MIGRATION, 0, names(0, BLOCKS), receiver.deliver)
    assert size == BLOCKS * SIZE
    for first, count in [(3, 1), (100, 129), (699, 1), (0, 128)]:
        await client.pull(
            source.peer, source.session, MIGRATION, first, names(first, count), receiver.deliver
        )
    assert sorted(receiver.blocks) == list(range(BLOCKS))
    assert all(receiver.blocks[number] == block(number, SIZE).tobytes() for number in range(BLOCKS))


async def test_transfers_at_the_same_time_do_not_mix(client: KvClient, source: Source) -> None:
    receivers = [Receiver() for _ in range(3)]
    ranges = [(0, 400), (200, 400), (300, 400)]
    await asyncio.gather(
        *(
            client.pull(source.peer, source.session, MIGRATION, first, names(first, count), each.deliver)
            for each, (first, count) in zip(receivers, ranges, strict=True)
        )
    )
    for each, (first, count) in zip(receivers, ranges, strict=True):
        assert sorted(each.blocks) == list(range(first, first + count))


async def test_idle_connections_make_room(client: KvClient) -> None:
    """A large fleet's peers keep more of them than there may be."""
    engine = BlockEngine(1, SIZE)
    metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
    peers: list[KvClient] = []
    async with source_process(connections=2) as source:
        for first in range(4):
            peers.append(KvClient(shape(SIZE), StagingPool(engine, SIZE), metrics))  # type: ignore[arg-type]
            receiver = Receiver()
            await peers[-1].pull(
                source.peer, source.session, MIGRATION, first, names(first, 2), receiver.deliver
            )
            assert sorted(receiver.blocks) == [first, first + 1]
        for each in peers:
            await each.close()


async def test_other_blocks_than_those_named_are_refused(client: KvClient, source: Source) -> None:
    receiver = Receiver()
    with pytest.raises(KvIdentityError):
        await client.pull(
            source.peer, source.session, MIGRATION, 0, [b"another", *names(1, 3)], receiver.deliver
        )
    assert receiver.blocks == {}
    # A transfer that failed leaves nothing behind that could disturb the next.
    await client.pull(source.peer, source.session, MIGRATION, 0, names(0, 4), receiver.deliver)
    assert len(receiver.blocks) == 4


async def test_who_does_not_know_the_session_gets_nothing(client: KvClient, source: Source) -> None:
    receiver = Receiver()
    for session, migration in [(source.session + 1, MIGRATION), (source.session, "another")]:
        with pytest.raises(KvTransferError, match="ended"):
            await client.pull(source.peer, session, migration, 0, names(0, 4), receiver.deliver)
    with pytest.raises(KvTransferError, match="ended"):
        await client.pull(
            source.peer, source.session, MIGRATION, BLOCKS - 1, names(BLOCKS - 1, 2), receiver.deliver
        )
    assert receiver.blocks == {}


async def test_a_damaged_block_is_noticed(client: KvClient) -> None:
    async with source_process(faults='[{"corrupt": "kv"}]') as source:
        receiver = Receiver()
        with pytest.raises(KvCorrupt):
            await client.pull(source.peer, source.session, MIGRATION, 0, names(0, 4), receiver.deliver)
        await client.pull(source.peer, source.session, MIGRATION, 0, names(0, 4), receiver.deliver)
        assert len(receiver.blocks) == 4


async def test_nobody_listens(client: KvClient) -> None:
    with pytest.raises(KvTransferError):
        await client.pull(Peer("127.0.0.1", 9), 1, MIGRATION, 0, names(0, 1), Receiver().deliver)


async def test_a_source_that_dies_under_a_transfer_is_an_error_not_a_wait(client: KvClient) -> None:
    async with source_process() as source:
        received = Receiver()

        async def die_then(first: int, num_blocks: int, data: Staging, sums: Sequence[int]) -> None:
            if source.process.returncode is None:
                source.process.kill()
                await source.process.wait()
            await received.deliver(first, num_blocks, data, sums)

        with pytest.raises((KvTransferError, TimeoutError)):
            async with asyncio.timeout(20):
                await client.pull(source.peer, source.session, MIGRATION, 0, names(0, BLOCKS), die_then)


async def test_a_pull_that_is_given_up_ends_at_once(client: KvClient, source: Source) -> None:
    entered = asyncio.Event()

    async def wait_for_ever(first: int, num_blocks: int, data: Staging, sums: Sequence[int]) -> None:
        entered.set()
        await asyncio.sleep(0.2)

    pull = asyncio.create_task(
        client.pull(source.peer, source.session, MIGRATION, 0, names(0, BLOCKS), wait_for_ever)
    )
    await entered.wait()
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(3):
            await pull
    receiver = Receiver()
    await client.pull(source.peer, source.session, MIGRATION, 0, names(0, 4), receiver.deliver)
    assert len(receiver.blocks) == 4
