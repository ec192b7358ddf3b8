"""The retransmission interval of connections, and when they give up."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import select
import socket
import struct
import time
from contextlib import ExitStack

import pytest

from frontend_svc.api_server.sockets import bind_http
from tailrace.service.message_stream import MessageStream, connect_stream, serve_streams
from tailrace.service.sockets import bound_retransmission
from tailrace.v1 import worker_pb2
from tests.waiting import WAIT_S

# Linux, include/uapi/linux/tcp.h, asm-generic/socket.h and filter.h.
TCP_RTO_MAX_MS = 44
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
BPF_RETURN = 0x06


def longest_interval_ms(sock: socket.socket) -> int:
    """Return the bound; skip the test where the kernel has none (before Linux 6.15)."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
    except OSError as error:
        assert error.errno == errno.ENOPROTOOPT
        pytest.skip("the kernel cannot bound the retransmission interval")


def lose_everything(sock: socket.socket) -> None:
    """Drop what arrives at the socket before TCP sees it, by a filter that keeps no byte of any packet."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def doublings(sock: socket.socket) -> int:
    """Return how often the kernel has doubled the retransmission interval (tcpi_backoff)."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[4]


def interval_ms(sock: socket.socket) -> float:
    """Return how long the kernel waits before the next retransmission (tcpi_rto)."""
    interval_us: int = struct.unpack_from("I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 12), 8)[0]
    return interval_us / 1_000


def give_up_ms(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_a_connection_continues_soon_after_an_outage() -> None:
    """Both lose what is sent for three seconds; the one without a bound stays silent for up to three more."""
    with ExitStack() as stack:
        pairs = []
        for bounded in (True, False):
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            if bounded:
                longest_interval_ms(listening)
                assert bound_retransmission(listening, 1.0, 60.0)
            client = stack.enter_context(socket.create_connection(listening.getsockname()))
            accepted, _ = listening.accept()
            pairs.append((client, stack.enter_context(accepted)))
        for client, accepted in pairs:
            lose_everything(client)
            accepted.sendall(b"token")
        until_s = time.monotonic() + WAIT_S
        while any(doublings(accepted) < 4 for _, accepted in pairs):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        bounded_ms, unbounded_ms = (interval_ms(accepted) for _, accepted in pairs)
        assert bounded_ms <= 1_000 and unbounded_ms > 3_000
        client, _ = pairs[0]
        client.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        assert select.select([client], [], [], WAIT_S)[0] == [client]


def test_connections_of_clients_inherit_both_bounds() -> None:
    with bind_http("127.0.0.1:0", lambda: False) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
            with accepted:
                # Without it the kernel, which counts retransmissions, would give up after half a minute.
                assert give_up_ms(accepted) == 300_000
                assert longest_interval_ms(accepted) == 2_000


async def test_both_ends_of_a_message_stream_have_both_bounds() -> None:
    served: asyncio.Queue[MessageStream[worker_pb2.AttachUp]] = asyncio.Queue()
    over = asyncio.Event()

    async def serve(stream: MessageStream[worker_pb2.AttachUp]) -> None:
        served.put_nowait(stream)
        await over.wait()

    async with asyncio.timeout(WAIT_S), serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address:
        client = await connect_stream(address, worker_pb2.AttachDown)
        for end in (client, await served.get()):
            assert end._transport is not None
            sock = end._transport.get_extra_info("socket")
            assert give_up_ms(sock) == 60_000
            assert longest_interval_ms(sock) == 1_000
        client.close()
        over.set()


def test_a_kernel_without_the_option_still_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # No option has this number.
    monkeypatch.setattr("tailrace.service.sockets._TCP_RTO_MAX_MS", 999)
    with socket.socket() as sock:
        assert not bound_retransmission(sock, 1.0, 60.0)
        assert give_up_ms(sock) == 60_000


def test_a_socket_that_is_not_tcp_is_an_error() -> None:
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(OSError):
        bound_retransmission(sock, 1.0, 60.0)
