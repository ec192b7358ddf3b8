"""Real control services in this process with a real etcd, and scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import grpc
import msgspec
import pytest

from migration_svc import main as migration_main
from migration_svc.migration import CopyRules
from migration_svc.slots import MigrationSlots
from monitor_svc import main as monitor_main
from scheduler_svc import main as scheduler_main
from tailrace.records import PolicyRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.options import CommonOptions
from tailrace.service.runtime import Shutdown
from tailrace.service.server import Servicer, serve_grpc
from tailrace.store.election import Election
from tailrace.store.membership import Membership
from tailrace.store.registration import Registration, register
from tailrace.store.store import Store
from tailrace.v1 import admin_pb2, monitor_pb2, worker_pb2_grpc
from tailrace.v1.admin_pb2_grpc import AdminStub
from tailrace.v1.monitor_pb2_grpc import MonitorStub
from tailrace.v1.scheduler_pb2_grpc import SchedulerStub
from tests.migration.scripted_worker import ScriptedWorker
from tests.scheduler.facts import instance
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from tailrace.v1.admin_pb2_grpc import AdminAsyncStub
    from tailrace.v1.scheduler_pb2_grpc import SchedulerAsyncStub


class Worker(ScriptedWorker):
    """A scripted worker that is registered in etcd; tests send its reports."""

    def __init__(self, name: str, registration: Registration) -> None:
        super().__init__()
        self.name = name
        self.registration = registration


@dataclass
class Control:
    """The services of one cluster."""

    etcd: str
    cluster: str
    store: Store
    members: Membership
    stack: contextlib.AsyncExitStack
    channels: Channels
    # Seconds without a report after which a monitor takes an instance to be silent.
    silence_s: float
    workers: dict[str, Worker] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    shutdowns: dict[str, Shutdown] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def options(self, kind: str, name: str) -> CommonOptions:
        """Return options as from the command line."""
        return CommonOptions((self.etcd,), self.cluster, "127.0.0.1:0", "127.0.0.1:0", name, "")

    async def wait_for_members(self, wanted: Callable[[Membership], bool]) -> None:
        """Wait until the membership in etcd satisfies `wanted`."""
        async with asyncio.timeout(WAIT_S):
            while not wanted(self.members):
                self._changed.clear()
                await self._changed.wait()

    async def start_monitor(self, name: str = "monitor", silence_s: float | None = None) -> None:
        """Start a monitor."""
        shutdown = self.shutdowns[name] = Shutdown()
        silence_s = silence_s or self.silence_s
        serving = monitor_main.serve(self.options("monitor", name), silence_s, 1_000, shutdown)
        await self._start("monitor", name, serving)

    async def start_migration(self) -> None:
        """Start a migration service without a journal."""
        shutdown = self.shutdowns["migration"] = Shutdown()
        options = self.options("migration", "migration")
        serving = migration_main.serve(options, None, MigrationSlots(), CopyRules(), shutdown)
        await self._start("migration", "migration", serving)

    async def start_scheduler(self, name: str) -> None:
        """Start a scheduler."""
        shutdown = self.shutdowns[name] = Shutdown()
        serving = scheduler_main.serve(
            self.options("scheduler", name), PolicyRecord(name="least_loaded"), shutdown
        )
        await self._start("scheduler", name, serving)

    async def _start(self, kind: str, name: str, serving: object) -> None:
        assert asyncio.iscoroutine(serving)
        self.tasks[name] = asyncio.create_task(serving)
        await self.wait_for_members(lambda m: (kind, name) in m.services)

    async def stop(self, name: str) -> None:
        """Stop a service as SIGTERM does: drain it, then cancel it."""
        await self.shutdowns[name].run_drain()
        await self.cancel(name)

    async def cancel(self, name: str) -> None:
        """Stop a service as a second SIGTERM does."""
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.wait([task])

    async def start_worker(self, name: str) -> Worker:
        """Start a worker and wait until it is registered."""
        record = instance(name)
        registration = await register(self.store, f"instances/{name}", msgspec.json.encode(record))
        worker = self.workers[name] = Worker(name, registration)
        servicer = Servicer(worker_pb2_grpc.add_WorkerServicer_to_server, worker, "tailrace.v1.Worker")
        server = await self.stack.enter_async_context(serve_grpc("127.0.0.1:0", [servicer]))
        await registration.update(msgspec.json.encode(instance(name, server.address)))
        await self.wait_for_members(
            lambda m: name in m.instances and m.instances[name].address == server.address
        )
        return worker

    async def channel(self, kind: str, name: str) -> grpc.aio.Channel:
        """Return a channel to a service."""
        return self.channels.get(self.members.services[(kind, name)].address, Role(kind))

    async def admin(self, name: str = "s1") -> AdminAsyncStub:
        """Return a stub of a scheduler's admin API."""
        return AdminStub(await self.channel("scheduler", name))

    async def scheduler(self, name: str = "s1") -> SchedulerAsyncStub:
        """Return a stub of a scheduler."""
        return SchedulerStub(await self.channel("scheduler", name))

    async def report(self, *reports: monitor_pb2.WorkerReport, to: str = "monitor") -> None:
        """Send reports to a monitor and wait for their acknowledgement."""
        stub = MonitorStub(await self.channel("monitor", to))
        async for _ in stub.Report(iter(reports), timeout=WAIT_S):
            pass


