"""KV blocks between two processes: on one host in memory that both have mapped, and by UCX alone, as between
hosts."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from tailrace.v1 import worker_pb2
from tests.worker.kv_peer import BlockEngine, PeerSettings, block, block_hash, checksums, shape
from worker_agent.engine.base import KvShape, Staging
from worker_agent.engine.errors import KvCorrupt
from worker_agent.faults import FaultSpec
from worker_agent.kv.address import KvAddress, KvIdentityError, KvTransferError, address_of
from worker_agent.kv.binding import interfaces, ucx_options
from worker_agent.kv.client import KvClient, KvTransfer
from worker_agent.kv.segments import Mappings
from worker_agent.kv.staging import StagingPool
from worker_agent.kv.strays import discard_strays
from worker_agent.kv.ticket import Ticket
from worker_agent.kv.transport import Channel, own_address, start_ucx, stop_ucx
from worker_agent.kv.wire import RequestKind
from worker_agent.metrics import WorkerHistograms, WorkerMetrics

# UCX is bound to one event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = 64 << 10
BLOCKS = 700
LOOPBACK = ucx_options("127.0.0.1", None, {}, interfaces(), [])


class Source:
    """A process that serves blocks."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._asking = asyncio.Lock()

    async def ask(self, *command: object) -> object:
        assert self.process.stdin is not None and self.process.stdout is not None
        async with asyncio.timeout(30), self._asking:
            self.process.stdin.write(msgspec.json.encode(command) + b"\n")
            return msgspec.json.decode(await self.process.stdout.readline())

    async def open(self, client: KvClient) -> tuple[int, KvAddress, Ticket]:
        """A session for this client."""
        answer = await self.ask("open", client.address.message().SerializeToString().hex())
        assert isinstance(answer, list), answer
        number, address, ticket = answer
        message = worker_pb2.KvAddress.FromString(bytes.fromhex(address))
        return number, address_of(message, client.address), Ticket(bytes.fromhex(ticket))

    @asynccontextmanager
    async def transfer(self, client: KvClient) -> AsyncIterator[KvTransfer]:
        number, address, ticket = await self.open(client)
        transfer = await client.connect(address, ticket)
        try:
            yield transfer
        finally:
            await transfer.close()
            if self.process.returncode is None:
                await self.ask("end", number)

    async def until(self, sessions: int, strays: int) -> None:
        async with asyncio.timeout(20):
            while await self.ask("state") != [sessions, strays]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def source_process(settings: PeerSettings | None = None) -> AsyncIterator[Source]:
    given = settings or PeerSettings(BLOCKS, SIZE)
    given.ucx = given.ucx or LOOPBACK
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.worker.kv_peer",
        msgspec.json.encode(given).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "UCX_LOG_FILE": "stderr"},
        limit=1 << 20,
    )
    assert process.stdin is not None
    try:
        yield Source(process)
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
        data = np.frombuffer(received.buffer, np.uint8)[: num_blocks * SIZE]  # type: ignore[call-overload]
        if checksums(data, SIZE) != list(sums):
            raise KvCorrupt("damaged")
        for number in range(num_blocks):
            self.blocks[first + number] = data[number * SIZE : (number + 1) * SIZE].tobytes()


def client_of(kv: KvShape, kind: type[KvClient] = KvClient, sealed: bool = False) -> KvClient:
    metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
    return kind(kv, StagingPool(BlockEngine(1, SIZE), SIZE), Mappings(), metrics, sealed)


class Remote(KvClient):
    """One that no source takes for a process of its host."""

    @property
    def address(self) -> KvAddress:
        return dataclasses.replace(super().address, host=b"")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ucx() -> AsyncIterator[None]:
    start_ucx(LOOPBACK)
    yield
    stop_ucx()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(ucx: None) -> KvClient:
    return client_of(shape(SIZE))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["here", "elsewhere", "sealed"])
