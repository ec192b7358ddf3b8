"""A live run, recorded, comes out the same when it is replayed, to the last decision."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import grpc
import pytest

from tailrace.control.recording import Decided, decode
from tailrace.control.replay import Replay, Replayed
from tailrace.control.shadow import Comparison, Shadow, Verdict
from tailrace.records import PolicyRecord
from tailrace.slo import Slo
from tailrace.v1 import admin_pb2
from tests.live.fleet import WAIT_S, Fleet

pytestmark = [pytest.mark.fleet, pytest.mark.asyncio(loop_scope="module")]

POLICIES = ("pascal", "ares", "arrow", "cascade", "tailrace")


async def record(fleet: Fleet, lines: list[bytes], began: asyncio.Event) -> None:
    """Until cancelled by the event loop or the longest recording is over."""
    async for told in fleet.admin.Record(admin_pb2.RecordRequest(seconds=WAIT_S), timeout=2 * WAIT_S):
        lines += told.lines
        began.set()


async def recorded(fleet: Fleet, policy: str) -> list[bytes]:
    """Requests that are there before the recording begins, and more that come meanwhile."""
    await fleet.set_policy(policy)
    lengths = itertools.cycle([(40, 0, 220), (200, 150, 60), (16, 60, 300), (600, 0, 40), (300, 0, 500)])
    before = [await fleet.send(*next(lengths)) for _ in range(8)]
    await asyncio.gather(*(fleet.running(request, 5) for request in before))
    lines: list[bytes] = []
    began = asyncio.Event()
    recording = asyncio.create_task(record(fleet, lines, began))
    async with asyncio.timeout(WAIT_S):
        await began.wait()
    after = [await fleet.send(*next(lengths)) for _ in range(16)]
    await fleet.finish(*before, *after)
    recording.cancel()
    await asyncio.wait([recording])
    return lines


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_decision_comes_out_the_same(fleet: Fleet, policy: str) -> None:
    lines = await recorded(fleet, policy)
    replayed: list[Replayed] = []
    run = Replay(decode(lines), replayed.append)
    shadows = {name: Counter[Verdict]() for name in POLICIES}

    def counting(name: str) -> Shadow:
        def count(compared: Comparison) -> None:
            shadows[name][compared.verdict] += 1

        return Shadow(PolicyRecord(name=name), Slo(), count)

    for name in POLICIES:
        run.watch(counting(name))
    run.run()
    assert [r for r in replayed if not r.same] == []
    assert {r.policy for r in replayed} == {policy}
    assert run.decisions["place"] == 16
    assert len(replayed) == sum(isinstance(event, Decided) for event in decode(lines))
    # In its own shadow it does what it does.
    assert set(shadows[policy]) == {Verdict.SAME}
    assert all(sum(counts.values()) == len(replayed) for counts in shadows.values())
    assert all(Verdict.FAILED not in counts for counts in shadows.values())
    # Of the requests there is what they are called and how long they are, and not what they say.
    assert not any(b"think" in line for line in lines)


async def test_a_shadow_is_counted_and_changes_nothing(fleet: Fleet) -> None:
    admin = fleet.admin
    set_ = await admin.SetShadow(admin_pb2.SetShadowRequest(name="least_loaded"), timeout=WAIT_S)
    assert set_.previous == ""
    requests = [await fleet.send(40, 0, 40) for _ in range(6)]
    await fleet.finish(*requests)
    shadow = await admin.GetShadow(admin_pb2.GetShadowRequest(), timeout=WAIT_S)
    assert (shadow.name, shadow.policy) == ("least_loaded", "round_robin")
    placed = next(count for count in shadow.counts if count.point == "place")
    assert placed.same + placed.different == 6 and not placed.failed
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await admin.SetShadow(admin_pb2.SetShadowRequest(name="nobody"), timeout=WAIT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    gone = await admin.SetShadow(admin_pb2.SetShadowRequest(), timeout=WAIT_S)
    assert gone.previous == "least_loaded"
    assert (await admin.GetShadow(admin_pb2.GetShadowRequest(), timeout=WAIT_S)).name == ""


async def test_one_recording_at_a_time(fleet: Fleet) -> None:
    lines: list[bytes] = []
    began = asyncio.Event()
    recording = asyncio.create_task(record(fleet, lines, began))
    async with asyncio.timeout(WAIT_S):
        await began.wait()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await record(fleet, [], asyncio.Event())
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    recording.cancel()
    await asyncio.wait([recording])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in fleet.admin.Record(admin_pb2.RecordRequest(), timeout=WAIT_S):
            pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
