"""A link to a worker: it is reopened whatever breaks it, and reports what happened to the worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from frontend_svc import links as link_module
from frontend_svc.links import Link, Loss, LossCause
from tailrace.service.message_stream import MessageStream, StreamBroken, serve_streams
from tailrace.telemetry.incidents import UNREADABLE
from tailrace.v1 import worker_pb2
from tests.counting import skipped
from tests.frontend.fleet import MODEL, record
from tests.waiting import WAIT_S

Up = MessageStream[worker_pb2.AttachUp]
HELLO = worker_pb2.FrontendHello(frontend_id="f", incarnation="1")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for hellos for as long as a busy machine may take."""
    monkeypatch.setattr(link_module, "HELLO_S", WAIT_S)


class Sink:
    """Queues the events that a link reports."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def on_attached(self, instance_id: str, hello: worker_pb2.WorkerHello) -> None:
        self.events.put_nowait(("attached", hello))

    def on_lost(self, instance_id: str, loss: Loss) -> None:
        self.events.put_nowait(("lost", loss))

    def on_process_gone(self, instance_id: str) -> None:
        self.events.put_nowait(("gone", instance_id))

    def on_silence_explained(self, instance_id: str) -> None:
        self.events.put_nowait(("explained", instance_id))

    def on_message(self, instance_id: str, message: worker_pb2.AttachDown) -> None:
        if not message.HasField("heartbeat"):
            self.events.put_nowait(("message", message))

    async def next_event(self, kind: str) -> Any:
        async with asyncio.timeout(WAIT_S):
            event_kind, event = await self.events.get()
        assert event_kind == kind, (event_kind, event)
        return event


@asynccontextmanager
async def running(address: str) -> AsyncIterator[tuple[Link, Sink]]:
    """Run a link to the worker w at the address, with regular ticks."""
    sink = Sink()
    link = Link(record("w", address), HELLO, sink)

    async def tick() -> None:
        while True:
            due_s = time.monotonic() + 0.02
            await asyncio.sleep(0.02)
            now_s = time.monotonic()
            link.tick(now_s, now_s - due_s)

    tasks = [asyncio.create_task(link.run()), asyncio.create_task(tick())]
    try:
        yield link, sink
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results


async def greet(stream: Up, name: str = "w") -> worker_pb2.FrontendHello:
    """Exchange hellos as the worker and return the front end's."""
    first = await stream.read()
    assert first is not None and first.HasField("hello")
    hello = worker_pb2.WorkerHello(instance_id=name, incarnation="1", model=MODEL.key)
    await stream.write(worker_pb2.AttachDown(hello=hello))
    return first.hello


def end_at_once(stream: Up) -> None:
    stream.close()


def corrupt_length(stream: Up) -> None:
    raw(stream, b"\xff" * 8)


def corrupt_body(stream: Up) -> None:
    raw(stream, (3).to_bytes(4, "little") + b"\xff\xff\xff")


def truncated_message(stream: Up) -> None:
    raw(stream, (100).to_bytes(4, "little") + b"x")
    stream.close()


def raw(stream: Up, data: bytes) -> None:
    assert stream._writer is not None
    stream._writer.write(data)


