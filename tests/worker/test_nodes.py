"""The meeting of an engine's nodes over loopback: who takes part, who is missing, and who is gone.

tests/e2e/two_nodes.py has real engines.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator

import pytest
from click.testing import CliRunner

from tailrace.cli.main import main
from tests.counting import failures_of
from tests.ports import free_port
from tests.waiting import WAIT_S
from worker_agent.engine.errors import EngineSettingError
from worker_agent.parallel.node_command import NodeRefused, follow, join
from worker_agent.parallel.node_gathering import Nodes, NodeStream, Start
from worker_agent.parallel.node_span import NodeSpan, read_span, worker_span

VLLM = "0.32.0"
# No test waits for it to pass.
LONG_S = WAIT_S


class Log(logging.Handler):
    """What the meeting logs."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        self._more = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self._text += record.getMessage()
        self._more.set()

    async def wait_for(self, part: str) -> None:
        while part not in self._text:
            self._more.clear()
            await self._more.wait()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Log]:
    handler, logger = Log(), logging.getLogger("worker_agent.parallel.node_gathering")
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture
def span() -> NodeSpan:
    return NodeSpan(nodes=3, node=0, local_ranks=2, address="127.0.0.1", port=free_port())


@pytest.fixture
async def nodes(span: NodeSpan) -> AsyncIterator[Nodes]:
    gathered = Nodes(span, VLLM)
    yield gathered
    await gathered.close()


def joining(span: NodeSpan, node: int, vllm: str = VLLM) -> asyncio.Task[tuple[NodeStream, Start]]:
    return asyncio.create_task(join(span.meeting, node, vllm, LONG_S))


async def together(span: NodeSpan, nodes: Nodes) -> list[NodeStream]:
    """Have both nodes join, and start."""
    tasks = [joining(span, node) for node in (1, 2)]
    await nodes.gather(LONG_S)
    nodes.start(b"settings", "model")
    joined = await asyncio.gather(*tasks)
    assert [start for _, start in joined] == [Start(b"settings", "model")] * 2
    return [stream for stream, _ in joined]


async def test_nodes_learn_the_settings_and_how_the_engine_fares(span: NodeSpan, nodes: Nodes) -> None:
    streams = await together(span, nodes)
    meetings: list[str] = []
    followers = [asyncio.create_task(follow(stream, meetings.append)) for stream in streams]
    nodes.loaded({1: "one", 2: "two"})
    await nodes.stop()
    assert await asyncio.gather(*followers) == [True, True]
    assert sorted(meetings) == ["one", "two"]
    assert not nodes.lost.done()


async def test_port_is_free_once_all_have_joined(span: NodeSpan, nodes: Nodes) -> None:
    """Rank 0 listens there next, while the connections of the nodes stay open."""
    await together(span, nodes)
    server = await asyncio.start_server(lambda reader, writer: None, span.address, span.port)
    server.close()


async def test_a_node_may_come_before_the_worker_listens(span: NodeSpan, nodes: Nodes) -> None:
    early = joining(span, 1)
    # What listens there before is not a worker.
    closed = asyncio.Event()

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        closed.set()

    server = await asyncio.start_server(close, span.address, span.port)
    await closed.wait()
    server.close()
    late = joining(span, 2)
    await nodes.gather(LONG_S)
    nodes.start(b"", "")
    await asyncio.gather(early, late)


async def test_lost_node_is_named(span: NodeSpan, nodes: Nodes) -> None:
    streams = await together(span, nodes)
    streams[1].close()
    assert await nodes.lost == "node 2 of 3 (127.0.0.1) is gone"


async def test_a_watch_of_a_node_that_fails_is_counted_and_goes_on(
    span: NodeSpan, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, failed = NodeStream.wait_closed, asyncio.Event()

    async def fail_first(stream: NodeStream) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("nobody foresaw this")
        await wait(stream)

    monkeypatch.setattr(NodeStream, "wait_closed", fail_first)
    before = failures_of("nodes")
    streams = await together(span, nodes)
    streams[0].close()
    assert (await asyncio.wait_for(nodes.lost, WAIT_S)).startswith("node ")
    assert failures_of("nodes") == before + 1


async def test_lost_worker_is_noticed(span: NodeSpan, nodes: Nodes) -> None:
    streams = await together(span, nodes)
    await nodes.close()
    assert not await follow(streams[0], lambda meeting: None)


async def test_missing_nodes_are_named(span: NodeSpan, nodes: Nodes) -> None:
    present = joining(span, 1)
    said = "nodes 1, 2 of 3"
    async with asyncio.timeout(WAIT_S):
        # On a busy machine, the other one may not come within a second either.
        while said.startswith("nodes 1, 2 of 3"):
            with pytest.raises(RuntimeError) as caught:
                await nodes.gather(1.0)
            said = str(caught.value)
    assert re.match(r"nodes 2 of 3 did not join at 127\.0\.0\.1:\d+ within 1 s: run", said)
    present.cancel()


async def test_a_node_that_leaves_early_may_come_back(span: NodeSpan, nodes: Nodes, log: Log) -> None:
    gathering = asyncio.create_task(nodes.gather(LONG_S))
    first = joining(span, 1)
    await log.wait_for("node 1 of 3 joined")
    first.cancel()
    await asyncio.wait({first})
    tasks = [joining(span, 2)]
    await log.wait_for("left again")
    tasks.append(joining(span, 1))
    await gathering
    nodes.start(b"", "")
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("node", "vllm", "reason"),
    [
        (3, VLLM, r"--node 3: with nnodes 3, nodes besides the worker are 1 to 2"),
        (1, VLLM, r"--node 1: has joined from 127\.0\.0\.1 already"),
        (2, "0.31.0", r"vllm 0\.31\.0 there, 0\.32\.0 here"),
    ],
)
async def test_refused_node_is_told_why(
    span: NodeSpan, nodes: Nodes, log: Log, node: int, vllm: str, reason: str
) -> None:
    gathering = asyncio.create_task(nodes.gather(LONG_S))
    present = joining(span, 1)
    await log.wait_for("node 1 of 3 joined")
    with pytest.raises(NodeRefused, match=f"refused: {reason}"):
        await join(span.meeting, node, vllm, LONG_S)
    for task in (gathering, present):
        task.cancel()


