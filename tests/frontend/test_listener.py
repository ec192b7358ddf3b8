"""Closing a listening socket whose port is shared with others, without any client noticing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from frontend_svc.api_server import sockets
from frontend_svc.api_server.sockets import stop_accepting
from tests.waiting import WAIT_S

# Connections that a client makes one after another while the first listener goes away.
ROUNDS = 150


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no connection be too late to be accepted: this process accepts them, too."""
    monkeypatch.setattr(sockets, "_ACCEPT_S", WAIT_S)


@contextmanager
def shared(port: int) -> Iterator[socket.socket]:
    """Listen on a loopback port that another socket can share; port 0: any."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen()
        sock.setblocking(False)
        yield sock


async def answer(listener: socket.socket, word: bytes) -> None:
    """Accept connections one at a time and answer each with `word`."""
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        with closing(connection):
            connection.setblocking(False)
            await loop.sock_recv(connection, 1)
            await loop.sock_sendall(connection, word)


async def request_word(port: int) -> bytes:
    """Open a connection and return what it receives until its end."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"?")
        try:
            return await reader.read()
        finally:
            writer.close()


async def test_no_connection_is_reset_while_a_shared_listener_goes_away() -> None:
    with shared(0) as leaving:
        port = leaving.getsockname()[1]
        with shared(port) as staying:
            first = asyncio.create_task(answer(leaving, b"leaving"))
            second = asyncio.create_task(answer(staying, b"staying"))
            requests = [asyncio.create_task(request_word(port)) for _ in range(ROUNDS)]
            stopping = asyncio.create_task(stop_accepting(leaving))
            requests += [asyncio.create_task(request_word(port)) for _ in range(ROUNDS)]
            await stopping
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            leaving.close()
            requests += [asyncio.create_task(request_word(port)) for _ in range(ROUNDS)]
            answers = await asyncio.gather(*requests)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
    assert set(answers) <= {b"leaving", b"staying"}
    assert set(answers[-ROUNDS:]) == {b"staying"}


async def test_stop_waits_for_connections_that_are_not_accepted_yet() -> None:
    with shared(0) as leaving:
        port = leaving.getsockname()[1]
        waiting = asyncio.create_task(request_word(port))
        with socket.socket() as other:
            other.connect(("127.0.0.1", port))
            stopping = asyncio.create_task(stop_accepting(leaving))
            # Both are established but not accepted: on loopback, connecting completes them.
            await asyncio.sleep(0)
            assert not stopping.done()
            first = asyncio.create_task(answer(leaving, b"late"))
            other.sendall(b"?")
            assert await waiting == b"late"
            await stopping
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
