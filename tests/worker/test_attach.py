"""The data path's stream, without a network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tailrace.output_flags import OutputFlag
from tailrace.service.message_stream import DEFAULT_MAX_MESSAGE_BYTES
from tailrace.v1 import worker_pb2
from tailrace.wire.outputs import EngineCoreOutput, encode_outputs, read_outputs
from tailrace.wire.requests import utility_result
from tests.counting import skipped
from tests.waiting import WAIT_S
from tests.worker.simulated import SMALL, request_frames
from worker_agent.dispatch import AdmissionControl, AttachStreams, Dispatcher
from worker_agent.engine.base import RequestKey, StepColumns, Submission
from worker_agent.engine.simulated import SimulatedEngine
from worker_agent.frontends import HEARTBEAT_S, STALL_S, AttachRefused, FrontEnd, FrontEnds, send_heartbeats
from worker_agent.metrics import WorkerHistograms, WorkerMetrics
from worker_agent.migration.target import Imports
from worker_agent.reports import PhaseEvents
from worker_agent.running_requests import RunningRequests
from worker_agent.sink import FrontEndSink

HELLO = worker_pb2.WorkerHello(instance_id="w", incarnation="1", ready_response=b"ready")


class Recorder(Dispatcher):
    """Dispatcher that records its messages."""

    def __init__(self) -> None:
        self.handled: list[worker_pb2.AttachUp] = []

    def handle(self, front_end: FrontEnd, message: worker_pb2.AttachUp) -> None:
        self.handled.append(message)


class Peer:
    """The front end's side of a stream."""

    def __init__(self) -> None:
        self.up: asyncio.Queue[worker_pb2.AttachUp | None] = asyncio.Queue()
        self.down: asyncio.Queue[worker_pb2.AttachDown] = asyncio.Queue()
        self.has_read_all = True
        self.unsent_bytes = 0
        self.received_s = 0.0
        # Time since which it has read nothing.
        self.deaf_s: float | None = None

    async def messages(self) -> AsyncIterator[worker_pb2.AttachUp]:
        while (message := await self.up.get()) is not None:
            yield message

    def send(self, message: worker_pb2.AttachDown) -> None:
        if self.has_read_all:
            self.down.put_nowait(message)
        else:
            self.unsent_bytes += message.ByteSize()

    def stalled_s(self, now_s: float) -> float:
        return 0.0 if self.deaf_s is None else now_s - self.deaf_s

    def greet(self, name: str, incarnation: str = "1", attempt: int = 0, limit: int = 0) -> None:
        hello = worker_pb2.FrontendHello(
            frontend_id=name, incarnation=incarnation, attempt=attempt, max_message_bytes=limit
        )
        self.up.put_nowait(worker_pb2.AttachUp(hello=hello))


@dataclass
class Attached:
    """Both sides of an attached stream."""

    peer: Peer
    served: asyncio.Task[None]
    front_end: FrontEnd


class Worker:
    """The parts of a worker between the engine's outputs and the stream."""

    def __init__(self) -> None:
        self.front_ends = FrontEnds()
        self.running = RunningRequests()
        self.gone: list[int] = []
        self.failed_because: list[RequestKey] = []
        self.front_ends.on_gone(self.gone.append)
        self.dispatch = Recorder()
        self.streams = AttachStreams(self.front_ends, self.dispatch, HELLO)
        self.metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
        self.sink = FrontEndSink(
            self.front_ends,
            self.running,
            PhaseEvents(),
            self.metrics,
            lambda reason: None,
            self.failed_because.append,
        )

    def serve(self, peer: Peer) -> asyncio.Task[None]:
        return asyncio.create_task(self.streams.serve(peer.messages(), peer))

    def step(self, client: int, number: int, payload: bytes = b"verbatim") -> None:
        self.sink.on_step(
            StepColumns(client, number, [payload], [1, 2], [0, 3], [number, 7], [1, 1], [number, 9], [0, 0])
        )


async def test_steps_reach_their_front_end_unchanged_and_in_order() -> None:
    worker, peer, other = Worker(), Peer(), Peer()
    served = [worker.serve(peer), worker.serve(other)]
    peer.greet("a")
    assert (await peer.down.get()).hello == HELLO
    other.greet("b")
    assert (await other.down.get()).hello == HELLO
    for number in range(3):
        worker.step(0, number)
    for number in range(3):
        outputs = (await peer.down.get()).outputs
        assert outputs.step == number and list(outputs.frames) == [b"verbatim"]
        assert list(outputs.handles) == [1, 2] and list(outputs.epochs) == [0, 3]
        assert list(outputs.first_indices) == [number, 7] and list(outputs.counts) == [1, 1]
        assert list(outputs.token_ids) == [number, 9] and list(outputs.flags) == [0, 0]
    assert other.down.empty()
    for each in (peer, other):
        each.up.put_nowait(None)
    await asyncio.gather(*served)
    assert sorted(worker.gone) == [0, 1] and worker.metrics.tokens == 6


