"""Pulls of prefixes from another worker by requests that share them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from tailrace.perf.transfer_rate import TransferRate
from tailrace.telemetry.tracing import Tracing
from tailrace.v1 import cache_pb2
from tests.worker.simulated import SMALL
from worker_agent.engine.base import Pull, RequestKey, Submission
from worker_agent.engine.simulated import SimulatedEngine
from worker_agent.faults import Faults
from worker_agent.kv.address import KvAddress, KvShape, Ticket, kv_layout
from worker_agent.metrics import WorkerHistograms, WorkerMetrics
from worker_agent.prefixes import LoanLink, PullParts, Pulls
from worker_agent.spans import TransferSpans

SHAPE = KvShape("model", block_tokens=4, num_layers=1, layer_block_bytes=8)
HOLDER = Pull("holder", "127.0.0.1:9", 8)
PREFIX = [b"block 0", b"block 1"]


class PrefixEngine(SimulatedEngine):
    """Engine whose prefix cache lacks the common prefix of all requests until it is fetched."""

    def __init__(self) -> None:
        super().__init__(SMALL)
        self.kept: list[bytes] = []
        self.found: dict[str, int] = {}

    def submit(self, submission: Submission) -> None:
        self.found[submission.request_id] = len(self.kept)

    async def fetch_missing(self, submission: Submission) -> list[bytes]:
        await asyncio.sleep(0)
        return PREFIX[len(self.kept) :]

    async def fetch_open(self, fetch_id: str, submission: Submission, max_tokens: int) -> list[bytes]:
        await asyncio.sleep(0)
        return PREFIX[len(self.kept) : max_tokens // SHAPE.block_tokens]

    async def fetch_keep(self, fetch_id: str, blocks: int) -> None:
        self.kept += PREFIX[:blocks]


class HeldTransfer:
    """BlockPuller and BlockTransfer that deliver nothing before the gate opens."""

    addresses = (KvAddress(b"here", "1.0"),)

    def __init__(self) -> None:
        self.gate, self.begun = asyncio.Event(), 0

    async def connect(
        self, request_id: str, sources: Sequence[KvAddress], tickets: Sequence[Ticket]
    ) -> HeldTransfer:
        self.begun += 1
        return self

    async def pull(self, first_block: int, hashes: Sequence[bytes]) -> int:
        await self.gate.wait()
        return SHAPE.block_bytes * len(hashes)

    async def close(self) -> None:
        pass


class Loan(LoanLink):
    """LoanLink to a holder that grants every loan."""

    shape = SHAPE

    def __init__(self, address: str, request: cache_pb2.LendRequest, timeout_s: float) -> None:
        self._request = request

    async def open(self) -> cache_pb2.Lent:
        return cache_pb2.Lent(
            layout=kv_layout(self.shape),
            blocks=len(self._request.names),
            kv_addresses=self._request.kv_addresses,
            kv_tickets=[bytes(32)],
        )

    def close(self) -> None:
        pass


class Worker:
    """The parts of a worker that pulls use."""

    def __init__(self, loan: type[Loan] = Loan) -> None:
        self.engine, self.transfer = PrefixEngine(), HeldTransfer()
        self.metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
        self.pulls = Pulls(
            PullParts(
                engine=self.engine,
                shape=SHAPE,
                puller=self.transfer,
                connect=loan,
                metrics=self.metrics,
                faults=Faults(),
                spans=TransferSpans(Tracing(None), "here"),
                incoming=TransferRate(),
                timeout_s=60.0,
            )
        )

    def submit(self, name: str, pull: Pull | None = None) -> RequestKey:
        key = RequestKey(0, len(self.engine.found) + len(self.pulls))
        self.pulls.submit(Submission(key, name, 1, [], pull=pull))
        return key

    async def drained(self) -> dict[str, int]:
        """Run all requests and return the number of blocks that each found."""
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert not len(self.pulls)
        return self.engine.found


@pytest.mark.parametrize("turns", range(6))
async def test_later_requests_wait_for_a_running_pull(turns: int) -> None:
    """Also while it is not yet known which blocks the pull will bring."""
    worker = Worker()
    worker.submit("first", HOLDER)
    for _ in range(turns):
        await asyncio.sleep(0)
    for name in ("second", "third"):
        worker.submit(name)
    assert not worker.engine.found
    worker.transfer.gate.set()
    assert await worker.drained() == {"first": 2, "second": 2, "third": 2}
    assert worker.transfer.begun == 1
    assert +worker.metrics.pulls == {"pulled": 1, "shared": 2}


async def test_pull_cancelled_before_its_start_delays_no_request() -> None:
    worker = Worker()
    worker.pulls.drop([worker.submit("first", HOLDER)])
    worker.submit("second")
    assert await worker.drained() == {"second": 0}
    worker.submit("third")
    assert worker.engine.found == {"second": 0, "third": 0} and not len(worker.pulls)


class LoanOfAnotherModel(Loan):
    """Loan of another model whose blocks have the same names and size."""

    shape = replace(SHAPE, model_fingerprint="another model's")


async def test_nothing_is_pulled_from_another_model() -> None:
    worker = Worker(LoanOfAnotherModel)
    worker.transfer.gate.set()
    worker.submit("first", HOLDER)
    assert await worker.drained() == {"first": 0}
    assert worker.transfer.begun == 0
    assert not worker.metrics.pulls["pulled"]
    assert (worker.metrics.kv_identity_failures, worker.metrics.kv_transfer_failures) == (1, 0)
