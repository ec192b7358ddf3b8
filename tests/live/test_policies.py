"""The mechanism of each paper, live: real services and front end, simulated engines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from tailrace.cluster import Pool
from tailrace.policy.cascade.layout import tiles
from tailrace.security.roles import Role
from tailrace.v1 import admin_pb2, migration_pb2, types_pb2, worker_pb2
from tailrace.v1.worker_pb2_grpc import WorkerStub
from tests.harness.fleet import request_had_ended
from tests.harness.tries import RequestEnded, before_they_end
from tests.live.fleet import Fleet
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from tailrace.v1.admin_pb2_grpc import AdminAsyncStub

pytestmark = [pytest.mark.fleet, pytest.mark.asyncio(loop_scope="module")]


async def test_pascal_migrates_requests_when_their_reasoning_ends(fleet: Fleet) -> None:
    # If the machine stalls, the pacer sees a missed SLO, and PASCAL may leave the request where it is.
    for _ in range(3):
        moved = await _reasoning_ends_beside_others(fleet)
        if moved:
            break
    assert "w-0" in {m.source_instance_id for m in moved} and {m.policy for m in moved} == {"pascal"}
    assert all(m.phase == types_pb2.PHASE_ANSWERING for m in moved)


async def _reasoning_ends_beside_others(fleet: Fleet) -> list[migration_pb2.MigrationRecord]:
    """Place four reasoning requests on one instance by round robin, and none elsewhere.

    The first to end its reasoning leaves; its answer is long, so that it does not finish before.
    """
    await fleet.set_policy("round_robin")
    lengths = [(60, 600, 60) if n % 4 == 0 else (60, 0, 700) for n in range(16)]
    lengths[0] = (60, 300, 900)
    requests = [await fleet.send(*each) for each in lengths]
    await fleet.set_policy("pascal")
    await fleet.finish(*requests)
    return await fleet.migrations("reasoning ended")


async def test_answers_and_moves_are_in_the_admin_api(fleet: Fleet) -> None:
    await fleet.set_policy("least_loaded")

    async def moved() -> tuple[str, str, str, admin_pb2.ListInstancesReply]:
        request_id = await fleet.send(60, 20, 900)
        await fleet.wait_for_tokens(request_id, 40)
        listed = await fleet.admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=WAIT_S)
        source = (await fleet.owners()).get(request_id, "")
        target = next(name for name in fleet.names if name != source)
        try:
            last = await _migrate(fleet, request_id, target)
        except RequestEnded:
            await fleet.finish(request_id)
            raise
        assert last.state == types_pb2.MIGRATION_STATE_COMMITTED, last
        return request_id, source, target, listed

    request_id, source, target, listed = await before_they_end(moved)
    before = _recent(listed, target).answers
    await fleet.finish(request_id)
    async with asyncio.timeout(WAIT_S):
        # The last report comes by the monitor.
        while _recent(listed, target).answers == before:
            listed = await fleet.admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=WAIT_S)
    shown = _recent(listed, target)
    assert shown.moves_in >= 1 and _recent(listed, source).moves_out >= 1
    for recent in (shown, listed.recent):
        assert 0.0 < recent.ttft_ms_p50 <= recent.ttft_ms_p99 and recent.tpot_ms_p50 > 0.0
        assert 0.0 <= recent.slo_attainment <= 1.0
    assert listed.recent.answers >= shown.answers and listed.recent.slo_attainment > 0.0


async def _migrate(fleet: Fleet, request_id: str, target: str) -> migration_pb2.MigrationRecord:
    """Migrate a request; return the last record. Raise RequestEnded if it had ended."""
    ordered = admin_pb2.AdminMigrateRequest(request_id=request_id, target_instance_id=target)

    async def once(admin: AdminAsyncStub) -> migration_pb2.MigrationRecord:
        return [record async for record in admin.Migrate(ordered, timeout=WAIT_S)][-1]

    try:
        last = await fleet.call(once)
    except grpc.aio.AioRpcError as refused:
        if refused.code() is grpc.StatusCode.NOT_FOUND:
            raise RequestEnded(str(refused.details())) from refused
        raise
    if request_had_ended(last):
        raise RequestEnded(last.error)
    return last


def _recent(listed: admin_pb2.ListInstancesReply, instance_id: str) -> admin_pb2.RecentFigures:
    return next(i.recent for i in listed.instances if i.instance_id == instance_id)


async def test_ares_rebalances_at_its_tick(fleet: Fleet) -> None:
    async def rebalanced() -> None:
        await fleet.set_policy("round_robin")
        # Round robin places all long requests on one instance.
        lengths = [(200, 0, 900) if n % 4 == 0 else (16, 0, 60) for n in range(16)]
        requests = [await fleet.send(*each) for each in lengths]
        try:
            await asyncio.gather(*(fleet.wait_for_tokens(r, 5) for r in requests))
            loaded = {owner for r, owner in (await fleet.owners()).items() if r in requests[::4]}
            await fleet.set_policy("ares")
            moved = await fleet.wait_for_migrations("rescheduling", requests)
        finally:
            await fleet.finish(*requests)
        assert {moved[0].source_instance_id} == loaded and moved[0].policy == "ares"

    await before_they_end(rebalanced)


async def test_arrow_flips_pools_in_etcd_without_a_drain(fleet: Fleet) -> None:
    await fleet.set_policy("arrow")
    await fleet.wait_for_members(lambda m: len(m.pools) == 4)
    first = dict(fleet.members.pools)
    assert sorted(first.values(), key=lambda p: p.value) == [Pool.DECODE] * 2 + [Pool.PREFILL] * 2

    # Decoding takes more than half of the capacity of two instances and nothing prefills: an idle prefill
    # instance flips.
    async def flipped() -> None:
        requests = [await fleet.send(300, 0, 500) for _ in range(10)]
        try:
            await fleet.wait_for_members(
                lambda m: sum(p is Pool.PREFILL for p in m.pools.values()) < 2, requests
            )
            assert fleet.members.draining == frozenset()
        finally:
            await fleet.finish(*requests)

    await before_they_end(flipped)
    assert (await fleet.migrations("prefill done"))[0].policy == "arrow"
    assert fleet.members.draining == frozenset()
    states = {info.state for info in (await fleet.instances()).values()}
    assert states == {types_pb2.INSTANCE_STATE_ACTIVE}


async def test_cascade_hands_over_a_request_that_outgrows_its_stage(fleet: Fleet) -> None:
    await fleet.set_stages(
        types_pb2.Stage(lo=0, hi=256, instance_ids=["w-0", "w-1"]),
        types_pb2.Stage(lo=256, hi=131_072, instance_ids=["w-2", "w-3"]),
    )
    await fleet.wait_for_members(lambda m: len(m.stages) == 2)
    await fleet.set_policy("cascade", rebalance="false")

    async def handed_over() -> list[migration_pb2.MigrationRecord]:
        # Long enough to be still running when a busy machine comes to move them.
        requests = [await fleet.send(100, 0, 1_000) for _ in range(4)]
        try:
            return await fleet.wait_for_migrations("length boundary", requests, 4)
        finally:
            await fleet.finish(*requests)

    moved = await before_they_end(handed_over)
    assert {m.source_instance_id for m in moved} <= {"w-0", "w-1"}
    assert {m.target_instance_id for m in moved} <= {"w-2", "w-3"}
    # The workers decided the target among themselves.
    await fleet.wait_for_metric(4, "tailrace_worker_offers_total", outcome="taken")


async def test_waiting_prompts_are_returned_and_placed_elsewhere(fleet: Fleet) -> None:
    """Only four of the eight fit for seconds. The others have no KV to migrate, and are placed again."""
    await fleet.set_stages(
        types_pb2.Stage(lo=0, hi=2_048, instance_ids=["w-0"]),
        types_pb2.Stage(lo=2_048, hi=131_072, instance_ids=["w-1", "w-2", "w-3"]),
    )
    await fleet.wait_for_members(lambda m: len(m.stages) == 2)
    before = len(await fleet.migrations())
    requests = await before_they_end(lambda: _handed_back(fleet))
    await asyncio.gather(*(fleet.wait_for_tokens(r) for r in requests[4:]))
    owners = await fleet.owners()
    assert {owners[r] for r in requests[4:] if r in owners} <= {"w-1", "w-2", "w-3"}
    await fleet.finish(*requests)
    assert len(await fleet.migrations()) == before


async def _handed_back(fleet: Fleet) -> list[str]:
    """Have the four of eight prompts returned that wait. Raise RequestEnded if not all four others run then,
    as the machine is too busy; or if those were not all placed by the scheduler."""
    await fleet.set_policy("cascade", rebalance="false")
    own = fleet.placed_by_front_end()
    requests = [await fleet.send(900, 0, 600) for _ in range(8)]
    await asyncio.gather(*(fleet.wait_for_tokens(r) for r in requests[:4]))
    owners = await fleet.owners()
    if fleet.placed_by_front_end() == own:
        assert set(owners.values()) - {""} == {"w-0"}
    # On a busy machine a tick of cascade sees a returned prompt wait outside its stage, and sends it back.
    await fleet.set_policy("least_loaded")
    worker = WorkerStub(fleet.channels.get(fleet.members.instances["w-0"].address, Role.WORKER))
    request = worker_pb2.HandBackPromptsRequest(request_ids=requests)
    reply = await worker.HandBackPrompts(request, timeout=WAIT_S)
    if fleet.placed_by_front_end() != own or len(fleet.running(*requests[:4])) < 4:
        await fleet.finish(*requests)
        raise RequestEnded("not just four prompts waited")
    # Running requests stay.
    assert reply.returned == 4
    return requests


async def test_cascade_writes_planned_stages_to_etcd(fleet: Fleet) -> None:
    # For a small fleet, stages are planned from a few seconds of requests, two per instance; stages of one
    # instance are planned whatever the gain.
    await fleet.set_policy("cascade", layout="chain", plan_requests="2", replan_s="3")
    requests: list[str] = []
    async with asyncio.timeout(WAIT_S):
        while not fleet.members.stages:
            requests.append(await fleet.send(400 if len(requests) % 4 else 16, 0, 20))
            await fleet.wait_for_tokens(requests[-1], 20)
    stages = fleet.members.stages
    assert tiles(stages, 131_072) and {n for s in stages for n in s.instance_ids} == set(fleet.names)
    await fleet.finish(*requests)