async def leads(admin: AdminAsyncStub) -> bool:
    """Return whether a leading scheduler answers."""
    try:
        await admin.GetShadow(admin_pb2.GetShadowRequest(), timeout=WAIT_S)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        return False
    return True


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no call of the services to etcd, and of one to another, fail because this machine is busy."""
    monkeypatch.setattr("tailrace.store.client._DEADLINE_S", WAIT_S)
    monkeypatch.setattr("scheduler_svc.admin.in_force.FOLLOW_S", WAIT_S)
    monkeypatch.setattr("scheduler_svc.admin.in_force._ANSWER_S", WAIT_S)
    monkeypatch.setattr("scheduler_svc.following.ETCD_LAG_S", WAIT_S)
    monkeypatch.setattr("scheduler_svc.actuator.ETCD_LAG_S", WAIT_S)
    monkeypatch.setattr("scheduler_svc.migrations._OPEN_S", WAIT_S)
    monkeypatch.setattr("scheduler_svc.migrations._LIST_S", WAIT_S)
    monkeypatch.setattr("scheduler_svc.actuator._CALL_S", WAIT_S)
    monkeypatch.setattr("scheduler_svc.actuator._COPY_S", WAIT_S)
    monkeypatch.setattr("scheduler_svc.actuator._POOL_TURN_S", WAIT_S)


@pytest.fixture
def silence_s() -> float:
    """After how long an instance of `control` is silent: in most tests, each reports only once."""
    return WAIT_S


@pytest.fixture
async def control(
    etcd: str, cluster: str, silence_s: float, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Control]:
    """Start a cluster on the shared etcd, whose leaders lead until they resign."""
    # What is placed and never reported counts all the time, too.
    monkeypatch.setattr("tailrace.control.reported_instance._PENDING_S", WAIT_S)
    monkeypatch.setattr("tailrace.control.reported_cluster.UNREPORTED_S", WAIT_S)
    monkeypatch.setattr("tailrace.service.runtime.Election", partial(Election, ttl_s=WAIT_S))
    async with open_control(etcd, cluster, silence_s) as opened:
        yield opened


async def connect(
    stack: contextlib.AsyncExitStack, etcd: str, cluster: str
) -> tuple[Store, Membership, Channels]:
    """Return what every service needs; `stack` closes it."""
    store = await Store.connect([etcd], cluster)
    stack.push_async_callback(store.close)
    members = await Membership.start(store)
    stack.push_async_callback(members.close)
    channels = Channels()
    stack.push_async_callback(channels.close)
    return store, members, channels


@contextlib.asynccontextmanager
async def open_control(etcd: str, cluster: str, silence_s: float) -> AsyncIterator[Control]:
    """Start a monitor, a migration service, a leading scheduler s1, and workers a and b."""
    async with contextlib.AsyncExitStack() as stack:
        store, members, channels = await connect(stack, etcd, cluster)
        control = Control(etcd, cluster, store, members, stack, channels, silence_s)
        members.add_listener(control._changed.set)
        try:
            # Workers first, so that each service knows them from its start: each watches etcd itself.
            await control.start_worker("a")
            await control.start_worker("b")
            await control.start_monitor()
            await control.start_migration()
            await control.start_scheduler("s1")
            await control.wait_for_members(lambda m: {"scheduler", "monitor"} <= m.leaders.keys())
            async with asyncio.timeout(WAIT_S):
                while not await leads(await control.admin()):  # each is a call: no need to sleep
                    pass
            yield control
        finally:
            for name in list(control.tasks):
                await control.cancel(name)
