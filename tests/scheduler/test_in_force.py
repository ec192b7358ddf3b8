"""Settings are reported as changed once every scheduler goes by them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from scheduler_svc.admin.errors import AdminError
from scheduler_svc.admin.in_force import InForce
from tailrace.records import ServiceRecord
from tailrace.service.channels import Channels
from tailrace.service.server import Servicer, serve_grpc
from tailrace.v1 import admin_pb2, admin_pb2_grpc


class Standby(admin_pb2_grpc.AdminServicer):
    """A scheduler that reads another revision of etcd each time it is asked."""

    def __init__(self, revisions: Iterator[int]) -> None:
        self.revisions = revisions
        self.asked: list[int] = []

    async def ListServices(self, request: Any, context: Any) -> admin_pb2.ListServicesReply:
        self.asked.append(next(self.revisions))
        return admin_pb2.ListServicesReply(revision=self.asked[-1])


@asynccontextmanager
async def standby(revisions: Iterator[int]) -> Any:
    """Yield what waits on scheduler `a`, which has followed up to revision 7, beside this standby and a dead
    one."""
    servicer = Standby(revisions)  # type: ignore[abstract]  # the other methods are not called
    channels = Channels()
    services = [Servicer(admin_pb2_grpc.add_AdminServicer_to_server, servicer, "tailrace.v1.Admin")]
    async with serve_grpc("127.0.0.1:0", services) as server:
        addresses = {"a": "127.0.0.1:1", "dead": "127.0.0.1:1", "standby": server.address}
        records = {
            ("scheduler", name): ServiceRecord(
                kind="scheduler", service_id=name, incarnation="1", address=address
            )
            for name, address in addresses.items()
        }
        members: Any = SimpleNamespace(services=records, revision=7)
        try:
            yield InForce("a", members, channels), servicer
        finally:
            await channels.close()


async def test_waits_for_this_scheduler_and_the_others() -> None:
    async with standby(iter([5, 6, 8])) as (in_force, other):
        here = asyncio.Event()
        waiting = asyncio.create_task(in_force.wait("the drain of w", here.is_set))
        await asyncio.sleep(0)
        assert not other.asked
        here.set()
        await waiting
        assert other.asked == [5, 6, 8]


async def test_names_the_scheduler_that_does_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.admin.in_force.FOLLOW_S", 0.3)
    async with standby(iter(lambda: 5, 0)) as (in_force, _):
        for here, lagging in ((False, "a"), (True, "standby")):
            with pytest.raises(AdminError, match=f"scheduler {lagging} has not followed") as caught:
                await in_force.wait("the drain of w", lambda here=here: here)
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
