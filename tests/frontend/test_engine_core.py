"""The engine core's sockets against libzmq's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from frontend_svc.engine_core import EngineCoreSocket, HandshakeFailed, PushSocket
from tailrace.wire.ready import ENGINE_IDENTITY
from tailrace.wire.requests import RequestType, UtilityCall
from tests.waiting import WAIT_S


async def test_messages_of_all_sizes_arrive_in_order_past_a_full_buffer(tmp_path: Path) -> None:
    disconnected = asyncio.Event()
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as pull:
        pull.bind(f"ipc://{tmp_path / 'out'}")
        push = PushSocket(str(tmp_path / "out"), disconnected.set)
        await push.connect()
        messages = [
            [bytes([number]) * size, b"second", b""]
            for number, size in enumerate((0, 1, 255, 256, 65_536, 3_000_000, 5))
        ]
        for message in messages:
            push.send(message)
        async with asyncio.timeout(WAIT_S):
            assert [await pull.recv_multipart() for _ in messages] == messages
        push.send([b"alone"])
        async with asyncio.timeout(WAIT_S):
            assert await pull.recv_multipart() == [b"alone"]
        push.close()
    assert not disconnected.is_set()


async def test_disconnected_peer_is_reported(tmp_path: Path) -> None:
    disconnected = asyncio.Event()
    with zmq.asyncio.Context() as context:
        pull = context.socket(zmq.PULL)
        pull.bind(f"ipc://{tmp_path / 'out'}")
        push = PushSocket(str(tmp_path / "out"), disconnected.set)
        await push.connect()
        pull.close(linger=0)
    # The end of the context has closed its connections.
    push.send([b"x"])
    assert disconnected.is_set()
    push.close()


async def test_peer_that_does_not_speak_zmtp_is_refused(tmp_path: Path) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n".ljust(64, b" "))
        writer.close()

    async with await asyncio.start_unix_server(greet, tmp_path / "out"):
        push = PushSocket(str(tmp_path / "out"), lambda: None)
        with pytest.raises(HandshakeFailed, match="greeting"):
            await push.connect()
        push.close()


async def test_messages_of_the_api_server_arrive_whole_and_in_order(tmp_path: Path) -> None:
    received: list[object] = []
    complete = asyncio.Event()

    def on_add(frames: Sequence[bytes]) -> None:
        received.append(frames)

    def on_abort(request_ids: Sequence[str]) -> None:
        received.append(request_ids)

    def on_utility(call: UtilityCall, frames: Sequence[bytes]) -> None:
        received.append(call.method)
        complete.set()

    with (
        zmq.asyncio.Context() as context,
        context.socket(zmq.ROUTER) as router,
        context.socket(zmq.PULL) as pull,
    ):
        router.bind(f"ipc://{tmp_path / 'in'}")
        pull.bind(f"ipc://{tmp_path / 'out'}")
        core = EngineCoreSocket(tmp_path / "in", tmp_path / "out", lambda: None)
        await core.announce(b"ready" * 100)
        async with asyncio.timeout(WAIT_S):
            assert await router.recv_multipart() == [ENGINE_IDENTITY, b"ready" * 100]
        receiving = asyncio.create_task(core.receive(on_add, on_abort, on_utility))
        sizes = (0, 1, 255, 256, 65_536, 3_000_000, 5)
        requests = [[bytes([number]) * size, b"second", b""] for number, size in enumerate(sizes)]
        abort, call = msgspec.msgpack.encode(["a", "b"]), msgspec.msgpack.encode([0, 1, "reset", []])
        unreadable, unknown = [RequestType.ABORT, b"\xc1"], [b"\x77", b""]
        for message in (
            *([RequestType.ADD, *frames] for frames in requests),
            unreadable,
            unknown,
            [RequestType.ABORT, abort],
            [RequestType.UTILITY, call],
        ):
            await router.send_multipart([ENGINE_IDENTITY, *message])
        async with asyncio.timeout(WAIT_S):
            await complete.wait()
        assert received == [*requests, ["a", "b"], "reset"]
        receiving.cancel()
        await asyncio.wait([receiving])
        core.close()
