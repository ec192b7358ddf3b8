"""A fleet with engines of two ranks: SIGKILL to one rank, in mid-stream and in each step of a migration,
SIGSTOP to a rank, and SIGKILL to the worker.

`make test-ranks`. Two workers have tensor-parallel size 2 and exchange KV rank by rank; the third has a
single device, and requests move to it by replay.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from examples.fleet import Chat
from tailrace.tiny.task import task
from tailrace.v1 import migration_pb2, types_pb2
from tests.harness.chats import Chats, assert_expected
from tests.harness.fleet import Fleet
from tests.harness.processes import wait_until
from tests.harness.tries import RequestEnded, before_it_ends
from tests.waiting import WAIT_S
from worker_agent.parallel.rank_leftovers import Names, names_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TWO_RANKS = ("w0", "w1")
WORKERS = (*TWO_RANKS, "w2")
START_S = 400
LONG = task("wxyz", 120, 100)
STEPS = ("import:open", "import:pre_copy", "import:paused", "import:adopt", "export:paused")
_SHARED = Path("/dev/shm")


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("ranks"), "vllm")
    try:
        fleet.start_control()
        for name in WORKERS:
            options = ["--tensor-parallel-size", "2"] if name in TWO_RANKS else []
            fleet.start_worker(name, [*options, "--kv-blocks", "512"], wait=False)
            fleet.wait_healthy(name, START_S)
        fleet.start_frontend()
        fleet.wait_instances(WORKERS)
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def fleet(session: Fleet) -> Iterator[Fleet]:
    """The fleet, complete before each test."""
    session.disarm()
    session.repair(START_S)
    session.wait_instances(WORKERS)
    yield session
    session.disarm()


@pytest.fixture
def chats(fleet: Fleet) -> Iterator[Chats]:
    clients = Chats(fleet.http)
    yield clients
    clients.close()


def streaming_on(fleet: Fleet, chats: Chats, worker: str) -> tuple[str, Future[Chat]]:
    """Start a stream on this worker; return its request ID, and the future of its end."""
    return before_it_ends(lambda: try_to_stream_on(fleet, chats, worker))


def try_to_stream_on(fleet: Fleet, chats: Chats, worker: str) -> tuple[str, Future[Chat]]:
    """Do as `streaming_on`, once. Raise RequestEnded if the stream ends before it is there."""
    stream, chat = chats.begin(LONG.prompt, lambda chat: len(chat.reasoning) > 40)
    placed = fleet.wait_request(chat.request_id, ended=stream.done)
    if placed.instance_id != worker:
        # The control plane may hear of it later than the client.
        wait_decoding(fleet, placed.request_id, placed.instance_id, stream)
        fleet.move(placed.request_id, worker)
    return placed.request_id, stream


def wait_decoding(fleet: Fleet, request_id: str, worker: str, stream: Future[Chat]) -> None:
    """Wait until the request decodes there; after a replay its prompt is computed first. Raise RequestEnded
    if its stream ends before."""

    def decodes() -> bool:
        if stream.done():
            raise RequestEnded(f"{request_id} was not seen to decode on {worker}")
        found = fleet.find_request(request_id)
        return found is not None and found.instance_id == worker and found.phase != types_pb2.PHASE_PREFILL

    wait_until(decodes, f"the request to decode on {worker}")


def ranks_of(fleet: Fleet, worker: str) -> list[int]:
    return [rank.process for rank in fleet.instances()[worker].ranks]


def shared_by(fleet: Fleet, worker: str) -> Names:
    """Return the shared memory of the worker and its ranks."""
    names = names_of([fleet.processes[worker].pid, *ranks_of(fleet, worker)])
    assert names
    return names


def assert_nothing_left(fleet: Fleet, worker: str, ranks: list[int], shared: Names) -> None:
    """Check that the worker exits by itself, with its ranks and what they shared."""
    wait_until(lambda: not fleet.processes[worker].alive, f"{worker} to end")
    wait_until(lambda: not any(map(is_running, ranks)), "the ranks to end")
    wait_until(lambda: not any(map(exists, shared)), "shared memory to be freed")


def exists(name: str) -> bool:
    """Return whether this shared memory has a name still."""
    return (_SHARED / name).exists()


def is_running(process: int) -> bool:
    """Return whether the process has not ended; a zombie without a parent to reap it has."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_requests_move_between_engines_with_two_ranks_and_one(fleet: Fleet, chats: Chats) -> None:
    def moved() -> tuple[Future[Chat], list[migration_pb2.MigrationRecord]]:
        request, stream = try_to_stream_on(fleet, chats, "w0")
        records = []
        for source, target in pairwise(("w0", "w1", "w0", "w2", "w1")):
            wait_decoding(fleet, request, source, stream)
            records.append(fleet.move(request, target))
        return stream, records

    stream, records = before_it_ends(moved)
    assert_expected(stream.result(timeout=WAIT_S), LONG)
    assert [record.way for record in records] == [types_pb2.WAY_LIVE] * 2 + [types_pb2.WAY_REPLAY] * 2
    assert "tensor_parallel_size 2 against 1" in records[2].way_reason
    assert all(record.bytes > 0 for record in records[:2])


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed_in_mid_stream(fleet: Fleet, chats: Chats, rank: int) -> None:
    ranks, shared = ranks_of(fleet, "w0"), shared_by(fleet, "w0")
    _, stream = streaming_on(fleet, chats, "w0")
    os.kill(ranks[rank], signal.SIGKILL)
    assert_expected(stream.result(timeout=WAIT_S), LONG)
    assert_nothing_left(fleet, "w0", ranks, shared)


