"""The data path's stream, without gRPC under it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from tailrace.service.message_stream import DEFAULT_MAX_MESSAGE_BYTES
from tailrace.v1 import worker_pb2
from worker_agent.attach import AttachStreams
from worker_agent.carried import CarriedRequests
from worker_agent.dispatch import Dispatch
from worker_agent.engine.base import StepColumns
from worker_agent.frontends import STALL_S, AttachRefused, FrontEnd, FrontEnds
from worker_agent.heartbeats import HEARTBEAT_S, beat
from worker_agent.metrics import WorkerHistograms, WorkerMetrics
from worker_agent.phase_news import PhaseNews
from worker_agent.sink import FrontEndSink

HELLO = worker_pb2.WorkerHello(instance_id="w", incarnation="1", ready_response=b"ready")


class Recorder(Dispatch):
    """A dispatch that keeps what it is given."""

    def __init__(self) -> None:
        self.handled: list[worker_pb2.AttachUp] = []

    def handle(self, front_end: FrontEnd, message: worker_pb2.AttachUp) -> None:
        self.handled.append(message)


class Peer:
    """The front end's end of a stream."""

    def __init__(self) -> None:
        self.up: asyncio.Queue[worker_pb2.AttachUp | None] = asyncio.Queue()
        self.down: asyncio.Queue[worker_pb2.AttachDown] = asyncio.Queue()
        self.reads = True
        self.unsent_bytes = 0
        self.received_s = 0.0
        # Since when it takes nothing.
        self.deaf_s: float | None = None

    async def messages(self) -> AsyncIterator[worker_pb2.AttachUp]:
        while (message := await self.up.get()) is not None:
            yield message

    def send(self, message: worker_pb2.AttachDown) -> None:
        if self.reads:
            self.down.put_nowait(message)
        else:
            self.unsent_bytes += message.ByteSize()

    def stalled_s(self, now_s: float) -> float:
        return 0.0 if self.deaf_s is None else now_s - self.deaf_s

    def greet(self, name: str, incarnation: str = "1", attempt: int = 0) -> None:
        hello = worker_pb2.FrontendHello(frontend_id=name, incarnation=incarnation, attempt=attempt)
        self.up.put_nowait(worker_pb2.AttachUp(hello=hello))


@dataclass
class Attached:
    """Both ends of a stream that was greeted."""

    peer: Peer
    served: asyncio.Task[None]
    front_end: FrontEnd


class Worker:
    """Everything between an engine's outputs and the stream."""

    def __init__(self) -> None:
        self.front_ends = FrontEnds()
        self.gone: list[int] = []
        self.front_ends.on_gone(self.gone.append)
        self.dispatch = Recorder()
        self.streams = AttachStreams(self.front_ends, self.dispatch, HELLO)
        self.metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
        self.sink = FrontEndSink(
            self.front_ends, CarriedRequests(), PhaseNews(), self.metrics, lambda reason: None
        )

    def serve(self, peer: Peer) -> asyncio.Task[None]:
        return asyncio.create_task(self.streams.serve(peer.messages(), peer))

    def step(self, client: int, number: int, payload: bytes = b"verbatim") -> None:
        self.sink.on_step(
            StepColumns(client, number, [payload], [1, 2], [0, 3], [number, 7], [1, 1], [number, 9], [0, 0])
        )


async def test_steps_reach_their_front_end_verbatim_and_in_order() -> None:
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


async def attached(worker: Worker, name: str, incarnation: str = "1", attempt: int = 0) -> Attached:
    """A front end that has its hello."""
    peer = Peer()
    served = worker.serve(peer)
    peer.greet(name, incarnation, attempt)
    async with asyncio.timeout(10):
        assert (await peer.down.get()).HasField("hello")
    front_end = worker.front_ends.by_id(name)
    assert front_end is not None
    return Attached(peer, served, front_end)


