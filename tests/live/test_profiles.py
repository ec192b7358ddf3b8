"""Profiles through real services: measured by a worker, stored in etcd, and used by Arrow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
import msgspec
import pytest
import pytest_asyncio

from frontend_svc.admission import OVERLOADED, Refusal
from scheduler_svc.settings import Settings
from tailrace.cluster import Pool
from tailrace.control.reported_cluster import PoolOrder
from tailrace.records import PROFILES, ProfileRecord
from tailrace.v1 import admin_pb2, profile_pb2, types_pb2
from tests.harness.tries import RequestEnded, before_they_end
from tests.live.fleet import Fleet
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from tailrace.v1.admin_pb2_grpc import AdminAsyncStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILLING = (Pool.PREFILL, Pool.DECODE_TO_PREFILL)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def remove_profiles(fleet: Fleet) -> AsyncIterator[None]:
    """Remove all profiles after a test."""
    yield
    for key in await fleet.store.get_prefix(PROFILES):
        await fleet.store.delete(key)


async def run_profile(
    fleet: Fleet, name: str, budget_s: float, force: bool = False
) -> list[profile_pb2.ProfileEvent]:
    """Profile an instance like `tailrace profile`; return the events."""
    request = admin_pb2.AdminProfileRequest(instance_id=name, budget_s=budget_s, force=force)

    async def once(admin: AdminAsyncStub) -> list[profile_pb2.ProfileEvent]:
        return [event async for event in admin.Profile(request, timeout=WAIT_S)]

    return await fleet.call(once)


async def set_admit(fleet: Fleet, admit: float) -> None:
    """Set up to which lateness requests are admitted."""
    request = admin_pb2.SetSloRequest(slo=admin_pb2.Slo(admit=admit))
    await fleet.call(lambda admin: admin.SetSlo(request, timeout=WAIT_S))


async def list_profiles(fleet: Fleet) -> list[profile_pb2.MeasuredProfile]:
    """Return the profiles like `tailrace get profiles`."""
    request = admin_pb2.ListProfilesRequest()
    reply = await fleet.call(lambda admin: admin.ListProfiles(request, timeout=WAIT_S))
    return list(reply.profiles)


async def kind_of(fleet: Fleet) -> str:
    """Return the profile kind of all instances of the fleet."""
    (kind,) = {info.profile_kind for info in (await fleet.instances()).values()}
    assert kind
    return kind


async def set_measured_time(fleet: Fleet, base_s: float) -> None:
    """Store a profile by which each prompt takes `base_s` seconds."""
    kind = await kind_of(fleet)
    if kind not in fleet.members.profiles:
        await run_profile(fleet, "w-0", 30.0)
        await fleet.wait_for_members(lambda m: kind in m.profiles)
    record = fleet.members.profiles[kind]
    curve = msgspec.structs.replace(record.ttft, base_s=base_s)
    changed = msgspec.structs.replace(record, ttft=curve)
    await fleet.store.put(f"{PROFILES}{kind}", msgspec.json.encode(changed))
    async with asyncio.timeout(WAIT_S):
        while [each.ttft.base_s for each in await list_profiles(fleet)] != [base_s]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_an_idle_instance_is_measured_for_all_of_its_kind(fleet: Fleet) -> None:
    submitted = await fleet.read_metric("tailrace_worker_submitted_requests_total")
    events = await run_profile(fleet, "w-1", 30.0)
    assert events[0].message == "warming up" and events[-1].HasField("profile")
    found = events[-1].profile
    assert found.kind == await kind_of(fleet) and found.instance_id == "w-1"
    assert found.decode.base_ms > 0 and found.decode.samples >= 3 and found.ttft.samples >= 3
    value = await fleet.store.get(f"{PROFILES}{found.kind}")
    assert value is not None
    record = msgspec.json.decode(value, type=ProfileRecord)
    assert record.profile.decode.base_ms == found.decode.base_ms
    await fleet.wait_for_members(lambda m: found.kind in m.profiles)
    # The probes are no requests: none is listed, and none was submitted.
    assert (await fleet.instances())["w-1"].running == 0
    assert await fleet.owners() == {}
    assert await fleet.read_metric("tailrace_worker_submitted_requests_total") == submitted


async def test_profiling_a_busy_instance_is_refused(fleet: Fleet) -> None:
    async def refused_while_busy() -> None:
        request = await fleet.send(60, 0, 300)
        await fleet.wait_for_tokens(request)
        owner = (await fleet.owners()).get(request)
        try:
            if owner is None:
                raise RequestEnded("it had ended before its instance was known")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await run_profile(fleet, owner, 3.0)
                # Nobody told this process in time that the instance is idle.
                if not fleet.running(request):
                    raise RequestEnded("it had ended before the instance was profiled")
        finally:
            await fleet.finish(request)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "carries 1 requests" in (refused.value.details() or "")

    await before_they_end(refused_while_busy)
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await run_profile(fleet, "w-9", 3.0)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_measured_profile_affects_arrows_decision(fleet: Fleet) -> None:
    await fleet.set_policy("arrow")
    await fleet.wait_for_members(lambda m: len(m.pools) == 4)

    def prefilling() -> int:
        return sum(pool in PREFILLING for pool in fleet.members.pools.values())

    assert prefilling() == 2
    # By the engine's own profile, a short prompt meets its SLO: no instance flips.
    on_time = await fleet.send(60, 0, 5)
    await fleet.finish(on_time)
    assert prefilling() == 2
    # At ten seconds per prompt, Alg. 1 flips a decode instance to prefill (Alg. 3).
    await set_measured_time(fleet, 10.0)
    late = await fleet.send(60, 0, 200)
    await fleet.wait_for_members(lambda m: sum(pool in PREFILLING for pool in m.pools.values()) == 3)
    # The pool changed in etcd without a drain.
    assert fleet.members.draining == frozenset()
    states = {info.state for info in (await fleet.instances()).values()}
    assert states == {types_pb2.INSTANCE_STATE_ACTIVE}
    await fleet.finish(late)


async def test_a_flip_is_a_compare_and_swap(fleet: Fleet) -> None:
    # Two schedulers saw the same pool: the second one changes nothing.
    first, second = Settings(fleet.store), Settings(fleet.store)
    await fleet.set_pool("w-0", types_pb2.POOL_DECODE)
    assert await first.swap_pools([PoolOrder("w-0", Pool.DECODE, Pool.DECODE_TO_PREFILL)]) == {"w-0"}
    assert not await second.swap_pools([PoolOrder("w-0", Pool.DECODE, Pool.PREFILL)])
    assert await fleet.store.get("pools/w-0") == b"decode_to_prefill"


async def test_a_late_request_is_refused_and_running_ones_are_not(fleet: Fleet) -> None:
    running = await fleet.send(60, 0, 300)
    await fleet.wait_for_tokens(running)
    # A prompt takes ten seconds, and one second is allowed.
    kind = await kind_of(fleet)
    if kind not in fleet.members.profiles:
        busy = set((await fleet.owners()).values())
        idle = next(name for name in fleet.names if name not in busy)
        await run_profile(fleet, idle, 30.0)
    await set_measured_time(fleet, 10.0)
    await set_admit(fleet, 0.5)
    try:
        await fleet.wait_for_members(lambda m: m.slo.admit == 0.5)
        async with asyncio.timeout(WAIT_S):
            # Repeat until the workers report the measured speed.
            while (end := await fleet.front.end_of(await fleet.send(60, 0, 5))).stop_reason is None:
                pass
        assert Refusal.decode(end.stop_reason) == OVERLOADED
        assert fleet.front.tokens[end.request_id] == []
        await fleet.finish(running)
    finally:
        await set_admit(fleet, 0.0)
    await fleet.wait_for_members(lambda m: m.slo.admit is None)
    await fleet.finish(await fleet.send(60, 0, 5))