async def attached(
    worker: Worker, name: str, incarnation: str = "1", attempt: int = 0, limit: int = 0
) -> Attached:
    """Attach a front end. `limit`: its announced message limit in bytes, 0: none."""
    peer = Peer()
    served = worker.serve(peer)
    peer.greet(name, incarnation, attempt, limit)
    async with asyncio.timeout(WAIT_S):
        assert (await peer.down.get()).HasField("hello")
    front_end = worker.front_ends.by_id(name)
    assert front_end is not None
    return Attached(peer, served, front_end)


async def test_front_end_that_reads_nothing_is_disconnected_and_others_continue() -> None:
    worker = Worker()
    stalled, other = await attached(worker, "deaf"), await attached(worker, "other")
    now_s = time.monotonic()
    stalled.peer.deaf_s = now_s
    stalled.front_end.check(now_s + STALL_S, 0.0, 60.0)
    assert not stalled.front_end.closed.is_set()
    # This process itself was suspended, so no front end is at fault.
    stalled.front_end.check(now_s + STALL_S + 5.0, 5.0, 60.0)
    assert not stalled.front_end.closed.is_set()
    stalled.front_end.check(now_s + STALL_S + 1.0, 0.0, 60.0)
    async with asyncio.timeout(WAIT_S):
        await stalled.served
    assert worker.gone == [0] and not other.served.done()
    assert stalled.front_end.reason.startswith("took nothing")
    other.peer.up.put_nowait(None)
    await other.served


async def test_large_reply_disconnects_no_front_end() -> None:
    worker = Worker()
    front = await attached(worker, "a")
    front.peer.has_read_all = False
    worker.step(0, 0, b"x" * (32 << 20))
    # It takes a while to read this, and only its received bytes prove meanwhile that it is alive.
    now_s = time.monotonic()
    front.peer.deaf_s = now_s
    front.peer.received_s = now_s + STALL_S - 2.0
    front.front_end.check(now_s + STALL_S - 1.0, 0.0, 2.0)
    await asyncio.sleep(0)
    assert not front.front_end.closed.is_set() and worker.gone == []
    front.peer.up.put_nowait(None)
    await front.served


def large_step(sizes: Sequence[int]) -> StepColumns:
    """Return a step of vLLM with one output of about each size, for different requests, two tokens each."""
    outputs = [
        EngineCoreOutput(f"r{n}", [n, n + 100], new_logprobs=msgspec.Raw(msgspec.msgpack.encode(b"x" * size)))
        for n, size in enumerate(sizes)
    ]
    count = len(outputs)
    tokens = [token for n in range(count) for token in (n, n + 100)]
    handles = list(range(1, count + 1))
    frames = encode_outputs(outputs)
    return StepColumns(0, 5, frames, handles, [3] * count, [4] * count, [2] * count, tokens, [0] * count)


async def test_too_large_outputs_end_only_their_request() -> None:
    worker = Worker()
    front = await attached(worker, "a", limit=2 << 20)
    worker.sink.on_step(large_step([10, 3 << 20, 20, 1 << 20]))
    rejected = (await front.peer.down.get()).rejected
    assert (rejected.handle, rejected.epoch) == (2, 3)
    assert rejected.code == worker_pb2.REJECT_CODE_REPLY_TOO_LARGE
    assert "2097152 bytes" in rejected.reason
    outputs = (await front.peer.down.get()).outputs
    assert list(outputs.handles) == [1, 3, 4] and list(outputs.counts) == [2, 2, 2]
    assert list(outputs.token_ids) == [0, 100, 2, 102, 3, 103]
    assert [each.request_id for each in read_outputs(list(outputs.frames)).outputs] == ["r0", "r2", "r3"]
    assert outputs.ByteSize() < 2 << 20
    # The engine was told to free it, and no front end was disconnected.
    await asyncio.sleep(0)
    assert worker.failed_because == [RequestKey(0, 2)] and not front.front_end.closed.is_set()
    front.peer.up.put_nowait(None)
    await front.served


