"""The cluster: three etcd members and every service, each in its own network namespace with its own
certificate; and a supervisor that restarts processes that have exited, as systemd would."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import grpc

from tailrace.address import parse_endpoints
from tailrace.local.certificates import (
    ETCD_ROOT,
    OPERATOR,
    certificate_folder,
    span_certificates,
    transport_of,
)
from tailrace.local.plan import PartSpec
from tailrace.local.plan import Tier as StartTier
from tailrace.local.process import PartFailed, PartProcess
from tailrace.local.ready import active_instances, is_ready
from tailrace.security.authority import Authority
from tailrace.security.roles import Identity, Role
from tailrace.service.tasks import cancel
from tailrace.store.client import EtcdClient
from tailrace.store.etcd_roles import apply_rights, etcd_rights
from tailrace.tiny import MODEL_PATH, REASONING_PARSER
from tailrace.v1 import admin_pb2_grpc
from tests.chaos.core_dumps import native_stack, take_core
from tests.chaos.links import Link
from tests.chaos.schedule import Tier, Version
from tests.chaos.timeline import Timeline
from tests.chaos.xdp import XdpPrograms, XdpUnavailable
from tests.harness.bad_policies import install
from tests.harness.etcd_members import COUNT, FaultyCluster, member_addresses
from tests.harness.keys import write_key_file
from tests.harness.namespaces import run

KEY: Final = "sk-tailrace-chaos-of-the-users"
"""Of all users: front ends know it as vLLM's own, the edge as a tenant's."""
MODEL: Final = "tiny"
# The cluster name that services take by default.
CLUSTER: Final = "default"
POISON: Final = "this prompt kills engines"

_GRPC: Final = 7000
_METRICS: Final = 7001
_HTTP: Final = 8000
_FIRST_ADDRESS: Final = 10
_PROCESSES: Final = 4
# Few enough that a monitor's trace store is full early in a run: later growth is a leak.
_TRACE_SPANS: Final = 10_000
_CHANGED_PROCESSES: Final = 2
_KEEP_S: Final = 120
_SMALL_DISK: Final = "size=8m"
_POLL_S: Final = 0.05
_RESTART_DELAY_S: Final = 0.5
# vLLM's Python API server takes half a minute, more on a busy machine.
_START_S: Final = 240.0
_STOP_S: Final = 60.0
# An edge also waits for streams whose front end is stopped.
_STOP_EDGE_S: Final = 180.0
# Signals by which a process ends if a native library in it fails.
_CRASHES: Final = tuple(f"({name})" for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"))


@dataclass(frozen=True, slots=True)
class Shape:
    """Engine, API server and size of a cluster."""

    engine: str
    front: str
    workers: int
    speed: float
    # Workers that run the changed version, in addition to the others.
    changed: int = 0

    @property
    def keeps_answers(self) -> bool:
        """Whether its front ends keep answers; with vLLM's Rust API server they cannot."""
        return self.front == "python"

    @property
    def groups(self) -> list[tuple[Version, Sequence[str]]]:
        """Workers by process; each real engine has its own process."""
        max_processes = _PROCESSES if self.engine == "simulated" else self.workers
        names = [f"worker-{number}" for number in range(self.workers + self.changed)]
        first = _split(names[: self.workers], max_processes)
        changed = _split(names[self.workers :], _CHANGED_PROCESSES)
        return [(Version.FIRST, part) for part in first] + [(Version.CHANGED, part) for part in changed]


@dataclass(eq=False)
class Member:
    """One process of the cluster, including all its restarts."""

    tier: Tier
    spec: PartSpec
    link: Link
    # Its own small disk, for its files.
    disk: Path
    # Read at each fault point (worker_agent/faults.py).
    faults: Path
    metrics: str
    # The model version that its workers run.
    version: Version = Version.FIRST
    process: PartProcess | None = None
    starts: int = 0
    # How often it was ended at once, so that not even a proxy's streams could finish.
    kills: int = 0
    # Faults in progress on it.
    active_faults: int = 0
    # If False, an exit of the process is a violation.
    exit_expected: bool = False
    ready: bool = False
    _became_ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """Its ID in the cluster."""
        return self.spec.name

    @property
    def healthy(self) -> bool:
        """Whether it serves, and no fault is in progress on it."""
        return self.ready and not self.active_faults

    @property
    def pids(self) -> list[int]:
        """The IDs of its processes."""
        return [] if self.process is None else self.process.part.identity.session_members()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        for pid in self.pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def terminate(self) -> None:
        """Send SIGTERM to the main process, as systemd does."""
        if self.process is not None:
            os.kill(self.process.part.identity.pid, signal.SIGTERM)

    @contextmanager
    def under_fault(self) -> Iterator[None]:
        """Count a fault as in progress for the block."""
        self.active_faults += 1
        try:
            yield
        finally:
            self.active_faults -= 1

    async def wait_ready(self) -> None:
        """Wait until it serves. Raise TimeoutError if it does not in time."""
        async with asyncio.timeout(_START_S):
            while not self.ready:
                self._became_ready.clear()
                await self._became_ready.wait()

    def set_ready(self, ready: bool) -> None:
        """Record whether it serves."""
        self.ready = ready
        if ready:
            self._became_ready.set()


