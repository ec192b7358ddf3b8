"""A worker that is cut off from a single monitor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import grpc
import pytest

from tailrace.profiles import load_profile
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, preferred
from tailrace.v1 import admin_pb2, monitor_pb2, scheduler_pb2, types_pb2
from tailrace.v1.monitor_pb2_grpc import MonitorStub
from tests.scheduler.conftest import Control
from tests.scheduler.facts import place_one
from tests.scheduler.test_service import until
from tests.service.silent_proxy import silent_proxy
from tests.waiting import WAIT_S
from worker_agent.engine.base import EngineStats
from worker_agent.load import MigrationLoad
from worker_agent.reports import PhaseEvents, ReportStream
from worker_agent.running_requests import RunningRequests
from worker_agent.speeds import Speeds

if TYPE_CHECKING:
    from tailrace.v1.admin_pb2_grpc import AdminAsyncStub

ACTIVE = types_pb2.INSTANCE_STATE_ACTIVE

IDLE = EngineStats(
    requests=[],
    kv_blocks_used=0,
    kv_blocks_total=1_000,
    host_kv_bytes_used=0,
    host_kv_bytes_total=0,
    prefill_backlog_tokens=0,
    steps=0,
    generated_tokens=0,
    preemptions=0,
    token_interval_ms_mean=0.0,
    token_interval_ms_p99=0.0,
)


class ProxiedChannels(Channels):
    """Channels, some of which go through a proxy."""

    def __init__(self, by_address: Mapping[str, str]) -> None:
        super().__init__()
        self._by_address = by_address

    def get(self, address: str, role: Role) -> grpc.aio.Channel:
        return super().get(self._by_address.get(address, address), role)


def reports(control: Control, name: str, channels: Channels) -> ReportStream:
    """Return the reporting task of a worker."""
    return ReportStream(
        name,
        "1",
        16,
        lambda: IDLE,
        lambda request_ids: [],
        lambda: MigrationLoad(0, 0, 0.0),
        RunningRequests(lambda: 0.1),
        PhaseEvents(),
        lambda: Speeds.of(load_profile("llama-3.1-8b-h100"), 0.1),
        lambda: [record.address for record in preferred(control.members, "monitor")],
        channels,
        0.1,
    )


async def wait_for_delta(address: str, wanted: Callable[[monitor_pb2.StateDelta], bool]) -> None:
    """Wait until the monitor sends a delta that satisfies `wanted`."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(WAIT_S):
        async for delta in MonitorStub(channel).Watch(monitor_pb2.WatchRequest(subscriber="test")):
            if wanted(delta):
                return


async def all_active(admin: AdminAsyncStub) -> bool:
    reply = await admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=WAIT_S)
    return all(info.state == ACTIVE and info.report_age_s < 1.9 for info in reply.instances)


# Of the leading monitor.
@pytest.mark.parametrize("silence_s", [2.0])
async def test_a_worker_cut_off_from_only_the_leading_monitor_still_gets_requests(
    control: Control,
) -> None:
    # To this one b reports, too, and none of them is silent to it: a busy machine holds up their reports.
    await control.start_monitor("second", WAIT_S)
    second = control.members.services[("monitor", "second")].address
    admin, scheduler = await control.admin(), await control.scheduler()
    leading = control.members.leaders["monitor"].address
    async with silent_proxy(leading) as proxy, contextlib.AsyncExitStack() as stack:
        cut, other = ProxiedChannels({leading: proxy.address}), ProxiedChannels({leading: second})
        for name, channels in (("a", cut), ("b", other)):
            stack.push_async_callback(channels.close)
            task = asyncio.create_task(reports(control, name, channels).run())
            stack.push_async_callback(asyncio.wait, [task])
            stack.callback(task.cancel)
        await wait_for_delta(leading, lambda delta: "a" in {report.instance_id for report in delta.reports})
        proxy.open.clear()
        await wait_for_delta(leading, lambda delta: "a" in delta.silent_instance_ids)
        # The leading monitor misses it, but the scheduler hears from it through the other one.
        await until(lambda: all_active(admin))
        placed = [
            await place_one(
                scheduler, scheduler_pb2.PlaceRequest(request_id=f"r{n}", prompt_tokens=100, max_tokens=10)
            )
            for n in range(4)
        ]
        assert sorted(reply.instance_id for reply in placed) == ["a", "a", "b", "b"]
        proxy.open.set()