async def either(request: pytest.FixtureRequest, ucx: None) -> KvClient:
    """On the source's host, on another, and on another to which KV is encrypted."""
    kind = KvClient if request.param == "here" else Remote
    return client_of(shape(SIZE), kind, request.param == "sealed")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def source(ucx: None) -> AsyncIterator[Source]:
    async with source_process() as source:
        yield source


def names(first: int, count: int) -> list[bytes]:
    return [block_hash(number) for number in range(first, first + count)]


async def test_many_blocks_arrive_as_they_are(either: KvClient, source: Source) -> None:
    receiver = Receiver()
    async with source.transfer(either) as transfer:
        assert await transfer.pull(0, names(0, BLOCKS), receiver.deliver) == BLOCKS * SIZE
        for first, count in [(3, 1), (100, 129), (699, 1), (0, 128)]:
            await transfer.pull(first, names(first, count), receiver.deliver)
    assert sorted(receiver.blocks) == list(range(BLOCKS))
    assert all(receiver.blocks[number] == block(number, SIZE).tobytes() for number in range(BLOCKS))


async def test_transfers_at_the_same_time_do_not_mix(either: KvClient, source: Source) -> None:
    async def pull(first: int, count: int) -> list[int]:
        receiver = Receiver()
        async with source.transfer(either) as transfer:
            await transfer.pull(first, names(first, count), receiver.deliver)
        return sorted(receiver.blocks)

    ranges = [(0, 400), (200, 400), (300, 400)]
    assert await asyncio.gather(*(pull(*each) for each in ranges)) == [
        list(range(first, first + count)) for first, count in ranges
    ]


async def test_only_the_given_address_and_ports_listen_while_blocks_are_sent(client: KvClient) -> None:
    """By UCX's transport, for nothing else listens."""
    options = LOOPBACK | {"TCP_PORT_RANGE": "23100-23199"}
    listening: list[tuple[str, int]] = []
    async with source_process(PeerSettings(BLOCKS, SIZE, ucx=options)) as source:

        async def look(first: int, num_blocks: int, data: Staging, sums: Sequence[int]) -> None:
            of_source = psutil.Process(source.process.pid).net_connections()
            listening.extend(
                (each.laddr.ip, each.laddr.port) for each in of_source if each.status == psutil.CONN_LISTEN
            )

        async with source.transfer(client) as transfer:
            await transfer.pull(0, names(0, 300), look)
    assert listening
    assert all(address == "127.0.0.1" and 23100 <= port <= 23199 for address, port in listening)


async def test_other_blocks_than_those_named_are_refused(client: KvClient, source: Source) -> None:
    receiver = Receiver()
    async with source.transfer(client) as transfer:
        with pytest.raises(KvIdentityError):
            await transfer.pull(0, [b"another", *names(1, 3)], receiver.deliver)
    assert receiver.blocks == {}
    # A transfer that failed leaves nothing behind that could disturb the next.
    async with source.transfer(client) as transfer:
        await transfer.pull(0, names(0, 4), receiver.deliver)
    assert len(receiver.blocks) == 4


async def test_blocks_that_were_not_announced_are_refused(client: KvClient, source: Source) -> None:
    receiver = Receiver()
    async with source.transfer(client) as transfer:
        with pytest.raises(KvTransferError, match="ended"):
            await transfer.pull(BLOCKS - 1, names(BLOCKS - 1, 2), receiver.deliver)
    assert receiver.blocks == {}


