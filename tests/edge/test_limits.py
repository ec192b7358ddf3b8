"""What an edge holds for a request until Envoy says that it has ended, and what front ends report."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from edge_svc.configuration import Bounds
from edge_svc.ends import ends
from edge_svc.limits import Limits
from edge_svc.usage import Usage
from tailrace.service.channels import Channels
from tailrace.tenancy import pace as pace_module
from tailrace.tenancy.body import LimitRefusal
from tailrace.tenancy.demand import Demand
from tailrace.tenancy.keys import Tenant
from tailrace.tenancy.pace import Pace
from tailrace.v1 import usage_pb2
from tests.waiting import WAIT_S

ONE = Tenant(name="a", concurrency=1)
SMALL = Demand(text_bytes=10)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody be alone because this process waits for a core."""
    monkeypatch.setattr(pace_module, "ALONE_AFTER_S", WAIT_S)


async def test_a_question_that_comes_after_its_requests_end_counts_nothing() -> None:
    """Envoy has ended a request whose client left, and the edge still reads what it asked."""
    limits = Limits(Bounds(), has_tenants=True)
    limits.end("gone", 0)
    late = limits.open("gone", ONE)
    await limits.check(late, 0)
    await limits.begin(late, SMALL, tokenizes=False)
    assert limits.opened == 0
    other = limits.open("other", ONE)
    await limits.begin(other, SMALL, tokenizes=False)
    third = limits.open("third", ONE)
    with pytest.raises(LimitRefusal, match="1 of 1 sequences"):
        await limits.check(third, 0)


async def test_the_next_request_waits_for_the_end_of_the_one_before_it() -> None:
    limits = Limits(Bounds(), has_tenants=True)
    await limits.begin(limits.open("first", ONE), SMALL, tokenizes=False)
    second = limits.open("second", ONE)
    waiting = asyncio.create_task(limits.begin(second, SMALL, tokenizes=False))
    await asyncio.sleep(0)
    assert not waiting.done()
    limits.end("first", 200)
    await waiting
    assert second.sequences == 1


async def test_bodies_that_arrive_are_bounded_for_each_tenant() -> None:
    limits = Limits(Bounds(max_bodies_bytes=1 << 20), has_tenants=True)
    a, b = Tenant(name="a"), Tenant(name="b")
    for number in range(512):
        await limits.check(limits.open(f"a{number}", a), 0)
    with pytest.raises(LimitRefusal, match="still arriving of one key's tenant"):
        await limits.check(limits.open("one more", a), 0)
    await limits.check(limits.open("b0", b), 0)
    with pytest.raises(LimitRefusal, match="bytes of request bodies of one key's tenant"):
        await limits.hold(limits.open("a0", a), 600 << 10)
    for number in range(512):
        limits.end(f"a{number}", 200)
    # What is announced counts before it is read.
    await limits.check(limits.open("again", a), 500 << 10)
    with pytest.raises(LimitRefusal, match="bytes of request bodies of one key's tenant"):
        await limits.check(limits.open("another", a), 100 << 10)


async def test_one_tenants_requests_leave_others_most_of_the_time() -> None:
    limits = Limits(Bounds(), has_tenants=True)
    a, b = Tenant(name="a"), Tenant(name="b")
    loop = asyncio.get_running_loop()

    async def begin(name: str, tenant: Tenant, demand: Demand) -> None:
        await limits.begin(limits.open(name, tenant), demand, tokenizes=True)

    large = Demand(loop_s=0.05)
    await begin("alone", a, large)
    await begin("of another", b, SMALL)
    began_s = loop.time()
    await begin("first", a, large)
    # It waits until the one before it has taken a quarter of the time.
    await begin("second", a, SMALL)
    assert loop.time() - began_s >= 0.2
    await begin("largest", a, Demand(loop_s=5.0))
    with pytest.raises(LimitRefusal, match="their share"):
        await begin("beyond", a, SMALL)


async def test_only_so_many_requests_of_a_tenant_wait_for_their_times() -> None:
    pace = Pace()
    await pace.wait("b", 0.0)
    waiting = [asyncio.create_task(pace.wait("a", 1e-3)) for _ in range(600)]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    refused = [task.result() for task in done if task.result() is not None]
    assert refused and all(each is not None and each.retry_after_s >= 1 for each in refused)
    assert await asyncio.wait_for(pace.wait("c", 1e-3), WAIT_S) is None
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await pace.wait("a", 0.0) is None


async def test_lines_of_a_pipe_in_pieces(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    path = tmp_path / "ended"
    with (
        ends(path, lambda ticket, status: seen.append((ticket, status))),
        path.open("wb", buffering=0) as pipe,
    ):
        for piece in (b"one 200\ntw", b"o 0\n- 404\nbad\n", b"x" * 5_000, b"\nlast 503\n"):
            pipe.write(piece)
            await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):
            while ("last", 503) not in seen:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert seen == [("one", 200), ("two", 0), ("-", 404), ("last", 503)]


async def test_tokens_are_charged_once() -> None:
    charged: list[tuple[str, int]] = []
    usage = Usage(
        Channels(), lambda tenant, tokens: charged.append((tenant, tokens)), CollectorRegistry(), True
    )
    for run, tokens in (("r", {"a": 5}), ("r", {"a": 9}), ("s", {"a": 2}), ("r", {"a": 9, "b": 1})):
        usage._heard("x:1", usage_pb2.UsageReport(run=run, tokens=tokens, knows_tenants=True))
    # Of what was used before the edge listened, nothing.
    assert charged == [("a", 4), ("b", 1)]
    await usage.close()


async def test_an_edge_is_unready_if_all_its_front_ends_are() -> None:
    usage = Usage(Channels(), lambda tenant, tokens: None, CollectorRegistry(), False)
    # Nobody listens there.
    usage.follow({"rust-a": ["127.0.0.1:1", "127.0.0.1:2"], "python-b": ["127.0.0.1:3"]})

    def hear(address: str, unready: str) -> str:
        usage._heard(address, usage_pb2.UsageReport(run=address, unready=unready))
        return usage.unready()

    assert [hear(f"127.0.0.1:{n}", "full") for n in (1, 2)] == ["", ""], "the third has said nothing yet"
    assert hear("127.0.0.1:3", "none") == "full"
    assert hear("127.0.0.1:2", "") == ""
    usage.follow({"python-b": ["127.0.0.1:3"]})
    assert usage.unready() == "none"
    usage.follow({})
    assert usage.unready() == ""
    await usage.close()


async def test_a_clusters_context_is_its_shortest_known_one() -> None:
    usage = Usage(Channels(), lambda tenant, tokens: None, CollectorRegistry(), True)
    # Nobody listens there.
    usage.follow({"rust-a": ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"], "rust-b": ["127.0.0.1:4"]})
    for address, context in (("127.0.0.1:1", 0), ("127.0.0.1:2", 4_096), ("127.0.0.1:3", 8_192)):
        usage._heard(address, usage_pb2.UsageReport(run=address, context_tokens=context, knows_tenants=True))
    assert (usage.context_tokens("rust-a"), usage.context_tokens("rust-b")) == (4_096, 0)
    await usage.close()