async def test_large_outputs_end_first_while_much_is_queued() -> None:
    worker = Worker()
    front = await attached(worker, "a", limit=8 << 20)
    front.peer.unsent_bytes = 8 << 20
    worker.sink.on_step(large_step([10, 2 << 20, 20]))
    # Congestion is not the request's fault: it may be tried again.
    rejected = (await front.peer.down.get()).rejected
    assert (rejected.handle, rejected.code) == (2, worker_pb2.REJECT_CODE_CONGESTED)
    assert list((await front.peer.down.get()).outputs.handles) == [1, 3]
    # Requests are given up before the front end would be disconnected, and lose all of its requests.
    front.peer.unsent_bytes = 25 << 20
    worker.sink.on_step(large_step([10, 20]))
    for handle in (1, 2):
        rejected = (await front.peer.down.get()).rejected
        assert (rejected.handle, rejected.code) == (handle, worker_pb2.REJECT_CODE_CONGESTED)
    assert not front.front_end.closed.is_set()
    front.peer.unsent_bytes = 0
    worker.sink.on_step(large_step([10, 2 << 20, 20]))
    assert list((await front.peer.down.get()).outputs.handles) == [1, 2, 3]
    front.peer.up.put_nowait(None)
    await front.served


async def test_too_large_result_of_a_call_is_a_failure() -> None:
    worker = Worker()
    front = await attached(worker, "a", limit=1 << 20)
    worker.sink.on_utility(0, 7, utility_result(7, "x" * (2 << 20)))
    result = (await front.peer.down.get()).utility
    assert result.call_id == 7 and b"more than 1048576" in result.frames[0]
    front.peer.up.put_nowait(None)
    await front.served