async def test_kv_of_another_model_is_refused_at_once(client: KvClient, source: Source) -> None:
    number, address, ticket = await source.open(client)
    other = KvShape("another-model", 16, 4, SIZE // 4)
    with pytest.raises(KvIdentityError, match="another model"):
        await client_of(other).connect(address, ticket)
    await source.ask("end", number)


async def test_an_export_that_ends_between_two_pulls_is_told(either: KvClient, source: Source) -> None:
    number, address, ticket = await source.open(either)
    transfer = await either.connect(address, ticket)
    receiver = Receiver()
    await transfer.pull(0, names(0, 4), receiver.deliver)
    await source.ask("end", number)
    with pytest.raises(KvTransferError, match="ended"):
        async with asyncio.timeout(3):
            await transfer.pull(4, names(4, 4), receiver.deliver)
    await transfer.close()


async def test_what_is_being_read_does_not_change_when_its_export_ends(
    client: KvClient, source: Source
) -> None:
    """It would be taken for damaged: in shared memory, another export could come to lie where it is."""
    number, address, ticket = await source.open(client)
    transfer = await client.connect(address, ticket)
    reading, others = asyncio.Event(), asyncio.Event()
    receiver = Receiver()

    async def read_late(first: int, num_blocks: int, data: Staging, sums: Sequence[int]) -> None:
        reading.set()
        await others.wait()
        await receiver.deliver(first, num_blocks, data, sums)

    pull = asyncio.create_task(transfer.pull(0, names(0, BLOCKS), read_late))
    await reading.wait()
    await source.ask("end", number)
    async with source.transfer(client) as another:
        await another.pull(300, names(300, 400), Receiver().deliver)
    others.set()
    with pytest.raises(KvTransferError, match="ended"):
        await pull
    assert receiver.blocks and all(data == block(n, SIZE).tobytes() for n, data in receiver.blocks.items())
    await transfer.close()


async def test_a_ticket_serves_once(client: KvClient) -> None:
    """Neither another target nor a repeated message gets an answer, or leaves anything behind."""
    async with source_process() as source:
        number, address, ticket = await source.open(client)
        receiver = Receiver()
        transfer = await client.connect(address, ticket)
        await transfer.pull(0, names(0, 8), receiver.deliver)
        assert await source.ask("state") == [1, 0]
        # Anybody who knows the address can send; what is not expected is dropped, whatever its size.
        channel = await Channel.connect(address)
        for size, tag in [
            (16, ticket.request(0)),
            (8 << 20, ticket.request(1)),
            (16, Ticket.fresh().request(0)),
        ]:
            await channel.wait(channel.send(np.zeros(size, np.uint8), tag))
        await source.until(sessions=1, strays=3)
        await transfer.pull(8, names(8, 8), receiver.deliver)
        assert len(receiver.blocks) == 16
        await transfer.close()
        await channel.close()
        # The target has left: its ticket is worth nothing any more.
        await source.until(sessions=0, strays=3)
        with pytest.raises((TimeoutError, KvTransferError)):
            async with asyncio.timeout(0.3):
                await client.connect(address, ticket)
        await source.ask("end", number)


async def test_a_ticket_that_nobody_claims_expires(client: KvClient) -> None:
    async with source_process(PeerSettings(BLOCKS, SIZE, claim_s=0.3)) as source:
        await source.open(client)
        await source.until(sessions=0, strays=0)


async def test_late_answers_are_dropped(either: KvClient, source: Source) -> None:
    """A target that gives up does not know which of its answers are on their way."""
    async with source.transfer(either) as transfer:
        entered = asyncio.Event()

        async def wait_for_ever(first: int, num_blocks: int, data: Staging, sums: Sequence[int]) -> None:
            entered.set()
            await asyncio.sleep(0.2)

        pull = asyncio.create_task(transfer.pull(0, names(0, BLOCKS), wait_for_ever))
        await entered.wait()
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(3):
                await pull
    async with asyncio.timeout(20):
        while await discard_strays():
            pass
    receiver = Receiver()
    async with source.transfer(either) as transfer:
        await transfer.pull(0, names(0, 4), receiver.deliver)
    assert len(receiver.blocks) == 4


async def test_a_damaged_block_is_noticed(either: KvClient) -> None:
    async with source_process(PeerSettings(BLOCKS, SIZE, faults=[FaultSpec(corrupt="kv")])) as source:
        receiver = Receiver()
        async with source.transfer(either) as transfer:
            with pytest.raises(KvCorrupt):
                await transfer.pull(0, names(0, 4), receiver.deliver)
        async with source.transfer(either) as transfer:
            await transfer.pull(0, names(0, 4), receiver.deliver)
        assert len(receiver.blocks) == 4


@pytest.mark.parametrize("insists", ["source", "target"])
async def test_where_one_end_encrypts_nothing_else_is_sent(insists: str, client: KvClient) -> None:
    async with source_process(PeerSettings(BLOCKS, SIZE, sealed=insists == "source")) as source:
        receiver = Receiver()
        async with source.transfer(client_of(shape(SIZE), Remote, insists == "target")) as transfer:
            await transfer.pull(0, names(0, 4), receiver.deliver)
            assert transfer._kind is RequestKind.SEALED
            # As if the request had been changed on its way.
            transfer._sealed = False
            with pytest.raises(KvTransferError):
                await transfer.pull(4, names(4, 4), receiver.deliver)
        async with source.transfer(client) as shared:
            await shared.pull(8, names(8, 4), receiver.deliver)
        assert sorted(receiver.blocks) == [0, 1, 2, 3, 8, 9, 10, 11]


async def test_memory_is_not_mapped_for_a_source_that_shares_none(client: KvClient, source: Source) -> None:
    """It names some in its hello, as who changes messages on their way would: blocks come over the wire."""
    number, address, ticket = await source.open(client)
    transfer = await client.connect(replace(address, host=b"elsewhere"), ticket)
    receiver = Receiver()
    try:
        await transfer.pull(0, names(0, 4), receiver.deliver)
        assert transfer._kind is RequestKind.BLOCKS and len(receiver.blocks) == 4
    finally:
        await transfer.close()
        await source.ask("end", number)


async def test_a_source_that_dies_under_a_transfer_is_an_error_not_a_wait(either: KvClient) -> None:
    async with source_process() as source:
        received = Receiver()

        async def die_then(first: int, num_blocks: int, data: Staging, sums: Sequence[int]) -> None:
            if source.process.returncode is None:
                source.process.kill()
                await source.process.wait()
            await received.deliver(first, num_blocks, data, sums)

        async with source.transfer(either) as transfer:
            with pytest.raises(KvTransferError):
                async with asyncio.timeout(20):
                    await transfer.pull(0, names(0, BLOCKS), die_then)
    with pytest.raises(KvTransferError):
        async with asyncio.timeout(20):
            await either.connect(own_address(sealed=False), Ticket.fresh())


async def test_a_target_that_dies_under_a_transfer_leaves_nothing(client: KvClient, source: Source) -> None:
    """Ended as its export is when the target's gRPC stream breaks, the source serves on."""
    async with source_process() as target:
        opened = await source.ask("open", await target.ask("address"))
        assert isinstance(opened, list)
        assert await target.ask("pull", opened[1], opened[2])
        target.process.kill()
        await target.process.wait()
        await source.ask("end", opened[0])
    state = await source.ask("state")
    assert isinstance(state, list)
    await source.until(sessions=0, strays=state[1])
    receiver = Receiver()
    async with source.transfer(client) as transfer:
        await transfer.pull(0, names(0, 4), receiver.deliver)
    assert len(receiver.blocks) == 4


async def test_an_address_that_came_damaged_never_reaches_ucx() -> None:
    ours = own_address(sealed=False)
    whole = ours.message()
    assert address_of(whole, ours) == ours
    for damaged in (
        worker_pb2.KvAddress(),
        worker_pb2.KvAddress(worker=whole.worker[:-1], ucx_version=whole.ucx_version, digest=whole.digest),
        worker_pb2.KvAddress(worker=whole.worker, ucx_version="0.0.0", digest=whole.digest),
    ):
        with pytest.raises(KvTransferError):
            address_of(damaged, ours)
