"""A worker that is stopped or drained by an operator: what it announces, returns and waits for."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import msgspec
import pytest

from tailrace.records import InstanceRecord
from tailrace.service.message_stream import StreamBroken
from tailrace.store.store import Store
from tailrace.v1 import worker_pb2, worker_pb2_grpc
from tests.waiting import WAIT_S
from tests.worker.scripted_front_end import ScriptedFrontEnd, Stream
from tests.worker.worker_processes import (
    ENDLESS,
    ENDLESS_ENGINE,
    PATIENT,
    WorkerProcess,
    migrate,
    worker_process,
)

pytestmark = pytest.mark.fleet

PROMPT = [72, 101, 108, 108, 111, 32] * 50
SHORT = {"max_tokens": 100, "ignore_eos": True, "min_tokens": 100}


class Rig:
    """One worker that runs one request at a time, and a front end attached to it."""

    def __init__(self, store: Store, worker: WorkerProcess, front_end: ScriptedFrontEnd) -> None:
        self.store = store
        self.worker = worker
        self.front_end = front_end

    async def submit(self, **sampling: object) -> Stream:
        return await self.front_end.submit("w", PROMPT, **sampling)

    async def start_running(self) -> Stream:
        """Submit an endless request and wait until it runs."""
        stream = await self.submit(**ENDLESS)
        await stream.until(3)
        return stream

    async def submit_waiting(self, count: int) -> list[Stream]:
        """Submit requests that wait for the running one, and wait until the worker has them."""
        streams = [await self.submit(**SHORT) for _ in range(count)]
        await self.worker.until_metric("request_states", count, 'state="waiting"')
        return streams

    async def next_returned(self) -> int:
        """Wait for the next request that is returned and return its handle."""
        async with asyncio.timeout(WAIT_S):
            return (await self.front_end.returned.get())[1]

    async def abort(self, stream: Stream) -> None:
        await self.front_end.send("w", abort=worker_pb2.Abort(handles=[stream.handle]))

    def terminate(self) -> None:
        self.worker.process.send_signal(signal.SIGTERM)

    async def exit_code(self) -> int:
        return await self.worker.wait()

    async def record(self) -> InstanceRecord | None:
        value = await self.store.get("instances/w")
        return None if value is None else msgspec.json.decode(value, type=InstanceRecord)


@asynccontextmanager
async def rig(etcd: str, folder: Path, *more: str) -> AsyncIterator[Rig]:
    cluster = f"test-{uuid.uuid4().hex[:8]}"
    store = await Store.connect([etcd], cluster)
    front_end = ScriptedFrontEnd()
    engine = ENDLESS_ENGINE | {"max_num_seqs": 1}
    async with worker_process(
        store, etcd, cluster, folder, "w", engine=engine, more=more, deadlines=PATIENT
    ) as worker:
        await front_end.attach(worker.stream_address)
        yield Rig(store, worker, front_end)
    await front_end.close()
    await store.close()


async def test_stopping_worker_waits_for_its_requests(etcd: str, tmp_path: Path) -> None:
    async with rig(etcd, tmp_path, "--drain-timeout", str(WAIT_S)) as r:
        running, (waiting,) = await r.start_running(), await r.submit_waiting(1)
        r.terminate()
        async with asyncio.timeout(WAIT_S):
            assert await r.front_end.draining.get() == "w"
        # The waiting prompt has no state to lose; the running request is left to be moved.
        assert await r.next_returned() == waiting.handle
        await r.abort(waiting)
        late = ScriptedFrontEnd("late")
        await late.attach(r.worker.stream_address)
        assert late.attached["w"].hello.draining
        await late.close()
        await r.worker.logged("requests to hand over")
        record = await r.record()
        assert record is not None and record.draining
        async with grpc.aio.insecure_channel(r.worker.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="the worker is stopping"):
                await migrate(channel, "another", "127.0.0.1:1", 0)
        tokens_before = len(running.tokens)
        await running.until(tokens_before + 20)
        assert r.worker.process.returncode is None
        assert r.front_end.returned.empty()
        await r.abort(running)
        assert await r.exit_code() == 0
        assert await r.record() is None


async def test_remaining_requests_are_returned_at_the_drain_timeout(etcd: str, tmp_path: Path) -> None:
    async with rig(etcd, tmp_path, "--drain-timeout", "0.3") as r:
        running = await r.start_running()
        r.terminate()
        assert await r.next_returned() == running.handle
        # The worker waits for this a few seconds, which may be over.
        with contextlib.suppress(StreamBroken):
            await r.abort(running)
        assert await r.exit_code() == 0


async def test_second_signal_stops_the_worker_at_once(etcd: str, tmp_path: Path) -> None:
    async with rig(etcd, tmp_path) as r:
        await r.start_running()
        r.terminate()
        await r.worker.logged("requests to hand over")
        r.terminate()
        assert await r.exit_code() == 0
        assert await r.record() is None


async def test_idle_worker_stops_at_once(etcd: str, tmp_path: Path) -> None:
    async with rig(etcd, tmp_path) as r:
        r.terminate()
        assert await r.exit_code() == 0


async def test_operators_drain_hands_back_waiting_prompts(etcd: str, tmp_path: Path) -> None:
    async with rig(etcd, tmp_path) as r:
        running, (waiting,) = await r.start_running(), await r.submit_waiting(1)
        await r.store.put("drains/w", b"")
        assert await r.next_returned() == waiting.handle
        # It was not placed elsewhere: it is returned again, and meanwhile runs here when its turn comes.
        assert await r.next_returned() == waiting.handle
        await r.abort(running)
        assert len(await waiting.end()) == SHORT["max_tokens"]
        await r.store.delete("drains/w")


async def test_operators_drain_keeps_out_what_a_front_end_that_knows_nothing_of_it_submits(
    etcd: str, tmp_path: Path
) -> None:
    """Such as one whose fallback chooses among the instances that it knew, with no scheduler to ask."""
    async with rig(etcd, tmp_path) as r:
        running, (waiting,) = await r.start_running(), await r.submit_waiting(1)
        await r.store.put("drains/w", b"")
        assert await r.next_returned() == waiting.handle
        late = await r.submit(**SHORT)
        async with asyncio.timeout(WAIT_S):
            rejected = await r.front_end.rejected.get()
        assert (rejected.handle, rejected.code) == (late.handle, worker_pb2.REJECT_CODE_BUSY)
        assert "drains" in rejected.reason
        # What it has goes on.
        tokens_before = len(running.tokens)
        await running.until(tokens_before + 20)
        await r.abort(running)
        await r.store.delete("drains/w")
        assert len(await waiting.end()) == SHORT["max_tokens"]


async def test_scheduler_can_request_waiting_prompts_back(etcd: str, tmp_path: Path) -> None:
    """Only the named ones that wait are returned, and the worker still accepts new requests."""
    async with rig(etcd, tmp_path) as r:
        running, (waiting, other) = await r.start_running(), await r.submit_waiting(2)
        named = [stream.request_id for stream in (running, waiting)]
        async with grpc.aio.insecure_channel(r.worker.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            request = worker_pb2.HandBackPromptsRequest(request_ids=[*named, "nobody's"])
            reply = await stub.HandBackPrompts(request, timeout=WAIT_S)
        assert reply.returned == 1
        assert await r.next_returned() == waiting.handle
        await r.abort(running)
        # It was not placed elsewhere, and runs here when its turn comes.
        assert len(await waiting.end()) == len(await other.end()) == SHORT["max_tokens"]
        assert r.front_end.returned.empty()