async def test_memory_for_a_slow_front_end_is_bounded() -> None:
    worker = Worker()
    front = await attached(worker, "a")
    front.peer.has_read_all = False
    for number in range(5 * DEFAULT_MAX_MESSAGE_BYTES // (1 << 20)):
        worker.step(0, number, b"x" * 900_000)
    await asyncio.sleep(0)
    # Requests are given up, each by a small message; the front end keeps its connection.
    assert front.peer.unsent_bytes < 3.1 * DEFAULT_MAX_MESSAGE_BYTES and not front.front_end.closed.is_set()
    front.peer.up.put_nowait(None)
    await front.served


async def test_peer_without_a_hello_is_refused() -> None:
    worker, peer = Worker(), Peer()
    served = worker.serve(peer)
    peer.up.put_nowait(worker_pb2.AttachUp(abort=worker_pb2.Abort(handles=[1])))
    with pytest.raises(AttachRefused):
        await served
    assert worker.gone == [] and worker.dispatch.handled == []


async def test_new_attachment_ends_the_older_one_of_the_same_front_end() -> None:
    worker, older, newer = Worker(), Peer(), Peer()
    first = worker.serve(older)
    older.greet("a")
    await older.down.get()
    second = worker.serve(newer)
    newer.greet("a")
    await newer.down.get()
    async with asyncio.timeout(WAIT_S):
        await first
    assert worker.gone == [0]
    current = worker.front_ends.by_id("a")
    assert current is not None and current.client == 1
    newer.up.put_nowait(None)
    await second


async def test_second_process_with_the_same_id_is_refused_while_the_first_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However long it takes, the first one is not silent.
    monkeypatch.setattr("worker_agent.frontends._ALIVE_S", WAIT_S)
    worker = Worker()
    first = await attached(worker, "a", "one")
    for _ in range(3):
        second = Peer()
        served = worker.serve(second)
        second.greet("a", "two")
        assert "another process attached as front end a" in (await second.down.get()).refused.reason
        second.up.put_nowait(None)
        with pytest.raises(AttachRefused):
            await served
    assert worker.gone == [] and not first.front_end.closed.is_set()
    # When the first has become silent, the second takes over, once.
    first.front_end.last_received_s -= 2 * WAIT_S
    second_end = await attached(worker, "a", "two")
    async with asyncio.timeout(WAIT_S):
        await first.served
    assert worker.gone == [0] and worker.front_ends.by_id("a") is second_end.front_end
    second_end.peer.up.put_nowait(None)
    await second_end.served


async def test_hello_that_arrives_after_a_later_one_is_refused() -> None:
    worker = Worker()
    current = await attached(worker, "a", attempt=3)
    late = Peer()
    served = worker.serve(late)
    late.greet("a", attempt=2)
    assert "later connection" in (await late.down.get()).refused.reason
    late.up.put_nowait(None)
    with pytest.raises(AttachRefused):
        await served
    assert not current.front_end.closed.is_set()
    current.peer.up.put_nowait(None)
    await current.served


async def test_leaving_worker_says_goodbye_and_refuses_new_front_ends() -> None:
    worker = Worker()
    front = await attached(worker, "a")
    leaving = asyncio.create_task(worker.front_ends.leave(worker_pb2.Goodbye(reason="told to stop")))
    async with asyncio.timeout(WAIT_S):
        goodbye = (await front.peer.down.get()).goodbye
        assert goodbye.reason == "told to stop" and not goodbye.engine_failed
        late = Peer()
        served = worker.serve(late)
        late.greet("b")
        assert (await late.down.get()).refused.reason == "told to stop"
        front.peer.up.put_nowait(None)
        late.up.put_nowait(None)
        await asyncio.gather(leaving, front.served)
        with pytest.raises(AttachRefused):
            await served


async def test_heartbeats_are_sent_and_silent_peers_are_disconnected() -> None:
    worker, peer = Worker(), Peer()
    served = worker.serve(peer)
    peer.greet("a")
    await peer.down.get()
    beating = asyncio.create_task(
        send_heartbeats(worker.front_ends, 2.5 * HEARTBEAT_S, lambda: lambda _: worker_pb2.Heartbeat())
    )
    async with asyncio.timeout(WAIT_S):
        assert (await peer.down.get()).HasField("heartbeat")
        await served
    assert worker.gone == [0]
    beating.cancel()


def submission(handle: int) -> Submission:
    name = f"r{handle}"
    return Submission(RequestKey(0, handle), name, 0, request_frames(name, [65, 66, 67]), frontend_id="a")


async def test_worker_at_its_request_limit_rejects_others() -> None:
    worker = Worker()
    engine = SimulatedEngine(SMALL)
    await engine.start(worker.sink)
    admission = AdmissionControl(engine.submit, worker.front_ends, worker.running, worker.metrics, 2)
    front = await attached(worker, "a")
    for handle in (1, 2, 3):
        admission.submit(submission(handle))
    assert [(await front.peer.down.get()).taken.handle for _ in range(2)] == [1, 2]
    rejected = (await front.peer.down.get()).rejected
    assert (rejected.handle, rejected.epoch, rejected.code) == (3, 0, worker_pb2.REJECT_CODE_BUSY)
    assert (worker.metrics.submitted, worker.metrics.rejected_busy) == (2, 1)
    # When one ends, there is room again.
    engine.abort([RequestKey(0, 1)])
    worker.running.remove(RequestKey(0, 1))
    admission.submit(submission(4))
    assert worker.metrics.submitted == 3
    await engine.stop()
    front.peer.up.put_nowait(None)
    await front.served


async def test_failing_submission_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    engine = SimulatedEngine(SMALL)

    def fail(submission: Submission) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(engine, "submit", fail)
    admission = AdmissionControl(engine.submit, worker.front_ends, worker.running, worker.metrics, 2)
    front = await attached(worker, "a")
    admission.submit(submission(1))
    assert (await front.peer.down.get()).taken.handle == 1
    outputs = (await front.peer.down.get()).outputs
    assert list(outputs.handles) == [1] and list(outputs.flags) == [int(OutputFlag.FAILED)]
    assert len(worker.running) == 0 and not front.front_end.closed.is_set()
    front.peer.up.put_nowait(None)
    await front.served


async def test_pending_calls_of_engine_methods_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    engine = SimulatedEngine(SMALL)
    # The engine never answers.
    monkeypatch.setattr(engine, "utility", lambda client, call_id, frames: None)
    dispatch = Dispatcher.__new__(Dispatcher)
    dispatch._engine = engine
    front = await attached(worker, "a")
    for call_id in range(65):
        call = worker_pb2.UtilityCall(call_id=call_id, frames=[b""])
        dispatch.handle(front.front_end, worker_pb2.AttachUp(utility=call))
    answer = (await front.peer.down.get()).utility
    assert answer.call_id == 64 and b"calls are already waiting for the engine" in answer.frames[0]
    front.peer.up.put_nowait(None)
    await front.served


async def test_a_message_that_cannot_be_handled_is_skipped_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    worker = Worker()
    engine = SimulatedEngine(SMALL)
    monkeypatch.setattr(engine, "utility", fail)
    dispatch = Dispatcher.__new__(Dispatcher)
    dispatch._engine = engine
    dispatch._imports = Imports.__new__(Imports)
    monkeypatch.setattr(dispatch._imports, "supersede_by", fail)
    worker.streams = AttachStreams(worker.front_ends, dispatch, HELLO)
    front = await attached(worker, "a")
    before = skipped("message of a front end")
    call = worker_pb2.UtilityCall(call_id=1, frames=[b""])
    front.peer.up.put_nowait(worker_pb2.AttachUp(utility=call))
    submit = worker_pb2.Submit(handle=7, request_id="r", epoch=2, output_token_ids=[1, 2])
    front.peer.up.put_nowait(worker_pb2.AttachUp(submit=submit))
    async with asyncio.timeout(WAIT_S):
        outputs = (await front.peer.down.get()).outputs
    # The request may be tried elsewhere, and the stream carries the others.
    assert (outputs.handles[0], outputs.epochs[0], outputs.first_indices[0]) == (7, 2, 2)
    assert list(outputs.flags) == [int(OutputFlag.FAILED)]
    assert skipped("message of a front end") == before + 2
    assert not front.front_end.closed.is_set()
    front.peer.up.put_nowait(None)
    await front.served