async def test_other_programs_are_turned_away(span: NodeSpan, nodes: Nodes, log: Log) -> None:
    gathering = asyncio.create_task(nodes.gather(LONG_S))
    await log.wait_for("waiting for nodes 1, 2")
    reader, writer = await asyncio.open_connection(span.address, span.port)
    writer.write(b"\x05\x00\x00\x00hello")
    assert await reader.read() == b""
    await log.wait_for("is no `tailrace serve ranks`")
    writer.close()
    gathering.cancel()


async def test_node_without_a_worker_gives_up() -> None:
    meeting = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        NodeRefused, match=rf"no engine started at {meeting} within 1 s: --worker is the worker's"
    ):
        await join(meeting, 1, VLLM, 1.0)


async def test_taken_port_is_named(span: NodeSpan, nodes: Nodes) -> None:
    server = await asyncio.start_server(lambda reader, writer: None, span.address, span.port)
    with pytest.raises(EngineSettingError, match=rf"master_port {span.port}: in use on 127\.0\.0\.1"):
        await nodes.gather(LONG_S)
    server.close()


async def test_foreign_address_is_named() -> None:
    # TEST-NET-1 (RFC 5737).
    span = NodeSpan(nodes=2, node=0, local_ranks=1, address="192.0.2.1", port=free_port())
    with pytest.raises(EngineSettingError, match=r"master_addr 192\.0\.2\.1: not an address of this machine"):
        await Nodes(span, VLLM).gather(LONG_S)


def test_span_of_two_nodes() -> None:
    arguments = {
        "tensor_parallel_size": 4,
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "::1",
        "master_port": 2,
    }
    span = read_span(arguments)
    assert span == NodeSpan(nodes=2, node=1, local_ranks=2, address="::1", port=2)
    assert span.meeting == "[::1]:2"
    assert [span.of_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert read_span({"tensor_parallel_size": 4}) is None


TWO = {"tensor_parallel_size": 2, "nnodes": 2}
MET = {"master_addr": "127.0.0.1", "master_port": 29_600}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"nnodes": 0}, "nnodes 0: a number of machines expected"),
        ({"node_rank": 1}, "node_rank 1: without nnodes, the engine is on this machine alone"),
        ({**TWO, **MET, "node_rank": 2}, "node_rank 2: with nnodes 2, nodes are 0 to 1"),
        (
            {**TWO, **MET, "node_rank": 1},
            "node_rank 1: a worker is node 0; another machine runs `tailrace serve ranks --worker "
            "127.0.0.1:29600 --node 1`",
        ),
        (
            {**MET, "nnodes": 2, "tensor_parallel_size": 3},
            "nnodes 2: does not divide tensor_parallel_size 3 x pipeline_parallel_size 1, and every node has "
            "as many ranks",
        ),
        (TWO, "nnodes 2: master_addr is not set: the address of the worker's machine for the other nodes"),
        (
            {**TWO, "master_addr": "127.0.0.1"},
            "nnodes 2: master_port is not set: a port of 127.0.0.1 for the other nodes",
        ),
        ({**TWO, **MET, "master_port": 70_000}, "master_port 70000: a port is at most 65535"),
    ],
)
def test_settings_that_do_not_fit_together(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(EngineSettingError) as error:
        worker_span(arguments)
    assert str(error.value) == said


@pytest.mark.parametrize(
    "arguments",
    [
        "ranks --worker 192.0.2.1:29600 --node 1",
        "worker --tensor-parallel-size 2 --nnodes 2 --master-addr 192.0.2.1 --master-port 29600",
        "worker --data-parallel-size 2 --data-parallel-rank 0 "
        "--data-parallel-address 192.0.2.1 --data-parallel-rpc-port 29600",
    ],
)
def test_networks_are_trusted_only_if_told_so(arguments: str) -> None:
    result = CliRunner().invoke(main, ["serve", *arguments.split()])
    assert result.exit_code == 2
    assert "192.0.2.1:29600: vLLM's connections between the nodes" in " ".join(result.stderr.split())
