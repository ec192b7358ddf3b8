"""A process that serves KV blocks of a made-up engine: block n of a request is its own seeded noise.

Run as `python -m tests.worker.kv_peer BLOCKS BLOCK_BYTES [FAULTS]`; prints port and session, serves until its
input closes.
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

from worker_agent.engine.base import Engine, EngineRefusal, KvShape, Staging
from worker_agent.faults import Faults, FaultSpec
from worker_agent.kv.server import KvServer
from worker_agent.kv.sessions import Sessions
from worker_agent.kv.staging import StagingPool
from worker_agent.kv.transport import start_ucx, stop_ucx
from worker_agent.metrics import WorkerHistograms, WorkerMetrics

MIGRATION = "migration-1"


def shape(block_bytes: int) -> KvShape:
    return KvShape("test-model", 16, 4, block_bytes // 4)


def block(number: int, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of a block: cheap to make, and no two are alike."""
    words = np.arange(size // 8, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)).view(np.uint8)


def block_hash(number: int) -> bytes:
    return b"hash of %d" % number


class Memory:
    """Staging in ordinary memory."""

    def __init__(self, size: int) -> None:
        self.array: npt.NDArray[np.uint8] = np.zeros(size, np.uint8)

    @property
    def buffer(self) -> object:
        return self.array


class BlockEngine:
    """The part of Engine that the transport calls. What it holds is made beforehand, so that reading costs
    what it costs a real engine: a copy and a checksum."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self._bytes = block_bytes
        self._kv = np.concatenate([block(number, block_bytes) for number in range(blocks)])

    def staging(self, num_blocks: int) -> Staging:
        return Memory(num_blocks * self._bytes)

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        data = self._kv[first_block * self._bytes : (first_block + num_blocks) * self._bytes]
        if data.size != num_blocks * self._bytes:
            raise EngineRefusal("no such blocks")
        return await asyncio.to_thread(self._copy, data, out)

    def _copy(self, data: npt.NDArray[np.uint8], out: Staging) -> list[int]:
        np.frombuffer(out.buffer, np.uint8)[:] = data  # type: ignore[call-overload]
        return checksums(data, self._bytes)


def checksums(data: npt.NDArray[np.uint8], size: int) -> list[int]:
    view = memoryview(data)  # type: ignore[arg-type]
    return [xxhash.xxh3_64_intdigest(view[at : at + size]) for at in range(0, data.size, size)]


async def serve(blocks: int, block_bytes: int, faults: Sequence[FaultSpec], connections: int) -> None:
    start_ucx()
    engine: Engine = BlockEngine(blocks, block_bytes)  # type: ignore[assignment]
    sessions = Sessions()
    session = sessions.open("request", MIGRATION)
    session.announce(0, [block_hash(number) for number in range(blocks)])
    metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
    pool = StagingPool(engine, block_bytes)
    server = KvServer(engine, shape(block_bytes), sessions, pool, Faults(faults), metrics, connections)
    print(server.port, session.number, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    stop_ucx()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[3], type=list[FaultSpec]) if len(sys.argv) > 3 else []
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), given, int(sys.argv[4])))
