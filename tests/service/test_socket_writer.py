"""Concurrent writes are complete, in order per thread, and never block, however slow the reader is."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
import uvloop

from tailrace.service.sockets import SocketWriter
from tests.waiting import WAIT_S

_THREADS = 3
_RECORDS = 400
_SIZE = 4096


def record(thread: int, number: int) -> bytes:
    return bytes([thread]) + number.to_bytes(4, "big") + bytes([thread + number & 0xFF]) * (_SIZE - 5)


async def write_from_threads_to_a_late_reader() -> list[tuple[int, int]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    drained = asyncio.Event()
    writer = SocketWriter(ours, lambda error: drained.set())

    def write(thread: int) -> None:
        for number in range(_RECORDS):
            writer.write(record(thread, number))

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(_THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        await asyncio.to_thread(each.join, 20)
    assert writer.buffered_bytes > 0, "nothing was read: the kernel cannot have accepted everything"
    received = b""
    loop = asyncio.get_running_loop()
    while len(received) < _THREADS * _RECORDS * _SIZE:
        received += await loop.sock_recv(theirs, 1 << 20)
    await drained.wait()
    assert writer.buffered_bytes == 0
    writer.close()
    assert await loop.sock_recv(theirs, 1) == b""
    theirs.close()
    seen = []
    for start in range(0, len(received), _SIZE):
        thread, number = received[start], int.from_bytes(received[start + 1 : start + 5], "big")
        assert received[start : start + _SIZE] == record(thread, number)
        seen.append((thread, number))
    return seen


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_records_arrive_complete_and_in_order_per_thread(run: object) -> None:
    assert callable(run)
    seen = run(asyncio.wait_for(write_from_threads_to_a_late_reader(), WAIT_S))
    for thread in range(_THREADS):
        assert [number for each, number in seen if each == thread] == list(range(_RECORDS))


async def test_writing_to_a_closed_socket_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    writer = SocketWriter(ours, lambda error: None)
    theirs.close()
    with pytest.raises(OSError):
        writer.write(b"x")
    writer.close()
    writer.close()
    with pytest.raises(ConnectionAbortedError):
        writer.write(b"x")


async def test_lost_buffered_data_is_reported() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    reported: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    writer = SocketWriter(ours, reported.set_result)
    while not writer.buffered_bytes:
        writer.write(b"x" * (1 << 20))
    theirs.close()
    async with asyncio.timeout(WAIT_S):
        assert isinstance(await reported, OSError)
    assert writer.buffered_bytes == 0
    writer.close()
