"""Giving up a listening socket that others share the port with: no client may notice."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

from frontend_svc.api_server.listener import stop_accepting

# Connections that a client makes one after another while the first listener goes away.
ROUNDS = 150


@contextmanager
def shared(port: int) -> Iterator[socket.socket]:
    """A listener on a loopback port that another one may share; port 0: any."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen()
        sock.setblocking(False)
        yield sock


async def answer(listener: socket.socket, word: bytes) -> None:
    """Accept, one at a time and not at once, and answer each connection with `word`."""
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        with closing(connection):
            connection.setblocking(False)
            await loop.sock_recv(connection, 1)
            await loop.sock_sendall(connection, word)


async def ask(port: int) -> bytes:
    """One connection, from its first packet to the answer."""
    async with asyncio.timeout(10):
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
            asked = [asyncio.create_task(ask(port)) for _ in range(ROUNDS)]
            stopping = asyncio.create_task(stop_accepting(leaving))
            asked += [asyncio.create_task(ask(port)) for _ in range(ROUNDS)]
            await stopping
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            leaving.close()
            asked += [asyncio.create_task(ask(port)) for _ in range(ROUNDS)]
            answers = await asyncio.gather(*asked)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
    assert set(answers) <= {b"leaving", b"staying"}
    assert set(answers[-ROUNDS:]) == {b"staying"}


async def test_connections_that_wait_to_be_accepted_are_waited_for() -> None:
    with shared(0) as leaving:
        port = leaving.getsockname()[1]
        waiting = asyncio.create_task(ask(port))
        with socket.socket() as other:
            other.connect(("127.0.0.1", port))
            stopping = asyncio.create_task(stop_accepting(leaving))
            # Both are made and unaccepted by now, for connecting to loopback makes them.
            await asyncio.sleep(0)
            assert not stopping.done()
            first = asyncio.create_task(answer(leaving, b"late"))
            other.sendall(b"?")
            assert await waiting == b"late"
            await stopping
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
