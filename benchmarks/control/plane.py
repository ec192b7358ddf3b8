"""A control plane of real services, with one process of synthetic workers that report to it."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import msgspec

from benchmarks.control.population import TOKENS_PER_S
from tailrace.local.ports import LOOPBACK, free_ports
from tailrace.model_identity import ModelIdentity
from tailrace.records import InstanceRecord
from tailrace.service.etcd import etcd_command
from tailrace.service.tasks import cancel
from tailrace.store.membership import Membership
from tailrace.store.store import Store
from tailrace.v1 import admin_pb2, admin_pb2_grpc

_PREFIX: Final = "worker-"
_INCARNATION: Final = "synthetic"
_CLUSTER: Final = "default"
_CALL_S: Final = 30.0
_START_S: Final = 120.0
_POLL_S: Final = 0.25
_LEASE_S: Final = 7_200.0
# Of a process that has ended.
_LOG_LINES: Final = 12
# As in deploy/systemd/tailrace-monitor.service.
_MONITOR_NICENESS: Final = 5


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a case. `rate`: placements per second; `interval_s`: between steady reports."""

    instances: int
    requests: int
    rate: float
    seconds: float
    interval_s: float

    @property
    def mean_tokens(self) -> int:
        """Return the mean output length that keeps the number of requests constant."""
        return max(4, round(self.instances * self.requests / self.rate * TOKENS_PER_S))


class WorkersEnded(Exception):
    """The process of the synthetic workers has ended."""


@dataclass(slots=True)
class WorkerFigures:
    """The largest P99 of a second of the reports' lateness, in seconds, and the requests that migrated."""

    late_s: float = 0.0
    migrated: int = 0


@dataclass(slots=True)
class ControlPlane:
    """A running control plane with synthetic workers."""

    load: Load
    members: Membership
    admin: admin_pb2_grpc.AdminAsyncStub
    workers: asyncio.subprocess.Process
    pids: dict[str, list[int]]
    # What the workers say of themselves, and the task that reads it.
    figures: WorkerFigures
    reading: asyncio.Task[None]

    async def set_policy(self, name: str) -> None:
        """Select a policy, and wait until the scheduler decides by it and has reports of all instances."""
        await self.admin.SetPolicy(admin_pb2.SetPolicyRequest(name=name), timeout=_CALL_S)
        async with asyncio.timeout(_START_S):
            while True:
                reply = await self.admin.ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=_CALL_S)
                active = next((policy.name for policy in reply.policies if policy.active), "")
                ages = await self.report_ages()
                if (
                    active == name
                    and len(ages) == self.load.instances
                    and max(ages) < 4 * self.load.interval_s
                ):
                    return
                await asyncio.sleep(_POLL_S)

    async def report_ages(self) -> list[float]:
        """Return the age of each instance's newest report, in seconds."""
        reply = await self.admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=_CALL_S)
        return [info.report_age_s for info in reply.instances]

    def placed(self, instance_id: str, request_id: str) -> None:
        """Let a placed request appear on its instance."""
        # Once the workers have ended, `measure` says so.
        if self.workers.stdin is not None and not self.workers.stdin.is_closing():
            self.workers.stdin.write(f"{instance_id} {request_id}\n".encode())


@asynccontextmanager
async def control_plane(load: Load) -> AsyncIterator[ControlPlane]:
    """Run etcd, monitor, scheduler and synthetic workers for the block. Raise TimeoutError if a service does
    not serve in time."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-control-")))
        etcd_port, workers_port, *ports = free_ports(8)
        workers_at = f"{LOOPBACK}:{workers_port}"
        etcd = f"{LOOPBACK}:{etcd_port}"
        monitor, monitor_metrics, scheduler, scheduler_metrics, migration, migration_metrics = (
            f"{LOOPBACK}:{port}" for port in ports
        )
        pids = {"front ends": [os.getpid()]}

        async def start(
            name: str, command: Sequence[str], pipes: int | None = None
        ) -> asyncio.subprocess.Process:
            with (folder / f"{name}.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=pipes, stdout=pipes, stderr=log
                )
            stack.push_async_callback(_stop, process)
            pids[name] = [process.pid]
            return process

        def service(kind: str, listen: str, metrics: str, niceness: int = 0) -> list[str]:
            command = ["nice", "-n", str(niceness), sys.executable, "-m", "tailrace", "serve", kind]
            return [*command, "--etcd", etcd, "--id", kind, "--listen", listen, "--metrics", metrics]

        await start("etcd", etcd_command(folder / "etcd", etcd_port))
        store = await Store.connect([etcd], _CLUSTER)
        stack.push_async_callback(store.close)
        members = await Membership.start(store)
        stack.push_async_callback(members.close)
        await _register(store, load, workers_at)
        await start("migration", service("migration", migration, migration_metrics))
        await start("monitor", service("monitor", monitor, monitor_metrics, _MONITOR_NICENESS))
        await start("scheduler", service("scheduler", scheduler, scheduler_metrics))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(scheduler))
        admin = admin_pb2_grpc.AdminStub(channel)
        await admin.ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=_START_S, wait_for_ready=True)
        await grpc_ready(monitor)
        await grpc_ready(migration)
        command = _workers_command(load, monitor, workers_at)
        workers = await start("workers", command, asyncio.subprocess.PIPE)
        figures = WorkerFigures()
        reading = asyncio.create_task(_read_figures(workers, figures, folder / "workers.log"))
        stack.push_async_callback(cancel, reading)
        yield ControlPlane(load, members, admin, workers, pids, figures, reading)


async def grpc_ready(address: str) -> None:
    """Wait until a gRPC server accepts connections. Raise TimeoutError if it does not in time."""
    async with asyncio.timeout(_START_S), grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()


async def _register(store: Store, load: Load, address: str) -> None:
    lease = await store.grant_lease(_LEASE_S)
    for number in range(load.instances):
        record = InstanceRecord(
            instance_id=f"{_PREFIX}{number}",
            incarnation=_INCARNATION,
            address=address,
            stream_address=address,
            engine="synthetic",
            model="synthetic",
            model_fingerprint="synthetic",
            model_identity=ModelIdentity("synthetic"),
            block_tokens=16,
            kv_blocks_total=1_000_000,
            max_model_len=131_072,
            max_num_seqs=4 * load.requests,
            kv_bytes_per_token=65_536,
            started_s=time.time(),
        )
        await store.put_leased(f"instances/{record.instance_id}", msgspec.json.encode(record), lease)


def _workers_command(load: Load, monitor: str, listen: str) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.control.reporters", "--monitor", monitor, "--listen", listen]
    command += ["--prefix", _PREFIX, "--incarnation", _INCARNATION, "--instances", str(load.instances)]
    command += ["--requests", str(load.requests), "--mean-tokens", str(load.mean_tokens)]
    return [*command, "--interval", str(load.interval_s)]


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a process that may have exited already."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(_CALL_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _read_figures(workers: asyncio.subprocess.Process, figures: WorkerFigures, log: Path) -> None:
    if workers.stdout is not None:
        while line := await workers.stdout.readline():
            _, late_s, migrated = line.split()
            figures.late_s = max(figures.late_s, float(late_s))
            figures.migrated += int(migrated)
    written = await asyncio.to_thread(log.read_text, errors="replace")
    last = "".join(written.splitlines(keepends=True)[-_LOG_LINES:])
    raise WorkersEnded(f"the synthetic workers have ended:\n{last}")
