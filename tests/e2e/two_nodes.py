"""Run by test_nodes.py in namespaces of its own: a worker here, its engine's other rank in a second network
namespace, and a worker with one device.

Requests leave the former by replay. What it computes is compared with the known answers of one device.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from examples.fleet import Chat
from tailrace.tiny.task import task
from tailrace.v1 import migration_pb2, types_pb2
from tests.e2e.test_ranks import is_running, streaming_on, try_to_stream_on, wait_decoding
from tests.harness.chats import Chats, assert_expected
from tests.harness.fleet import Fleet
from tests.harness.namespaces import ip, prepare, run
from tests.harness.processes import tailrace, wait_until
from tests.harness.tries import before_it_ends
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NODE = "node1"
WORKER_ADDRESS, NODE_ADDRESS, PORT = "10.77.0.1", "10.77.0.2", 29_600
LINK = "nodes0"
START_S = 400
LONG = task("wxyz", 120, 100)
SHORT = [task(letters, 12, 8) for letters in ("abcd", "bcde", "cdef", "wxyz")]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet whose only worker spans two nodes."""
    prepare()
    # Others' files, whose processes are not visible here, would look unused.
    run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    ip("netns", "add", NODE)
    ip("link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", NODE)
    for address, where in ((WORKER_ADDRESS, []), (NODE_ADDRESS, ["-n", NODE])):
        ip(*where, "address", "add", f"{address}/24", "dev", LINK)
        ip(*where, "link", "set", LINK, "up")
        ip(*where, "link", "set", "lo", "up")
    fleet = Fleet(tmp_path_factory.mktemp("nodes"), "vllm")
    fleet.forks_workers = False
    try:
        fleet.start_control()
        options = ["--tensor-parallel-size", "2", "--kv-blocks", "512", "--insecure"]
        options += ["--nnodes", "2", "--master-addr", WORKER_ADDRESS, "--master-port", str(PORT)]
        fleet.start_worker("w0", options, wait=False)
        ranks = ["serve", "ranks", "--worker", f"{WORKER_ADDRESS}:{PORT}", "--node", "1", "--insecure"]
        inside = ["ip", "netns", "exec", NODE, *tailrace(*ranks)]
        fleet.start_command(NODE, inside, {"OMP_NUM_THREADS": "1"})
        fleet.wait_healthy("w0", START_S)
        fleet.start_frontend()
        fleet.wait_instances(["w0"])
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def fleet(session: Fleet) -> Fleet:
    """The fleet with a worker on one device besides, complete before each test."""
    if "w1" not in session.processes:
        session.start_worker("w1", ["--kv-blocks", "512"])
    session.repair(START_S)
    session.wait_instances(["w0", "w1"])
    return session


@pytest.fixture
def chats(session: Fleet) -> Iterator[Chats]:
    clients = Chats(session.http)
    yield clients
    clients.close()


def ranks_of(fleet: Fleet) -> list[int]:
    return [rank.process for rank in fleet.instances()["w0"].ranks]


def unused_memory() -> set[str]:
    """Return the names of shared memory files that no process has mapped."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= {line.rpartition("/dev/shm/")[2] for line in maps.read_text().splitlines()}
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names - mapped if name.startswith(("psm_", "vllm_dist_"))}


def assert_nothing_left(fleet: Fleet, ranks: list[int], left: set[str]) -> None:
    """Check that the worker and the other node exit by themselves, with their ranks and shared memory."""
    wait_until(lambda: not fleet.processes["w0"].alive, "w0 to end")
    wait_until(lambda: not fleet.processes[NODE].alive, f"{NODE} to end")
    wait_until(lambda: not any(map(is_running, ranks)), "the ranks to end")
    wait_until(lambda: unused_memory() <= left, "shared memory to be freed")


def test_streams_equal_those_of_one_device(session: Fleet, chats: Chats) -> None:
    """The tiny model's answers are known, and no other worker runs yet."""
    streams = chats.run_all([each.prompt for each in SHORT])
    for chat, expected in zip(streams, SHORT, strict=True):
        assert_expected(chat, expected)


def test_instance_says_how_requests_migrate_and_where_its_ranks_are(fleet: Fleet) -> None:
    instance = fleet.instances()["w0"]
    assert (instance.way, instance.way_reason) == (types_pb2.WAY_REPLAY, "ranks on 2 nodes")
    assert [rank.hardware.partition(":")[0] for rank in instance.ranks] == ["node 0", "node 1"]