def test_rank_stopped_in_mid_stream(fleet: Fleet, chats: Chats) -> None:
    ranks, shared = ranks_of(fleet, "w0"), shared_by(fleet, "w0")

    def stopped() -> Future[Chat]:
        _, stream = try_to_stream_on(fleet, chats, "w0")
        os.kill(ranks[1], signal.SIGSTOP)
        if stream.done():
            os.kill(ranks[1], signal.SIGCONT)
            raise RequestEnded("the stream had ended when the rank was stopped")
        return stream

    assert_expected(before_it_ends(stopped).result(timeout=WAIT_S), LONG)
    fleet.processes["w0"].wait_for(r"rank 1 of 2 \(process \d+\) answers no more")
    assert_nothing_left(fleet, "w0", ranks, shared)


def test_worker_killed_in_mid_stream_leaves_no_rank(fleet: Fleet, chats: Chats) -> None:
    ranks, shared = ranks_of(fleet, "w0"), shared_by(fleet, "w0")
    _, stream = streaming_on(fleet, chats, "w0")
    # Kill only the worker; its ranks notice this themselves.
    os.kill(fleet.processes["w0"].pid, signal.SIGKILL)
    assert_expected(stream.result(timeout=WAIT_S), LONG)
    assert_nothing_left(fleet, "w0", ranks, shared)


def test_worker_killed_during_engine_start_leaves_no_rank(fleet: Fleet) -> None:
    """At that time a rank waits for the other one or loads its part of the model."""
    fleet.processes["w1"].kill()
    worker, meeting = fleet.restart("w1"), "world_size=2 rank="
    before = worker.text().count(meeting)
    wait_until(lambda: worker.text().count(meeting) > before, "a rank to wait for the other", START_S)
    ranks = [child.pid for child in psutil.Process(worker.pid).children(recursive=True)]
    os.kill(worker.pid, signal.SIGKILL)
    assert len(ranks) >= 2
    wait_until(lambda: not any(map(is_running, ranks)), "the ranks to end")


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("step", STEPS)
def test_rank_killed_at_a_migration_step(fleet: Fleet, chats: Chats, step: str, victim: str) -> None:
    worker = {"source": "w0", "target": "w1"}[victim]
    ranks, shared = ranks_of(fleet, worker), shared_by(fleet, worker)

    def held() -> tuple[Future[Chat], threading.Thread]:
        request, stream = try_to_stream_on(fleet, chats, "w0")
        return stream, fleet.hold_migration(request, "w1", step, ended=stream.done)

    stream, mover = before_it_ends(held)
    os.kill(ranks[1], signal.SIGKILL)
    fleet.disarm()
    assert_expected(stream.result(timeout=WAIT_S), LONG)
    assert_nothing_left(fleet, worker, ranks, shared)
    mover.join(timeout=WAIT_S)
    assert not mover.is_alive()