@pytest.mark.parametrize("break_link", [end_at_once, corrupt_length, corrupt_body, truncated_message])
async def test_broken_link_to_a_live_worker_is_reopened_within_a_second(
    break_link: Callable[[Up], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    async def serve(stream: Up) -> None:
        attempts.append((await greet(stream)).attempt)
        await stream.read()
        break_link(stream)
        while await stream.read() is not None:
            pass

    async with serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address, running(address) as ends:
        link, sink = ends
        pauses: list[float] = []
        next_s = link._backoff.next_s

        def next_pause_s() -> float:
            pauses.append(next_s())
            return pauses[-1]

        monkeypatch.setattr(link._backoff, "next_s", next_pause_s)
        await sink.next_event("attached")
        for _ in range(4):
            assert link.send(worker_pb2.AttachUp(abort=worker_pb2.Abort(handles=[1])))
            loss = await sink.next_event("lost")
            assert loss.cause is LossCause.BROKEN and loss.reason
            await sink.next_event("attached")
    # Not the measured time: this process may have to wait for a core.
    assert len(pauses) == 4 and max(pauses) < 1.0
    # Each connection carries its number.
    assert attempts == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("failed", [False, True])
async def test_goodbye_states_the_reason(failed: bool) -> None:
    async def serve(stream: Up) -> None:
        await greet(stream)
        goodbye = worker_pb2.Goodbye(engine_failed=failed, reason="enough")
        await stream.write(worker_pb2.AttachDown(goodbye=goodbye))
        assert await stream.read() is None

    async with serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address, running(address) as ends:
        await ends[1].next_event("attached")
        loss = await ends[1].next_event("lost")
        assert loss == Loss(LossCause.ENGINE_FAILED if failed else LossCause.STOPPED, "enough")


async def test_ended_process_is_distinguished_from_a_broken_link() -> None:
    over = asyncio.Event()

    async def serve(stream: Up) -> None:
        await greet(stream)
        await over.wait()

    async with serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address:
        running_link = running(address)
        _, sink = await running_link.__aenter__()
        await sink.next_event("attached")
    # The port does not accept connections any more.
    loss = await sink.next_event("lost")
    assert loss.cause is LossCause.BROKEN
    assert await sink.next_event("gone") == "w"
    async with serve_streams(address, worker_pb2.AttachUp, serve):
        await sink.next_event("attached")
        await running_link.__aexit__(None, None, None)


async def test_goodbye_of_a_silent_worker_is_heard() -> None:
    """A worker whose event loop stands still says it from another thread, and its process runs again."""
    speaks = asyncio.Event()

    async def serve(stream: Up) -> None:
        await greet(stream)
        await speaks.wait()
        await stream.write(worker_pb2.AttachDown(goodbye=worker_pb2.Goodbye(reason="runs again")))
        assert await stream.read() is None

    async with serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address, running(address) as ends:
        link, sink = ends
        await sink.next_event("attached")
        link.tick(time.monotonic() + link_module.SILENCE_S + 0.5, 0.0)
        loss = await sink.next_event("lost")
        assert loss.cause is LossCause.SILENT
        speaks.set()
        assert await sink.next_event("explained") == "w"


async def test_worker_that_accepts_and_never_answers_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "HELLO_S", 0.1)
    silent = 2

    async def serve(stream: Up) -> None:
        nonlocal silent
        if silent:
            silent -= 1
            with pytest.raises(StreamBroken):
                while await stream.read() is not None:
                    pass
                raise StreamBroken
            return
        await greet(stream)
        await stream.read()

    async with serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address, running(address) as ends:
        link, sink = ends
        assert not link.send(worker_pb2.AttachUp())
        await sink.next_event("attached")
        assert silent == 0


async def test_worker_that_refuses_the_front_end_is_retried_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "_REFUSED_S", 0.05)
    refusals = 3

    async def serve(stream: Up) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            await stream.read()
            refused = worker_pb2.AttachRefused(reason="another one of this id")
            await stream.write(worker_pb2.AttachDown(refused=refused))
        else:
            await greet(stream)
        await stream.read()

    async with serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address, running(address) as ends:
        await ends[1].next_event("attached")
    refused = [entry for entry in caplog.records if "another one of this id" in entry.getMessage()]
    # Logged once, not at each attempt.
    assert len(refused) == 1 and refused[0].levelname == "ERROR"


@asynccontextmanager
async def proxy(address: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Yield a proxy's address and a function that makes its connection half open: no more data passes."""
    gates: list[asyncio.Event] = []
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        while data := await reader.read(65536):
            await gate.wait()
            writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition(":")
        back_reader, back_writer = await asyncio.open_connection(host, int(port))
        gate = asyncio.Event()
        gate.set()
        gates.append(gate)
        for work in (pump(reader, back_writer, gate), pump(back_reader, writer, gate)):
            tasks.add(asyncio.create_task(work))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", lambda: gates[-1].clear()
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_half_open_connection_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SILENCE_S", 0.3)
    monkeypatch.setattr(link_module, "GRACE_S", 0.2)

    async def serve(stream: Up) -> None:
        await greet(stream)
        while not stream.closed:
            await asyncio.sleep(0.05)
            stream.send(worker_pb2.AttachDown(heartbeat=worker_pb2.Heartbeat()))

    async with (
        serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address,
        proxy(address) as (front, freeze),
        running(front) as (link, sink),
    ):
        await sink.next_event("attached")
        freeze()
        loss = await sink.next_event("lost")
        assert loss.cause is LossCause.SILENT
        await sink.next_event("attached")
        assert link.attached


async def test_slow_large_message_is_not_taken_for_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    # Much longer than this process may have to wait for a core, and shorter than the message takes.
    monkeypatch.setattr(link_module, "SILENCE_S", 1.2)
    data = worker_pb2.AttachDown(utility=worker_pb2.UtilityResult(frames=[b"x" * 1000])).SerializeToString()

    async def serve(stream: Up) -> None:
        await greet(stream)
        frame = len(data).to_bytes(4, "little") + data
        for at in range(0, len(frame), 50):
            raw(stream, frame[at : at + 50])
            await asyncio.sleep(0.08)
        await stream.read()

    async with serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address, running(address) as ends:
        await ends[1].next_event("attached")
        message = await ends[1].next_event("message")
        assert message.utility.frames[0] == b"x" * 1000


async def test_worker_that_reads_nothing_for_long_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "STALL_S", 0.3)

    async def serve(stream: Up) -> None:
        await greet(stream)
        while not stream.closed:
            # It sends heartbeats and reads nothing, so its receive buffer is soon full.
            stream.send(worker_pb2.AttachDown(heartbeat=worker_pb2.Heartbeat()))
            await asyncio.sleep(0.02)

    async with serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address, running(address) as ends:
        link, sink = ends
        await sink.next_event("attached")
        for _ in range(60):
            link.send(submission(1 << 20))
        loss = await sink.next_event("lost")
        assert loss.reason.startswith("took nothing of")


