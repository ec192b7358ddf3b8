"""Ranks of a deployment meet, call each other to waves, and notice that one is lost; on loopback."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from tests.ports import free_port
from tests.waiting import WAIT_S
from worker_agent.parallel.data_parallel_meeting import (
    Hello,
    Link,
    LinkLost,
    Meeting,
    MeetingError,
    RankPeers,
    Rendezvous,
    Start,
    meet,
)

SETTINGS = {"data_parallel_size": "3"}
PORTS = [5001, 5002]

Arrive = Callable[..., Future[Meeting]]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def arrive(port: int) -> Iterator[Arrive]:
    """Have a rank come to the meeting of three, on a thread."""
    with ThreadPoolExecutor(8) as pool, ExitStack() as stack:

        def come(
            rank: int, deadline_s: float = WAIT_S, settings: Mapping[str, str] = SETTINGS
        ) -> Future[Meeting]:
            def close(done: Future[Meeting]) -> None:
                if done.exception() is None:
                    for link in done.result().links.values():
                        stack.callback(link.close)

            future = pool.submit(
                meet, Rendezvous("127.0.0.1", port, rank, 3, settings), PORTS if rank == 0 else [], deadline_s
            )
            future.add_done_callback(close)
            return future

        yield come


@dataclass
class Member:
    """A rank with its peers, and what it has heard."""

    peers: RankPeers
    starts: queue.Queue[int] = field(default_factory=queue.Queue)
    losses: queue.Queue[str] = field(default_factory=queue.Queue)


@pytest.fixture
def members(arrive: Arrive) -> Iterator[list[Member]]:
    """Three ranks that have met."""
    meetings = [each.result(WAIT_S) for each in [arrive(rank) for rank in range(3)]]
    found: list[Member] = []
    for rank, meeting in enumerate(meetings):
        starts: queue.Queue[int] = queue.Queue()
        losses: queue.Queue[str] = queue.Queue()
        found.append(Member(RankPeers(rank, 3, meeting, starts.put, losses.put), starts, losses))
    yield found
    for member in found:
        member.peers.leave("was stopped")


def test_all_ranks_get_the_ports_of_rank_0(arrive: Arrive) -> None:
    later = [arrive(2), arrive(1)]
    assert [list(each.result(WAIT_S).ports) for each in [arrive(0), *later]] == [PORTS] * 3


def test_missing_ranks_are_named_on_rank_0(arrive: Arrive) -> None:
    said = r"ranks 1, 2 of data_parallel_size 3 did not come to 127\.0\.0\.1:\d+"
    with pytest.raises(MeetingError, match=said):
        arrive(0, 0.2).result(WAIT_S)


def test_rank_without_rank_0_names_the_address_and_its_settings(arrive: Arrive) -> None:
    with pytest.raises(
        MeetingError, match=r"rank 1 did not meet .* \(data_parallel_address, data_parallel_rpc"
    ):
        arrive(1, 0.2).result(WAIT_S)


def test_rank_with_another_setting_is_refused_and_the_meeting_goes_on(arrive: Arrive) -> None:
    host = arrive(0)
    with pytest.raises(MeetingError, match="data_parallel_size 2 against 3 on rank 0"):
        arrive(1, settings={"data_parallel_size": "2"}).result(WAIT_S)
    members = [arrive(1), arrive(2)]
    assert set(host.result(WAIT_S).links) == {1, 2}
    assert all(each.result(WAIT_S) for each in members)


def test_second_worker_with_the_same_rank_is_refused(arrive: Arrive) -> None:
    host, ones = arrive(0), [arrive(1), arrive(1)]
    (refused,), _ = wait(ones, WAIT_S, FIRST_COMPLETED)
    with pytest.raises(MeetingError, match=r"another worker is rank 1 already \(data_parallel_rank\)"):
        refused.result()
    arrive(2)
    assert set(host.result(WAIT_S).links) == {1, 2}


def test_rank_that_dies_before_the_others_have_come_may_come_again(arrive: Arrive, port: int) -> None:
    host = arrive(0)
    dying = _connect(port)
    dying.send(Hello(1, SETTINGS))
    dying.close()
    members = [arrive(2), arrive(1)]
    assert set(host.result(WAIT_S).links) == {1, 2}
    assert all(each.result(WAIT_S) for each in members)


def test_strangers_do_not_disturb_a_meeting(arrive: Arrive, port: int) -> None:
    host = arrive(0)
    silent, wrong = _connect(port), _socket(port)
    wrong.sendall(b"GET / HTTP/1.1\r\n\r\n")
    # Rank 0 closes the connection: at the latest here, it has read it.
    assert wrong.recv(1) == b""
    members = [arrive(1), arrive(2)]
    assert set(host.result(WAIT_S).links) == {1, 2}
    assert all(each.result(WAIT_S) for each in members)
    silent.close()
    wrong.close()


@pytest.mark.parametrize("starter", [0, 1])
def test_call_reaches_all_other_ranks_in_order(members: list[Member], starter: int) -> None:
    for wave in (7, 8):
        members[starter].peers.start(wave)
    for rank, member in enumerate(members):
        if rank != starter:
            assert [member.starts.get(timeout=WAIT_S) for _ in range(2)] == [7, 8]
    assert members[starter].starts.empty()


@pytest.mark.parametrize("victim", [0, 2])
def test_stopped_rank_is_named_on_all_others(members: list[Member], victim: int) -> None:
    members[victim].peers.leave("was stopped")
    said = f"rank {victim} of 3 of the data-parallel deployment was stopped; "
    for rank, member in enumerate(members):
        if rank != victim:
            assert member.losses.get(timeout=WAIT_S).startswith(said)
            assert member.peers.lost_within(0).startswith(said)
    assert members[victim].losses.empty()


@pytest.mark.parametrize("victim", [0, 2])
def test_dead_rank_is_named_on_all_others(arrive: Arrive, victim: int) -> None:
    meetings = [each.result(WAIT_S) for each in [arrive(rank) for rank in range(3)]]
    losses: queue.Queue[str] = queue.Queue()
    peers = [
        RankPeers(rank, 3, meeting, lambda _: None, losses.put)
        for rank, meeting in enumerate(meetings)
        if rank != victim
    ]
    # What the kernel does with a dead process's connections.
    for link in meetings[victim].links.values():
        link.close()
    said = f"rank {victim} of 3 of the data-parallel deployment has died; "
    assert all(losses.get(timeout=WAIT_S).startswith(said) for _ in peers)
    for each in peers:
        each.leave("was stopped")


def test_link_refuses_what_is_not_a_message() -> None:
    ours, theirs = _pair()
    theirs.sendall(b'{"type":"Start","wave":1}\n{"type":"Sta')
    assert ours.receive() == [Start(1)]
    theirs.sendall(b"x\n")
    with pytest.raises(LinkLost, match="sent what is not a message"):
        ours.receive()
    ours.close()
    theirs.close()


def test_link_bounds_a_message() -> None:
    ours, theirs = _pair()
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(theirs.sendall, b"x" * (1 << 18))
        with pytest.raises(LinkLost, match="too long a message"):
            while True:
                ours.receive()
        ours.close()
        assert isinstance(sent.exception(WAIT_S), ConnectionError | None)
    theirs.close()


def _connect(port: int) -> Link:
    return Link(_socket(port))


def _socket(port: int) -> socket.socket:
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        with contextlib.suppress(ConnectionError):
            return socket.create_connection(("127.0.0.1", port))
    raise AssertionError("rank 0 does not listen")


def _pair() -> tuple[Link, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    return Link(ours), theirs