async def test_a_front_end_that_takes_nothing_for_long_is_cut_and_others_go_on() -> None:
    worker = Worker()
    deaf, other = await attached(worker, "deaf"), await attached(worker, "other")
    now_s = time.monotonic()
    deaf.peer.deaf_s = now_s
    deaf.front_end.check(now_s + STALL_S, 0.0, 60.0)
    assert not deaf.front_end.closed.is_set()
    # This process itself stood still: nobody else is to blame.
    deaf.front_end.check(now_s + STALL_S + 5.0, 5.0, 60.0)
    assert not deaf.front_end.closed.is_set()
    deaf.front_end.check(now_s + STALL_S + 1.0, 0.0, 60.0)
    async with asyncio.timeout(10):
        await deaf.served
    assert worker.gone == [0] and not other.served.done()
    assert deaf.front_end.reason.startswith("took nothing")
    other.peer.up.put_nowait(None)
    await other.served


async def test_a_large_reply_cuts_nobody() -> None:
    worker = Worker()
    front = await attached(worker, "a")
    front.peer.reads = False
    worker.step(0, 0, b"x" * (32 << 20))
    # It takes a while to read this, and is heard of in the meantime by its bytes alone.
    front.peer.deaf_s = time.monotonic()
    front.peer.received_s = time.monotonic() + 8.0
    front.front_end.check(time.monotonic() + 9.0, 0.0, 2.0)
    await asyncio.sleep(0)
    assert not front.front_end.closed.is_set() and worker.gone == []
    front.peer.up.put_nowait(None)
    await front.served


async def test_memory_for_a_front_end_that_reads_slowly_is_bounded() -> None:
    worker = Worker()
    front = await attached(worker, "a")
    front.peer.reads = False
    for number in range(5 * DEFAULT_MAX_MESSAGE_BYTES // (1 << 20)):
        worker.step(0, number, b"x" * (1 << 20))
        await asyncio.sleep(0)
        if front.front_end.closed.is_set():
            break
    async with asyncio.timeout(10):
        await front.served
    assert "unread" in front.front_end.reason


async def test_who_does_not_greet_is_refused() -> None:
    worker, peer = Worker(), Peer()
    served = worker.serve(peer)
    peer.up.put_nowait(worker_pb2.AttachUp(abort=worker_pb2.Abort(handles=[1])))
    with pytest.raises(AttachRefused):
        await served
    assert worker.gone == [] and worker.dispatch.handled == []


async def test_a_front_end_that_attaches_anew_ends_its_older_stream() -> None:
    worker, older, newer = Worker(), Peer(), Peer()
    first = worker.serve(older)
    older.greet("a")
    await older.down.get()
    second = worker.serve(newer)
    newer.greet("a")
    await newer.down.get()
    async with asyncio.timeout(5):
        await first
    assert worker.gone == [0]
    current = worker.front_ends.by_id("a")
    assert current is not None and current.client == 1
    newer.up.put_nowait(None)
    await second


async def test_a_second_process_of_the_same_id_is_refused_while_the_first_is_alive() -> None:
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
    # The first is not heard any more: the second takes over, once.
    first.front_end.heard_s -= 60.0
    second_end = await attached(worker, "a", "two")
    async with asyncio.timeout(10):
        await first.served
    assert worker.gone == [0] and worker.front_ends.by_id("a") is second_end.front_end
    second_end.peer.up.put_nowait(None)
    await second_end.served


async def test_a_hello_that_was_overtaken_by_a_later_one_is_refused() -> None:
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


async def test_a_worker_that_leaves_says_so_and_takes_nobody_any_more() -> None:
    worker = Worker()
    front = await attached(worker, "a")
    leaving = asyncio.create_task(worker.front_ends.leave(worker_pb2.Goodbye(reason="told to stop")))
    async with asyncio.timeout(10):
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


async def test_heartbeats_go_out_and_silence_is_cut() -> None:
    worker, peer = Worker(), Peer()
    served = worker.serve(peer)
    peer.greet("a")
    await peer.down.get()
    beating = asyncio.create_task(beat(worker.front_ends, 2.5 * HEARTBEAT_S))
    async with asyncio.timeout(10):
        assert (await peer.down.get()).HasField("heartbeat")
        await served
    assert worker.gone == [0]
    beating.cancel()