class Cluster:
    """All processes. `open_cluster` creates one."""

    def __init__(self, folder: Path, shape: Shape, timeline: Timeline) -> None:
        self.shape = shape
        self.timeline = timeline
        self._logs = folder / "logs"
        self._logs.mkdir()
        self.authority = Authority.create(folder / "certs")
        self._certificates = str(self.authority.folder)
        issued = [
            self.authority.issue(Identity(Role.ETCD, f"m{number}"), hosts=member_addresses(number))
            for number in range(COUNT)
        ]
        self.root = self.authority.issue(ETCD_ROOT).folder
        self._python_path = install(folder / "policies")
        self.authority.issue(OPERATOR)
        self.operator = transport_of(self._certificates, OPERATOR)
        self.operator_folder = certificate_folder(self._certificates, OPERATOR.role.value, OPERATOR.name)
        self.etcd = FaultyCluster(folder, False, [each.folder for each in issued])
        try:
            programs: XdpPrograms | None = XdpPrograms(Path("/run/bpf"))
        except XdpUnavailable as error:
            timeline.note(f"cannot drop packets: {error}")
            programs = None
        self.drops_packets = programs is not None
        self._keys = write_key_file(folder / "keys.json", KEY)
        self.members = self._plan(folder, programs)
        self._monitor = next(m.spec.address for m in self.members.values() if m.tier is Tier.MONITOR)
        self._deaths_left = 0
        self._deaths_until_s = 0.0
        # Tasks that each wait for one process to become ready.
        self._start_watchers: set[asyncio.Task[None]] = set()

    # ---- members

    def in_tier(self, tier: Tier) -> list[Member]:
        """Return the members of a tier."""
        return [member for member in self.members.values() if member.tier is tier]

    @property
    def admin(self) -> str:
        """HOST:PORT[,..] of the schedulers."""
        return ",".join(member.spec.address for member in self.in_tier(Tier.SCHEDULER))

    @property
    def instances(self) -> list[str]:
        """The IDs of all workers."""
        return [name for member in self.in_tier(Tier.WORKER) for name in member.spec.members]

    def admin_stub(self, scheduler: Member) -> tuple[grpc.aio.Channel, admin_pb2_grpc.AdminAsyncStub]:
        """Open a channel to a scheduler's admin API; the caller closes it."""
        channel = self.operator.channel(scheduler.spec.address, Role.SCHEDULER, ())
        return channel, admin_pb2_grpc.AdminStub(channel)

    def root_client(self) -> EtcdClient:
        """Return a client of etcd with all rights; the caller closes it."""
        return EtcdClient(parse_endpoints(self.etcd.endpoints), transport_of(self._certificates, ETCD_ROOT))

    # ---- lifecycle

    async def start(self) -> None:
        """Start everything; return when a scheduler sees every worker. Raise PartFailed, TimeoutError or
        RuntimeError if that fails."""
        await self.etcd.start()
        client = self.root_client()
        try:
            await apply_rights(client, etcd_rights(CLUSTER), CLUSTER)
        finally:
            await client.close()
        for member in self.members.values():
            member.link.prepare()
            member.disk.mkdir()
            run("mount", "-t", "tmpfs", "-o", _SMALL_DISK, "tmpfs", str(member.disk))
        data_path = (Tier.WORKER, Tier.FRONTEND)
        for tiers in ((Tier.SCHEDULER, Tier.MONITOR, Tier.MIGRATION), data_path, (Tier.EDGE,)):
            started = [member for member in self.members.values() if member.tier in tiers]
            for member in started:
                self._launch(member)
            for member in started:
                await member.wait_ready()
        await self.wait_registered()

    async def wait_registered(self) -> None:
        """Wait until a scheduler sees all instances. Raise TimeoutError if it does not in time."""
        wanted = set(self.instances)
        async with asyncio.timeout(_START_S):
            while not wanted <= (await active_instances([self.admin], self.operator)).keys():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    async def supervise(self) -> None:
        """Restart processes that have exited, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            for member in self.members.values():
                if member.process is not None and (reason := _exit_reason(member.process)):
                    await self._restart_ended(member, reason)

    def stop(self) -> None:
        """Kill everything."""
        for task in self._start_watchers:
            task.cancel()
        for member in self.members.values():
            member.signal(signal.SIGKILL)
        self.etcd.kill()

    def _launch(self, member: Member) -> None:
        member.starts += 1
        member.exit_expected = False
        environment = {"PYTHONPATH": self._python_path, **member.spec.environment}
        log = self._logs / f"{member.name}.{member.starts}.log"
        member.process = PartProcess(member.spec, log, environment)
        task = asyncio.get_running_loop().create_task(self._watch_start(member, member.process))
        self._start_watchers.add(task)
        task.add_done_callback(self._start_watchers.discard)

    async def _watch_start(self, member: Member, process: PartProcess) -> None:
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s and member.process is process:
            if await is_ready(member.spec, self.operator):
                member.set_ready(True)
                return
            await asyncio.sleep(2 * _POLL_S)
        if member.process is process:
            self.timeline.violation(f"{member.name} was not ready {_START_S:.0f} s after its start")

    async def _restart_ended(self, member: Member, reason: str) -> None:
        member.set_ready(False)
        poisoned = member.tier is Tier.WORKER and self._death_expected() and "does not bear" in reason
        if poisoned:
            self._deaths_left -= 1
        # A process may crash while it stops as well.
        crashed = any(cause in reason for cause in _CRASHES)
        if crashed or not (member.exit_expected or poisoned):
            member.kills += 1
            self.timeline.violation(f"{member.name} exited unexpectedly: {reason}")
        member.signal(signal.SIGKILL)
        member.process = None
        await asyncio.sleep(_RESTART_DELAY_S)
        ended = member.starts
        self._launch(member)
        if crashed:
            await self._report_crash(f"{member.name}.{ended}")

    async def _report_crash(self, name: str) -> None:
        """Record the native stack of a process that crashed, if it left a core dump."""
        core = await asyncio.to_thread(take_core, Path.cwd(), self._logs / f"{name}.core")
        if core is not None:
            self.timeline.note(f"native stack of {name}:\n{await asyncio.to_thread(native_stack, core)}")

    # ---- faults

    def allow_deaths(self, count: int, seconds: float) -> None:
        """Expect up to `count` engines to die of the poison prompt within so many seconds from now."""
        self._deaths_left, self._deaths_until_s = count, time.monotonic() + seconds

    def _death_expected(self) -> bool:
        return self._deaths_left > 0 and time.monotonic() < self._deaths_until_s

    def kill(self, member: Member) -> None:
        """Send SIGKILL; the supervisor restarts it."""
        self.end(member, member.pids)

    def end(self, member: Member, pids: Sequence[int]) -> None:
        """Send SIGKILL to these of its processes, with which it ends; the supervisor restarts it."""
        member.exit_expected = True
        member.kills += 1
        member.set_ready(False)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def restart(self, member: Member) -> None:
        """Send SIGTERM, wait until it has exited and is ready again. Raise TimeoutError if that takes too
        long."""
        starts, member.exit_expected = member.starts, True
        member.terminate()
        async with asyncio.timeout(_STOP_EDGE_S if member.tier is Tier.EDGE else _STOP_S):
            while member.starts == starts:  # noqa: ASYNC110 - processes are polled
                await asyncio.sleep(_POLL_S)
        await member.wait_ready()

    # ---- the plan

    def _plan(self, folder: Path, programs: XdpPrograms | None) -> dict[str, Member]:
        members: dict[str, Member] = {}

        def add(tier: Tier, name: str, start: StartTier, *arguments: str, ids: Sequence[str] = ()) -> Member:
            number = _FIRST_ADDRESS + len(members)
            link = Link(name, number, programs)
            role = Role(tier.value)
            self.authority.issue(Identity(role, name), hosts=[link.address])
            certificate = certificate_folder(self._certificates, role.value, name)
            disk, faults = folder / f"disk-{name}", folder / f"faults-{name}.json"
            metrics = f"{link.address}:{_METRICS}"
            command = [
                sys.executable,
                "-m",
                "tailrace",
                "serve",
                tier.value,
                "--id",
                name,
                "--tls",
                certificate,
            ]
            command += ["--etcd", ",".join(self.etcd.endpoints), "--listen", f"{link.address}:{_GRPC}"]
            command += ["--metrics", metrics, *(text.format(disk=disk) for text in arguments)]
            spec = PartSpec(
                name,
                start,
                link.command_inside(command),
                f"{link.address}:{_GRPC}",
                environment=span_certificates(certificate)
                | {
                    "VLLM_API_KEY": KEY,
                    "VLLM_NO_USAGE_STATS": "1",
                    "TAILRACE_FAULTS": f"@{faults}" if tier is Tier.WORKER else "",
                    "OMP_NUM_THREADS": "1",
                }
                # Where an edge has its sockets.
                | ({"TMPDIR": str(disk)} if tier is Tier.EDGE else {}),
                members=ids,
                role=role.value,
                timeout_s=_START_S,
            )
            if tier in (Tier.FRONTEND, Tier.EDGE):
                http = f"{link.address}:{_HTTP}"
                spec = replace(spec, command=[*spec.command, "--http", http], http=f"http://{http}")
            member = members[name] = Member(tier, spec, link, disk, faults, metrics)
            return member

        control = StartTier.CONTROL
        for number in range(2):
            add(Tier.SCHEDULER, f"scheduler-{number}", control, "--audit-log", "{disk}/audit.jsonl")
            add(Tier.MONITOR, f"monitor-{number}", control, "--trace-spans", str(_TRACE_SPANS))
        add(Tier.MIGRATION, "migration", control, "--journal", "{disk}/migrations.jsonl")
        for version, ids in self.shape.groups:
            count = ["--count", str(len(ids))] if len(ids) > 1 else []
            engine = _engine(self.shape, version)
            add(Tier.WORKER, ids[0], StartTier.WORKER, *engine, *count, ids=ids).version = version
        model = ["--front", self.shape.front, "--model", str(MODEL_PATH), "--served-model-name", MODEL]
        if self.shape.keeps_answers:
            model += ["--keep-answers", str(_KEEP_S)]
        for number in range(2):
            add(Tier.FRONTEND, f"frontend-{number}", StartTier.FRONTEND, *model)
        add(Tier.EDGE, "edge", StartTier.EDGE, "--api-keys", str(self._keys))
        monitor = next(member for member in members.values() if member.tier is Tier.MONITOR)
        for member in members.values():
            member.spec = replace(
                member.spec,
                environment={
                    **member.spec.environment,
                    "OTEL_EXPORTER_OTLP_ENDPOINT": f"https://{monitor.spec.address}",
                },
            )
        return members


def _split(names: Sequence[str], max_parts: int) -> list[Sequence[str]]:
    """Split names into at most `max_parts` parts of nearly equal size."""
    count = min(len(names), max_parts)
    return [names[len(names) * n // count : len(names) * (n + 1) // count] for n in range(count)]


def _engine(shape: Shape, version: Version) -> list[str]:
    common = ["--engine", shape.engine, "--model", str(MODEL_PATH), "--intra", "policy"]
    if shape.engine != "simulated":
        return [*common, "--reasoning-parser", REASONING_PARSER]
    settings = {"speed": shape.speed, "kv_blocks": 4_000, "dies_of": POISON, "reasoning_mean_tokens": 0}
    if version is Version.CHANGED:
        settings["weights_seed"] = 1
    return [*common, *(f"--sim={name}={json.dumps(value)}" for name, value in settings.items())]


def _exit_reason(process: PartProcess) -> str:
    """Return how the process exited, or an empty string while it runs."""
    try:
        process.check()
    except PartFailed as failure:
        return str(failure).replace("ended while starting", "ended")
    return ""


@asynccontextmanager
async def open_cluster(folder: Path, shape: Shape, timeline: Timeline, logs: Path) -> AsyncIterator[Cluster]:
    """Run a supervised cluster for the block. Keep its logs in `logs` if an invariant was violated.

    Raise PartFailed, TimeoutError or RuntimeError if it does not start.
    """
    async with AsyncExitStack() as stack:
        run("mount", "-t", "tmpfs", "tmpfs", str(folder))
        stack.callback(run, "umount", "--recursive", "--lazy", str(folder))

        def keep_logs(kind: type[BaseException] | None, *_: object) -> None:
            if kind is not None or timeline.violations:
                shutil.rmtree(logs, ignore_errors=True)
                shutil.copytree(folder / "logs", logs)
                timeline.note(f"logs: {logs}")

        stack.push(keep_logs)
        cluster = Cluster(folder, shape, timeline)
        stack.callback(cluster.stop)
        supervising = asyncio.create_task(cluster.supervise(), name="supervisor")
        stack.push_async_callback(cancel, supervising)
        await cluster.start()
        yield cluster
