"""`make bench-control`: placements of a real scheduler while a large fleet reports to a real monitor.

etcd, monitor and scheduler are real processes. Synthetic workers, played by one process, report all their
requests at the interval of real ones and phase changes at once; synthetic front ends place requests through
the real placement client, at random times. Every placed request appears on its instance, generates tokens and
finishes there. A real migration service has ordered migrations carried out: the synthetic workers hand the
request over after a moment.

All of them share this machine: the row says what each process used, and by how much the reports were late.
The synthetic workers, which in a fleet have machines of their own, get only the CPU time that is left over.
The monitor runs at the priority of its systemd unit.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import grpc
import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.control.population import MAX_TOKENS, PROMPT_TOKENS, TOKENS_PER_S
from frontend_svc.placement_client import PlacementClient
from tailrace.local.ports import LOOPBACK, free_ports
from tailrace.records import InstanceRecord
from tailrace.service.channels import Channels
from tailrace.service.etcd import etcd_command
from tailrace.service.tasks import cancel
from tailrace.store.membership import Membership
from tailrace.store.store import Store
from tailrace.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2
from tests.harness.loadgen import percentile
from tests.harness.report import print_json, save
from tests.harness.usage import cpu_seconds

POLICIES: Final = ("tailrace", "pascal", "ares", "arrow", "cascade")
_PREFIX: Final = "worker-"
_INCARNATION: Final = "synthetic"
_FRONT_ENDS: Final = 4
_CLUSTER: Final = "default"
_CALL_S: Final = 30.0
_START_S: Final = 120.0
_POLL_S: Final = 0.25
_LEASE_S: Final = 7_200.0
# As in deploy/systemd/tailrace-monitor.service.
_MONITOR_NICENESS: Final = 5
_PARTS: Final = ("monitor", "scheduler", "migration", "etcd", "workers", "front ends")


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one policy. Times in seconds; `cpu`: cores used, `memory`: bytes resident, by process."""

    policy: str
    instances: int
    requests: int
    rate: float
    placements: int
    refused: int
    failed: int
    migrated_per_s: float
    placement_p50_s: float
    placement_p99_s: float
    decision_p50_s: float
    decision_p99_s: float
    # Age of the scheduler's newest report of each instance; at least up to the interval.
    report_age_p50_s: float
    report_age_max_s: float
    # By how much the synthetic workers were late, the largest P99 of a second.
    reports_late_s: float
    cpu: dict[str, float]
    memory: dict[str, int]


@dataclass(frozen=True, slots=True)
class Failure:
    """A policy that could not be measured, because the control plane did not keep up."""

    policy: str
    instances: int
    reason: str


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
        reading = asyncio.create_task(_read_figures(workers, figures))
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


async def _read_figures(workers: asyncio.subprocess.Process, figures: WorkerFigures) -> None:
    if workers.stdout is not None:
        while line := await workers.stdout.readline():
            _, late_s, migrated = line.split()
            figures.late_s = max(figures.late_s, float(late_s))
            figures.migrated += int(migrated)
    raise WorkersEnded("the synthetic workers have ended")


async def measure(plane: ControlPlane, policy: str, seed: int) -> Outcome:
    """Place requests at random times for the load's duration."""
    load = plane.load
    await plane.set_policy(policy)
    await asyncio.sleep(2 * load.interval_s)
    generator = random.Random(seed)
    channels = Channels()
    clients = [PlacementClient(plane.members, channels) for _ in range(_FRONT_ENDS)]
    latencies: list[float] = []
    decisions: list[float] = []
    counts = {"refused": 0, "failed": 0}
    plane.figures.late_s, plane.figures.migrated = 0.0, 0

    async def place(number: int) -> None:
        request_id = f"{policy}-{number}"
        began_s = time.perf_counter()
        reply = await clients[number % _FRONT_ENDS].place(
            scheduler_pb2.PlaceRequest(
                request_id=request_id,
                frontend_id=f"frontend-{number % _FRONT_ENDS}",
                prompt_tokens=PROMPT_TOKENS,
                max_tokens=MAX_TOKENS,
            )
        )
        latencies.append(time.perf_counter() - began_s)
        if reply is None or reply.refusal:
            counts["failed" if reply is None else "refused"] += 1
            return
        decisions.append(reply.decided_us / 1e6)
        plane.placed(reply.instance_id, request_id)

    used = {name: cpu_seconds(pids) for name, pids in plane.pids.items()}
    began_s = time.monotonic()
    due_s, number = began_s, 0
    try:
        async with asyncio.TaskGroup() as tasks:
            while (due_s := due_s + generator.expovariate(load.rate)) < began_s + load.seconds:
                if (left_s := due_s - time.monotonic()) > 0:
                    await asyncio.sleep(left_s)
                tasks.create_task(place(number))
                number += 1
    finally:
        for client in clients:
            await client.close()
        await channels.close()
    took_s = time.monotonic() - began_s
    if plane.reading.done():
        # The workers have ended, and nothing was measured; raises.
        plane.reading.result()
    cpu = {name: (cpu_seconds(pids) - used[name]) / took_s for name, pids in plane.pids.items()}
    late_s, migrated = plane.figures.late_s, plane.figures.migrated
    ages = await plane.report_ages()
    return Outcome(
        policy=policy,
        instances=load.instances,
        requests=load.requests,
        rate=load.rate,
        placements=len(latencies),
        refused=counts["refused"],
        failed=counts["failed"],
        migrated_per_s=migrated / took_s,
        placement_p50_s=percentile(latencies, 0.5),
        placement_p99_s=percentile(latencies, 0.99),
        decision_p50_s=percentile(decisions, 0.5),
        decision_p99_s=percentile(decisions, 0.99),
        report_age_p50_s=percentile(ages, 0.5),
        report_age_max_s=max(ages),
        reports_late_s=late_s,
        cpu=cpu,
        memory={name: sum(map(_resident, pids)) for name, pids in plane.pids.items()},
    )


