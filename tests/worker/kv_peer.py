"""A process that serves KV blocks of a fake engine, where each block has distinct contents.

Run as `python -m tests.worker.kv_peer` with a JSON PeerSettings. It answers each line of its input, in JSON:

    ["open", ADDRESS]           open a session for this target: its number, the peer's address, the ticket
    ["end", NUMBER]             end a session
    ["address"]                 the peer's address
    ["pull", ADDRESS, TICKET]   begin to pull all blocks and stop after the first chunk
    ["state"]                   the numbers of open sessions and of dropped stray messages

It exits at the end of its input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from prometheus_client import CollectorRegistry

from tailrace.v1 import worker_pb2
from tests.waiting import WAIT_S
from worker_agent.engine.base import Engine, KvShape, Staging
from worker_agent.engine.errors import EngineRefusal
from worker_agent.faults import Faults, FaultSpec
from worker_agent.kv import server
from worker_agent.kv.address import KvTransferError, Ticket, address_of
from worker_agent.kv.client import KvClient
from worker_agent.kv.memory import Mappings, Segments, StagingPool
from worker_agent.kv.server import KvServer, KvSession
from worker_agent.kv.ucx import discarding_strays, start_ucx, stop_ucx
from worker_agent.metrics import WorkerHistograms, WorkerMetrics


class PeerSettings(msgspec.Struct):
    blocks: int
    block_bytes: int
    faults: list[FaultSpec] = []
    claim_s: float = 30.0
    ucx: dict[str, str] = {}
    sealed: bool = False
    # Blocks that the device has memory to stage; -1: any number.
    staged_max: int = -1


def shape(block_bytes: int) -> KvShape:
    return KvShape("test-model", 16, 4, block_bytes // 4)


def block(number: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of a block, which differ from those of every other block."""
    words = np.arange(size // 8, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)).view(np.uint8)


def block_hash(number: int) -> bytes:
    return b"hash of %d" % number


class Memory:
    """Staging buffer in ordinary memory."""

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self.array = array

    @property
    def buffer(self) -> object:
        return self.array


class BlockEngine:
    """The part of Engine that the transport calls. Its blocks are generated in advance, so that a read costs
    as much as in a real engine: a copy and a checksum."""

    def __init__(self, blocks: int, block_bytes: int, staged_max: int = -1) -> None:
        self._bytes = block_bytes
        self._staged_max = staged_max
        self._kv = np.concatenate([block(number, block_bytes) for number in range(blocks)])

    def staging(self, num_blocks: int) -> Staging:
        if 0 <= self._staged_max < num_blocks:
            raise EngineRefusal("no memory")
        return Memory(np.zeros(num_blocks * self._bytes, np.uint8))

    def staging_over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        return Memory(memory)

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        data = self._kv[first_block * self._bytes : (first_block + num_blocks) * self._bytes]
        if data.size != num_blocks * self._bytes:
            raise EngineRefusal("no such blocks")
        return await asyncio.to_thread(self._copy, data, out)

    def _copy(self, data: npt.NDArray[np.uint8], out: Staging) -> list[int]:
        np.frombuffer(out.buffer, np.uint8)[: data.size] = data  # type: ignore[call-overload]
        return checksums(data, self._bytes)


def checksums(data: npt.NDArray[np.uint8], size: int) -> list[int]:
    view = memoryview(data)  # type: ignore[arg-type]
    return [xxhash.xxh3_64_intdigest(view[at : at + size]) for at in range(0, data.size, size)]


class Serving:
    """Executes the commands of the test."""

    def __init__(self, settings: PeerSettings) -> None:
        self._settings = settings
        engine: Engine = BlockEngine(  # type: ignore[assignment]
            settings.blocks, settings.block_bytes, settings.staged_max
        )
        metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
        pool = StagingPool(engine, settings.block_bytes)
        self.server = KvServer(
            engine,
            shape(settings.block_bytes),
            pool,
            Segments(),
            Faults(settings.faults),
            metrics,
            settings.sealed,
            settings.claim_s,
        )
        self._client = KvClient(shape(settings.block_bytes), pool, Mappings(), metrics, settings.sealed)
        self._sessions: list[KvSession] = []
        self._pulls: list[asyncio.Task[int]] = []
        self._strays = 0

    def count(self, strays: int) -> None:
        self._strays += strays

    async def execute(self, command: Sequence[str | int]) -> object:
        match command:
            case ["open", str(address)]:
                message = worker_pb2.KvAddress.FromString(bytes.fromhex(address))
                ours = self.server.address
                try:
                    session = await self.server.open("request", address_of(message, ours))
                except KvTransferError as error:
                    return str(error)
                await session.announce(0, [block_hash(number) for number in range(self._settings.blocks)])
                self._sessions.append(session)
                own = ours.message().SerializeToString().hex()
                return [len(self._sessions) - 1, own, session.ticket.secret.hex()]
            case ["end", int(number)]:
                await self._sessions[number].end()
                return True
            case ["requested", int(number)]:
                return asyncio.get_running_loop().time() - await self._sessions[number].quiet_s()
            case ["address"]:
                return self.server.address.message().SerializeToString().hex()
            case ["pull", str(address), str(ticket)]:
                return await self._pull(worker_pb2.KvAddress.FromString(bytes.fromhex(address)), ticket)
            case ["state"]:
                return [len(self.server), self._strays]
            case _:
                raise ValueError(command)

    async def _pull(self, message: worker_pb2.KvAddress, ticket: str) -> bool:
        address = address_of(message, self.server.address)
        arrived = asyncio.Event()

        async def stand_still(first: int, num_blocks: int, data: Staging, sums: Sequence[int]) -> None:
            arrived.set()
            await asyncio.Event().wait()

        transfer = await self._client.connect(address, Ticket(bytes.fromhex(ticket)), stand_still)
        names = [block_hash(number) for number in range(self._settings.blocks)]
        self._pulls.append(asyncio.create_task(transfer.pull(0, names)))
        await arrived.wait()
        return True


async def serve(settings: PeerSettings) -> None:
    # A target's process may be slow to take blocks.
    assert server._SEND_S
    server._SEND_S = WAIT_S  # type: ignore[misc]
    start_ucx(settings.ucx)
    serving = Serving(settings)
    async with discarding_strays(serving.count):
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(msgspec.json.encode(await serving.execute(msgspec.json.decode(line))).decode(), flush=True)
        await serving.server.close()
    stop_ucx()


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=PeerSettings)))