def test_requests_move_by_replay(fleet: Fleet, chats: Chats) -> None:
    def moved() -> tuple[Future[Chat], list[migration_pb2.MigrationRecord]]:
        request, stream = try_to_stream_on(fleet, chats, "w0")
        wait_decoding(fleet, request, "w0", stream)
        records = [fleet.move(request, "w1")]
        wait_decoding(fleet, request, "w1", stream)
        return stream, [*records, fleet.move(request, "w0")]

    stream, records = before_it_ends(moved)
    assert_expected(stream.result(timeout=WAIT_S), LONG)
    assert [record.way for record in records] == [types_pb2.WAY_REPLAY] * 2
    assert [record.way_reason for record in records] == [
        "source: ranks on 2 nodes",
        "target: ranks on 2 nodes",
    ]


def test_rank_on_the_other_node_killed(fleet: Fleet, chats: Chats) -> None:
    _, stream = streaming_on(fleet, chats, "w0")
    ranks, before = ranks_of(fleet), unused_memory()
    os.kill(ranks[1], signal.SIGKILL)
    assert_expected(stream.result(timeout=WAIT_S), LONG)
    fleet.processes[NODE].wait_for(rf"rank 1 \(process {ranks[1]}\) is gone")
    assert_nothing_left(fleet, ranks, before)


def test_rank_killed_while_the_engine_is_idle(fleet: Fleet) -> None:
    """No step fails then: the worker knows it from the other node."""
    ranks, before = ranks_of(fleet), unused_memory()
    os.kill(ranks[1], signal.SIGKILL)
    fleet.processes["w0"].wait_for(rf"node 1 of 2 \({NODE_ADDRESS}\) is gone")
    assert_nothing_left(fleet, ranks, before)


def test_other_node_killed(fleet: Fleet, chats: Chats) -> None:
    _, stream = streaming_on(fleet, chats, "w0")
    ranks, before = ranks_of(fleet), unused_memory()
    os.kill(fleet.processes[NODE].pid, signal.SIGKILL)
    assert_expected(stream.result(timeout=WAIT_S), LONG)
    assert_nothing_left(fleet, ranks, before)


def test_worker_killed(fleet: Fleet, chats: Chats) -> None:
    _, stream = streaming_on(fleet, chats, "w0")
    ranks, before = ranks_of(fleet), unused_memory()
    os.kill(fleet.processes["w0"].pid, signal.SIGKILL)
    assert_expected(stream.result(timeout=WAIT_S), LONG)
    fleet.processes[NODE].wait_for(rf"the worker at {WORKER_ADDRESS}:{PORT} is gone")
    assert_nothing_left(fleet, ranks, before)


def test_network_between_the_nodes_fails(fleet: Fleet, chats: Chats) -> None:
    _, stream = streaming_on(fleet, chats, "w0")
    ranks, before = ranks_of(fleet), unused_memory()
    # Its packets vanish: no end learns of it from the other.
    ip("-n", NODE, "link", "set", LINK, "down")
    try:
        assert_expected(stream.result(timeout=WAIT_S), LONG)
        assert_nothing_left(fleet, ranks, before)
    finally:
        ip("-n", NODE, "link", "set", LINK, "up")


def test_other_node_killed_while_the_engine_loads(fleet: Fleet) -> None:
    fleet.processes["w0"].kill()
    wait_until(lambda: not fleet.processes[NODE].alive, f"{NODE} to end")
    joined = "node 1 of 2 joined"
    before = fleet.processes["w0"].text().count(joined)
    worker, node = fleet.restart("w0"), fleet.restart(NODE)
    wait_until(lambda: worker.text().count(joined) > before, joined, START_S)
    ranks = [child.pid for child in psutil.Process(worker.pid).children(recursive=True)]
    node.kill()
    worker.wait_for(r"vLLM did not start: node 1 of 2 .* is gone")
    wait_until(lambda: not worker.alive, "w0 to end")
    wait_until(lambda: not any(map(is_running, ranks)), "the ranks to end")


def test_worker_stopped_in_order(fleet: Fleet) -> None:
    ranks, before = ranks_of(fleet), unused_memory()
    assert fleet.processes["w0"].stop() == 0
    fleet.processes[NODE].wait_for("the worker has stopped its engine")
    assert_nothing_left(fleet, ranks, before)
