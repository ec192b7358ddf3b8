"""Transfer of KV blocks between processes: through mapped memory on one host, and by UCX as between hosts."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import sys
import weakref
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
from tests.counting import failures_of
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S
from tests.worker.kv_peer import BlockEngine, PeerSettings, block, block_hash, checksums, shape
from worker_agent.engine.base import KvShape, Staging
from worker_agent.engine.errors import KvCorrupt
from worker_agent.faults import FaultSpec
from worker_agent.kv.address import KvAddress, KvIdentityError, KvTransferError, Ticket, address_of
from worker_agent.kv.client import Deliver, KvClient, KvTransfer
from worker_agent.kv.memory import Mappings, StagingPool
from worker_agent.kv.ucx import (
    Channel,
    discard_strays,
    discarding_strays,
    own_address,
    progress_paused,
    start_ucx,
    stop_ucx,
)
from worker_agent.kv.wire import RequestKind
from worker_agent.metrics import WorkerHistograms, WorkerMetrics
from worker_agent.network import interfaces, ucx_options

# UCX is bound to one event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = 64 << 10
BLOCKS = 700
LOOPBACK = ucx_options("127.0.0.1", None, {}, interfaces(), [])


class Source:
    """A peer process that serves blocks."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._asking = asyncio.Lock()

    async def ask(self, *command: object) -> object:
        assert self.process.stdin is not None and self.process.stdout is not None
        async with asyncio.timeout(WAIT_S), self._asking:
            self.process.stdin.write(msgspec.json.encode(command) + b"\n")
            return msgspec.json.decode(await self.process.stdout.readline())

    async def open(self, client: KvClient) -> tuple[int, KvAddress, Ticket]:
        """Open a session for this client and return its number, the address and the ticket."""
        answer = await self.ask("open", client.address.message().SerializeToString().hex())
        assert isinstance(answer, list), answer
        number, address, ticket = answer
        message = worker_pb2.KvAddress.FromString(bytes.fromhex(address))
        return number, address_of(message, client.address), Ticket(bytes.fromhex(ticket))

    @asynccontextmanager
    async def transfer(self, client: KvClient, deliver: Deliver) -> AsyncIterator[KvTransfer]:
        number, address, ticket = await self.open(client)
        transfer = await client.connect(address, ticket, deliver)
        try:
            yield transfer
        finally:
            await transfer.close()
            if self.process.returncode is None:
                await self.ask("end", number)

    async def until(self, sessions: int, strays: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while await self.ask("state") != [sessions, strays]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def source_process(settings: PeerSettings | None = None) -> AsyncIterator[Source]:
    peer_settings = settings or PeerSettings(BLOCKS, SIZE)
    peer_settings.ucx = peer_settings.ucx or LOOPBACK
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.worker.kv_peer",
        msgspec.json.encode(peer_settings).decode(),
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
            async with asyncio.timeout(WAIT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            raise


class Receiver:
    """Checks delivered blocks and records their numbers."""

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
    """Client that no source recognizes as a process on its host."""

    @property
    def address(self) -> KvAddress:
        return dataclasses.replace(super().address, host=b"")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ucx() -> AsyncIterator[None]:
    start_ucx(LOOPBACK)
    with pytest.MonkeyPatch.context() as patch:
        # A source's process may be slow to answer.
        patch.setattr("worker_agent.kv.client._CONNECT_S", WAIT_S)
        yield
    stop_ucx()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(ucx: None) -> KvClient:
    return client_of(shape(SIZE))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["here", "elsewhere", "sealed"])
async def any_client(request: pytest.FixtureRequest, ucx: None) -> KvClient:
    """A client on the source's host, on another host, and on another host with encryption."""
    kind = KvClient if request.param == "here" else Remote
    return client_of(shape(SIZE), kind, request.param == "sealed")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def source(ucx: None) -> AsyncIterator[Source]:
    async with source_process() as source:
        yield source


async def test_the_progress_thread_has_ended_while_it_is_paused(ucx: None) -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    before = threads()
    with progress_paused():
        # Who waits for a thread is woken a moment before the kernel stops listing it.
        wait_until(lambda: len(before - threads()) == 1, "the thread to be listed no more")
    assert len(threads()) == len(before)


def names(first: int, count: int) -> list[bytes]:
    return [block_hash(number) for number in range(first, first + count)]


async def test_many_blocks_arrive_unchanged(any_client: KvClient, source: Source) -> None:
    receiver = Receiver()
    async with source.transfer(any_client, receiver.deliver) as transfer:
        assert await transfer.pull(0, names(0, BLOCKS)) == BLOCKS * SIZE
        for first, count in [(3, 1), (100, 129), (699, 1), (0, 128)]:
            await transfer.pull(first, names(first, count))
    assert sorted(receiver.blocks) == list(range(BLOCKS))
    assert all(receiver.blocks[number] == block(number, SIZE).tobytes() for number in range(BLOCKS))


async def test_concurrent_transfers_are_separate(any_client: KvClient, source: Source) -> None:
    async def pull(first: int, count: int) -> list[int]:
        receiver = Receiver()
        async with source.transfer(any_client, receiver.deliver) as transfer:
            await transfer.pull(first, names(first, count))
        return sorted(receiver.blocks)

    ranges = [(0, 400), (200, 400), (300, 400)]
    assert await asyncio.gather(*(pull(*each) for each in ranges)) == [
        list(range(first, first + count)) for first, count in ranges
    ]


async def test_only_the_given_address_and_ports_listen_during_a_transfer(client: KvClient) -> None:
    """With the UCX transport, as the other one does not listen."""
    options = LOOPBACK | {"TCP_PORT_RANGE": "23100-23199"}
    listening: list[tuple[str, int]] = []
    async with source_process(PeerSettings(BLOCKS, SIZE, ucx=options)) as source:

        async def look(first: int, num_blocks: int, data: Staging, sums: Sequence[int]) -> None:
            of_source = psutil.Process(source.process.pid).net_connections()
            listening.extend(
                (each.laddr.ip, each.laddr.port) for each in of_source if each.status == psutil.CONN_LISTEN
            )

        async with source.transfer(client, look) as transfer:
            await transfer.pull(0, names(0, 300))
    assert listening
    assert all(address == "127.0.0.1" and 23100 <= port <= 23199 for address, port in listening)


async def test_blocks_with_other_names_are_refused(client: KvClient, source: Source) -> None:
    receiver = Receiver()
    async with source.transfer(client, receiver.deliver) as transfer:
        with pytest.raises(KvIdentityError):
            await transfer.pull(0, [b"another", *names(1, 3)])
    assert receiver.blocks == {}
    # A failed transfer leaves nothing behind that could disturb the next one.
    async with source.transfer(client, receiver.deliver) as transfer:
        await transfer.pull(0, names(0, 4))
    assert len(receiver.blocks) == 4


async def test_unannounced_blocks_are_refused(client: KvClient, source: Source) -> None:
    receiver = Receiver()
    async with source.transfer(client, receiver.deliver) as transfer:
        with pytest.raises(KvTransferError, match="ended"):
            await transfer.pull(BLOCKS - 1, names(BLOCKS - 1, 2))
    assert receiver.blocks == {}


async def test_source_without_memory_to_stage_blocks_says_so(ucx: None) -> None:
    receiver = Receiver()
    async with source_process(PeerSettings(BLOCKS, SIZE, staged_max=1)) as source:
        remote = client_of(shape(SIZE), Remote)
        async with source.transfer(remote, receiver.deliver) as transfer:
            with pytest.raises(KvTransferError, match="cannot read the blocks"):
                await transfer.pull(0, names(0, 2))
        async with source.transfer(remote, receiver.deliver) as transfer:
            await transfer.pull(0, names(0, 1))
    assert list(receiver.blocks) == [0]


async def test_kv_of_another_model_is_refused(client: KvClient, source: Source) -> None:
    number, address, ticket = await source.open(client)
    other = KvShape("another-model", 16, 4, SIZE // 4)
    with pytest.raises(KvIdentityError, match="another model"):
        await client_of(other).connect(address, ticket, Receiver().deliver)
    await source.ask("end", number)


async def test_pull_after_the_end_of_the_export_fails(any_client: KvClient, source: Source) -> None:
    number, address, ticket = await source.open(any_client)
    receiver = Receiver()
    transfer = await any_client.connect(address, ticket, receiver.deliver)
    await transfer.pull(0, names(0, 4))
    await source.ask("end", number)
    with pytest.raises(KvTransferError, match="ended"):
        async with asyncio.timeout(WAIT_S):
            await transfer.pull(4, names(4, 4))
    await transfer.close()


async def test_blocks_being_read_do_not_change_when_the_export_ends(client: KvClient, source: Source) -> None:
    """In shared memory, another export could overwrite it, and it would count as corrupt."""
    number, address, ticket = await source.open(client)
    reading, others = asyncio.Event(), asyncio.Event()
    receiver = Receiver()

    async def read_late(first: int, num_blocks: int, data: Staging, sums: Sequence[int]) -> None:
        reading.set()
        await others.wait()
        await receiver.deliver(first, num_blocks, data, sums)

    transfer = await client.connect(address, ticket, read_late)
    pull = asyncio.create_task(transfer.pull(0, names(0, BLOCKS)))
    await reading.wait()
    await source.ask("end", number)
    async with source.transfer(client, Receiver().deliver) as another:
        await another.pull(300, names(300, 400))
    others.set()
    with pytest.raises(KvTransferError, match="ended"):
        await pull
    assert receiver.blocks and all(data == block(n, SIZE).tobytes() for n, data in receiver.blocks.items())
    await transfer.close()


async def test_a_source_knows_when_its_target_last_requested_blocks(client: KvClient, source: Source) -> None:
    number, address, ticket = await source.open(client)
    transfer = await client.connect(address, ticket, Receiver().deliver)
    requested = [await source.ask("requested", number)]
    for first in (0, 4):
        await transfer.pull(first, names(first, 4))
        requested.append(await source.ask("requested", number))
    await transfer.close()
    await source.ask("end", number)
    opened_s, first_s, second_s = requested
    assert isinstance(opened_s, float) and isinstance(first_s, float) and isinstance(second_s, float)
    assert opened_s < first_s < second_s


async def test_ticket_is_valid_once(client: KvClient) -> None:
    """Neither another target nor a repeated message gets a reply or leaves anything behind."""
    async with source_process() as source:
        number, address, ticket = await source.open(client)
        receiver = Receiver()
        transfer = await client.connect(address, ticket, receiver.deliver)
        await transfer.pull(0, names(0, 8))
        assert await source.ask("state") == [1, 0]
        # Any process that knows the address can send; unexpected messages of any size are dropped.
        channel = await Channel.connect(address)
        for size, tag in [
            (16, ticket.request(0)),
            (8 << 20, ticket.request(1)),
            (16, Ticket.fresh().request(0)),
        ]:
            await channel.wait(channel.send(np.zeros(size, np.uint8), tag))
        await source.until(sessions=1, strays=3)
        await transfer.pull(8, names(8, 8))
        assert len(receiver.blocks) == 16
        await transfer.close()
        await channel.close()
        # The target has disconnected, so its ticket is invalid.
        await source.until(sessions=0, strays=3)
        with pytest.raises((TimeoutError, KvTransferError)):
            async with asyncio.timeout(0.3):
                await client.connect(address, ticket, receiver.deliver)
        await source.ask("end", number)


async def test_closed_channel_keeps_no_buffer_of_a_receive(client: KvClient, source: Source) -> None:
    """Each aborted import closes one while messages are under way."""
    number, address, _ = await source.open(client)
    channel = await Channel.connect(address)
    buffer = np.empty(64, np.uint8)
    message, kept = channel.receive(buffer, 12345), weakref.ref(buffer)
    await asyncio.sleep(0)
    await channel.close()
    with pytest.raises(KvTransferError):
        await channel.wait(message)
    await source.ask("end", number)
    del channel, message, buffer
    gc.collect()
    assert kept() is None


async def test_unclaimed_ticket_expires(client: KvClient) -> None:
    async with source_process(PeerSettings(BLOCKS, SIZE, claim_s=0.3)) as source:
        await source.open(client)
        await source.until(sessions=0, strays=0)


async def test_late_replies_are_dropped(any_client: KvClient, source: Source) -> None:
    """A target that gives up does not know which replies are still in flight."""
    entered = asyncio.Event()

    async def wait_for_ever(first: int, num_blocks: int, data: Staging, sums: Sequence[int]) -> None:
        entered.set()
        await asyncio.sleep(0.2)

    async with source.transfer(any_client, wait_for_ever) as transfer:
        pull = asyncio.create_task(transfer.pull(0, names(0, BLOCKS)))
        await entered.wait()
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(WAIT_S):
                await pull
    async with asyncio.timeout(WAIT_S):
        while await discard_strays():
            pass
    receiver = Receiver()
    async with source.transfer(any_client, receiver.deliver) as transfer:
        await transfer.pull(0, names(0, 4))
    assert len(receiver.blocks) == 4


async def test_corrupt_block_is_detected(any_client: KvClient) -> None:
    async with source_process(PeerSettings(BLOCKS, SIZE, faults=[FaultSpec(corrupt="kv")])) as source:
        receiver = Receiver()
        async with source.transfer(any_client, receiver.deliver) as transfer:
            with pytest.raises(KvCorrupt):
                await transfer.pull(0, names(0, 4))
        async with source.transfer(any_client, receiver.deliver) as transfer:
            await transfer.pull(0, names(0, 4))
        assert len(receiver.blocks) == 4


@pytest.mark.parametrize("encrypting_end", ["source", "target"])
async def test_plain_transfer_is_refused_if_one_end_encrypts(encrypting_end: str, client: KvClient) -> None:
    async with source_process(PeerSettings(BLOCKS, SIZE, sealed=encrypting_end == "source")) as source:
        receiver = Receiver()
        remote = client_of(shape(SIZE), Remote, encrypting_end == "target")
        async with source.transfer(remote, receiver.deliver) as transfer:
            await transfer.pull(0, names(0, 4))
            assert transfer._kind is RequestKind.SEALED
            # As if the request had been modified in transit.
            transfer._sealed = False
            with pytest.raises(KvTransferError):
                await transfer.pull(4, names(4, 4))
        async with source.transfer(client, receiver.deliver) as shared:
            await shared.pull(8, names(8, 4))
        assert sorted(receiver.blocks) == [0, 1, 2, 3, 8, 9, 10, 11]


async def test_memory_of_a_source_that_shares_none_is_not_mapped(client: KvClient, source: Source) -> None:
    """The hello names shared memory, as a modified message could; blocks are still sent by UCX."""
    number, address, ticket = await source.open(client)
    receiver = Receiver()
    transfer = await client.connect(replace(address, host=b"elsewhere"), ticket, receiver.deliver)
    try:
        await transfer.pull(0, names(0, 4))
        assert transfer._kind is RequestKind.BLOCKS and len(receiver.blocks) == 4
    finally:
        await transfer.close()
        await source.ask("end", number)


async def test_death_of_the_source_during_a_transfer_is_an_error(
    any_client: KvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with source_process() as source:
        received = Receiver()

        async def die_then(first: int, num_blocks: int, data: Staging, sums: Sequence[int]) -> None:
            if source.process.returncode is None:
                source.process.kill()
                await source.process.wait()
            await received.deliver(first, num_blocks, data, sums)

        async with source.transfer(any_client, die_then) as transfer:
            with pytest.raises(KvTransferError):
                async with asyncio.timeout(WAIT_S):
                    await transfer.pull(0, names(0, BLOCKS))
    # Nobody answers.
    monkeypatch.setattr("worker_agent.kv.client._CONNECT_S", 0.3)
    with pytest.raises(KvTransferError):
        async with asyncio.timeout(WAIT_S):
            await any_client.connect(own_address(sealed=False), Ticket.fresh(), received.deliver)


async def test_death_of_the_target_during_a_transfer_leaves_nothing_behind(
    client: KvClient, source: Source
) -> None:
    """The export ends when the target's gRPC stream breaks, and the source continues to serve."""
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
    async with source.transfer(client, receiver.deliver) as transfer:
        await transfer.pull(0, names(0, 4))
    assert len(receiver.blocks) == 4


async def test_corrupt_address_never_reaches_ucx() -> None:
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


async def test_discarding_strays_goes_on_after_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it UCX would keep every unexpected message from then on."""
    results = iter([3])
    mistakes = iter([ZeroDivisionError("a mistake")])
    counted: asyncio.Queue[int] = asyncio.Queue()

    async def discard() -> int:
        if (mistake := next(mistakes, None)) is not None:
            raise mistake
        return next(results, 0)

    before = failures_of("stray KV messages")
    monkeypatch.setattr("worker_agent.kv.ucx.discard_strays", discard)
    async with discarding_strays(counted.put_nowait), asyncio.timeout(WAIT_S):
        assert await counted.get() == 3
    assert failures_of("stray KV messages") == before + 1
