"""Messages over one connection are complete, in order and bounded, and its end has a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.service.message_stream import MessageStream, StreamBroken, connect_stream, serve_streams
from tailrace.service.sockets import ListenError
from tailrace.v1 import worker_pb2
from tests.counting import skipped
from tests.waiting import WAIT_S

Down = MessageStream[worker_pb2.AttachDown]
Up = MessageStream[worker_pb2.AttachUp]


def message(content: bytes) -> worker_pb2.AttachUp:
    return worker_pb2.AttachUp(submit=worker_pb2.Submit(frames=[content]))


@asynccontextmanager
async def ends() -> AsyncIterator[tuple[Down, Up, str]]:
    """Yield both ends of a connection, and the server's address."""
    served: asyncio.Queue[Up] = asyncio.Queue()
    over = asyncio.Event()

    async def serve(stream: Up) -> None:
        served.put_nowait(stream)
        await over.wait()

    async with asyncio.timeout(WAIT_S), serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address:
        client = await connect_stream(address, worker_pb2.AttachDown)
        try:
            yield client, await served.get(), address
        finally:
            client.close()
            over.set()


async def echo(contents: list[bytes]) -> list[bytes]:
    async with ends() as (client, server, _):
        for content in contents:
            await client.write(message(content))
        received = [await server.read() for _ in contents]
        return [each.submit.frames[0] for each in received if each is not None]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b"long" * 50_000)), max_size=12))
def test_messages_arrive_whole_and_in_order(contents: list[bytes]) -> None:
    # The services run on uvloop, whose transports behave differently from asyncio's.
    assert uvloop.run(echo(contents)) == contents
    assert asyncio.run(echo(contents)) == contents


async def deliver(contents: list[bytes]) -> list[bytes]:
    async with ends() as (client, server, _):
        received: list[bytes] = []
        complete = asyncio.Event()

        def handle(each: worker_pb2.AttachUp) -> None:
            received.append(each.submit.frames[0])
            if len(received) == len(contents):
                complete.set()

        for content in contents[:2]:
            await client.write(message(content))
        delivering = asyncio.create_task(server.deliver(handle))
        for content in contents[2:]:
            await client.write(message(content))
        if contents:
            await complete.wait()
        delivering.cancel()
        await asyncio.gather(delivering, return_exceptions=True)
        # A message that arrives after that is read.
        await client.write(message(b"later"))
        last = await server.read()
        assert last is not None
        return [*received, last.submit.frames[0]]


@settings(deadline=None, max_examples=15)
@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b"long" * 50_000)), max_size=8))
def test_messages_are_delivered_whole_and_in_order(contents: list[bytes]) -> None:
    assert uvloop.run(deliver(contents)) == [*contents, b"later"]
    assert asyncio.run(deliver(contents)) == [*contents, b"later"]


async def test_delivery_ends_with_the_callbacks_exception() -> None:
    seen: list[bytes] = []

    def handle(each: worker_pb2.AttachUp) -> None:
        seen.append(each.submit.frames[0])
        if seen[-1] == b"last":
            raise LookupError("enough")

    async with ends() as (client, server, _):
        delivering = asyncio.create_task(server.deliver(handle))
        for content in (b"one", b"last", b"not delivered"):
            await client.write(message(content))
        client.close()
        with pytest.raises(LookupError, match="enough"):
            await delivering
        assert seen == [b"one", b"last"]
        assert server.closed


async def test_delivery_ends_with_the_stream() -> None:
    async with ends() as (client, server, _):
        delivering = asyncio.create_task(server.deliver(lambda each: None))
        await asyncio.sleep(0)
        client.close()
        try:
            await delivering
        except StreamBroken as broken:
            assert str(broken)


async def test_an_empty_message_is_a_message() -> None:
    async with ends() as (client, server, _):
        await client.write(worker_pb2.AttachUp())
        assert await server.read() == worker_pb2.AttachUp()


async def test_a_waiting_reader_sees_the_end() -> None:
    async with ends() as (client, server, _):
        waiting = asyncio.create_task(client.read())
        await asyncio.sleep(0)
        server.close()
        # The kernel decides whether an abort is a reset or an orderly end.
        try:
            assert await waiting is None
        except StreamBroken as broken:
            assert str(broken)
        with pytest.raises(StreamBroken):
            while True:
                await client.write(message(b"x"))
                await asyncio.sleep(0)


async def test_messages_sent_before_the_end_are_read() -> None:
    async with ends() as (client, server, _):
        await client.write(message(b"last"))
        assert await server.read() == message(b"last")
        client.close()
        with suppress(StreamBroken):
            assert await server.read() is None
        assert server.closed


async def test_a_peer_with_another_protocol_is_disconnected() -> None:
    async with ends() as (_, _, address):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


async def test_an_undecodable_message_is_an_error() -> None:
    before = skipped("message of a stream")
    served: asyncio.Queue[Up] = asyncio.Queue()

    async def serve(stream: Up) -> None:
        served.put_nowait(stream)
        await asyncio.Event().wait()

    async with asyncio.timeout(WAIT_S), serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address:
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write((3).to_bytes(4, "little") + b"\xff\xff\xff")
        with pytest.raises(StreamBroken, match="not a message"):
            await (await served.get()).read()
        writer.close()
    assert skipped("message of a stream") == before + 1


async def test_a_writer_waits_for_a_reader_that_does_not_read() -> None:
    async with ends() as (client, server, _):
        big = message(b"x" * (1 << 20))
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while sent < 200:
                await client.write(big)
                sent += 1

        task = asyncio.create_task(flood())
        before = -1
        while before != sent or not sent:
            before = sent
            await asyncio.wait([task], timeout=0.3)
        assert 0 < sent < 200, "without a reader, the data in flight is bounded"
        for _ in range(200):
            assert await server.read() == big
        await task


async def test_a_port_in_use_is_an_error() -> None:
    async def serve(stream: Up) -> None:
        raise AssertionError("unexpected connection")

    async with serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address:
        with pytest.raises(
            ListenError, match=f"--stream-port: cannot listen on {address}: the port is taken"
        ):
            async with serve_streams(address, worker_pb2.AttachUp, serve):
                pass
