"""Replaying the recording of a live run gives the same decisions."""

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
from tests.harness.tries import TRIES
from tests.live.fleet import Fleet
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.fleet, pytest.mark.asyncio(loop_scope="module")]

POLICIES = ("pascal", "ares", "arrow", "cascade", "tailrace")


async def record(fleet: Fleet, lines: list[bytes], began: asyncio.Event) -> None:
    """Record until cancelled or until the maximum duration."""
    async for reply in fleet.admin.Record(admin_pb2.RecordRequest(seconds=WAIT_S), timeout=2 * WAIT_S):
        lines += reply.lines
        began.set()


async def record_run(fleet: Fleet, policy: str) -> list[bytes]:
    """Return a recording with requests that started before it and requests that arrive during it, all placed
    by the scheduler."""
    await fleet.set_policy(policy)
    for _ in range(TRIES):
        own = fleet.placed_by_front_end()
        lines = await record_once(fleet)
        # On a busy machine it may answer too late.
        if fleet.placed_by_front_end() == own:
            break
    return lines


async def record_once(fleet: Fleet) -> list[bytes]:
    """Return a recording of such requests."""
    lengths = itertools.cycle([(40, 0, 220), (200, 150, 60), (16, 60, 300), (600, 0, 40), (300, 0, 500)])
    before = [await fleet.send(*next(lengths)) for _ in range(8)]
    await asyncio.gather(*(fleet.wait_for_tokens(request, 5) for request in before))
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
async def test_a_replay_makes_the_same_decisions(fleet: Fleet, policy: str) -> None:
    lines = await record_run(fleet, policy)
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
    # As its own shadow, the policy decides the same.
    assert set(shadows[policy]) == {Verdict.SAME}
    assert all(sum(counts.values()) == len(replayed) for counts in shadows.values())
    assert all(Verdict.FAILED not in counts for counts in shadows.values())
    # The recording has IDs and lengths of requests, but no content.
    assert not any(b"think" in line for line in lines)


async def test_a_shadow_is_counted_and_has_no_effect(fleet: Fleet) -> None:
    admin = fleet.admin

    async def set_shadow(name: str = "") -> admin_pb2.SetShadowReply:
        request = admin_pb2.SetShadowRequest(name=name)
        return await fleet.call(lambda admin: admin.SetShadow(request, timeout=WAIT_S))

    async def get_shadow() -> admin_pb2.Shadow:
        request = admin_pb2.GetShadowRequest()
        return await fleet.call(lambda admin: admin.GetShadow(request, timeout=WAIT_S))

    for _ in range(TRIES):
        own = fleet.placed_by_front_end()
        assert (await set_shadow("least_loaded")).previous == ""
        requests = [await fleet.send(40, 0, 40) for _ in range(6)]
        await fleet.finish(*requests)
        shadow = await get_shadow()
        # On a busy machine the scheduler may answer too late.
        if fleet.placed_by_front_end() == own:
            break
        await set_shadow()
    assert (shadow.name, shadow.policy) == ("least_loaded", "round_robin")
    placed = next(count for count in shadow.counts if count.point == "place")
    assert placed.same + placed.different == 6 and not placed.failed
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await admin.SetShadow(admin_pb2.SetShadowRequest(name="nobody"), timeout=WAIT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await set_shadow()).previous == "least_loaded"
    assert (await get_shadow()).name == ""


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