def submission(size: int) -> worker_pb2.AttachUp:
    return worker_pb2.AttachUp(submit=worker_pb2.Submit(frames=[b"x" * size]))


async def serve_hello(stream: Up, limit: int, resume: asyncio.Event) -> None:
    await stream.read()
    hello = worker_pb2.WorkerHello(instance_id="w", incarnation="1", max_message_bytes=limit, model=MODEL.key)
    await stream.write(worker_pb2.AttachDown(hello=hello))
    await resume.wait()


async def test_submissions_a_worker_cannot_accept_are_refused_and_the_link_stays_up() -> None:
    resume = asyncio.Event()
    serve: Callable[[Up], Awaitable[None]] = lambda stream: serve_hello(stream, 100_000, resume)  # noqa: E731
    async with serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address, running(address) as ends:
        link, sink = ends
        await sink.next_event("attached")
        assert link.max_message_bytes == 100_000
        assert not link.send(submission(100_001))
        accepted = 0
        while link.send(submission(90_000)):
            accepted += 1
        assert accepted == 4
        # Other messages are still accepted.
        assert link.send(worker_pb2.AttachUp(abort=worker_pb2.Abort(handles=[1])))
        assert sink.events.empty() and link.attached
        resume.set()


async def test_queue_limit_for_submissions_is_below_the_one_for_aborts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Small: filling the real one takes a busy machine longer than a worker may be silent.
    limit = 200
    monkeypatch.setattr(link_module, "QUEUE_LIMIT", limit)
    resume = asyncio.Event()
    serve: Callable[[Up], Awaitable[None]] = lambda stream: serve_hello(stream, 0, resume)  # noqa: E731
    async with serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address, running(address) as ends:
        link, sink = ends
        await sink.next_event("attached")
        accepted = 0
        while link.send(submission(10)):
            accepted += 1
        assert accepted == limit // 2
        for _ in range(limit // 2):
            assert link.send(worker_pb2.AttachUp(abort=worker_pb2.Abort(handles=[1])))
        assert not link.send(worker_pb2.AttachUp(abort=worker_pb2.Abort(handles=[1])))
        loss = await sink.next_event("lost")
        assert "messages unread" in loss.reason
        resume.set()


async def test_a_message_that_cannot_be_processed_resets_the_link() -> None:
    """Whatever the sink raises: what the worker ran goes on on another stream."""
    attempts: list[int] = []

    async def serve(stream: Up) -> None:
        attempts.append((await greet(stream)).attempt)
        await stream.write(worker_pb2.AttachDown(taken=worker_pb2.Taken(handle=7)))
        await stream.read()

    before = UNREADABLE.labels("message of a worker")._value.get()
    async with (
        serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address,
        running(address) as (_, sink),
    ):
        sink.on_message = fail  # type: ignore[method-assign]
        for _ in range(2):
            await sink.next_event("attached")
            loss = await sink.next_event("lost")
            assert loss.cause is LossCause.BROKEN and "list index out of range" in loss.reason
    assert attempts[:2] == [1, 2]
    assert UNREADABLE.labels("message of a worker")._value.get() >= before + 2


class Undecodable:
    """A message that no protobuf can read."""

    def SerializeToString(self) -> bytes:
        return b"\xff\xff\xff"


async def test_a_message_that_cannot_be_decoded_resets_the_link() -> None:
    """Its streams go on elsewhere: which of them it was about is not known."""
    attempts: list[int] = []

    async def serve(stream: Up) -> None:
        attempts.append((await greet(stream)).attempt)
        if len(attempts) == 1:
            stream.send(Undecodable())  # type: ignore[arg-type]
        await stream.read()

    before = skipped("message of a stream")
    async with (
        serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address,
        running(address) as (_, sink),
    ):
        await sink.next_event("attached")
        loss = await sink.next_event("lost")
        assert loss.cause is LossCause.BROKEN and "not a message" in loss.reason
        await sink.next_event("attached")
    assert attempts == [1, 2]
    assert skipped("message of a stream") == before + 1


def fail(instance_id: str, message: worker_pb2.AttachDown) -> None:
    raise IndexError("list index out of range")
