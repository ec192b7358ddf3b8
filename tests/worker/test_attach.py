"""The data path's stream, without gRPC under it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from tailrace.v1 import worker_pb2
from worker_agent.attach import AttachRefused, AttachStreams
from worker_agent.carried import CarriedRequests
from worker_agent.dispatch import Dispatch
from worker_agent.engine.base import StepColumns
from worker_agent.frontends import FrontEnd, FrontEnds
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

    async def messages(self) -> AsyncIterator[worker_pb2.AttachUp]:
        while (message := await self.up.get()) is not None:
            yield message

    def send(self, message: worker_pb2.AttachDown) -> None:
        if self.reads:
            self.down.put_nowait(message)
        else:
            self.unsent_bytes += message.ByteSize()

    def greet(self, name: str) -> None:
        hello = worker_pb2.FrontendHello(frontend_id=name, incarnation="1")
        self.up.put_nowait(worker_pb2.AttachUp(hello=hello))


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


async def test_a_front_end_that_does_not_read_is_cut_and_others_go_on() -> None:
    worker, deaf, other = Worker(), Peer(), Peer()
    served, others = worker.serve(deaf), worker.serve(other)
    deaf.greet("deaf")
    await deaf.down.get()
    other.greet("other")
    await other.down.get()
    deaf.reads = False
    for number in range(1_000):
        worker.step(0, number, b"long" * 10_000)
        worker.step(1, number)
        if number % 100 == 0:
            await asyncio.sleep(0)
            while not other.down.empty():
                other.down.get_nowait()
    async with asyncio.timeout(5):
        await served
    assert worker.gone == [0] and not others.done()
    other.up.put_nowait(None)
    await others


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