def _resident(pid: int) -> int:
    """Return a process's resident memory in bytes; 0 if it has exited."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)


async def measure_all(
    loads: Sequence[Load], policies: Sequence[str], seed: int, console: Console
) -> tuple[list[Outcome], list[Failure]]:
    """Measure every policy under every load."""
    outcomes: list[Outcome] = []
    failures: list[Failure] = []
    for load in loads:
        console.print(f"starting {load.instances} instances with {load.requests} requests each", style="dim")
        async with control_plane(load) as plane:
            for policy in policies:
                try:
                    outcomes.append(await measure(plane, policy, seed))
                except grpc.aio.AioRpcError as error:
                    failures.append(Failure(policy, load.instances, error.details() or error.code().name))
                    console.print(failures[-1], style="dim")
                except WorkersEnded as error:
                    failures.append(Failure(policy, load.instances, str(error)))
                    console.print(failures[-1], style="dim")
                    break
                except TimeoutError:
                    failures.append(Failure(policy, load.instances, "reports of all instances never arrived"))
                    console.print(failures[-1], style="dim")
                else:
                    console.print(outcomes[-1], style="dim")
    return outcomes, failures


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with a row per policy and size."""
    title = "Placements while a fleet reports (monitor: niceness 5; synthetic workers: idle class)"
    result = Table(title=title)
    for heading in ("instances", "requests", "per s"):
        result.add_column(heading, justify="right")
    result.add_column("policy", no_wrap=True)
    for heading in (
        "P50 ms",
        "P99 ms",
        "decision P99 ms",
        "not placed",
        "migrated per s",
        "report age max s",
        "reports late s",
    ):
        result.add_column(heading, justify="right")
    for name in _PARTS:
        result.add_column(f"{name} cores", justify="right")
    for o in outcomes:
        result.add_row(
            f"{o.instances}",
            f"{o.instances * o.requests}",
            f"{o.rate:g}",
            o.policy,
            f"{1e3 * o.placement_p50_s:.1f}",
            f"{1e3 * o.placement_p99_s:.1f}",
            f"{1e3 * o.decision_p99_s:.2f}",
            f"{o.refused + o.failed}",
            f"{o.migrated_per_s:.0f}",
            f"{o.report_age_max_s:.2f}",
            f"{o.reports_late_s:.2f}",
            *(f"{o.cpu[name]:.2f}" for name in _PARTS),
        )
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="make bench-control",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--instances", type=int, nargs="+", default=[256, 1_024], metavar="N")
    parser.add_argument("--requests", type=int, default=100, help="on each instance")
    parser.add_argument("--rate", type=float, default=500.0, help="placements per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, for each policy")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between steady reports")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    console = Console(stderr=True)
    loads = [
        Load(instances, options.requests, options.rate, options.seconds, options.interval)
        for instances in options.instances
    ]
    outcomes, failures = uvloop.run(measure_all(loads, options.policies, options.seed, console))
    figures: dict[str, object] = {
        "rows": [asdict(outcome) for outcome in outcomes],
        "not_measured": [asdict(failure) for failure in failures],
    }
    path = save("control", figures)
    if options.output == "json":
        print_json("control", figures)
    else:
        # Files and pipes have no terminal width.
        output = Console(width=None if sys.stdout.isatty() else 160)
        output.print(table(outcomes))
        for failure in failures:
            output.print(
                f"not measured: {failure.policy} with {failure.instances} instances: {failure.reason}"
            )
    console.print(f"saved to {path}")


if __name__ == "__main__":
    main()
