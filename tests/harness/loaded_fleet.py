"""Real services with simulated engines, as processes, under an open-loop load: etcd or endpoints of one,
schedulers, monitor, migration service, one process of workers, and a front end without an API server."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tailrace.local.plan import PartSpec, Plan, Tier
from tailrace.local.ports import LOOPBACK, free_ports
from tailrace.local.state import RunFolder
from tailrace.service.etcd import etcd_command
from tests.harness.engine_core_load import LoadGenerator
from tests.harness.plans import NoProgress, started
from tests.harness.usage import descendants


@dataclass(frozen=True, slots=True)
class Workers:
    """One process of simulated workers `worker-0`, `worker-1`, ..."""

    count: int
    # Of the engine (worker_agent/engine/simulated/settings.py).
    settings: Mapping[str, object]
    # Further options of `tailrace serve worker`.
    options: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class LoadedFleet:
    """A running fleet; its load is open-loop and has no HTTP."""

    load: LoadGenerator
    # HOST:PORT of each scheduler's admin API, and of the monitor.
    admins: Sequence[str]
    monitor: str
    # HOST:PORT of each part's metrics, and its process IDs, by the part's name.
    metrics: Mapping[str, str]
    pids: Mapping[str, Sequence[int]]


@asynccontextmanager
async def loaded_fleet(
    path: Path,
    workers: Workers,
    *,
    max_tokens: int,
    reasons: bool,
    schedulers: int = 1,
    endpoints: Sequence[str] = (),
) -> AsyncIterator[LoadedFleet]:
    """Run a fleet for the block, with its files in the folder `path`.

    `max_tokens`: of every request; `reasons`: whether the model reasons; `endpoints`: of a running etcd, none
    to start one. Raise PartFailed or TimeoutError if the fleet does not start.
    """
    async with AsyncExitStack() as stack:
        folder = RunFolder(path)
        stack.enter_context(folder.locked())
        folder.data.mkdir()
        sockets = folder.path / "front"
        sockets.mkdir()
        load = await stack.enter_async_context(LoadGenerator(sockets, max_tokens, reasons))
        plan, metrics = _plan(folder, workers, sockets, schedulers, endpoints)
        state = await stack.enter_async_context(started(plan, folder, NoProgress()))
        await load.ready()
        yield LoadedFleet(
            load=load,
            admins=[part.address for part in plan.parts if part.name.startswith("scheduler")],
            monitor=next(part.address for part in plan.parts if part.name == "monitor"),
            metrics=metrics,
            pids={part.name: descendants(part.identity.pid) for part in state.parts},
        )


def _plan(
    folder: RunFolder, workers: Workers, sockets: Path, schedulers: int, endpoints: Sequence[str]
) -> tuple[Plan, dict[str, str]]:
    """Return the processes, and the address of each one's metrics."""
    etcd_port, http_port, *ports = free_ports(10 + 2 * schedulers)
    etcd = ",".join(endpoints) or f"{LOOPBACK}:{etcd_port}"
    addresses = iter([f"{LOOPBACK}:{port}" for port in ports])
    metrics: dict[str, str] = {}

    def service(kind: str, tier: Tier, *arguments: str, name: str = "", id: str = "") -> PartSpec:
        name = name or kind
        listen, metrics[name] = next(addresses), next(addresses)
        command = [sys.executable, "-m", "tailrace", "serve", kind, "--etcd", etcd, "--listen", listen]
        command += ["--metrics", metrics[name], "--id", id or name, *arguments]
        members = [f"worker-{n}" for n in range(workers.count)] if tier is Tier.WORKER else []
        return PartSpec(name, tier, command, listen, members=members)

    engine = [f"--sim={name}={json.dumps(value)}" for name, value in workers.settings.items()]
    worker = ["--engine", "simulated", "--count", str(workers.count), *workers.options, *engine]
    # Answers are measured as they are made.
    front = [
        "--front",
        "none",
        "--ipc",
        str(sockets),
        "--http",
        f"{LOOPBACK}:{http_port}",
        "--pace-tpot",
        "0",
    ]
    names = ["scheduler"] if schedulers == 1 else [f"scheduler-{n}" for n in range(schedulers)]
    leading = [service("scheduler", Tier.CONTROL, name=name) for name in names]
    parts = [
        *leading,
        service("monitor", Tier.CONTROL),
        service("migration", Tier.CONTROL),
        service("worker", Tier.WORKER, *worker, id="worker-0"),
        service("frontend", Tier.FRONTEND, *front),
    ]
    if not endpoints:
        parts.insert(0, PartSpec("etcd", Tier.ETCD, etcd_command(folder.data / "etcd", etcd_port), etcd))
    return Plan(parts, {}, leading[0].address, "", etcd), metrics
